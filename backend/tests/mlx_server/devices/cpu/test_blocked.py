"""Layers in blocks, against the same layers as they are stored."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear

from mlx_manager.mlx_server.devices.cpu.blocked import (
    MOST_INPUTS,
    BlockedExperts,
    BlockedLinear,
    Tiles,
    can_be_blocked,
    experts_can_be_blocked,
    parts_of,
)


@pytest.mark.parametrize(
    "shape", [(1,), (3,), (16,), (17,), (100,), (128,), (300,), (2, 1), (2, 5)]
)
@pytest.mark.parametrize(
    ("inputs", "outputs", "bias"), [(64, 64, False), (640, 192, True), (2048, 128, True)]
)
def test_products_in_blocks_are_the_layers_own(
    inputs: int, outputs: int, bias: bool, shape: tuple[int, ...]
) -> None:
    linear = nn.Linear(inputs, outputs, bias=bias)
    blocked = BlockedLinear(linear)
    x = mx.random.normal((*shape, inputs))
    np.testing.assert_allclose(np.array(blocked(x)), np.array(linear(x)), atol=2e-5)
    assert mx.array_equal(blocked.weight, linear.weight)


def test_a_row_gets_the_same_product_whoever_is_beside_it() -> None:
    blocked = BlockedLinear(nn.Linear(1024, 128))
    x = mx.random.normal((40, 1024))
    alone = mx.concatenate([blocked(x[i : i + 1]) for i in range(40)])
    np.testing.assert_allclose(np.array(blocked(x)), np.array(alone), atol=2e-5)


def test_blocks_take_the_bytes_of_the_weight() -> None:
    linear = nn.Linear(2048, 128)
    parameters = dict(tree_flatten(BlockedLinear(linear).parameters()))
    assert parameters.keys() == {"blocks", "bias"}
    assert parameters["blocks"].nbytes == linear.weight.nbytes


@pytest.mark.parametrize("inputs", [256, 896, 1024, 1536, 3584, 4096, 8960, 14336])
def test_inputs_are_cut_into_equal_parts_that_are_long_enough(inputs: int) -> None:
    assert can_be_blocked(nn.Linear(inputs, 64))
    assert inputs % parts_of(inputs) == 0
    assert MOST_INPUTS // 2 < inputs // parts_of(inputs) <= MOST_INPUTS or inputs <= MOST_INPUTS


def test_what_does_not_come_out_even_stays_as_it_is() -> None:
    assert not can_be_blocked(nn.Linear(512, 100))
    assert not can_be_blocked(nn.Linear(1031, 64))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 40, 200])
@pytest.mark.parametrize(
    ("inputs", "inner", "experts", "chosen"), [(64, 128, 5, 2), (1024, 64, 8, 3), (8192, 64, 4, 4)]
)
def test_experts_in_blocks_give_what_they_give(
    inputs: int, inner: int, experts: int, chosen: int, rows: int, bias: bool
) -> None:
    mlp = SwitchGLU(inputs, inner, experts, bias=bias)
    for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        if bias:
            layer.bias = mx.random.normal(layer.bias.shape)
    x = mx.random.normal((rows, inputs))
    picked = mx.argsort(mx.random.normal((rows, experts)), axis=1)[:, :chosen].astype(mx.uint32)
    stored = mlp(x, picked)
    for name in ("gate_proj", "up_proj", "down_proj"):
        mlp[name] = BlockedExperts(mlp[name])
    np.testing.assert_allclose(np.array(mlp(x, picked)), np.array(stored), atol=2e-4)


def test_blocks_of_experts_take_the_bytes_of_their_weight() -> None:
    experts = SwitchLinear(128, 192, 3, bias=True)
    blocked = BlockedExperts(experts)
    parameters = dict(tree_flatten(blocked.parameters()))
    assert parameters.keys() == {"blocks", "bias"}
    assert parameters["blocks"].nbytes == experts.weight.nbytes
    assert mx.array_equal(blocked.weight, experts.weight)
    assert (blocked.input_dims, blocked.output_dims, blocked.num_experts) == (128, 192, 3)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.integers(1, 5))
def test_each_row_is_in_a_tile_of_its_expert(chosen: list[int], rows: int) -> None:
    in_order = mx.array(sorted(chosen), mx.uint32)
    tiles = Tiles.of(in_order, 7, rows)
    experts, own, places = (np.array(each) for each in (tiles.experts, tiles.rows, tiles.places))
    assert len(set(places)) == len(chosen)
    assert np.array_equal(own.reshape(-1)[places], np.arange(len(chosen)))
    assert np.array_equal(experts[places // rows], np.array(in_order))
    assert own.min() >= 0
    assert own.max() < len(chosen)


def test_experts_that_do_not_come_out_even_stay_as_they_are() -> None:
    assert experts_can_be_blocked(SwitchLinear(64, 64, 2))
    assert not experts_can_be_blocked(SwitchLinear(64, 100, 2))
    assert not experts_can_be_blocked(SwitchLinear(32, 64, 2))
