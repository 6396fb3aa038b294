"""Linear layers in blocks, against the same layers as they are stored."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from mlx_manager.mlx_server.models.blocked import (
    MOST_INPUTS,
    BlockedLinear,
    can_be_blocked,
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
