"""Keys and values in 8 bits: numbers from -127 to 127, and a scale for each group of them.

A number of a head is its code times its group's scale, which is the group's largest magnitude
divided by 127, in bfloat16, whose range is that of float32: llama.cpp's Q8_0 is the same but for
groups of 32 and float16.

Heads are turned first, by a Hadamard matrix, as in QuaRot (Ashkboos et al. 2024). A few numbers of
a key are much larger than the others, and would leave these few codes; turned, all are of like
size. A product of two heads is that of the turned heads. The matrix is its own inverse.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import numpy as np

GROUP = 64
"""Most numbers with one scale."""
LEAST_GROUP = 8
"""Fewest numbers that a scale is worth storing for."""
MOST = 127
SCALE = mx.bfloat16
"""Type of scales."""
_LEAST = 1e-30
"""Smallest scale, so that zeros are divided by something."""


def group_of(dim: int) -> int | None:
    """Return how many numbers of a head of size `dim` share a scale; None if no number of them
    from `LEAST_GROUP` to `GROUP` divides the head."""
    sizes = range(min(GROUP, dim), LEAST_GROUP - 1, -1)
    return next((size for size in sizes if dim % size == 0), None)


def token_bytes(dim: int) -> int:
    """Return the bytes of a head of size `dim` in 8 bits, its scales included.

    Raises:
        ValueError: there are no groups for this size.
    """
    group = group_of(dim)
    if group is None:
        raise ValueError(f"heads of size {dim} have no groups")
    return dim + dim // group * SCALE.size


@lru_cache
def turn_of(dim: int) -> mx.array:
    """Return the matrix, (dim, dim) float32, that heads of size `dim` are turned by: Hadamard's of
    the largest power of two that divides the head, for each such part of it."""
    size = dim & -dim
    block = np.ones((1, 1), np.float32)
    while len(block) < size:
        block = np.block([[block, block], [block, -block]])
    turn = mx.array(np.kron(np.eye(dim // size, dtype=np.float32), block / np.sqrt(size)))
    mx.eval(turn)
    return turn


def encoded(heads: mx.array, group: int) -> tuple[mx.array, mx.array]:
    """Return the codes, (..., dim) int8, and the scales, (..., dim / group), of `heads`,
    (..., dim) float32."""
    *outer, dim = heads.shape
    groups = heads.reshape(*outer, dim // group, group)
    largest = mx.max(mx.abs(groups), axis=-1, keepdims=True)
    scales = mx.maximum(largest * (1 / MOST), _LEAST).astype(SCALE)
    # The codes are those of the scale as it is stored, which rounding makes smaller by 1/512 at
    # most: the largest code is then 127.25 before it is rounded.
    codes = mx.round(groups / scales.astype(mx.float32)).astype(mx.int8)
    return codes.reshape(heads.shape), scales.squeeze(-1)


def decoded(codes: mx.array, scales: mx.array, dtype: mx.Dtype) -> mx.array:
    """Return the heads, (..., dim) of type `dtype`, of codes and scales as `encoded` returns
    them."""
    *outer, dim = codes.shape
    groups = codes.reshape(*outer, scales.shape[-1], dim // scales.shape[-1]).astype(mx.float32)
    heads = groups * scales.astype(mx.float32)[..., None]
    return heads.reshape(codes.shape).astype(dtype)
