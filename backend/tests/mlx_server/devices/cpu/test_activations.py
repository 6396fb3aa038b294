from __future__ import annotations

import sys

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models.activations import precise_swiglu, swiglu
from tiny_models import FAMILIES, random_model

from mlx_manager.mlx_server.devices.cpu.activations import OURS, ByPowers, silu_by_powers
from mlx_manager.mlx_server.devices.cpu.powers import silu_of

MANY = (64, 128)


def some(seed: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return (5 * mx.random.normal(MANY, key=mx.random.key(seed))).astype(dtype)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_gates_are_those_of_mlx_lm(dtype: mx.Dtype) -> None:
    gate, up = some(0, dtype), some(1, dtype)
    ours, precise = (ByPowers(f, OURS[f.__name__]) for f in (swiglu, precise_swiglu))
    for mine, wanted in (
        (ours(gate, up), swiglu(gate, up)),
        (precise(up, gate, up), precise_swiglu(up, gate, up)),
    ):
        assert mine.dtype == dtype
        assert mx.allclose(mine, wanted, rtol=1e-5, atol=1e-6)


def test_silu_of_large_numbers_is_a_number() -> None:
    x = mx.array([-3e38, -1e4, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 1e4, 3e38])
    exact = np.array(x, np.float64) / (1 + np.exp(np.clip(-np.array(x, np.float64), None, 700)))
    assert np.allclose(np.array(silu_of(x)), exact, rtol=1e-6, atol=1e-30)
    assert mx.isnan(silu_of(mx.array([mx.nan]))).item()


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_moe", "mamba2"])
def test_a_models_modules_have_it_once(family: str) -> None:
    model = random_model({"model_type": family, **FAMILIES[family]}, seed=0, dtype=mx.float32)
    tokens = mx.array([[5, 6, 7] * 40])
    before = model(tokens)
    silu_by_powers(model)
    placed = nn.silu
    silu_by_powers(model)
    assert nn.silu is placed
    spaces = [vars(sys.modules[type(module).__module__]) for module in model.modules()]
    found = [space[name] for space in spaces for name in OURS if name in space] + [nn.silu]
    assert all(isinstance(each, ByPowers) for each in found)
    assert not any(isinstance(each.original, ByPowers) for each in found)
    assert mx.allclose(model(tokens), before, rtol=1e-4, atol=1e-4)
