"""The choice of a forward; test_forward.py has the forwards themselves."""

from __future__ import annotations

import mlx.core as mx
import pytest
from devices.portable import Portable, plainly
from tiny_models import FAMILIES, random_model

from mlx_manager.mlx_server.errors import ModelNotSupported
from mlx_manager.mlx_server.execution.select import choose


@pytest.mark.parametrize(("family", "tried"), [("llama", 4), ("olmo2", 5)])
def test_it_says_which_way_of_how_many_is_compared(family: str, tried: int) -> None:
    said: list[str] = []
    model = random_model({"model_type": family, **FAMILIES[family]}, seed=0, dtype=mx.float32)
    choose(model, 16, doing=said.append)
    ways = [f"a way to run it is compared ({number + 1} of 10)" for number in range(tried)]
    assert said == ["it is run as it is, to compare with", *ways]


def test_on_a_gpu_it_says_which_kernels_are_checked_and_compiled() -> None:
    said: list[str] = []
    model = random_model({"model_type": "llama", **FAMILIES["llama"]}, seed=0, dtype=mx.float32)
    assert choose(model, 16, Portable, plainly, doing=said.append).kind == "fused"
    rest = said[2:]
    assert rest[:5] == [f"kernels of step 1 are checked ({n + 1} of 5)" for n in range(5)]
    assert rest[10:13] == [f"its steps are compiled ({n + 1} of 3)" for n in range(3)]
    assert rest[13:] == ["kernels that draw tokens are checked"]


def test_a_model_whose_logits_are_no_numbers_is_refused() -> None:
    of = {"model_type": "llama", **FAMILIES["llama"]}
    model = random_model(of, seed=0, dtype=mx.float32)
    model.model.norm.weight = model.model.norm.weight * float("nan")
    with pytest.raises(ModelNotSupported, match="no number"):
        choose(model, 16)
