"""The choice of a forward; test_forward.py has the forwards themselves."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from devices.portable import Portable, PortableCoded, plainly
from tiny_models import FAMILIES, random_model

from mlx_manager.mlx_server.devices.attention.kernel import CodedShape
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


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("deepseek_v3", "latent vectors"),
        ("deepseek_v32", "latent vectors"),
        ("mamba2", "a state instead"),
        ("llama4", "one at a time"),
    ],
)
def test_a_model_whose_pages_cannot_be_in_8_bits_is_refused_with_the_reason(
    family: str, reason: str
) -> None:
    model = random_model({"model_type": family, **FAMILIES[family]}, seed=0, dtype=mx.float32)
    with pytest.raises(ModelNotSupported, match=reason):
        choose(model, 16, kv_bits=8)


def test_a_model_that_8_bits_change_too_much_is_refused() -> None:
    of = {"model_type": "llama", **FAMILIES["llama"]}
    model = random_model(of, seed=0, dtype=mx.float32)
    for layer in model.layers:
        # One number of each head is so large that no other is told from 0 beside it.
        weight = np.array(layer.self_attn.v_proj.weight)
        weight[::16] *= 1000
        layer.self_attn.v_proj.weight = mx.array(weight)
        output = np.array(layer.self_attn.o_proj.weight)
        output[:, ::16] = 0
        layer.self_attn.o_proj.weight = mx.array(output)
    assert choose(model, 16).kind == "fused"
    with pytest.raises(ModelNotSupported, match="its logits change"):
        choose(model, 16, kv_bits=8)


def test_on_a_gpu_kernels_read_pages_in_8_bits_that_none_has_written() -> None:
    model = random_model({"model_type": "llama", **FAMILIES["llama"]}, seed=0, dtype=mx.float32)
    built = []

    def coded(of: CodedShape) -> PortableCoded:
        built.append(of)
        return PortableCoded(of)

    forward = choose(model, 16, Portable, plainly, kv_bits=8, coded=coded)
    assert {store.format for store in forward.stores} == {"int8/16"}
    assert all(store.kernels is None for store in forward.stores)
    assert [of.group for of in built] == [16]
