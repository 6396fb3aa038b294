"""Layers with a state as mlx-lm has them, without their first and last product."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.lfm2 import ShortConv
from mlx_lm.models.qwen3_5 import GatedDeltaNet
from mlx_lm.models.qwen3_next import Qwen3NextGatedDeltaNet

from mlx_manager.mlx_server.devices.states import DeltaShape, DeltaWeights, ShortShape


class ShortLayer:
    """A gated short convolution. Texts are (tokens, columns) float32 of numbers that `shape.dtype`
    has: what the first product gives."""

    def __init__(self, shape: ShortShape) -> None:
        self.shape = shape
        config = SimpleNamespace(
            hidden_size=shape.channels, conv_L_cache=shape.taps, conv_bias=False
        )
        mx.random.seed(5)
        self._module = ShortConv(config, 0)
        self._module.conv.weight = mx.random.normal((shape.channels, shape.taps, 1))
        self._module.set_dtype(shape.dtype)
        self._module.in_proj = self._module.out_proj = lambda x: x
        self.weights = mx.contiguous(self._module.conv.weight[:, :, 0].T)

    def text(self, tokens, salt):
        rng = np.random.default_rng(salt)
        return self.rounded(rng.normal(size=(tokens, self.shape.columns)).astype(np.float32) * 1.5)

    def memory(self, array):
        """Bits, of numpy's float32 or an array of the type."""
        return np.array(mx.array(array).astype(self.shape.dtype).view(mx.uint16))

    def given(self, text):
        """What the module gives for each token of a text, (tokens, channels)."""
        y = self._module(mx.array(text).astype(self.shape.dtype)[None], cache=ArraysCache(size=1))
        return np.array(y[0].astype(mx.float32))

    def exact(self, text):
        """The same, by sums in float32 in the order of the tokens, and rounded as the module's."""
        before, behind, _ = np.split(text, 3, axis=1)
        inputs, taps = self.inputs(text), np.array(self.weights.astype(mx.float32))
        sums = np.zeros_like(before)
        for tap in range(self.shape.taps):
            back = self.shape.taps - 1 - tap
            sums[back:] += taps[tap] * inputs[: len(text) - back]
        return self.rounded(behind * self.rounded(sums))

    def inputs(self, text):
        """Of the convolution."""
        before, _, x = np.split(text, 3, axis=1)
        return self.rounded(before * x)

    def ring(self, slots):
        """One that nothing should be read of, as it lies in memory."""
        return np.full((slots, self.shape.taps, self.shape.channels), 0x7FC0, np.uint16)

    def fill(self, ring, slot, text, new=None):
        """As the last `new` tokens of the text leave it, or all of them."""
        inputs, taps = self.memory(self.inputs(text)), self.shape.taps
        new = len(text) if new is None else new
        for position in range(len(text) - min(new, taps), len(text)):
            ring[slot, position % taps] = inputs[position]

    def rounded(self, values):
        return np.array(mx.array(values).astype(self.shape.dtype).astype(mx.float32))


class Layer:
    """Texts are (tokens, columns) float32 of numbers that `shape.dtype` has: what the first product
    gives."""

    def __init__(self, shape: DeltaShape) -> None:
        self.shape = shape
        self._module = _module(shape)
        self.weights = weights_of(self._module, shape.dtype)

    def text(self, tokens, salt):
        rng = np.random.default_rng(salt)
        return self._exact(rng.normal(size=(tokens, self.shape.columns)) * 1.5)

    def bits(self, text):
        return self.memory(mx.array(text).astype(self.shape.dtype))

    def memory(self, array):
        array = array if array.dtype == mx.float32 else array.view(mx.uint16)
        return np.array(array)

    def given(self, text):
        """What the layer gives for each token of a text, (tokens, values)."""
        return np.array(self._run(text)[0].astype(mx.float32))

    def pool(self, slots):
        """A ring and states that nothing should be read of, as they lie in memory."""
        of = self.shape
        ring = np.full((slots, of.taps, of.channels), 0x7FC0, np.uint16)
        states = np.full((slots, of.value_heads, of.value_dim, of.key_dim), np.nan, np.float32)
        return ring, states

    def fill(self, pool, slot, text):
        """As the text leaves them."""
        if not len(text):
            return
        _, cache = self._run(text)
        taps = self.shape.taps
        for back in range(1, taps):
            if len(text) >= back:
                pool[0][slot, (len(text) - back) % taps] = self.memory(cache[0])[0, -back]
        pool[1][slot] = np.array(cache[1])[0]

    def expect_filled(self, pool, slot, text):
        expected = self.pool(slot + 1)
        self.fill(expected, slot, text)
        taps = self.shape.taps
        for back in range(1, min(taps, len(text) + 1)):
            place = (len(text) - back) % taps
            np.testing.assert_array_equal(pool[0][slot, place], expected[0][slot, place])
        state = expected[1][slot]
        np.testing.assert_allclose(pool[1][slot], state, rtol=0.01, atol=0.01 * np.abs(state).max())

    def _run(self, text):
        cache = ArraysCache(size=2)
        self._module.tokens = mx.array(text).astype(self.shape.dtype)[None]
        return self._module(self._module.tokens, cache=cache)[0], cache

    def _exact(self, values):
        values = mx.array(values.astype(np.float32)).astype(self.shape.dtype)
        return np.array(values.astype(mx.float32))


def weights_of(module, dtype):
    rate = -mx.exp(module.A_log.astype(mx.float32))
    convolution = module.conv1d.weight.reshape(module.conv_dim, -1)
    return DeltaWeights(
        convolution, rate, module.dt_bias.astype(mx.float32), module.norm.weight.astype(dtype)
    )


def _module(shape):
    config = SimpleNamespace(
        hidden_size=8,
        linear_num_value_heads=shape.value_heads,
        linear_num_key_heads=shape.key_heads,
        linear_key_head_dim=shape.key_dim,
        linear_value_head_dim=shape.value_dim,
        linear_conv_kernel_dim=shape.taps,
        rms_norm_eps=shape.epsilon,
    )
    mx.random.seed(5)
    module = (Qwen3NextGatedDeltaNet if shape.grouped else GatedDeltaNet)(config)
    module.conv1d.weight = mx.random.normal(module.conv1d.weight.shape) * 0.5
    module.norm.weight = 1 + 0.3 * mx.random.normal(module.norm.weight.shape)
    module.dt_bias = mx.random.normal(module.dt_bias.shape)
    module.A_log = mx.log(mx.random.uniform(0.1, 4, module.A_log.shape))
    module.set_dtype(shape.dtype)
    if not shape.rounded:
        module.dt_bias = module.dt_bias.astype(mx.float32)
    _take_columns(module, shape)
    module.out_proj = lambda x: x
    return module


def _take_columns(module, shape):
    """The products give a row's columns, one after the other."""
    behind, heads = shape.channels + shape.values, shape.value_heads
    if shape.grouped:
        module.in_proj_qkvz = lambda x: x[..., :behind]
        module.in_proj_ba = lambda x: x[..., behind:]
        return
    module.in_proj_qkv = lambda x: x[..., : shape.channels]
    module.in_proj_z = lambda x: x[..., shape.channels : behind]
    module.in_proj_b = lambda x: x[..., behind : behind + heads]
    module.in_proj_a = lambda x: x[..., behind + heads :]
