"""The arrays behind the page numbers where keys and values are kept in 8 bits."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_manager.mlx_server.devices.attention import codes
from mlx_manager.mlx_server.devices.attention.kernel import CodedKernels, CodedShape
from mlx_manager.mlx_server.devices.attention.kernel_set import KernelSet
from mlx_manager.mlx_server.devices.kernel import Unsupported
from mlx_manager.mlx_server.engine.kv.pages import runs
from mlx_manager.mlx_server.engine.kv.store import (
    LayerShape,
    LayerStore,
    Numbers,
    Sent,
    gathered,
    resized,
    scattered,
)

DECODED = 1 << 24
"""Most numbers of a layer's keys and values that are decoded at once for running rows, unless they
are one row's: a crowd's would take memory that nobody has reckoned with."""


class CodedStore(LayerStore):
    """Keys and values of one layer in 8 bits, written by MLX's own operations on any device.

    Running rows are attended by kernels of `readers` where there are some. Otherwise attention
    reads what it needs decoded: the pages of a step's rows, a layer at a time. They are turned
    (`codes.turn_of`), and so are its queries and its result (`turned`). Heads of keys come
    before heads of values in one array, so that a layer takes half as many operations: `codes` is
    (2 * kv_heads, slots, dim) int8 and `scales` (2 * kv_heads, slots, groups).

    Raises:
        ValueError: keys and values of this shape are not kept in 8 bits; see `is_coded`.
    """

    attends_in_pages = False
    parts = ("codes", "scales")

    def __init__(self, shape: LayerShape, page_size: int, readers: KernelSet | None = None) -> None:
        super().__init__(shape, page_size)
        self._readers = readers
        group = codes.group_of(shape.key_dim)
        if group is None or not is_coded(shape):
            raise ValueError(f"{shape} is not kept in 8 bits")
        self._group = group
        self._turn = codes.turn_of(shape.key_dim)
        heads = 2 * shape.kv_heads
        self.codes = mx.zeros((heads, 0, shape.key_dim), mx.int8)
        self.scales = mx.zeros((heads, 0, shape.key_dim // group), codes.SCALE)

    @property
    def format(self) -> str:
        return f"int8/{self._group}"

    @property
    def token_bytes(self) -> int:
        return 2 * self.shape.kv_heads * codes.token_bytes(self.shape.key_dim)

    @property
    def held(self) -> list[mx.array]:
        return [self.codes, self.scales]

    @property
    def keys_at_once(self) -> int:
        return DECODED // self.codes.shape[0] // self.shape.key_dim

    def _resize(self, slots: int) -> None:
        self.codes = resized(self.codes, slots)
        self.scales = resized(self.scales, slots)

    @property
    def _slots(self) -> int:
        return self.codes.shape[1]

    def write(self, keys: mx.array, values: mx.array, slots: Numbers | Sent | slice) -> None:
        """Put `keys` and `values` into `slots`, encoded, as `LayerStore.write` does without
        kernels."""
        assert not isinstance(slots, Sent)
        heads = mx.concatenate([keys, values]).astype(mx.float32)
        fresh, scales = codes.encoded(heads @ self._turn, self._group)
        if isinstance(slots, slice):
            self.codes[:, slots] = fresh
            self.scales[:, slots] = scales
            return
        index = slots.of_heads(len(fresh), self._slots)
        self.codes = scattered(self.codes.reshape(-1, fresh.shape[2]), index, fresh)
        self.scales = scattered(self.scales.reshape(-1, scales.shape[2]), index, scales)

    def clear(self, pages: Sequence[int]) -> None:
        for first, end in runs(pages):
            slots = slice(first * self.page_size, end * self.page_size)
            self.codes[:, slots] = 0
            self.scales[:, slots] = 0

    def copied(self, pages: Sequence[int]) -> tuple[mx.array, mx.array]:
        """Return copies of the codes and scales of `pages`, as `LayerStore.copied` does."""
        table = Numbers(np.array([pages], np.int32))
        index = table.of_heads(2 * self.shape.kv_heads, self._slots // self.page_size)
        found, scales = (gathered(pool, index, self.page_size)[0] for pool in self.held)
        return found, scales

    def fill(self, pages: Sequence[int], keys: mx.array, values: mx.array) -> None:
        """Put the codes and scales that `copied` has returned into `pages`."""
        done = 0
        for first, end in runs(pages):
            behind = done + (end - first) * self.page_size
            slots = slice(first * self.page_size, end * self.page_size)
            self.codes[:, slots] = keys[:, done:behind]
            self.scales[:, slots] = values[:, done:behind]
            done = behind

    def reader(self, q_heads: int) -> CodedKernels | None:
        """Return the kernels that attend queries of so many heads, if there are some here."""
        if self._readers is None:
            return None
        found = self._readers.coded(CodedShape(self.attention(q_heads), self._group))
        return None if isinstance(found, Unsupported) else found

    def turned(self, heads: mx.array) -> mx.array:
        # In half precision the matrix would not be its own inverse.
        return (heads.astype(mx.float32) @ self._turn).astype(heads.dtype)

    def read(self, table: Numbers) -> tuple[mx.array, mx.array]:
        keys, values = self.gather(table)
        return self.turned(keys), self.turned(values)

    def gather(self, table: Numbers) -> tuple[mx.array, mx.array]:
        index = table.of_heads(2 * self.shape.kv_heads, self._slots // self.page_size)
        found = (gathered(pool, index, self.page_size) for pool in self.held)
        return self._decoded(*found)

    def slice(self, start: int, stop: int) -> tuple[mx.array, mx.array]:
        return self._decoded(*(pool[None, :, start:stop] for pool in self.held))

    def _decoded(self, found: mx.array, scales: mx.array) -> tuple[mx.array, mx.array]:
        """Return turned keys and values (rows, kv_heads, tokens, dim) of codes and scales (rows,
        2 * kv_heads, tokens, ...)."""
        heads = codes.decoded(found, scales, self.shape.dtype)
        return heads[:, : self.shape.kv_heads], heads[:, self.shape.kv_heads :]


def is_coded(shape: LayerShape) -> bool:
    """Return whether keys and values of this shape can be kept in 8 bits: those of heads can,
    while latent vectors, whose keys and values differ in size, stay as they are."""
    return shape.key_dim == shape.value_dim and codes.group_of(shape.key_dim) is not None
