"""What a decode step begins with: the kernel's source, run on a CPU, against MLX's operations."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from engine.common_decoders import MODELS, make

from mlx_manager.mlx_server.engine.fused.anatomy import Common
from mlx_manager.mlx_server.engine.fused.layers import Opening
from mlx_manager.mlx_server.engine.kernels.kernel import Unsupported
from mlx_manager.mlx_server.engine.kv.kernels.cuda import MOST_QUERIES
from mlx_manager.mlx_server.engine.kv.kernels.opening import (
    OpeningKernel,
    Turning,
    build,
    opening_source,
)

F32, I32, U32 = mx.float32, mx.int32, mx.uint32
DTYPES = (mx.bfloat16, mx.float16)
HALVES, NEIGHBOURS = False, True
KINDS = {
    "llama": [Turning(16, HALVES, 1.0)],
    "traditional": [Turning(12, NEIGHBOURS, 1.0)],
    "yarn": [Turning(16, HALVES, 1.1386294)],
    "two": [Turning(16, HALVES, 1.0), Turning(24, NEIGHBOURS, 0.5)],
}


def entry(dtype, turnings):
    kinds = [F32 for _ in turnings]
    inputs = (U32, I32, dtype, *kinds, I32, *kinds)
    return opening_source(dtype, turnings), inputs, (dtype, I32)


def test_nvidia_s_compiler_takes_it(nvidia_accepts):
    nvidia_accepts([entry(mx.bfloat16, KINDS["two"])])


class Emulated:
    """What `mx.fast.cuda_kernel` would give; what it writes into its inputs is there, too."""

    def __init__(self, compile_cuda, dtype, turnings) -> None:
        self._library = compile_cuda([entry(dtype, turnings)])

    def __call__(self, inputs, grid, threadgroup, output_shapes, output_dtypes):
        stored = [x.view(mx.uint16) if x.dtype in DTYPES else x for x in inputs]
        hidden, following = np.full(output_shapes[0], 77, np.uint16), np.full(output_shapes[1], 77)
        following = following.astype(np.int32)
        given = [np.array(x, copy=False) for x in stored]
        self._library.call(0, given, [hidden, following], grid, threadgroup)
        return [mx.array(hidden).view(output_dtypes[0]), mx.array(following)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_lengths_and_rotations_are_those_of_the_operations(compile_cuda, dtype, kind):
    turnings = KINDS[kind]
    rng = np.random.default_rng(1)
    embeddings = mx.array(rng.normal(size=(50, 72)).astype(np.float32)).astype(dtype)
    tokens = mx.array([49, 0, 7, 0], mx.uint32)
    before = mx.array([1, 130_000, 777, 0], mx.int32)
    frequencies = [
        mx.array(rng.uniform(1e-5, 1, turning.dims // 2).astype(np.float32)) for turning in turnings
    ]
    kernel = OpeningKernel(Emulated(compile_cuda, dtype, turnings), turnings)
    hidden, following = kernel.open(tokens, before, embeddings, frequencies)
    assert mx.array_equal(hidden, embeddings[tokens])
    assert following.tolist() == [2, 130_001, 778, 0]
    assert kernel.lengths.tolist() == [2, 130_001, 778, *[0] * (MOST_QUERIES - 3)]
    for turning, own, rotation in zip(turnings, frequencies, kernel.rotations, strict=True):
        assert not rotation[4:].any()
        angles = np.array(before)[:, None].astype(np.float32) * np.array(own)
        parts = np.cos(angles), np.sin(angles)
        expected = np.stack(parts, -1) if turning.traditional else np.stack(parts, 1)
        expected = turning.amplitude * expected.reshape(len(angles), -1)
        np.testing.assert_allclose(np.array(rotation)[:4], expected, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "traditional", "yarn", "llama3-rope", "phi3-partial"])
def test_a_models_steps_begin_as_by_operations(compile_cuda, name):
    model = make(*MODELS[name])
    model.set_dtype(mx.bfloat16)
    common = Common.of(model, 16)
    opening = Opening.of(
        common, lambda dtype, _, kinds: OpeningKernel(Emulated(compile_cuda, dtype, kinds), kinds)
    )
    by_operations = Opening.of(common, lambda *_: Unsupported("no GPU here"))
    given = mx.array([96, 3, 0], mx.uint32), mx.array([2000, 1, 0], mx.int32)
    (hidden, shared), (expected, by) = opening(*given), by_operations(*given)
    assert mx.array_equal(hidden, expected)
    assert mx.array_equal(shared.following, by.following)
    assert mx.array_equal(shared.lengths[:3], by.lengths)
    for rotation, own in zip(shared.rotations, by.rotations, strict=True):
        assert mx.allclose(rotation[:3], own, atol=1e-6)


def test_quantised_embeddings_are_looked_up_by_operations():
    def never(*_):
        raise AssertionError

    model = make("llama", {})
    model.model.embed_tokens = model.model.embed_tokens.to_quantized(group_size=32, bits=4)
    assert Opening.of(Common.of(model, 16), never).kernel is None


@pytest.mark.skipif(mx.default_device().type == mx.gpu, reason="there is a GPU")
def test_without_a_gpu_there_is_no_kernel():
    assert isinstance(build(mx.bfloat16, 64, KINDS["llama"]), Unsupported)
