"""Layers whose weights lie in memory in blocks, each as large as a BLAS multiplies at once.

A BLAS packs a weight's numbers into blocks of its own for every product, and with few rows that
takes most of the time: a product of one row goes at a third of what the memory gives. OpenBLAS has
kernels without packing for small products (`gemm_small_kernel`, for cores with AVX-512 among
others), which are quick if a block's numbers lie together. MLX multiplies the matrices of a batch
one by one, so that a product with all blocks is one operation.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

import mlx.core as mx
from mlx import nn
from mlx_lm.models.switch_layers import SwitchLinear

OUTPUTS = 64
"""Of a block: four registers of AVX-512."""
MOST_INPUTS = 960
MOST_ROWS = 16
"""Of one small product. Its multiplications, 10^6 at most, are what OpenBLAS takes to be small."""
LEAST_INPUTS = 64
ROWS_AT_ONCE = 128
"""What they make stays in a core's caches."""

EXPERT_ROWS = 4
"""Of a small product with an expert, whose rows are taken by so many, the last of them with others
that mean nothing."""
FEWEST_OF_EXPERT = 4
"""Rows that an expert has on average from which on they are taken together."""
SMALL = 10**6
"""Multiplications of what OpenBLAS takes to be a small product."""


class BlockedLinear(nn.Linear):  # type: ignore[misc] # mlx is not typed
    """`linear` with the same parameters, save that its weight is `blocks`.

    blocks: (outputs / 64, inputs, 64); of many inputs (outputs / 64, parts, inputs / parts, 64),
    and products with the parts are added up.
    """

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        outputs, inputs = linear.weight.shape
        parts = parts_of(inputs)
        apart = linear.weight.reshape(outputs // OUTPUTS, OUTPUTS, parts, inputs // parts)
        turned = apart.transpose(0, 2, 3, 1)
        self.blocks = mx.contiguous(turned[:, 0] if parts == 1 else turned)
        if "bias" in linear:
            self.bias = linear.bias
        self.eval()

    @property
    def weight(self) -> mx.array:
        """(outputs, inputs), put together anew."""
        count, *inputs, outputs = self.blocks.shape
        turned: mx.array = mx.moveaxis(self.blocks, -1, 1)
        return turned.reshape(count * outputs, prod(inputs))

    def __call__(self, x: mx.array) -> mx.array:
        *leading, inputs = x.shape
        rows = x.reshape(-1, inputs)
        starts = range(0, rows.shape[0], ROWS_AT_ONCE)
        products = [self._product(rows[start : start + ROWS_AT_ONCE]) for start in starts]
        product = products[0] if len(products) == 1 else mx.concatenate(products)
        out = product.reshape(*leading, -1)
        return out + self.bias if "bias" in self else out

    def _product(self, x: mx.array) -> mx.array:
        """(rows, outputs / 64, 64) of (rows, inputs)."""
        rows, inputs = x.shape
        blocks, outputs = self.blocks, self.blocks.shape[-1]
        groups = -(-rows // MOST_ROWS)
        of_group = -(-rows // groups)
        padding = groups * of_group - rows
        if padding:
            x = mx.pad(x, [(0, padding), (0, 0)])
        if groups > 1:
            # What differs least comes first: a block meets all groups while it is in the cache.
            x, blocks = x.reshape(groups, of_group, inputs), mx.expand_dims(blocks, -3)
        if self.blocks.ndim == 3:
            out = x @ blocks
        else:
            parts = self.blocks.shape[1]
            apart = x.reshape(*x.shape[:-1], parts, inputs // parts)
            out = (mx.contiguous(mx.moveaxis(apart, -2, 0)) @ blocks).sum(axis=1)
        out = out.reshape(-1, rows + padding, outputs).swapaxes(0, 1)
        return out[:rows] if padding else out


class BlockedExperts(SwitchLinear):  # type: ignore[misc] # mlx-lm is not typed
    """`experts` with the same parameters, save that their weight is `blocks`.

    blocks: (experts, outputs / 64, inputs, 64). MLX multiplies row by row, and without blocks each
    goes through its expert's weight as a BLAS multiplies a matrix by a vector. Where experts have
    several rows, these are put together in tiles: as many as there may be, since how many an expert
    has is known when they are computed, and not before.
    """

    def __init__(self, experts: SwitchLinear) -> None:
        nn.Module.__init__(self)
        count, outputs, inputs = experts.weight.shape
        apart = experts.weight.reshape(count, outputs // OUTPUTS, OUTPUTS, inputs)
        self.blocks = mx.contiguous(apart.swapaxes(2, 3))
        if "bias" in experts:
            self.bias = experts.bias
        self.eval()

    @property
    def weight(self) -> mx.array:
        """(experts, outputs, inputs), put together anew."""
        count, blocks, inputs, outputs = self.blocks.shape
        turned: mx.array = self.blocks.swapaxes(2, 3)
        return turned.reshape(count, blocks * outputs, inputs)

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """As `SwitchLinear`: (*indices.shape, rows, outputs) of (..., rows, inputs), each by the
        expert that `indices` names."""
        count, _, inputs, outputs = self.blocks.shape
        rows = min(EXPERT_ROWS, SMALL // (inputs * outputs))
        many = indices.ndim == 1 and indices.size >= FEWEST_OF_EXPERT * count
        if sorted_indices and many and rows > 1 and x.shape[1:-1] == (1,):
            tiles = Tiles.of(indices, count, rows)
            product = self._product(x[:, 0][tiles.rows], tiles.experts)
            out = product.reshape(-1, product.shape[-1])[tiles.places][:, None]
        else:
            out = self._product(x, indices)
        return out + mx.expand_dims(self.bias[indices], -2) if "bias" in self else out

    def _product(self, x: mx.array, experts: mx.array) -> mx.array:
        """(*experts.shape, rows, outputs) of (..., rows, inputs)."""
        blocks = self.blocks.shape[1]
        of_experts = experts[..., None] * blocks + mx.arange(blocks, dtype=experts.dtype)
        out = mx.gather_mm(x[..., None, :, :], self.blocks.flatten(0, 1), rhs_indices=of_experts)
        return out.swapaxes(-3, -2).flatten(-2)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows that are in order by expert, put together by some of one expert: see `BlockedExperts`.

    experts: (tiles,). rows: (tiles, rows), by their numbers; those of a tile that are none of its
    expert's are any. places: (rows in all,), where each is among the tiles'.
    """

    experts: mx.array
    rows: mx.array
    places: mx.array

    @staticmethod
    def of(indices: mx.array, count: int, rows: int) -> Tiles:
        """indices: each row's expert, of `count`. rows: of a tile."""
        size = indices.size
        of_expert = mx.zeros((count,), mx.int32).at[indices].add(1)
        needed = (of_expert + rows - 1) // rows
        begins, starts = mx.cumsum(needed) - needed, mx.cumsum(of_expert) - of_expert
        tiles = mx.arange(size // rows + count)
        before = (tiles[:, None] >= begins + needed).astype(mx.int32).sum(axis=1)
        experts = mx.minimum(before, count - 1)
        first = starts[experts] + (tiles - begins[experts]) * rows
        own = mx.minimum(first[:, None] + mx.arange(rows), size - 1)
        place = mx.arange(size) - starts[indices]
        places = (begins[indices] + place // rows) * rows + place % rows
        return Tiles(experts.astype(indices.dtype), own, places)


def can_be_blocked(linear: nn.Linear) -> bool:
    outputs: int
    inputs: int
    outputs, inputs = linear.weight.shape
    return outputs % OUTPUTS == 0 and inputs // parts_of(inputs) >= LEAST_INPUTS


def experts_can_be_blocked(experts: SwitchLinear) -> bool:
    _, outputs, inputs = experts.weight.shape
    return bool(outputs % OUTPUTS == 0 and LEAST_INPUTS <= inputs <= SMALL // OUTPUTS)


def parts_of(inputs: int) -> int:
    """Into how many equal parts so many inputs are cut."""
    least = ceil(inputs / MOST_INPUTS)
    return next(parts for parts in range(least, inputs + 1) if inputs % parts == 0)
