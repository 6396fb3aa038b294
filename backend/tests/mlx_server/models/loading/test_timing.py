from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import sleep
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import load_model
from tiny_models import make_tiny_model

from mlx_manager.mlx_server.models.loading import timing
from mlx_manager.mlx_server.models.loading.timing import (
    CacheFlush,
    cpu_seconds,
    fastest,
    is_believed,
    least_seconds,
    sample_of,
    typical_layer,
)
from mlx_manager.mlx_server.models.loading.weights import Form, default_device, forms_of

STORED = Form("stored", 100)

pytestmark = pytest.mark.skipif(default_device() != "cpu", reason="the forms are a CPU's")


def model_of(folder: Path, family: str, **form: Any) -> nn.Module:
    make_tiny_model(folder, family, **form)
    return load_model(folder, lazy=True)[0]


def times_by_turn(*milliseconds: float) -> Any:
    """In place of `seconds`: what each product takes, in the order in which they are timed."""
    left = iter(milliseconds)

    def seconds(
        layers: Sequence[nn.Module], rows: int, dtype: mx.Dtype, flush: CacheFlush | None = None
    ) -> float:
        return 0.001 * next(left)

    return seconds


def test_what_disturbs_one_turn_of_a_form_does_not_make_it_the_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = model_of(tmp_path / "m", "llama", dtype=mx.bfloat16)
    forms = forms_of(model, "cpu")
    # float32 alone and with 16 rows, then stored; the same once more.
    monkeypatch.setattr(
        timing, "seconds", times_by_turn(0.2, 0.4, 0.05, 0.3, 0.01, 0.04, 0.06, 0.5)
    )
    form, reason = fastest(model, forms, "cpu")
    assert form.name == "float32"
    assert reason.endswith(": float32 0.01 / 0.04, stored 0.05 / 0.3")


def test_a_hopeless_form_is_not_timed_with_many_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = model_of(tmp_path / "m", "llama", dtype=mx.bfloat16)
    forms = forms_of(model, "cpu")
    monkeypatch.setattr(timing, "seconds", times_by_turn(0.01, 5, 0.09, 0.01, 4, 0.1))
    form, reason = fastest(model, forms, "cpu")
    assert form.name == "float32"
    assert reason.endswith(": float32 0.01 / 4, stored 0.09")


def test_choice_is_one_of_the_forms_and_says_what_was_measured(tmp_path: Path):
    model = model_of(
        tmp_path / "m", "llama", dtype=mx.float16, quantize={"group_size": 32, "bits": 4}
    )
    forms = forms_of(model, "cpu")
    form, reason = fastest(model, forms, "cpu")
    assert form in forms
    assert reason.startswith("ms for a product of 1 / 16 rows: ")
    assert all(form.name in reason for form in forms)
    assert isinstance(model.model.layers[0].mlp.up_proj, nn.QuantizedLinear)


def test_typical_layer_is_of_the_kind_that_most_weights_belong_to(tmp_path: Path):
    model = model_of(tmp_path / "m", "qwen3_moe", dtype=mx.float32)
    layer = typical_layer(model)
    assert isinstance(layer, SwitchLinear)
    sample = sample_of(layer, "cpu")
    assert sample.weight.shape == layer.weight.shape
    assert typical_layer(nn.Module()) is None
    assert fastest(nn.Module(), [STORED], "cpu")[0] is STORED


def test_sample_of_a_large_layer_is_small_on_a_cpu():
    layer = nn.QuantizedLinear(4096, 4096, bias=True)
    sample = sample_of(layer, "cpu")
    assert sample.weight.shape == (256, 512)
    assert sample.bias.shape == (256,)
    assert sample(mx.ones((2, 4096))).shape == (2, 256)
    assert layer.weight.shape == sample_of(layer, "cuda").weight.shape == (4096, 512)


MIB = 2**20


def test_weights_that_the_caches_hold_are_timed_from_them_and_others_from_memory():
    flush = CacheFlush(32 * MIB)
    assert flush.before(32 * MIB) is None
    assert flush.before(32 * MIB + 1) is flush


@pytest.mark.parametrize(
    ("cache", "read"), [(MIB, 64 * MIB), (96 * MIB, 192 * MIB), (2**34, 512 * MIB)]
)
def test_caches_are_emptied_by_twice_what_they_hold_within_bounds(cache: int, read: int):
    assert CacheFlush(cache).nbytes == read


class CountedFlush(CacheFlush):
    times = 0

    def __call__(self) -> None:
        self.times += 1
        super().__call__()


def test_the_caches_are_emptied_before_each_time_that_is_taken():
    flush = CountedFlush(MIB)
    emptied: list[int] = []

    def work() -> None:
        emptied.append(flush.times)
        mx.eval(mx.ones((512, 512)) @ mx.ones((512, 512)))

    assert least_seconds(work, flush) > 0
    assert emptied == list(range(1, len(emptied) + 1))


def test_a_time_is_believed_once_it_was_met_twice():
    assert not is_believed([])
    assert not is_believed([0.001, 0.002])
    assert not is_believed([0.001, 0.002, 0.004])
    assert is_believed([0.001, 0.002, 0.004, 0.00104])
    assert not is_believed([0.0001, 0.0001, 0.0001])
    assert is_believed([0.001 * 1.2**place for place in range(timing.MOST_SAMPLES)])


def test_time_in_which_a_program_waits_is_none_that_its_work_takes():
    assert cpu_seconds(lambda: sleep(0.2)) < 0.1
