"""Gated short convolutions: the CUDA source against sums by numpy, on an emulated GPU."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import mlx.core as mx
import numpy as np
import pytest
from devices.cuda.linear_attention.layers import ShortLayer

from mlx_manager.mlx_server.devices.cuda.linear_attention import short
from mlx_manager.mlx_server.devices.cuda.linear_attention.delta import Texts
from mlx_manager.mlx_server.devices.kernel import Unsupported
from mlx_manager.mlx_server.devices.states import ShortShape

BF16, F16, I32 = mx.bfloat16, mx.float16, mx.int32
# One whose rows end within a block among them.
SHAPES = {
    "lfm2": ShortShape(64, 3, BF16),
    "wide": ShortShape(600, 3, F16),
    "two": ShortShape(12, 2, F16),
    "four": ShortShape(36, 4, BF16),
}
SOURCES = (short.step_source, short.chunks_source, short.restore_source)
INTEGERS = {"lengths", "slots", "spans", "pieces", "slot", "written"}
# Columns behind those of the first product, and rows behind those that are to be written.
BEHIND = 4
GUARD = 0x1234


def entries(shape):
    for build in SOURCES:
        source = build(shape)
        both = (source.inputs, source.outputs)
        types = [[I32 if name in INTEGERS else shape.dtype for name in names] for names in both]
        if build is short.restore_source:
            types[1] = [I32]
        yield source, *types


@pytest.fixture(scope="module")
def library(compile_cuda):
    return compile_cuda([entry for shape in SHAPES.values() for entry in entries(shape)])


@dataclass
class Device:
    """Launches as `ShortKernels` makes them, of arrays in memory: those of halves as their bits."""

    library: object
    number: int
    layer: ShortLayer

    def step(self, text, ring, lengths, slots):
        """text: the rows."""
        numbers = [np.array(each, np.int32) for each in (lengths, slots)]
        out = self._out(len(text))
        given = [self._heads(text), *numbers, self._weights, ring]
        self._launch(0, given, [out], short.threads_for(self.layer.shape, len(text)))
        return self._read(out)

    def chunks(self, text, ring, texts):
        out, written = self._out(len(text)), np.ones(1, np.int32)
        spans, pieces = (np.array(each) for each in astuple(texts))
        given = [self._heads(text), spans, pieces, self._weights, ring]
        self._launch(1, given, [out, written], short.threads_for(self.layer.shape, len(pieces)))
        assert written == 0
        return self._read(out)

    def restore(self, ring, slot, kept):
        done = np.ones(1, np.int32)
        given = [kept, np.array([slot], np.int32), ring]
        self._launch(2, given, [done], short.threads_for(self.layer.shape, 1))
        assert done == 0

    @property
    def _weights(self):
        return self.layer.memory(self.layer.weights)

    def _heads(self, text):
        heads = self.layer.memory(text)
        return np.concatenate([heads, np.full((len(heads), BEHIND), 0x7FC0, np.uint16)], axis=1)

    def _out(self, rows):
        out = np.full((rows + 2, self.layer.shape.channels), 0x7FC0, np.uint16)
        out[rows:] = GUARD
        return out

    def _read(self, out):
        """What has been written, when nothing behind it has."""
        assert (out[-2:] == GUARD).all()
        return np.array(mx.array(out[:-2]).view(self.layer.shape.dtype).astype(mx.float32))

    def _launch(self, which, given, outputs, threads):
        number = self.number * len(SOURCES) + which
        self.library.call(number, given, outputs, (threads, 1, 1), (short.THREADS, 1, 1))


@pytest.fixture(params=SHAPES)
def device(request, library):
    return Device(library, list(SHAPES).index(request.param), ShortLayer(SHAPES[request.param]))


def test_sums_are_what_the_module_gives(device):
    text = device.layer.text(20, 1)
    of_module = device.layer.given(text)
    near = 0.02 * np.abs(of_module).max()
    np.testing.assert_allclose(device.layer.exact(text), of_module, rtol=0.02, atol=near)


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("shift", [0, 1, 2, 5])
def test_a_token_of_each_row_is_what_numpy_gives(device, rows, shift):
    """Rows of all lengths from `shift` to 9, 0 for padding, in slots in another order."""
    layer = device.layer
    lengths = [(shift + 3 * row) % 10 for row in range(rows)]
    texts = [layer.text(max(length, 1), row) for row, length in enumerate(lengths)]
    slots = [(7 * row + 2) % 41 for row in range(rows)]
    ring = layer.ring(slots=41)
    for text, slot, length in zip(texts, slots, lengths, strict=True):
        if length:
            layer.fill(ring, slot, text[:-1])
    wanted_ring = ring.copy()
    out = device.step(np.concatenate([text[-1:] for text in texts]), ring, lengths, slots)
    for row, (text, slot, length) in enumerate(zip(texts, slots, lengths, strict=True)):
        if length:
            layer.fill(wanted_ring, slot, text, new=1)
        np.testing.assert_array_equal(out[row], layer.exact(text)[-1] * bool(length))
    np.testing.assert_array_equal(ring, wanted_ring)


# Tokens that are known, and new ones.
STEPS = {
    "one new": [(0, 1)],
    "begun anew": [(0, 2), (0, 3), (0, 1), (0, 4), (0, 16), (0, 17)],
    "gone on": [(1, 1), (1, 2), (2, 2), (3, 3), (9, 5), (2, 1), (5, 2), (4, 33)],
    "long": [(0, 40), (3, 50), (7, 1), (1, 2), (0, 1), (8, 16)],
}


@pytest.mark.parametrize("padding", [0, 5, 70])
@pytest.mark.parametrize("name", STEPS)
def test_prompts_are_what_numpy_gives_and_go_on_where_they_were(device, name, padding):
    layer, steps = device.layer, STEPS[name]
    texts = [layer.text(known + new, i) for i, (known, new) in enumerate(steps)]
    slots = [(5 * i + 3) % 11 for i in range(len(steps))]
    ring = layer.ring(slots=11)
    for text, slot, (known, _) in zip(texts, slots, steps, strict=True):
        layer.fill(ring, slot, text[:known])
    wanted_ring = ring.copy()
    parts = [text[known:] for text, (known, _) in zip(texts, steps, strict=True)]
    counts, known = [new for _, new in steps], [known for known, _ in steps]
    tokens = sum(counts) + padding
    rows = np.concatenate([*parts, layer.text(padding, 99)])
    out = device.chunks(rows, ring, Texts.of(counts, slots, known, tokens))
    wanted = [layer.exact(text)[known:] for text, (known, _) in zip(texts, steps, strict=True)]
    np.testing.assert_array_equal(out[: sum(counts)], np.concatenate(wanted))
    assert not out[sum(counts) :].any()
    for text, slot, (_, new) in zip(texts, slots, steps, strict=True):
        layer.fill(wanted_ring, slot, text, new=new)
    np.testing.assert_array_equal(ring, wanted_ring)


def test_a_slot_is_put_back(device):
    layer = device.layer
    ring = layer.ring(slots=3)
    layer.fill(ring, 2, layer.text(6, 1))
    kept, wanted = ring[2].copy(), ring.copy()
    ring[2] = 0
    device.restore(ring, 2, kept)
    np.testing.assert_array_equal(ring, wanted)


@pytest.mark.parametrize("name", ["lfm2", "wide"])
def test_nvidia_s_compiler_takes_them(nvidia_accepts, name):
    nvidia_accepts(list(entries(SHAPES[name])))


def test_other_sizes_and_devices_are_not_served():
    assert "of 5 tokens" in str(short.unserved(ShortShape(64, 5, BF16)))
    assert "of 66 channels" in str(short.unserved(ShortShape(66, 3, BF16)))
    assert short.unserved(SHAPES["lfm2"]) is None
    if mx.default_device() == mx.cpu:
        assert isinstance(short.build(SHAPES["lfm2"]), Unsupported)
