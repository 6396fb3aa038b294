"""Parts that are alike but for their arrays."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from mlx_manager.mlx_server.execution.alike import arrays_of, kind_of, made_of


@dataclass(frozen=True, slots=True)
class Pair:
    weight: mx.array
    bias: mx.array | None


@dataclass(frozen=True, slots=True)
class Part:
    pair: Pair
    norms: tuple[nn.RMSNorm, ...]
    linear: nn.Linear
    scale: float
    kernels: object


KERNELS = object()


def part(seed: int, *, norms: int = 2, bias: bool = True, scale: float = 0.5, eps: float = 1e-5):
    mx.random.seed(seed)
    pair = Pair(mx.random.normal((3, 4)), mx.random.normal((3,)) if bias else None)
    own = tuple(nn.RMSNorm(4, eps) for _ in range(norms))
    for norm in own:
        norm.weight = mx.random.normal((4,))
    return Part(pair, own, nn.Linear(4, 2, bias=bias), scale, KERNELS)


def values(of: Part) -> list[np.ndarray]:
    return [np.array(array) for array in arrays_of(of)]


def test_a_part_of_anothers_arrays_is_the_other():
    first, second = part(1), part(2)
    made = made_of(first, arrays_of(second))
    x = mx.ones((1, 4))
    assert np.array_equal(np.array(made.linear(x)), np.array(second.linear(x)))
    assert np.array_equal(np.array(made.norms[1](x)), np.array(second.norms[1](x)))
    assert made.pair.bias is second.pair.bias
    assert made.kernels is KERNELS
    assert len(arrays_of(made)) == len(arrays_of(second)) == 6


def test_who_the_arrays_are_taken_from_stays_as_it_was():
    first = part(1)
    before = values(first)
    made_of(first, arrays_of(part(2)))
    assert all(map(np.array_equal, before, values(first)))


def test_parts_that_differ_in_arrays_alone_are_of_one_kind():
    assert hash(kind_of(part(1))) == hash(kind_of(part(2)))
    assert kind_of(part(1)) == kind_of(part(2))


@pytest.mark.parametrize(
    "changes", [{"norms": 1}, {"bias": False}, {"scale": 0.25}, {"eps": 1e-6}], ids=str
)
def test_parts_that_differ_in_anything_else_are_not(changes):
    assert kind_of(part(1)) != kind_of(part(1, **changes))


def test_arrays_of_other_shapes_or_numbers_make_another_kind():
    weight = mx.zeros((3, 4))
    kinds = {
        kind_of(Pair(mine, None))
        for mine in (weight, weight.T, weight.astype(mx.float16), mx.ones((3, 4)))
    }
    assert len(kinds) == 3
