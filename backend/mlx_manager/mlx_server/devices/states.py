"""Layers with a recurrent state: sizes, weights, and the storage of each row's state."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from math import prod
from typing import Protocol

import mlx.core as mx


class StateShape(Protocol):
    """Sizes of a layer whose rows keep the last inputs of a convolution, and perhaps more.

    channels: channels of the convolution. taps: tokens that the convolution sees. dtype: type of
    the convolution's inputs. matrices: shape of the float32 state that a row keeps besides; () if
    there is none.
    """

    @property
    def channels(self) -> int: ...

    @property
    def taps(self) -> int: ...

    @property
    def dtype(self) -> mx.Dtype: ...

    @property
    def matrices(self) -> tuple[int, ...]: ...

    @property
    def numbers(self) -> int:
        """Intermediate elements per token between a layer's first product and its last."""

    @property
    def slot_bytes(self) -> int:
        """Bytes that a row keeps."""


@dataclass(frozen=True, slots=True)
class ShortShape:
    """Sizes of one layer of a gated short convolution.

    taps: tokens that it sees.
    """

    channels: int
    taps: int
    dtype: mx.Dtype

    @property
    def matrices(self) -> tuple[int, ...]:
        return ()

    @property
    def columns(self) -> int:
        """Elements per token in the output of the first product: B, C and x."""
        return 3 * self.channels

    @property
    def numbers(self) -> int:
        return self.channels

    @property
    def slot_bytes(self) -> int:
        return self.taps * self.channels * self.dtype.size


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Sizes of one layer of the gated delta rule.

    taps: tokens that the convolution sees. grouped: whether the first product gives a key head and
    its value heads together, as Qwen 3 Next has it. rounded: whether decays are computed in
    `dtype`. epsilon: epsilon of the norm after the rule.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    dtype: mx.Dtype
    grouped: bool
    rounded: bool
    epsilon: float

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        """Elements per token in the output of the rule: the values of all heads."""
        return self.value_heads * self.value_dim

    @property
    def columns(self) -> int:
        """Elements per token in the output of the first product."""
        return self.channels + self.values + 2 * self.value_heads

    @property
    def numbers(self) -> int:
        return self.channels + 2 * self.values

    @property
    def matrices(self) -> tuple[int, ...]:
        return self.value_heads, self.value_dim, self.key_dim

    @property
    def slot_bytes(self) -> int:
        return self.taps * self.channels * self.dtype.size + prod(self.matrices) * mx.float32.size


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """Weights of one layer of the gated delta rule.

    convolution: (channels, taps). rates: (value_heads,) float32, -exp(A_log). offsets:
    (value_heads,) float32, added to a. norm: (value_dim,).
    """

    convolution: mx.array
    rates: mx.array
    offsets: mx.array
    norm: mx.array


class StateStore:
    """States of all rows in one layer, each in its slot.

    pool: the `ring`, (slots, taps, channels), with the last inputs of the convolution (the input of
    position p at index p % taps); and `states`, (slots, *matrices) float32, where rows keep
    matrices. Kernels write the pool in place. `written` is the output of the last launch; all other
    readers must depend on it.
    """

    def __init__(self, shape: StateShape) -> None:
        self.shape = shape
        self.written = mx.zeros((1,), mx.int32)
        self.pool = self._zeros(0)

    @property
    def ring(self) -> mx.array:
        return self.pool[0]

    @property
    def states(self) -> mx.array:
        """Matrices of all slots; only for layers whose rows keep matrices."""
        return self.pool[1]

    @property
    def slots(self) -> int:
        return self.ring.shape[0]

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return (*self.pool, self.written)

    def alike(self, arrays: Sequence[mx.array]) -> StateStore:
        """Return a copy of this store with other `arrays`."""
        store = copy(self)
        *pool, store.written = arrays
        store.pool = tuple(pool)
        return store

    def resize(self, slots: int) -> None:
        """Change the number of slots; growing keeps the contents of the old slots.

        The pool is evaluated before this returns, so only one layer at a time is in memory twice.
        """
        more = slots - self.slots
        if more > 0 and self.slots:
            both = zip(self._read(), self._zeros(more), strict=True)
            self.pool = tuple(mx.concatenate(list(pair)) for pair in both)
        else:
            self.pool = self._zeros(slots)
        mx.eval(self.pool)

    def kept(self, slot: int) -> list[mx.array]:
        """Return a copy of the contents of `slot`; evaluate it before the next launch writes."""
        return [mx.contiguous(part[slot]) for part in self._read()]

    def _read(self) -> list[mx.array]:
        """Return the pool as it is after the last launch."""
        return list(mx.depends(list(self.pool), [self.written]))

    def _zeros(self, slots: int) -> tuple[mx.array, ...]:
        of = self.shape
        ring = mx.zeros((slots, of.taps, of.channels), of.dtype)
        if not of.matrices:
            return (ring,)
        return ring, mx.zeros((slots, *of.matrices), mx.float32)
