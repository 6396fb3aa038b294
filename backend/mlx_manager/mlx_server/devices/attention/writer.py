"""Kernel that writes keys and values into KV pages in place, on a GPU, for any head size."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_manager.mlx_server.devices.kernel import Kernel


@dataclass(frozen=True, slots=True)
class Pools:
    """Sizes that a writer is compiled for: pools of keys, (kv_heads, slots, key_dim), and of
    values, (kv_heads, slots, value_dim)."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype

    @property
    def widest(self) -> int:
        return max(self.key_dim, self.value_dim)


@dataclass(frozen=True, slots=True)
class PageWriter:
    """Launch of a write kernel: `threads` for each token, in blocks of `block` threads."""

    kernel: Kernel
    threads: int
    block: int

    def write(
        self, k_pool: mx.array, v_pool: mx.array, k: mx.array, v: mx.array, slots: mx.array
    ) -> mx.array:
        """Write keys and values in place; see `PagedKernels.write`."""
        (dep,) = self.kernel(
            inputs=[k_pool, v_pool, k, v, slots],
            grid=(self.threads, k.shape[0] * k.shape[2], 1),
            threadgroup=(self.block, 1, 1),
            output_shapes=[(1,)],
            output_dtypes=[mx.int32],
        )
        return dep
