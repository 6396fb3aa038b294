"""Sizes of a layer with latent attention."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_manager.mlx_server.devices.attention.kernel import AttentionShape
from mlx_manager.mlx_server.devices.attention.splits import TILE
from mlx_manager.mlx_server.devices.attention.writer import Pools

MOST_RANK = 512


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Sizes that the kernels for latent attention are compiled for.

    rank: elements of a latent vector. dims: elements of a rotated vector. plain: elements of a
    query's head before the rotated ones. queried: elements for queries in the output of the first
    product: the queries' own rank, or q_heads * (plain + dims). page_size: a multiple of 16 tokens.
    values: elements of a head's result.
    """

    q_heads: int
    rank: int
    dims: int
    plain: int
    queried: int
    page_size: int
    dtype: mx.Dtype
    values: int

    @property
    def pools(self) -> Pools:
        """Pools with latent vectors in the place of keys, and rotated ones in that of values."""
        return Pools(1, self.rank, self.dims, self.dtype)

    @property
    def expanded(self) -> AttentionShape:
        """Shape of attention to expanded keys and values, both as wide as the wider one needs."""
        width = max(self.plain + self.dims, self.values)
        heads = self.q_heads
        return AttentionShape(heads, heads, -(-width // 16) * 16, self.page_size, self.dtype)

    @property
    def unsupported(self) -> str | None:
        """Reason why the kernels do not serve these sizes on any device; None if they do."""
        if self.rank % 64 or self.rank > MOST_RANK:
            return f"latent vectors of {self.rank} elements"
        if self.dims % 16 or self.plain % 8 or self.queried % 16:
            return f"queries of {self.queried} elements, heads of {self.plain} and {self.dims}"
        if self.page_size % TILE:
            return f"page size {self.page_size} is no multiple of {TILE}"
        return None
