"""A linear layer whose weight lies in memory in blocks, each as large as a BLAS multiplies at once.

A BLAS packs a weight's numbers into blocks of its own for every product, and with few rows that
takes most of the time: a product of one row goes at a third of what the memory gives. OpenBLAS has
kernels without packing for small products (`gemm_small_kernel`, for cores with AVX-512 among
others), which are quick if a block's numbers lie together. MLX multiplies the matrices of a batch
one by one, so that a product with all blocks is one operation.
"""

from __future__ import annotations

import math

import mlx.core as mx
from mlx import nn

OUTPUTS = 64
"""Of a block: four registers of AVX-512."""
MOST_INPUTS = 960
MOST_ROWS = 16
"""Of one small product. Its multiplications, 10^6 at most, are what OpenBLAS takes to be small."""
LEAST_INPUTS = 64
ROWS_AT_ONCE = 128
"""What they make stays in a core's caches."""


class BlockedLinear(nn.Linear):  # type: ignore[misc] # mlx is not typed
    """`linear` with the same parameters, save that its weight is `blocks`.

    blocks: (outputs / 64, parts, inputs / parts, 64). Products of the parts are added up.
    """

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        outputs, inputs = linear.weight.shape
        parts = parts_of(inputs)
        apart = linear.weight.reshape(outputs // OUTPUTS, OUTPUTS, parts, inputs // parts)
        self.blocks = mx.contiguous(apart.transpose(0, 2, 3, 1))
        if "bias" in linear:
            self.bias = linear.bias
        self.eval()

    @property
    def weight(self) -> mx.array:
        """(outputs, inputs), put together anew."""
        count, parts, inputs, outputs = self.blocks.shape
        turned: mx.array = self.blocks.transpose(0, 3, 1, 2)
        return turned.reshape(count * outputs, parts * inputs)

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
        rows = x.shape[0]
        count, parts, inputs, outputs = self.blocks.shape
        groups = -(-rows // MOST_ROWS)
        of_group = -(-rows // groups)
        if rows < groups * of_group:
            x = mx.pad(x, [(0, groups * of_group - rows), (0, 0)])
        # What differs least comes first: a block meets all groups of rows while it is in the cache.
        if parts == 1:
            out = x.reshape(groups, of_group, inputs) @ self.blocks
        else:
            apart = x.reshape(groups, of_group, parts, inputs).transpose(2, 0, 1, 3)
            out = (mx.contiguous(apart) @ self.blocks[:, :, None]).sum(axis=1)
        out = out.reshape(count, groups * of_group, outputs).swapaxes(0, 1)
        return out if rows == groups * of_group else out[:rows]


def can_be_blocked(linear: nn.Linear) -> bool:
    outputs: int
    inputs: int
    outputs, inputs = linear.weight.shape
    return outputs % OUTPUTS == 0 and inputs // parts_of(inputs) >= LEAST_INPUTS


def parts_of(inputs: int) -> int:
    """Into how many equal parts so many inputs are cut."""
    least = math.ceil(inputs / MOST_INPUTS)
    return next(parts for parts in range(least, inputs + 1) if inputs % parts == 0)
