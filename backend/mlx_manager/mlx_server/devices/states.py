"""What layers with a state are: their sizes, their weights, and where their rows keep what."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from math import prod
from typing import Protocol

import mlx.core as mx


class StateShape(Protocol):
    """Of a layer whose rows keep the last inputs of a convolution, and perhaps more.

    channels, taps: of the convolution, which sees so many tokens, of the type `dtype`. matrices:
    sizes of what a row keeps besides, float32; none if that is nothing.
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
        """That are made of a token between a layer's first product and its last."""

    @property
    def slot_bytes(self) -> int:
        """What a row keeps."""


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
        """What the first product gives for a token: B, C and x."""
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

    taps: tokens that its convolution sees. grouped: whether the first product gives a key head and
    its value heads together, as Qwen 3 Next has it. rounded: whether decays are computed in
    `dtype`. epsilon: of the norm behind it.
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
        """Of the convolution."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        """What it gives for a token."""
        return self.value_heads * self.value_dim

    @property
    def columns(self) -> int:
        """What the first product gives for a token."""
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
    """convolution: (channels, taps). rates: (value_heads,) float32, -exp(A_log). offsets:
    (value_heads,) float32, what is added to a. norm: (value_dim,)."""

    convolution: mx.array
    rates: mx.array
    offsets: mx.array
    norm: mx.array


class StateStore:
    """One layer's states of all rows, each in its slot.

    pool: the `ring`, (slots, taps, channels), the last inputs of the convolution, that of position
    p in place p % taps; and `states`, (slots, *matrices) float32, where a row keeps such. Written
    in place by kernels: `written` comes from the last one, and who reads them otherwise must wait
    for it.
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
        """Of layers whose rows keep matrices."""
        return self.pool[1]

    @property
    def slots(self) -> int:
        return self.ring.shape[0]

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return (*self.pool, self.written)

    def alike(self, arrays: Sequence[mx.array]) -> StateStore:
        """One like this with other `arrays`."""
        store = copy(self)
        *pool, store.written = arrays
        store.pool = tuple(pool)
        return store

    def resize(self, slots: int) -> None:
        """Keeps what is in those that stay, and is computed when it returns, so that one layer
        alone is there twice."""
        more = slots - self.slots
        if more > 0 and self.slots:
            both = zip(self._read(), self._zeros(more), strict=True)
            self.pool = tuple(mx.concatenate(list(pair)) for pair in both)
        else:
            self.pool = self._zeros(slots)
        mx.eval(self.pool)

    def kept(self, slot: int) -> list[mx.array]:
        """A copy of what is in `slot`, to be evaluated before the next launch writes there."""
        return [mx.contiguous(part[slot]) for part in self._read()]

    def _read(self) -> list[mx.array]:
        """The pool, once the last launch has written to it."""
        return list(mx.depends(list(self.pool), [self.written]))

    def _zeros(self, slots: int) -> tuple[mx.array, ...]:
        of = self.shape
        ring = mx.zeros((slots, of.taps, of.channels), of.dtype)
        if not of.matrices:
            return (ring,)
        return ring, mx.zeros((slots, *of.matrices), mx.float32)
