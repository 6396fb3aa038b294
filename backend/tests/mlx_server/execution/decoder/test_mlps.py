"""An MLP and experts beside each other by the kernels' own source, on an emulated GPU."""

from __future__ import annotations

import os
from copy import deepcopy

import mlx.core as mx
import numpy as np
import pytest
from devices.cuda.matmul.devices import H200
from execution.decoder.common_decoders import EXPERTS, make
from mlx import nn

from mlx_manager.mlx_server.devices.cuda.compiler import launch
from mlx_manager.mlx_server.devices.cuda.matmul.products import ProductKernels
from mlx_manager.mlx_server.execution.decoder.layers import Block
from mlx_manager.mlx_server.execution.decoder.projections import Normed, Sum, norm_of
from mlx_manager.mlx_server.execution.spec.decoder import DecoderSpec

F16 = mx.float16
SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_experts": 40, "top_k_experts": 8}
FEW = ["gate_experts", "lower_experts", "product", "product", "route", "sum"]
slow = pytest.mark.skipif(os.environ.get("MLX_TEST_ALL") != "1", reason="MLX_TEST_ALL=1 runs it")


def in_numpy(array: mx.array) -> np.ndarray:
    """As it lies in memory."""
    return np.array(array.view(mx.uint16) if array.dtype == F16 else array)


@pytest.fixture
def launched(compile_cuda, monkeypatch) -> list[str]:
    """Names of the kernels that have been launched, each compiled when it is."""
    names, libraries = [], {}

    def compiled(source):
        def launch(inputs, grid, threadgroup, output_shapes, output_dtypes):
            names.append(source.name)
            if source not in libraries:
                types = [array.dtype for array in inputs]
                libraries[source] = compile_cuda([(source, types, output_dtypes)])
            arrays = [np.ascontiguousarray(in_numpy(array)) for array in inputs]
            shapes = zip(output_shapes, output_dtypes, strict=True)
            made = [in_numpy(mx.full(shape, -1, dtype)).copy() for shape, dtype in shapes]
            libraries[source].call(0, arrays, made, grid, threadgroup)
            typed = zip(made, output_dtypes, strict=True)
            return [mx.array(array).view(dtype) for array, dtype in typed]

        return launch

    monkeypatch.setattr(launch, "CudaKernel", compiled)
    return names


def is_behind_attention(name: str, layer: nn.Module) -> bool:
    return hasattr(layer, "to_quantized") and not name.startswith("self_attn")


def off(mine: mx.array, theirs: mx.array) -> np.ndarray:
    """Of each row, relative to `theirs`."""
    return np.array(mx.linalg.norm(mine - theirs, axis=1) / mx.linalg.norm(theirs, axis=1))


def of_module(layer: nn.Module, hidden: mx.array) -> mx.array:
    """What the module's layer makes of the sum behind attention."""
    of_mlp = layer.mlp(layer.pre_feedforward_layernorm(hidden))
    chosen = layer.router(hidden)
    of_experts = layer.experts(layer.pre_feedforward_layernorm_2(hidden), *chosen)
    of_mlp = layer.post_feedforward_layernorm_1(of_mlp)
    both = of_mlp + layer.post_feedforward_layernorm_2(of_experts)
    return (hidden + layer.post_feedforward_layernorm(both)) * layer.layer_scalar


@slow
@pytest.mark.parametrize("packed", [False, True])
def test_experts_beside_an_mlp_are_six_launches_that_give_what_the_module_does(packed, launched):
    model = make("gemma4_text", EXPERTS["gemma4_text"] | SIZES)
    if packed:
        nn.quantize(model.layers[1], 64, 4, class_predicate=is_behind_attention)
    model.set_dtype(F16)
    module = deepcopy(model.layers[1])
    module.set_dtype(mx.float32)
    layers = DecoderSpec.of(model, 16).layers
    block = Block.of(layers[1], ProductKernels(F16, H200))
    following = layers[2].attention_norms.pre
    for rows in (1, 5, 70):
        launched.clear()
        hidden = (2 * mx.random.normal((rows, 128))).astype(F16)
        ahead = Normed(layers[1].mlp_norms.pre(hidden))
        _, result = block.mlp.launches(Sum(hidden, ahead), norm_of(following))
        wide = hidden.astype(mx.float32)
        wanted = of_module(module, wide) - wide
        # A row of two experts that are nearly equal may go through the other one.
        assert np.quantile(off(result.rows - wide, wanted), 0.95) < 3e-3
        assert off(result.ahead.rows, following(result.rows.astype(mx.float32))).max() < 3e-3
        if rows <= 32:
            assert sorted(launched) == FEW
