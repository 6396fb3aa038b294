"""The arrays behind the page numbers, one pair a layer."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_manager.mlx_server.engine.kv.kernels import AttentionShape, KernelSet


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Geometry of one layer's keys and values. `window` is None for full attention."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    window: int | None = None

    @property
    def token_bytes(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.size


class LayerStore:
    """Keys and values of one layer.

    `keys` is (kv_heads, slots, key_dim) and `values` (kv_heads, slots, value_dim); page `p` is
    the slots `p * page_size` to `(p + 1) * page_size`. Heads come first so that a gathered row is
    (kv_heads, tokens, dim) without another copy, and neighbouring pages are a plain slice.

    kernels: what writes to the pages, and may read them, on a GPU; None for MLX's own operations.

    Raises:
        RuntimeError: no kernel serves this shape here.
    """

    def __init__(self, shape: LayerShape, page_size: int, kernels: KernelSet | None = None) -> None:
        self.shape = shape
        self.page_size = page_size
        self.kernels = kernels
        self._writer = None if kernels is None else kernels[self.attention(shape.kv_heads)]
        self.written = mx.zeros((1,), mx.int32)
        self.keys = mx.zeros((shape.kv_heads, 0, shape.key_dim), shape.dtype)
        self.values = mx.zeros((shape.kv_heads, 0, shape.value_dim), shape.dtype)

    def resize(self, pages: int) -> None:
        """Change the number of pages, keeping the content of those that stay.

        Evaluated at once, so that at most one layer exists twice at any moment.
        """
        slots = pages * self.page_size
        self.keys = _resized(self.keys, slots)
        self.values = _resized(self.values, slots)
        mx.eval(self.keys, self.values)

    def attention(self, q_heads: int) -> AttentionShape:
        """What kernels for so many query heads are compiled for.

        Raises:
            RuntimeError: no kernel reads keys and values of different sizes.
        """
        of = self.shape
        if of.key_dim != of.value_dim:
            raise RuntimeError(f"keys of {of.key_dim} elements and values of {of.value_dim}")
        return AttentionShape(q_heads, of.kv_heads, of.key_dim, self.page_size, of.dtype)

    def write(self, keys: mx.array, values: mx.array, slots: mx.array | slice) -> None:
        """Put `keys` and `values`, (kv_heads, tokens, dim), into `slots`, (tokens,) or a slice.

        In place: with kernels always, and otherwise once evaluated, as long as nothing else holds
        the arrays. Kernels want `slots` as an array.
        """
        if self._writer is None:
            self.keys[:, slots] = keys
            self.values[:, slots] = values
            return
        assert isinstance(slots, mx.array)
        self.written = self._writer.write(self.keys, self.values, keys[None], values[None], slots)
        # Evaluating the pages is to have evaluated what was written to them.
        self.keys, self.values = mx.depends([self.keys, self.values], [self.written])

    def after_write(self, x: mx.array) -> mx.array:
        """`x`, in time for reading with it what the step writes.

        Launches are ordered by the arrays they share. A kernel that writes into its inputs shares
        none with who reads them later, but for what it returns, which is 0.
        """
        return x if self._writer is None else x + self.written.astype(x.dtype)

    def read_after(self, result: mx.array) -> None:
        """What gathers pages from now on comes after the launch that gave `result`, too."""
        never = result.reshape(-1)[:1] < -mx.inf
        self.written = self.written + never.astype(mx.int32)

    def gather(self, table: mx.array) -> tuple[mx.array, mx.array]:
        """Keys and values (rows, kv_heads, n * page_size, dim) of `table`, (rows, n) pages."""
        return self._gather(self.keys, table), self._gather(self.values, table)

    def slice(self, start: int, stop: int) -> tuple[mx.array, mx.array]:
        """Slots `start` to `stop` as views (1, kv_heads, stop - start, dim)."""
        return self.keys[None, :, start:stop], self.values[None, :, start:stop]

    def _gather(self, pool: mx.array, table: mx.array) -> mx.array:
        heads, slots, dim = pool.shape
        rows, pages = table.shape
        paged = pool.reshape(heads, slots // self.page_size, self.page_size * dim)
        taken = paged[:, self.after_write(table)].reshape(heads, rows, pages * self.page_size, dim)
        return taken.transpose(1, 0, 2, 3)


def _resized(pool: mx.array, slots: int) -> mx.array:
    heads, have, dim = pool.shape
    if not slots:
        # Not cut from what there is: that may be what a failed step left, and never computable.
        return mx.zeros((heads, 0, dim), pool.dtype)
    if slots <= have:
        return mx.contiguous(pool[:, :slots])
    return mx.concatenate([pool, mx.zeros((heads, slots - have, dim), pool.dtype)], axis=1)
