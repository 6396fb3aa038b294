"""A layer of the gated delta rule as mlx-lm has it, without its first and last product."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.qwen3_5 import GatedDeltaNet
from mlx_lm.models.qwen3_next import Qwen3NextGatedDeltaNet

from mlx_manager.mlx_server.engine.recurrent.shapes import DeltaShape, DeltaWeights


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
