"""Layers of the gated delta rule on a GPU: the kernels against mlx-lm's own layers."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from devices.cuda.linear_attention.layers import Layer

from mlx_manager.mlx_server.devices.cuda.linear_attention.delta import DeltaKernels, Texts, build
from mlx_manager.mlx_server.devices.states import DeltaShape, StateStore

pytestmark = pytest.mark.skipif(
    not mx.cuda.is_available(), reason="needs an NVIDIA GPU and MLX's CUDA build"
)

BF16 = mx.bfloat16
SHAPES = {
    "qwen3.5-4b": DeltaShape(16, 32, 128, 128, 4, BF16, grouped=False, rounded=True, epsilon=1e-6),
    "qwen3-next": DeltaShape(16, 32, 128, 128, 4, BF16, grouped=True, rounded=True, epsilon=1e-6),
    "small": DeltaShape(2, 4, 64, 32, 4, mx.float16, grouped=False, rounded=True, epsilon=1e-6),
}


@pytest.fixture(params=SHAPES, scope="module")
def layer(request):
    return Layer(SHAPES[request.param])


@pytest.fixture
def kernels(layer):
    made = build(layer.shape)
    assert isinstance(made, DeltaKernels)
    return made


def filled(layer, texts, slots):
    """What rows have read of `texts`, in `slots`; nothing else is a number."""
    pool = layer.pool(max(slots) + 2)
    for text, slot in zip(texts, slots, strict=True):
        layer.fill(pool, slot, text)
    store = StateStore(layer.shape)
    store.pool = (mx.array(pool[0]).view(layer.shape.dtype), mx.array(pool[1]))
    mx.eval(store.pool)
    return store


def in_memory(layer, store):
    return layer.memory(store.ring), np.array(store.states)


def rows_of(layer, parts):
    return mx.array(np.concatenate(parts)).astype(layer.shape.dtype)


def near(out, wanted):
    error = np.linalg.norm(np.array(out.astype(mx.float32)) - wanted) / np.linalg.norm(wanted)
    assert error < 0.01


@pytest.mark.parametrize("rows", [1, 3, 8, 33])
def test_a_token_of_each_row_is_what_the_layer_gives(layer, kernels, rows):
    texts = [layer.text(1 + 5 * i % 23, i) for i in range(rows)]
    slots = list(range(rows))[::-1]
    store = filled(layer, [text[:-1] for text in texts], slots)
    lengths = [len(text) for text in texts]
    heads = rows_of(layer, [text[-1:] for text in texts])
    for _ in range(2):
        # The second time the counters must be back at 0.
        again = StateStore(layer.shape)
        again.pool = (store.ring + 0, store.states + 0)
        out = kernels.step(heads, layer.weights, again.pool, mx.array(lengths), mx.array(slots))
        mx.eval(out)
    near(out, np.concatenate([layer.given(text)[-1:] for text in texts]))
    for text, slot in zip(texts, slots, strict=True):
        layer.expect_filled(in_memory(layer, again), slot, text)


@pytest.mark.parametrize("lengths", [[700], [16, 1, 333, 2, 90]])
def test_prompts_are_what_the_layer_gives(layer, kernels, lengths):
    known = [0, 9, 3, 40, 0][: len(lengths)]
    texts = [layer.text(n + k, i) for i, (n, k) in enumerate(zip(lengths, known, strict=True))]
    slots = [(3 * i + 1) % 7 for i in range(len(texts))]
    store = filled(layer, [text[:k] for text, k in zip(texts, known, strict=True)], slots)
    parts = [text[k:] for text, k in zip(texts, known, strict=True)]
    heads = rows_of(layer, [*parts, parts[0][:7]])
    texts_of = Texts.of(lengths, slots, known, sum(lengths) + 7)
    out = kernels.chunks(heads, layer.weights, store, texts_of)
    mx.eval(out)
    wanted = [layer.given(text)[k:] for text, k in zip(texts, known, strict=True)]
    near(out[: sum(lengths)], np.concatenate(wanted))
    assert not np.array(out[sum(lengths) :].astype(mx.float32)).any()
    for text, slot in zip(texts, slots, strict=True):
        layer.expect_filled(in_memory(layer, store), slot, text)


def test_a_copy_is_put_back_in_another_slot(layer, kernels):
    store = filled(layer, [layer.text(20, 1)], [1])
    kept = store.kept(1)
    kernels.restore(store, 2, kept)
    mx.eval(store.written)
    ring, states = in_memory(layer, store)
    np.testing.assert_array_equal(ring[2], ring[1])
    np.testing.assert_array_equal(states[2], states[1])
