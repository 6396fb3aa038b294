"""What a decode step begins with: the kernel's source, run on a CPU, against MLX's operations."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from execution.decoder.common_decoders import MODELS, make
from mlx import nn

from mlx_manager.mlx_server.devices.cuda.attention.decode import MOST_QUERIES
from mlx_manager.mlx_server.devices.cuda.attention.opening import (
    OpeningKernel,
    Turning,
    build,
    is_served,
    opening_source,
)
from mlx_manager.mlx_server.devices.cuda.matmul.factors import Packed, arrays_of
from mlx_manager.mlx_server.devices.kernel import Unsupported
from mlx_manager.mlx_server.execution.decoder.layers import Opening
from mlx_manager.mlx_server.execution.decoder.projections import table_of
from mlx_manager.mlx_server.execution.spec.decoder import DecoderSpec

F32, I32, U32 = mx.float32, mx.int32, mx.uint32
DTYPES = (mx.bfloat16, mx.float16)
HALVES, NEIGHBOURS = False, True
KINDS = {
    "llama": [Turning(16, HALVES, 1.0)],
    "traditional": [Turning(12, NEIGHBOURS, 1.0)],
    "yarn": [Turning(16, HALVES, 1.1386294)],
    "two": [Turning(16, HALVES, 1.0), Turning(24, NEIGHBOURS, 0.5)],
}
PACKINGS = [(4, 64), (4, 32), (8, 64), (8, 128), (2, 64)]


def entry(embeddings, turnings, scale=None, *, shifted=False):
    kinds = [F32 for _ in turnings]
    table = [array.dtype for array in arrays_of(embeddings)]
    inputs = (U32, I32, *((I32,) if shifted else ()), *table, *kinds, I32, *kinds)
    source = opening_source(embeddings, turnings, scale, shifted=shifted)
    return source, inputs, (embeddings.dtype, I32)


def entries(embeddings, turnings, scale=None):
    """Return the entries of steps without shifts, and of steps with shifts."""
    return [entry(embeddings, turnings, scale, shifted=shifted) for shifted in (False, True)]


def random_embeddings(dtype, bits=None, width=128, group=64):
    values = np.random.default_rng(1).normal(size=(50, width)).astype(np.float32)
    embeddings = mx.array(values).astype(dtype)
    if bits is None:
        return embeddings
    return Packed(*mx.quantize(embeddings, group, bits), group, bits)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("scale", [None, 34.0])
def test_nvidia_s_compiler_takes_it(nvidia_accepts, bits, scale):
    nvidia_accepts(entries(random_embeddings(mx.bfloat16, bits), KINDS["two"], scale))


class Emulated:
    """What `mx.fast.cuda_kernel` would give; what it writes into its inputs is there, too."""

    def __init__(self, library, number=0) -> None:
        self._library, self._number = library, number

    def __call__(self, inputs, grid, threadgroup, output_shapes, output_dtypes):
        stored = [x.view(mx.uint16) if x.dtype in DTYPES else x for x in inputs]
        hidden, following = np.full(output_shapes[0], 77, np.uint16), np.full(output_shapes[1], 77)
        following = following.astype(np.int32)
        given = [np.array(x, copy=False) for x in stored]
        self._library.call(self._number, given, [hidden, following], grid, threadgroup)
        return [mx.array(hidden).view(output_dtypes[0]), mx.array(following)]


@pytest.fixture(scope="module")
def kernels(compile_cuda):
    """Of one library, by the embeddings' dtype and the rotations' kind, or how they are packed."""
    of = {
        (dtype, kind): (random_embeddings(dtype, width=72), turnings)
        for dtype in DTYPES
        for kind, turnings in KINDS.items()
    } | {
        (dtype, *packing): (random_embeddings(dtype, packing[0], 256, packing[1]), [])
        for dtype in DTYPES
        for packing in PACKINGS
    }
    library = compile_cuda([of_kind for each in of.values() for of_kind in entries(*each)])
    return {
        name: OpeningKernel(
            Emulated(library, 2 * number), *each, shifted=Emulated(library, 2 * number + 1)
        )
        for number, (name, each) in enumerate(of.items())
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shifts", [(), (-1, 5, -40, 0)], ids=["plain", "shifted"])
def test_embeddings_lengths_and_rotations_are_those_of_the_operations(kernels, dtype, kind, shifts):
    turnings = KINDS[kind]
    rng = np.random.default_rng(1)
    embeddings = random_embeddings(dtype, width=72)
    tokens = mx.array([49, 0, 7, 0], mx.uint32)
    before = mx.array([1, 130_000, 777, 0], mx.int32)
    frequencies = [
        mx.array(rng.uniform(1e-5, 1, turning.dims // 2).astype(np.float32)) for turning in turnings
    ]
    kernel = kernels[dtype, kind]
    shifted = [mx.array(shifts, mx.int32)] if shifts else []
    hidden, following = kernel.open(tokens, before, frequencies, shifted)
    assert mx.array_equal(hidden, embeddings[tokens])
    assert following.tolist() == [2, 130_001, 778, 0]
    assert kernel.lengths.tolist() == [2, 130_001, 778, *[0] * (MOST_QUERIES - 3)]
    for turning, own, rotation in zip(turnings, frequencies, kernel.rotations, strict=True):
        assert not rotation[4:].any()
        positions = np.array(before) + np.array(shifts or 0)
        angles = positions[:, None].astype(np.float32) * np.array(own)
        parts = np.cos(angles), np.sin(angles)
        expected = np.stack(parts, -1) if turning.traditional else np.stack(parts, 1)
        expected = turning.amplitude * expected.reshape(len(angles), -1)
        np.testing.assert_allclose(np.array(rotation)[:4], expected, atol=1e-6)


@pytest.mark.parametrize(
    "name", ["llama", "traditional", "yarn", "llama3-rope", "phi3-partial", "gemma3"]
)
def test_a_models_steps_begin_as_by_operations(compile_cuda, name):
    model = make(*MODELS[name])
    model.set_dtype(mx.bfloat16)
    spec = DecoderSpec.of(model, 16)
    opening = Opening.of(spec, partial(emulated_kernel, compile_cuda))
    by_operations = Opening.of(spec, lambda *_: Unsupported("no GPU here"))
    given = mx.array([96, 3, 0], mx.uint32), mx.array([2000, 1, 0], mx.int32)
    for shifts in ([], [mx.array([-700, 2, 0], mx.int32)]):
        (hidden, shared), (expected, by) = opening(*given, shifts), by_operations(*given, shifts)
        assert mx.array_equal(hidden, expected)
        assert mx.array_equal(shared.following, by.following)
        assert mx.array_equal(shared.lengths[:3], by.lengths)
        for rotation, own in zip(shared.rotations, by.rotations, strict=True):
            assert mx.allclose(rotation[:3], own, atol=1e-6)


def emulated_kernel(compile_cuda, embeddings, turnings, scale=None):
    library = compile_cuda(entries(embeddings, turnings, scale))
    return OpeningKernel(Emulated(library), embeddings, turnings, Emulated(library, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("bits", "group"), PACKINGS)
def test_packed_embeddings_are_unpacked(kernels, dtype, bits, group):
    embeddings, kernel = random_embeddings(dtype, bits, 256, group), kernels[dtype, bits, group]
    tokens = mx.array([49, 0, 7], mx.uint32)
    hidden, _ = kernel.open(tokens, mx.array([3, 4, 0], mx.int32), [])
    wide = [embeddings.scales.astype(F32), embeddings.biases.astype(F32)]
    expected = mx.dequantize(embeddings.words, *wide, group, bits)[tokens].astype(dtype)
    assert mx.allclose(hidden, expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", ["tied", "gemma3-tied"])
def test_a_packed_models_steps_begin_as_by_operations(compile_cuda, name):
    model = make(*MODELS[name])
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=32, bits=4)
    spec = DecoderSpec.of(model, 16)
    opening = Opening.of(spec, partial(emulated_kernel, compile_cuda))
    by_operations = Opening.of(spec, lambda *_: Unsupported("no GPU here"))
    given = mx.array([96, 3, 0], mx.uint32), mx.array([2000, 1, 0], mx.int32)
    atol = 2e-3 * (spec.scale or 1)
    assert mx.allclose(opening(*given)[0], by_operations(*given)[0], rtol=1e-2, atol=atol)


@pytest.mark.parametrize(
    ("packing", "served"),
    [({"bits": 4}, True), ({"bits": 6}, False), ({"bits": 4, "mode": "mxfp4"}, False)],
)
def test_embeddings_whose_integers_lie_across_words_are_looked_up_by_operations(packing, served):
    model = make("llama", {})
    nn.quantize(model, group_size=32, **packing)
    assert is_served(table_of(model.model.embed_tokens)) is served


@pytest.mark.skipif(mx.default_device().type == mx.gpu, reason="there is a GPU")
def test_without_a_gpu_there_is_no_kernel():
    assert isinstance(build(mx.zeros((9, 64), mx.bfloat16), KINDS["llama"], None), Unsupported)
