"""What kernels for latent attention are compiled for."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_manager.mlx_server.devices.attention.kernel import AttentionShape
from mlx_manager.mlx_server.devices.attention.splits import TILE
from mlx_manager.mlx_server.devices.attention.writer import Pools

MOST_RANK = 512


@dataclass(frozen=True, slots=True)
class LatentShape:
    """What the kernels are compiled for.

    rank: of the latent vectors. dims: of the vectors that are rotated. plain: numbers of a query's
    head before those that are rotated. queried: numbers that the first product gives for queries: a
    rank of their own, or q_heads * (plain + dims). `page_size` is a multiple of 16 tokens. values:
    numbers of a head's result.
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
        """Latent vectors stand where others have keys, the rotated ones where they have values."""
        return Pools(1, self.rank, self.dims, self.dtype)

    @property
    def expanded(self) -> AttentionShape:
        """Of attention to keys and values of heads, both as wide as the wider one needs."""
        width = max(self.plain + self.dims, self.values)
        heads = self.q_heads
        return AttentionShape(heads, heads, -(-width // 16) * 16, self.page_size, self.dtype)

    @property
    def unsupported(self) -> str | None:
        """Why the kernels do not serve it, whatever the device."""
        if self.rank % 64 or self.rank > MOST_RANK:
            return f"latent vectors of {self.rank} elements"
        if self.dims % 16 or self.plain % 8 or self.queried % 16:
            return f"queries of {self.queried} elements, heads of {self.plain} and {self.dims}"
        if self.page_size % TILE:
            return f"page size {self.page_size} is no multiple of {TILE}"
        return None
