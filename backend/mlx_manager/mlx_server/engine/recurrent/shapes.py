"""What a layer of the gated delta rule is: its sizes, its weights, and where its rows keep what."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Sizes of one layer.

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
    def slot_bytes(self) -> int:
        """What a row keeps."""
        state = self.value_heads * self.value_dim * self.key_dim
        return self.taps * self.channels * self.dtype.size + state * mx.float32.size


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

    ring: (slots, taps, channels), the last inputs of the convolution, that of position p in place
    p % taps. states: (slots, value_heads, value_dim, key_dim) float32. Written in place by kernels:
    `written` comes from the last one, and who reads them otherwise must wait for it.
    """

    def __init__(self, shape: DeltaShape) -> None:
        self.shape = shape
        self.written = mx.zeros((1,), mx.int32)
        self.ring = self._rings(0)
        self.states = self._states(0)

    @property
    def slots(self) -> int:
        return self.ring.shape[0]

    @property
    def arrays(self) -> tuple[mx.array, mx.array, mx.array]:
        return self.ring, self.states, self.written

    def alike(self, arrays: Sequence[mx.array]) -> StateStore:
        """One like this with other `arrays`."""
        store = copy(self)
        store.ring, store.states, store.written = arrays
        return store

    def resize(self, slots: int) -> None:
        """Keeps what is in those that stay, and is computed when it returns, so that one layer
        alone is there twice."""
        ring, states, _ = self._read()
        more = slots - self.slots
        if more > 0 and self.slots:
            self.ring = mx.concatenate([ring, self._rings(more)])
            self.states = mx.concatenate([states, self._states(more)])
        else:
            self.ring, self.states = self._rings(slots), self._states(slots)
        mx.eval(self.ring, self.states)

    def kept(self, slot: int) -> list[mx.array]:
        """A copy of what is in `slot`, to be evaluated before the next launch writes there."""
        ring, states, _ = self._read()
        return [mx.contiguous(ring[slot]), mx.contiguous(states[slot])]

    def _read(self) -> list[mx.array]:
        """The arrays, once the last launch has written to them."""
        return list(mx.depends(list(self.arrays), [self.written]))

    def _rings(self, slots: int) -> mx.array:
        of = self.shape
        return mx.zeros((slots, of.taps, of.channels), of.dtype)

    def _states(self, slots: int) -> mx.array:
        of = self.shape
        return mx.zeros((slots, of.value_heads, of.value_dim, of.key_dim), mx.float32)
