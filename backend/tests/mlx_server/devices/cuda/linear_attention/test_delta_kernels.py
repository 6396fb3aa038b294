"""The gated delta rule: the CUDA source against mlx-lm's own layers, on an emulated GPU."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from devices.cuda.linear_attention.layers import Layer
from devices.cuda.matmul.halves import bits

from mlx_manager.mlx_server.devices.cuda.linear_attention import delta
from mlx_manager.mlx_server.devices.kernel import Unsupported
from mlx_manager.mlx_server.devices.states import DeltaShape

BF16, F16, F32, I32 = mx.bfloat16, mx.float16, mx.float32, mx.int32
SHAPES = [
    DeltaShape(2, 4, 32, 32, 4, BF16, grouped=False, rounded=True, epsilon=1e-6),
    DeltaShape(2, 4, 64, 32, 4, BF16, grouped=True, rounded=True, epsilon=1e-5),
    DeltaShape(1, 1, 128, 128, 4, BF16, grouped=False, rounded=False, epsilon=1e-6),
    DeltaShape(1, 3, 32, 64, 2, F16, grouped=False, rounded=True, epsilon=1e-6),
]
WHOLE, SPLIT = (partial(delta.StepForm.of, rows=rows) for rows in (1, 1000))
SOURCES = (
    lambda shape: delta.step_source(shape, SPLIT(shape)),
    lambda shape: delta.step_source(shape, WHOLE(shape)),
    delta.convolve_source,
    delta.relate_source,
    delta.chunk_source,
    delta.finish_source,
    delta.restore_source,
)
TYPES = {
    "lengths": I32, "slots": I32, "rates": F32, "offsets": F32, "states": F32,
    "spans": I32, "kept_state": F32, "slot": I32, "written": I32, "pieces": I32, "figures": F32,
    "arrivals": I32,
}  # fmt: skip


def entries(shape):
    for build in SOURCES:
        source = build(shape)
        both = (source.inputs, source.outputs)
        yield source, *(tuple(TYPES.get(name, shape.dtype) for name in names) for names in both)


@pytest.fixture(scope="module")
def library(compile_cuda):
    return compile_cuda([entry for shape in SHAPES for entry in entries(shape)])


@dataclass
class Device:
    """Launches as `DeltaKernels` makes them, of arrays in memory: those of halves as their bits."""

    library: object
    number: int
    layer: Layer

    def step(self, heads, pool, lengths, slots, form):
        of = self.layer.shape
        out = np.full((len(heads), of.values), 0x7FC0, np.uint16)
        threads = form(of).warps * 32
        arrivals = np.zeros(len(heads) * of.value_heads, np.int32)
        given = [heads, lengths, slots, *self._weights("convolution", "rates", "offsets", "norm")]
        grid = (len(heads) * of.value_heads * form(of).splits * threads, 1, 1)
        which = (SPLIT, WHOLE).index(form)
        self._launch(which, [*given, *pool, arrivals], [out], grid, (threads, 1, 1))
        assert not arrivals.any()
        return out

    def chunks(self, heads, pool, texts):
        of, tokens = self.layer.shape, len(heads)
        ring, states = pool
        spans, pieces = (np.array(each) for each in astuple(texts))
        convolved = np.full((tokens, of.channels), 0x7FC0, np.uint16)
        y, out = (np.full((tokens, of.values), 0x7FC0, np.uint16) for _ in range(2))
        warps = len(pieces) * (2 * of.key_heads + of.value_heads)
        given = [heads, pieces, *self._weights("convolution"), ring]
        self._launch(2, given, [convolved], _blocks(warps * 32), (delta.THREADS, 1, 1))
        warps, threads = len(pieces) * of.value_heads, delta.RELATE_WARPS * 32
        relations = np.full((warps, 2 * delta.PIECE**2), 0x7FC0, np.uint16)
        figures = np.full((warps, 3 * delta.PIECE), np.nan, np.float32)
        given = [convolved, heads, pieces, *self._weights("rates", "offsets")]
        grid = (-(-warps * 32 // threads) * threads, 1, 1)
        self._launch(3, given, [relations, figures], grid, (threads, 1, 1))
        given = [convolved, relations, figures, heads, spans, ring, states]
        grid = (of.values // delta.BLOCK_ROWS * delta.CHUNK_THREADS, len(spans), 1)
        written = np.ones(1, np.int32)
        self._launch(4, given, [y, written], grid, (delta.CHUNK_THREADS, 1, 1))
        given = [y, heads, *self._weights("norm")]
        grid = _blocks(tokens * of.value_heads * 32)
        self._launch(5, given, [out], grid, (delta.THREADS, 1, 1))
        assert written == 0
        return out

    def restore(self, pool, slot, kept):
        done = np.ones(1, np.int32)
        given = [*kept, np.array([slot], np.int32), *pool]
        self._launch(6, given, [done], (2 * delta.THREADS, 1, 1), (delta.THREADS, 1, 1))

    def _weights(self, *names):
        return [self.layer.memory(getattr(self.layer.weights, name)) for name in names]

    def _launch(self, which, *how):
        self.library.call(self.number * len(SOURCES) + which, *how)


def _blocks(threads):
    return (-(-threads // delta.THREADS) * delta.THREADS, 1, 1)


@pytest.fixture(params=range(len(SHAPES)), ids=["plain", "grouped", "wide", "odd"])
def device(request, library):
    return Device(library, request.param, Layer(SHAPES[request.param]))


def near(out, wanted, dtype):
    mine = np.array(mx.array(out).view(dtype).astype(F32))
    np.testing.assert_allclose(mine, wanted, rtol=0.02, atol=0.02 * np.abs(wanted).max())


@pytest.mark.parametrize("form", [SPLIT, WHOLE], ids=["split", "whole"])
def test_a_token_of_each_row_is_what_the_layer_gives(device, form):
    layer = device.layer
    texts = [layer.text(n, salt) for n, salt in ((1, 1), (9, 2), (3, 3))]
    pool = layer.pool(slots=5)
    order = [4, 0, 2]
    for text, slot in zip(texts, order, strict=True):
        layer.fill(pool, slot, text[:-1])
    heads = np.concatenate([text[-1:] for text in texts[:2]] + [texts[0][:1] * 0, texts[2][-1:]])
    lengths = np.array([1, 9, 0, 3], np.int32)
    slots = np.array([order[0], order[1], 1, order[2]], np.int32)
    untouched = pool[1][1].copy()
    out = device.step(layer.bits(heads), pool, lengths, slots, form)
    near(out[[0, 1, 3]], np.concatenate([layer.given(t)[-1:] for t in texts]), layer.shape.dtype)
    assert not out[2].any()
    np.testing.assert_array_equal(pool[1][1], untouched)
    for text, slot in zip(texts, order, strict=True):
        layer.expect_filled(pool, slot, text)


def test_prompts_are_what_the_layer_gives_and_go_on_where_they_were(device):
    layer = device.layer
    texts = [layer.text(n, salt) for n, salt in ((40, 1), (2, 2), (8, 3), (23, 4))]
    known = [5, 0, 7, 3]
    pool = layer.pool(slots=6)
    slots = [3, 0, 5, 1]
    for text, slot, n in zip(texts, slots, known, strict=True):
        layer.fill(pool, slot, text[:n])
    parts = [text[n:] for text, n in zip(texts, known, strict=True)]
    counts = [len(part) for part in parts]
    end = sum(counts)
    heads = np.concatenate([*parts, parts[0][:3]])
    texts_of = delta.Texts.of(counts, slots, known, end + 3)
    out = device.chunks(layer.bits(heads), pool, texts_of)
    wanted = [layer.given(text)[n:] for text, n in zip(texts, known, strict=True)]
    near(out[:end], np.concatenate(wanted), layer.shape.dtype)
    assert not np.array(mx.array(out[end:]).view(layer.shape.dtype).astype(F32)).any()
    for text, slot in zip(texts, slots, strict=True):
        layer.expect_filled(pool, slot, text)


def test_a_slot_is_put_back(device):
    layer = device.layer
    pool = layer.pool(slots=3)
    layer.fill(pool, 2, layer.text(6, 1))
    kept = [part[2].copy() for part in pool]
    others = [part[:2].copy() for part in pool]
    pool[0][2], pool[1][2] = 0, 0
    device.restore(pool, 2, kept)
    for part, own, other in zip(pool, kept, others, strict=True):
        np.testing.assert_array_equal(part[2], own)
        np.testing.assert_array_equal(part[:2], other)


@pytest.mark.parametrize("index", [0, 1])
def test_nvidia_s_compiler_takes_them(nvidia_accepts, index):
    nvidia_accepts(list(entries(SHAPES[index])))


def test_other_sizes_and_devices_are_not_served():
    served = SHAPES[0]
    assert "192" in str(delta.unserved(DeltaShape(2, 4, 192, 32, 4, BF16, False, True, 1e-6)))
    assert "of 3 tokens" in str(
        delta.unserved(DeltaShape(2, 4, 32, 32, 3, BF16, False, True, 1e-6))
    )
    assert delta.unserved(served) is None
    if mx.default_device() == mx.cpu:
        assert isinstance(delta.build(served), Unsupported)


def test_halves_are_as_they_are_stored():
    values = np.array([[1.5, -2.0]], np.float32)
    assert bits(values, BF16).tolist() == [[0x3FC0, 0xC000]]
