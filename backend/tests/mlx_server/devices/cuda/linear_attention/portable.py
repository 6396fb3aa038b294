"""`DeltaKernels` and `ShortKernels` in MLX operations: what a GPU's kernels must do, the slow way,
on any device."""

from __future__ import annotations

import mlx.core as mx
from mlx import nn
from mlx_lm.models.activations import precise_swiglu
from mlx_lm.models.gated_delta import gated_delta_update, normalize_qk

from mlx_manager.mlx_server.devices.states import DeltaShape, ShortShape


class PortableStates:
    """Pools are written in place, so that whoever holds them sees it.

    wide: what they give for a token. _text: of tokens of one text, from a position on.
    """

    def __init__(self, shape, wide: int) -> None:
        self.shape, self._wide = shape, wide

    def step(self, heads, weights, pool, lengths, slots):
        rows = []
        for row, (length, slot) in enumerate(
            zip(lengths.tolist()[: heads.shape[0]], slots.tolist(), strict=True)
        ):
            if length:
                rows.append(self._text(heads[row : row + 1], weights, pool, slot, length - 1))
            else:
                rows.append(mx.zeros((1, self._wide), heads.dtype))
        return mx.concatenate(rows)

    def chunks(self, heads, weights, store, texts):
        parts = []
        for first, count, slot, position, _ in texts.spans.tolist():
            own = heads[first : first + count]
            if not count:
                continue
            if slot < 0:
                parts.append(mx.zeros((count, self._wide), heads.dtype))
                continue
            parts.append(self._text(own, weights, store.pool, slot, position))
        return mx.concatenate(parts)

    def restore(self, store, slot, kept):
        for part, own in zip(store.pool, kept, strict=True):
            part[slot] = own

    def _convolved(self, inputs, kernel, ring, slot, position):
        """(tokens, channels); leaves the last of `inputs`, the same, in the ring."""
        of = self.shape
        before = [
            ring[slot, (position - back) % of.taps][None]
            if position >= back
            else mx.zeros_like(inputs[:1])
            for back in range(of.taps - 1, 0, -1)
        ]
        seen = mx.concatenate([*before, inputs])
        for back in range(min(of.taps, inputs.shape[0])):
            end = position + inputs.shape[0] - 1 - back
            ring[slot, end % of.taps] = inputs[-1 - back]
        return mx.conv1d(seen[None], kernel[:, :, None], groups=of.channels)[0]


class PortableShort(PortableStates):
    """As `short.build` would give them."""

    def __init__(self, shape: ShortShape) -> None:
        super().__init__(shape, shape.channels)

    def _text(self, heads, weights, pool, slot, position):
        before, behind, x = mx.split(heads[:, : self.shape.columns], 3, axis=1)
        (ring,) = pool
        return behind * self._convolved(before * x, weights.T, ring, slot, position)


class PortableDelta(PortableStates):
    """As `kernels.build` would give them."""

    def __init__(self, shape: DeltaShape) -> None:
        super().__init__(shape, shape.values)

    def _text(self, heads, weights, pool, slot, position):
        of, (ring, states) = self.shape, pool
        q, k, v, z, b, a = self._columns(heads)
        inputs = mx.concatenate([q, k, v], axis=1)
        convolved = nn.silu(self._convolved(inputs, weights.convolution, ring, slot, position))
        keys = of.key_heads * of.key_dim
        sizes = ((of.key_heads, of.key_dim),) * 2 + ((of.value_heads, of.value_dim),)
        q, k, v = (
            part.reshape(1, -1, *size)
            for part, size in zip(mx.split(convolved, [keys, 2 * keys], -1), sizes, strict=True)
        )
        q, k = normalize_qk(q, k, inv_scale=of.key_dim**-0.5, eps=1e-6)
        state = states[slot][None] if position else mx.zeros_like(states[slot])[None]
        offsets = weights.offsets.astype(of.dtype) if of.rounded else weights.offsets
        rates = mx.log(-weights.rates)
        y, state = gated_delta_update(q, k, v, a[None], b[None], rates, offsets, state)
        states[slot] = state[0]
        z = z.reshape(1, -1, of.value_heads, of.value_dim)
        normed = mx.fast.rms_norm(y, weights.norm, of.epsilon)
        return precise_swiglu(y, z, normed).reshape(-1, of.values)

    def _columns(self, heads):
        """q, k, v, z, b and a, (tokens, n)."""
        of, tokens = self.shape, heads.shape[0]
        keys, share = of.key_heads * of.key_dim, of.value_heads // of.key_heads
        heads = heads[:, : of.columns]
        if not of.grouped:
            ends = [keys, 2 * keys, of.channels, of.channels + of.values]
            return mx.split(heads, [*ends, ends[-1] + of.value_heads], axis=1)
        wide = heads[:, : of.channels + of.values].reshape(tokens, of.key_heads, -1)
        narrow = heads[:, of.channels + of.values :].reshape(tokens, of.key_heads, -1)
        own = share * of.value_dim
        ends = [of.key_dim, 2 * of.key_dim, 2 * of.key_dim + own]
        parts = [*mx.split(wide, ends, -1), *mx.split(narrow, [share], -1)]
        return [part.reshape(tokens, -1) for part in parts]
