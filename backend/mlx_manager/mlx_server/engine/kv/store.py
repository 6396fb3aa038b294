"""The arrays behind the page numbers, one pair a layer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_manager.mlx_server.devices.attention.kernel import AttentionShape, PagedKernels
from mlx_manager.mlx_server.devices.attention.kernel_set import KernelSet
from mlx_manager.mlx_server.devices.attention.writer import PageWriter, Pools
from mlx_manager.mlx_server.devices.cuda.mapped import send
from mlx_manager.mlx_server.devices.dtypes import dtype_name
from mlx_manager.mlx_server.devices.kernel import Unsupported
from mlx_manager.mlx_server.devices.metal.order import IN_ORDER
from mlx_manager.mlx_server.engine.kv.pages import runs


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Geometry of one layer's keys and values. `window` is None for full attention."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    window: int | None = None

    @staticmethod
    def of(shape: AttentionShape, window: int | None) -> LayerShape:
        """Return the geometry of a layer whose attention has this `shape` and `window`."""
        dim = shape.head_dim
        return LayerShape(shape.kv_heads, dim, dim, shape.dtype, window)

    @property
    def pools(self) -> Pools:
        return Pools(self.kv_heads, self.key_dim, self.value_dim, self.dtype)

    @property
    def dtype_name(self) -> str:
        return dtype_name(self.dtype)

    @property
    def token_bytes(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.size


class Numbers:
    """Numbers of slots or pages, (tokens,) or (rows, n) int32, for the layers of a step.

    Attributes:
        array: on the device.
    """

    def __init__(self, numbers: NDArray[np.int32]) -> None:
        self._numbers = numbers
        self._of_heads: dict[tuple[int, int], mx.array] = {}
        self._places: dict[tuple[int, int], tuple[mx.array, mx.array, mx.array]] = {}

    @cached_property
    def array(self) -> mx.array:
        return send(self._numbers)

    def of_rows(self, first: int, behind: int) -> Numbers:
        """Return the numbers of some rows."""
        return Numbers(self._numbers[first:behind])

    def of_heads(self, heads: int, each: int) -> mx.array:
        """Return the numbers in an array in which `heads` heads of `each` slots or pages lie one
        after another: (heads, tokens) or (rows, heads, n)."""
        if (heads, each) not in self._of_heads:
            first = np.arange(heads, dtype=np.int32)[:, None] * np.int32(each)
            self._of_heads[heads, each] = send(self._numbers[..., None, :] + first)
        return self._of_heads[heads, each]

    def for_products(self, heads: int, each: int) -> tuple[mx.array, mx.array, mx.array]:
        """Return three numbers of each page's products, (rows, heads, n) uint32 each.

        The first is the number of the row's head, `row * heads + head`. The second is the page's
        number in an array in which `heads` heads of `each` pages lie one after another. The third
        is the product's own number, counted from 0.
        """
        if (heads, each) not in self._places:
            rows, pages = self._numbers.shape
            shape = rows, heads, pages
            of = np.arange(rows * heads, dtype=np.uint32).reshape(rows, heads, 1)
            first = np.arange(heads, dtype=np.uint32)[:, None] * np.uint32(each)
            page = self._numbers[:, None].astype(np.uint32) + first
            product = np.arange(rows * heads * pages, dtype=np.uint32).reshape(shape)
            self._places[heads, each] = (
                mx.array(np.broadcast_to(of, shape)),
                mx.array(page),
                mx.array(product),
            )
        return self._places[heads, each]


@dataclass(frozen=True, slots=True)
class Sent:
    """Numbers of slots, (tokens,) int32, that the device alone knows, for kernels.

    array: on the device.
    """

    array: mx.array


class LayerStore:
    """Keys and values of one layer.

    `keys` is (kv_heads, slots, key_dim) and `values` (kv_heads, slots, value_dim); page `p` is
    the slots `p * page_size` to `(p + 1) * page_size`. Heads come first so that a gathered row is
    (kv_heads, tokens, dim) without another copy, and neighbouring pages are a plain slice.

    Args:
        kernels: kernels that write to the pages on a GPU, and read them where there is one for
            that; None for MLX's own operations.
        gathered: whether pages are read by nothing else but `gather`.
        latents: whether they are read by kernels for latent attention alone.

    Attributes:
        attends_in_pages: flag: operations of a CPU may attend over `in_pages`, without a copy.
        parts: names of the arrays in `held`.

    Raises:
        RuntimeError: no kernel writes this shape here.
    """

    attends_in_pages: ClassVar[bool] = True
    parts: ClassVar[tuple[str, str]] = ("keys", "values")

    def __init__(
        self,
        shape: LayerShape,
        page_size: int,
        kernels: KernelSet | None = None,
        *,
        gathered: bool = False,
        latents: bool = False,
    ) -> None:
        self.shape = shape
        self.page_size = page_size
        self._latents = latents
        self._writer: PagedKernels | PageWriter | None = None
        self.kernels: KernelSet | None = None
        self._order = IN_ORDER if kernels is None else kernels.order
        if kernels is not None:
            self._writer, self.kernels = self._served(kernels, gathered or latents)
        self.written = mx.zeros((1,), mx.int32)
        self.pages = 0
        self.keys = mx.zeros((shape.kv_heads, 0, shape.key_dim), shape.dtype)
        self.values = mx.zeros((shape.kv_heads, 0, shape.value_dim), shape.dtype)

    @property
    def writes_in_place(self) -> bool:
        """Return whether pages are written in place even while other arrays hold them. If so,
        `write` takes numbers of slots only."""
        return self._writer is not None

    @property
    def arrays(self) -> tuple[mx.array, mx.array, mx.array]:
        """Return the keys, the values and `written`."""
        return self.keys, self.values, self.written

    @arrays.setter
    def arrays(self, arrays: Sequence[mx.array]) -> None:
        self.keys, self.values, self.written = arrays

    def alike(self, arrays: Sequence[mx.array]) -> LayerStore:
        """Return a copy of this store with other `arrays`."""
        store = copy(self)
        store.arrays = arrays
        return store

    @property
    def format(self) -> str:
        """Return the name of the numbers' format. Pages of one format mean nothing in another."""
        return self.shape.dtype_name

    @property
    def token_bytes(self) -> int:
        """Return the bytes of one token's keys and values."""
        return self.shape.token_bytes

    @property
    def keys_at_once(self) -> int:
        """Return the most keys of running rows that are read at once."""
        return sys.maxsize

    @property
    def held(self) -> list[mx.array]:
        """Return the arrays that outlive a step, which evaluate what was written to the pages."""
        return [self.keys, self.values]

    def bytes_of(self, pages: int) -> int:
        return pages * self.page_size * self.token_bytes

    def resize(self, pages: int) -> bool:
        """Change the number of pages, keeping the content of those that stay.

        Returns:
            Whether the pages were copied. A copy is evaluated at once, so that at most one layer
            exists twice at any moment.

        Raises:
            RuntimeError: on a Mac, what was under way failed.
        """
        if pages == self.pages:
            return False
        self.pages = pages
        slots = pages * self.page_size
        if min(slots, self._slots):
            # A step may be under way, whose writes a copy would miss.
            self._order.wait()
        self._resize(slots)
        mx.eval(self.held)
        return True

    @property
    def _slots(self) -> int:
        slots: int = self.keys.shape[1]
        return slots

    def _resize(self, slots: int) -> None:
        self.keys = resized(self.keys, slots)
        self.values = resized(self.values, slots)

    def _served(
        self, kernels: KernelSet, gathered: bool
    ) -> tuple[PagedKernels | PageWriter, KernelSet | None]:
        """Return the kernels that write pages, and the set whose kernels attend over them; None for
        the set if pages are read in another way."""
        of = self.shape
        if not gathered and of.key_dim == of.value_dim:
            attending = kernels.find(self.attention(of.kv_heads))
            if not isinstance(attending, Unsupported):
                return attending, kernels
        match kernels.writer(of.pools):
            case Unsupported(reason):
                raise RuntimeError(reason)
            case writer:
                return writer, None

    def attention(self, q_heads: int) -> AttentionShape:
        """Return the shape that attention kernels for `q_heads` query heads are compiled for. Such
        kernels read keys and values of one size."""
        of = self.shape
        return AttentionShape(q_heads, of.kv_heads, of.key_dim, self.page_size, of.dtype)

    def write(self, keys: mx.array, values: mx.array, slots: Numbers | Sent | slice) -> None:
        """Put `keys` and `values`, (kv_heads, tokens, dim), into `slots`, (tokens,) or a slice.

        In place: with kernels always, and otherwise once evaluated, as long as nothing else holds
        the arrays. Kernels want `slots` as numbers.
        """
        if isinstance(slots, slice):
            assert self._writer is None
            self.keys[:, slots] = keys
            self.values[:, slots] = values
            return
        if self._writer is None:
            assert isinstance(slots, Numbers)
            index = slots.of_heads(self.shape.kv_heads, self._slots)
            # Nothing here may hold the pages beside what writes to them.
            self.keys = scattered(self.keys.reshape(-1, self.shape.key_dim), index, keys)
            self.values = scattered(self.values.reshape(-1, self.shape.value_dim), index, values)
            return
        self.written = self._writer.write(
            self.keys, self.values, keys[None], values[None], slots.array
        )
        # Evaluating the pages is to have evaluated what was written to them.
        self.keys, self.values = mx.depends([self.keys, self.values], [self.written])

    def clear(self, pages: Sequence[int]) -> None:
        """Fill `pages`, in order, with zeros, where MLX's own operations read them.

        These read whole pages, and give tokens that a row may not see a weight of 0. What another
        row left there may be NaN or infinite, which times 0 gives NaN.
        """
        if self.kernels is not None or self._latents:
            return
        size = self.page_size
        if self._writer is not None:
            # In place, too: a step may be under way.
            of = self.shape
            slots = np.array(pages)[:, None] * size + np.arange(size)
            keys, values = (
                self._order.after(mx.zeros((of.kv_heads, slots.size, dim), of.dtype))
                for dim in (of.key_dim, of.value_dim)
            )
            self.write(keys, values, Numbers(slots.reshape(-1).astype(np.int32)))
            self._order.then(self.written)
            return
        for first, end in runs(pages):
            slice_ = slice(first * size, end * size)
            self.keys[:, slice_] = 0
            self.values[:, slice_] = 0

    def copied(self, pages: Sequence[int]) -> tuple[mx.array, mx.array]:
        """Return copies of the keys and values of `pages`, (kv_heads, pages * page_size, dim), as
        all that has been queued leaves them. Not evaluated; what is queued later, once the result
        has been, does not change them."""
        table = Numbers(np.array([pages], np.int32))
        of = table.of_heads(self.shape.kv_heads, self.keys.shape[1] // self.page_size)
        index = self._order.after(self.after_write(of))
        keys, values = (gathered(pool, index, self.page_size)[0] for pool in self.held)
        if not self._order.kept:
            self._order.then(keys.reshape(-1)[:1] + values.reshape(-1)[:1])
        return keys, values

    def fill(self, pages: Sequence[int], keys: mx.array, values: mx.array) -> None:
        """Put what `copied` has returned, here or in another process, into `pages`."""
        size = self.page_size
        if self._writer is not None:
            # As in `clear`.
            slots = np.array(pages)[:, None] * size + np.arange(size)
            self.write(
                self._order.after(keys),
                self._order.after(values),
                Numbers(slots.reshape(-1).astype(np.int32)),
            )
            self._order.then(self.written)
            return
        done = 0
        for first, end in runs(pages):
            behind = done + (end - first) * size
            self.keys[:, first * size : end * size] = keys[:, done:behind]
            self.values[:, first * size : end * size] = values[:, done:behind]
            done = behind

    def after_write(self, x: mx.array) -> mx.array:
        """Return `x`, made to depend on the step's writes: launches that read it come after them.

        Launches are ordered by the arrays they share. A kernel that writes into its inputs shares
        no array with later readers except its result, which is 0.
        """
        return x if self._writer is None else x + self.written.astype(x.dtype)

    def read_after(self, result: mx.array) -> None:
        """Order later gathers of pages after the launch that gave `result`."""
        never = result.reshape(-1)[:1] < -mx.inf
        self.written = self.written + never.astype(mx.int32)

    def turned(self, heads: mx.array) -> mx.array:
        """Return queries or results of attention, (..., dim), as the pages have keys and values. To
        turn once more is to turn back."""
        return heads

    def read(self, table: Numbers) -> tuple[mx.array, mx.array]:
        """Return what `gather` returns, turned back."""
        return self.gather(table)

    def gather(self, table: Numbers) -> tuple[mx.array, mx.array]:
        """Return keys and values (rows, kv_heads, n * page_size, dim) of `table`, (rows, n)
        pages."""
        pages, size = self._slots // self.page_size, self.page_size
        index = self.after_write(table.of_heads(self.shape.kv_heads, pages))
        return gathered(self.keys, index, size), gathered(self.values, index, size)

    def in_pages(self) -> tuple[mx.array, mx.array]:
        """Return keys and values as views (kv_heads * pages, page_size, dim)."""
        size, of = self.page_size, self.shape
        return self.keys.reshape(-1, size, of.key_dim), self.values.reshape(-1, size, of.value_dim)

    def slice(self, start: int, stop: int) -> tuple[mx.array, mx.array]:
        """Return slots `start` to `stop` as views (1, kv_heads, stop - start, dim)."""
        return self.keys[None, :, start:stop], self.values[None, :, start:stop]


def gathered(pool: mx.array, index: mx.array, page_size: int) -> mx.array:
    """Return the slots (rows, heads, n * page_size, dim) of `index`, (rows, heads, n), in a `pool`
    (heads, slots, dim); see `Numbers.of_heads`."""
    dim = pool.shape[2]
    rows, heads, pages = index.shape
    paged = pool.reshape(-1, page_size, dim)
    return mx.take(paged, index, axis=0).reshape(rows, heads, pages * page_size, dim)


def scattered(flat: mx.array, index: mx.array, content: mx.array) -> mx.array:
    """Return a pool (heads, slots, dim), given `flat`, (heads * slots, dim), with `content`,
    (heads, tokens, dim), at `index`, (heads, tokens)."""
    heads, slots = index.shape[0], flat.shape[0]
    flat[index] = content
    return flat.reshape(heads, slots // heads, -1)


def resized(pool: mx.array, slots: int) -> mx.array:
    """Return a pool of so many slots, which begins as `pool` does, (heads, slots, dim)."""
    heads, have, dim = pool.shape
    # If nothing stays, do not slice the old array: a failed step may have left it in a state that
    # can never be computed.
    kept = min(slots, have)
    if not kept:
        return mx.zeros((heads, slots, dim), pool.dtype)
    if slots <= have:
        return mx.contiguous(pool[:, :slots])
    return mx.pad(pool, [(0, 0), (0, slots - have), (0, 0)])
