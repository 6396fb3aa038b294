"""Gated short convolutions on a GPU: the kernels against sums by numpy."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from devices.cuda.linear_attention.layers import ShortLayer

from mlx_manager.mlx_server.devices.cuda.linear_attention.delta import Texts
from mlx_manager.mlx_server.devices.cuda.linear_attention.short import ShortKernels, build
from mlx_manager.mlx_server.devices.states import ShortShape, StateStore

pytestmark = pytest.mark.skipif(
    not mx.cuda.is_available(), reason="needs an NVIDIA GPU and MLX's CUDA build"
)

SHAPES = {
    "lfm2-1.2b": ShortShape(2048, 3, mx.bfloat16),
    "small": ShortShape(600, 4, mx.float16),
}


@pytest.fixture(params=SHAPES, scope="module")
def layer(request):
    return ShortLayer(SHAPES[request.param])


@pytest.fixture
def kernels(layer):
    made = build(layer.shape)
    assert isinstance(made, ShortKernels)
    return made


def filled(layer, texts, slots):
    """What rows have read of `texts`, in `slots`; nothing else is a number. With it, as it lies in
    memory."""
    ring = layer.ring(max(slots) + 2)
    for text, slot in zip(texts, slots, strict=True):
        layer.fill(ring, slot, text)
    store = StateStore(layer.shape)
    # The result of an operation lies in the device's memory.
    store.pool = (mx.contiguous(mx.array(ring).view(layer.shape.dtype)),)
    mx.eval(store.pool)
    return store, ring


def in_memory(store):
    return np.array(store.ring.view(mx.uint16))


def rows_of(layer, parts):
    return mx.array(np.concatenate(parts)).astype(layer.shape.dtype)


@pytest.mark.parametrize("rows", [1, 3, 40, 128])
def test_a_token_of_each_row_is_what_numpy_gives(layer, kernels, rows):
    texts = [layer.text(1 + 5 * i % 7, i) for i in range(rows)]
    slots = list(range(rows))[::-1]
    store, ring = filled(layer, [text[:-1] for text in texts], slots)
    # Padding writes nothing.
    lengths = [*map(len, texts), 0]
    heads = rows_of(layer, [*(text[-1:] for text in texts), texts[0][:1]])
    numbers = (mx.array(lengths, mx.int32), mx.array([*slots, rows], mx.int32))
    out = kernels.step(heads, layer.weights, store.pool, *numbers)
    mx.eval(out)
    wanted = [layer.exact(text)[-1:] for text in texts]
    np.testing.assert_array_equal(np.array(out[:-1].astype(mx.float32)), np.concatenate(wanted))
    for text, slot in zip(texts, slots, strict=True):
        layer.fill(ring, slot, text, new=1)
    np.testing.assert_array_equal(in_memory(store), ring)


@pytest.mark.parametrize("new", [[700], [16, 1, 333, 2, 90, 3], [1] * 40 + [4, 2000]])
def test_prompts_are_what_numpy_gives(layer, kernels, new):
    known = [(0, 9, 1, 40, 2)[i % 5] for i in range(len(new))]
    texts = [layer.text(n + k, i) for i, (n, k) in enumerate(zip(new, known, strict=True))]
    slots = list(range(len(texts)))[::-1]
    store, ring = filled(layer, [text[:k] for text, k in zip(texts, known, strict=True)], slots)
    parts = [text[k:] for text, k in zip(texts, known, strict=True)]
    heads = rows_of(layer, [*parts, layer.text(100, 99)])
    texts_of = Texts.of(new, slots, known, sum(new) + 100)
    out = kernels.chunks(heads, layer.weights, store, texts_of)
    mx.eval(out, store.written)
    out = np.array(out.astype(mx.float32))
    wanted = [layer.exact(text)[k:] for text, k in zip(texts, known, strict=True)]
    np.testing.assert_array_equal(out[: sum(new)], np.concatenate(wanted))
    assert not out[sum(new) :].any()
    for text, slot, count in zip(texts, slots, new, strict=True):
        layer.fill(ring, slot, text, new=count)
    np.testing.assert_array_equal(in_memory(store), ring)


def test_a_copy_is_put_back_in_another_slot(layer, kernels):
    store, ring = filled(layer, [layer.text(20, 1)], [1])
    kernels.restore(store, 2, store.kept(1))
    mx.eval(store.written)
    ring[2] = ring[1]
    np.testing.assert_array_equal(in_memory(store), ring)
