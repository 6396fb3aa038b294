"""Products of which every rank of a group has a part of the outputs, and gives all of them."""

from __future__ import annotations

from typing import cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models.base import gather_last_axis


class Gathered(nn.AllToShardedLinear):  # type: ignore[misc] # mlx is not typed
    """Product with a rank's rows of a dense weight."""

    def share(self, x: mx.array) -> mx.array:
        """Return this rank's outputs, (..., outputs ÷ ranks)."""
        return cast(mx.array, super().__call__(x))

    def __call__(self, x: mx.array) -> mx.array:
        """Return the outputs of all ranks, (..., outputs)."""
        return cast(mx.array, gather_last_axis(self.share(x), self.group))


class GatheredPacked(nn.QuantizedAllToShardedLinear):  # type: ignore[misc]
    """Product with a rank's rows of a packed weight."""

    def share(self, x: mx.array) -> mx.array:
        """Return this rank's outputs, (..., outputs ÷ ranks)."""
        return cast(mx.array, super().__call__(x))

    def __call__(self, x: mx.array) -> mx.array:
        """Return the outputs of all ranks, (..., outputs)."""
        return cast(mx.array, gather_last_axis(self.share(x), self.group))


GATHERED = (Gathered, GatheredPacked)


def gathered(layer: nn.Module, group: mx.distributed.Group) -> nn.Module | None:
    """Return the product with this rank's rows of a layer's weight; None if the layer is of another
    kind, or its rows are no multiple of the ranks."""
    if type(layer) not in (nn.Linear, nn.QuantizedLinear) or layer.weight.shape[0] % group.size():
        return None
    if type(layer) is nn.Linear:
        return cast(nn.Module, Gathered.from_linear(layer, group=group))
    return cast(nn.Module, GatheredPacked.from_quantized_linear(layer, group=group))
