"""A linear layer whose weight lies in memory in blocks, each as large as a BLAS multiplies at once.

A BLAS packs a weight's numbers into blocks of its own for every product, and with few rows that
takes most of the time: a product of one row goes at a third of what the memory gives. OpenBLAS has
kernels without packing for small products (`gemm_small_kernel`, for cores with AVX-512 among
others), which are quick if a block's numbers lie together. MLX multiplies the matrices of a batch
one by one, so that a product with all blocks is one operation.
"""

from __future__ import annotations

from math import ceil, prod

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


def can_be_blocked(linear: nn.Linear) -> bool:
    outputs: int
    inputs: int
    outputs, inputs = linear.weight.shape
    return outputs % OUTPUTS == 0 and inputs // parts_of(inputs) >= LEAST_INPUTS


def parts_of(inputs: int) -> int:
    """Into how many equal parts so many inputs are cut."""
    least = ceil(inputs / MOST_INPUTS)
    return next(parts for parts in range(least, inputs + 1) if inputs % parts == 0)
