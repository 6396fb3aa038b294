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
"""Outputs of a block: four registers of AVX-512."""
MOST_INPUTS = 960
MOST_ROWS = 16
"""Most rows of one small product. OpenBLAS treats products of up to 10^6 multiplications as small;
64 outputs, 960 inputs and 16 rows stay below."""
LEAST_INPUTS = 64
ROWS_AT_ONCE = 128
"""Rows multiplied at once: their results stay in a core's caches."""

EXPERT_ROWS = 4
"""Rows of a tile, which is one small product with an expert. An expert's last tile is filled up
with rows whose results are unused."""
FEWEST_OF_EXPERT = 4
"""Least average number of rows per expert for which rows are grouped into tiles."""
SMALL = 10**6
"""Most multiplications of a product that OpenBLAS treats as small."""


class BlockedLinear(nn.Linear):  # type: ignore[misc] # mlx is not typed
    """Linear layer with the parameters of `linear`, but with its weight stored as `blocks`.

    blocks: (outputs / 64, inputs, 64). If there are many inputs, they are cut into parts,
    (outputs / 64, parts, inputs / parts, 64), and the products with the parts are added up.
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
        """Weight as (outputs, inputs), assembled at each access."""
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
        """Return the products (rows, outputs / 64, 64) of `x`, (rows, inputs)."""
        rows, inputs = x.shape
        blocks, outputs = self.blocks, self.blocks.shape[-1]
        groups = -(-rows // MOST_ROWS)
        of_group = -(-rows // groups)
        padding = groups * of_group - rows
        if padding:
            x = mx.pad(x, [(0, padding), (0, 0)])
        if groups > 1:
            # Each block is multiplied with all groups while it is in the cache.
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
    """Experts' layer with the parameters of `experts`, but with its weight stored as `blocks`.

    blocks: (experts, outputs / 64, inputs, 64). MLX multiplies row by row; without blocks each row
    is a BLAS product of its expert's matrix and a vector. If experts have several rows, these rows
    are grouped into tiles. There are as many tiles as could be needed, since the number of rows of
    an expert is known only at evaluation.
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
        """Weight as (experts, outputs, inputs), assembled at each access."""
        count, blocks, inputs, outputs = self.blocks.shape
        turned: mx.array = self.blocks.swapaxes(2, 3)
        return turned.reshape(count, blocks * outputs, inputs)

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Multiply by the experts that `indices` names, as `SwitchLinear` does.

        Returns (*indices.shape, rows, outputs) for `x`, (..., rows, inputs).
        """
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
        """Return the products (*experts.shape, rows, outputs) of `x`, (..., rows, inputs)."""
        blocks = self.blocks.shape[1]
        of_experts = experts[..., None] * blocks + mx.arange(blocks, dtype=experts.dtype)
        out = mx.gather_mm(x[..., None, :, :], self.blocks.flatten(0, 1), rhs_indices=of_experts)
        return out.swapaxes(-3, -2).flatten(-2)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows sorted by expert, grouped into tiles of one expert each: see `BlockedExperts`.

    experts: (tiles,), the expert of each tile. rows: (tiles, rows), indices of each tile's rows; a
    tile is filled up with arbitrary rows of other experts. places: (all rows,), the index of each
    row in the flattened tiles.
    """

    experts: mx.array
    rows: mx.array
    places: mx.array

    @staticmethod
    def of(indices: mx.array, count: int, rows: int) -> Tiles:
        """Return the tiles of rows sorted by expert.

        indices: each row's expert, in ascending order. count: number of experts. rows: rows of a
        tile.
        """
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
    """Return the number of equal parts into which a block's inputs are cut."""
    least = ceil(inputs / MOST_INPUTS)
    return next(parts for parts in range(least, inputs + 1) if inputs % parts == 0)
