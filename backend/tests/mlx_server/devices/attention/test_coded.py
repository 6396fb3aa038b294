"""Attention over pages in 8 bits: the kernels' source against plain arithmetic, run on a CPU."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from devices.attention.test_kernels import (
    BF16,
    F16,
    F32,
    I32,
    NOWHERE,
    Case,
    loaded,
    poison,
    shape,
    stored,
    types_of,
)

from mlx_manager.mlx_server.devices.attention.check import (
    TOLERANCE,
    AttentionFeatures,
    CodedProblem,
    check_coded,
    difference,
    random_problem,
)
from mlx_manager.mlx_server.devices.attention.codes import group_of
from mlx_manager.mlx_server.devices.attention.kernel import CodedShape
from mlx_manager.mlx_server.devices.attention.kinds import build_coded
from mlx_manager.mlx_server.devices.cuda.attention import decode as cuda
from mlx_manager.mlx_server.devices.kernel import Unsupported
from mlx_manager.mlx_server.devices.metal import attention as metal

PAIRS = [
    (64, Case("llama-1b", shape(8, 2, 64, BF16))),
    (64, Case("window-128", shape(4, 2, 128, BF16, page=32), AttentionFeatures(50, 20.0, True))),
    (40, Case("whole-contexts-80", shape(2, 2, 80, F16), divided=False)),
]


def test_metal_attention_over_codes_is_the_reference(compile_metal) -> None:
    entries = []
    for group, case in PAIRS:
        dtype, variant = case.shape.dtype, replace(case.variant, coded=group)
        source = metal.attend_source(case.shape, variant)
        inputs = (dtype, mx.int8, BF16, I32, I32, I32, F32)
        entries.append((source, inputs, (dtype, F32, F32)))
        merge = metal.merge_source(case.shape, sinks=case.features.sinks)
        entries.append((merge, (F32, F32, I32, F32), (dtype,)))
    library = compile_metal(entries)
    for number, (group, case) in enumerate(PAIRS):
        of = case.shape
        random = random_problem(of, case.features, case.lengths, unused_page=NOWHERE)
        problem = CodedProblem.of(random, group)
        heads = metal.heads_per_block(of)
        blocks = of.kv_heads * -(-of.group // heads)
        splits = case.splits(problem.plain, blocks)
        count = splits.work * blocks * heads
        out = poison(random.q.shape, of.dtype)
        partial, figures = poison((count * of.head_dim,), F32), poison((count * 2,), F32)
        sinks = np.zeros(1, np.float32) if random.sinks is None else random.sinks
        library.call(
            2 * number,
            [
                stored(random.q, of.dtype),
                problem.codes,
                stored(problem.scales, BF16),
                random.table,
                random.lengths,
                np.array(splits.items),
                sinks,
            ],
            [out, partial, figures],
            (blocks * metal.SIMDGROUPS * 32, splits.work, 1),
            (metal.SIMDGROUPS * 32, 1, 1),
        )
        assert splits.divided == case.divided
        if splits.divided:
            library.call(
                2 * number + 1,
                [partial, figures, np.array(splits.items), sinks],
                [out],
                (of.q_heads * of.head_dim, splits.work, 1),
                (of.head_dim, 1, 1),
            )
        off = difference(loaded(out, of.dtype), problem.plain.expected())
        assert off <= TOLERANCE, case.name


def cuda_entry(group: int, case: Case) -> tuple:
    dtype, variant = case.shape.dtype, replace(case.variant, coded=group)
    source = cuda.attend_source(case.shape, case.launch, variant)
    types = types_of(dtype)
    return source, tuple(types[name] for name in source.inputs), (dtype, F32)


def test_cuda_attention_over_codes_is_the_reference(compile_cuda) -> None:
    library = compile_cuda([cuda_entry(group, case) for group, case in PAIRS])
    for number, (group, case) in enumerate(PAIRS):
        of, launch = case.shape, case.launch
        random = random_problem(of, case.features, case.lengths, unused_page=NOWHERE)
        problem = CodedProblem.of(random, group)
        blocks = cuda.blocks_per_item(of)
        splits = case.splits(problem.plain, blocks)
        count = splits.work * blocks * cuda.heads_per_block(of)
        out = poison(random.q.shape, of.dtype)
        given = {
            "q": stored(random.q, of.dtype),
            "codes": problem.codes,
            "scales": stored(problem.scales, BF16),
            "table": random.table,
            "lengths": random.lengths,
            "items": np.array(splits.items),
            "sinks": random.sinks,
            "arrivals": np.zeros(len(random.lengths) * blocks, np.int32),
        }
        library.call(
            number,
            [given[name] for name in library.inputs(number)],
            [out, poison((count * (of.head_dim + 2),), F32)],
            (blocks * launch.warps * 32, splits.work, 1),
            (launch.warps * 32, 1, 1),
        )
        off = difference(loaded(out, of.dtype), problem.plain.expected())
        assert off <= TOLERANCE, case.name


def test_nvidia_s_compiler_takes_attention_over_codes(nvidia_accepts) -> None:
    nvidia_accepts([cuda_entry(*PAIRS[0]), cuda_entry(*PAIRS[-1])])


@pytest.mark.skipif(mx.default_device().type != mx.gpu, reason="needs a GPU")
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize(
    "features",
    [
        AttentionFeatures(),
        AttentionFeatures(window=100, softcap=30.0),
        AttentionFeatures(sinks=True),
    ],
)
def test_kernels_over_codes_pass_their_check(dim: int, features: AttentionFeatures) -> None:
    of = CodedShape(shape(8, 2, dim, BF16), group_of(dim) or 0)
    kernels = build_coded(of)
    assert not isinstance(kernels, Unsupported)
    assert check_coded(kernels, of, features) is None
