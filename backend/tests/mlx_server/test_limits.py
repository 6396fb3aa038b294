"""A model's settings may say of sampling what a request may, and it means the same."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from mlx_manager.mlx_server.core import SAMPLING_DEFAULTS, Sampling
from mlx_manager.mlx_server.defaults import asked_sampling, fill_sampling
from mlx_manager.mlx_server.errors import InvalidSettings
from mlx_manager.mlx_server.limits import LARGEST_TOP_K
from mlx_manager.mlx_server.models.settings import read_models_file
from mlx_manager.mlx_server.protocols import parameters
from mlx_manager.mlx_server.schemas.openai import CompletionRequest

FRACTIONS = sorted(SAMPLING_DEFAULTS - {"top_k"})


def said_by_a_request(name: str, value: float) -> Sampling | None:
    """None: refused."""
    body = json.dumps({"prompt": "once", name: value})
    try:
        return parameters.sampling(CompletionRequest.model_validate_json(body))
    except ValidationError:
        return None


def said_by_the_file(name: str, value: float) -> Sampling | None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "models.toml"
        file.write_text(f"[models.a.sampling]\n{name} = {value!r}\n")
        try:
            settings = read_models_file(file).of("a")
        except InvalidSettings:
            return None
    return fill_sampling(asked_sampling(), settings.sampling.given())


@pytest.mark.parametrize("name", FRACTIONS)
@given(value=st.one_of(st.floats(), st.floats(-3, 3), st.integers(), st.integers(-3, 3)))
@example(value=2.5)
@example(value=math.inf)
@example(value=math.nan)
def test_a_request_and_the_models_file_may_say_the_same(name: str, value: float):
    assert said_by_a_request(name, value) == said_by_the_file(name, value)


@given(value=st.one_of(st.integers(), st.integers(-3, 3)))
@example(value=-1)
@example(value=10**40)
def test_so_they_may_of_top_k(value: int):
    assert said_by_a_request("top_k", value) == said_by_the_file("top_k", value)


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("repetition_penalty", 2.5, 2.5),
        ("repetition_penalty", 100, 100),
        ("top_k", -1, 0),
        ("top_k", 10**40, LARGEST_TOP_K),
    ],
)
def test_what_both_may_say(name: str, value: float, meant: float):
    expected = asked_sampling(**{name: meant})
    assert said_by_a_request(name, value) == said_by_the_file(name, value) == expected


@pytest.mark.parametrize("name", sorted(SAMPLING_DEFAULTS))
@pytest.mark.parametrize("value", ['"1"', "true"])
def test_in_the_file_a_number_is_a_number(tmp_path: Path, name: str, value: str):
    (tmp_path / "models.toml").write_text(f"[models.a.sampling]\n{name} = {value}\n")
    with pytest.raises(InvalidSettings, match=rf"models\.a\.sampling\.{name}: must be"):
        read_models_file(tmp_path / "models.toml")
