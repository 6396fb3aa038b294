"""What lies between the projections and attention, its sources run on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from devices.attention.test_kernels import (
    BF16,
    DEVICE,
    F16,
    F32,
    assert_written,
    loaded,
    named,
    pages_of,
    poison,
    shape,
    stored,
    types_of,
)
from devices.portable import Portable

from mlx_manager.mlx_server.devices.attention.check import (
    TOLERANCE,
    FreshProblem,
    difference,
    random_problem,
    self_check,
)
from mlx_manager.mlx_server.devices.attention.kernel import AttentionShape, AttentionVariant, Rotary
from mlx_manager.mlx_server.devices.attention.splits import plan
from mlx_manager.mlx_server.devices.cuda.attention import decode as cuda
from mlx_manager.mlx_server.devices.metal import attention as metal


@dataclass(frozen=True)
class Case:
    name: str
    shape: AttentionShape
    rotary: Rotary

    def problem(self, tokens: int, seed: int = 0) -> FreshProblem:
        """Tokens of as many sequences, on pages in random order; some are padding."""
        lengths = np.random.default_rng(seed).integers(0, 40, tokens).tolist()
        return FreshProblem.of(random_problem(self.shape, lengths=lengths, seed=seed), self.rotary)


HALVES, NEIGHBOURS = False, True
CASES = [
    Case("llama", shape(8, 2, 64, BF16), Rotary(64, HALVES, None)),
    Case("qwen3", shape(4, 2, 128, BF16, page=32), Rotary(128, HALVES, 1e-6)),
    Case("phi-96", shape(6, 2, 96, F16), Rotary(96, HALVES, None)),
    Case("odd-halves-80", shape(2, 2, 80, BF16), Rotary(80, HALVES, 1e-5)),
    Case("partial", shape(8, 1, 64, F16), Rotary(32, HALVES, None)),
    Case("partial-with-norms", shape(7, 1, 128, BF16), Rotary(48, HALVES, 1e-6)),
    Case("glm", shape(8, 1, 128, BF16), Rotary(64, NEIGHBOURS, None)),
    Case("neighbours-20-of-80", shape(3, 1, 80, F16), Rotary(20, NEIGHBOURS, 1e-6)),
    Case("wide", shape(4, 2, 256, BF16), Rotary(256, HALVES, 1e-6)),
    Case("gated", shape(6, 2, 64, F16), Rotary(16, HALVES, 1e-6, gated=True)),
    Case("gated-wide", shape(4, 1, 256, BF16), Rotary(64, HALVES, 1e-6, gated=True)),
    Case("of-512", shape(4, 2, 512, BF16), Rotary(512, HALVES, 1e-6, values=True)),
    Case("values", shape(3, 1, 64, F16), Rotary(64, HALVES, 1e-6, values=True)),
    Case("alone", shape(6, 2, 256, BF16), Rotary(256, HALVES, 1e-6, alone=True)),
    Case("neighbours-of-512", shape(3, 1, 512, F16), Rotary(512, NEIGHBOURS, None)),
    Case("partial-of-512", shape(8, 1, 512, BF16), Rotary(128, HALVES, 1e-6, gated=True)),
    Case("heads-that-fill-no-warp", shape(5, 5, 96, F16), Rotary(96, NEIGHBOURS, 1e-6)),
]
METAL_CASES = [
    *CASES,
    Case("of-72", shape(6, 2, 72, BF16), Rotary(72, HALVES, 1e-6, values=True)),
    Case("of-112", shape(4, 2, 112, F16), Rotary(112, HALVES, 1e-6)),
    Case("of-192", shape(3, 1, 192, BF16), Rotary(64, NEIGHBOURS, 1e-6, gated=True)),
    Case("float32", shape(4, 2, 64, F32), Rotary(64, HALVES, 1e-6)),
]


def entry(source, dtype: mx.Dtype) -> tuple:
    types = types_of(dtype)
    return (
        source,
        tuple(types[name] for name in source.inputs),
        (dtype, F32, F32)[: len(source.outputs)],
    )


def rotated(library, backend, index: int, problem: FreshProblem) -> tuple[np.ndarray, list]:
    """The queries' bits, and the pools afterwards."""
    of, tokens = problem.ready.shape, len(problem.qkv)
    out = poison((tokens, of.q_heads, 1, of.head_dim), of.dtype)
    pools = pages_of(problem.unwritten(), plan([1], blocks_per_item=1, blocks_wanted=1))[:2]
    given = named(problem, pools) | {"slots": problem.slots()}
    library.call(
        index,
        [given[name] for name in library.inputs(index)],
        [out],
        (backend.rotate_threads(of, tokens), 1, 1),
        (backend.THREADS, 1, 1),
    )
    return out, pools


@pytest.fixture(scope="module")
def on_cpu(compile_cuda, compile_metal):
    """For each backend its module, and its kernels of all cases."""
    made = {}
    for name, backend, cases, compile_entries in (
        ("cuda", cuda, CASES, compile_cuda),
        ("metal", metal, METAL_CASES, compile_metal),
    ):
        entries = [entry(backend.rotate_source(c.shape, c.rotary), c.shape.dtype) for c in cases]
        made[name] = backend, compile_entries(entries)
    return made


@pytest.mark.parametrize("tokens", [1, 7, 33])
@pytest.mark.parametrize(
    ("backend", "case"),
    [("cuda", case) for case in CASES] + [("metal", case) for case in METAL_CASES],
    ids=lambda value: getattr(value, "name", value),
)
def test_heads_are_finished_and_put_where_they_belong(on_cpu, backend, case, tokens):
    module, library = on_cpu[backend]
    problem = case.problem(tokens, seed=tokens)
    out, pools = rotated(library, module, METAL_CASES.index(case), problem)
    assert difference(loaded(out, case.shape.dtype)[:, :, 0], problem.ready.q) <= TOLERANCE
    assert_written(problem.ready, pools)
    before = problem.unwritten()
    others = np.setdiff1d(np.arange(pools[0].shape[1]), problem.slots())
    for pool, old in zip(pools, (before.k_pool, before.v_pool), strict=True):
        np.testing.assert_array_equal(pool[:, others], stored(old, case.shape.dtype)[:, others])


@pytest.mark.parametrize("backend", ["cuda", "metal"])
def test_padding_writes_nothing_and_its_queries_are_finished_all_the_same(on_cpu, backend):
    module, library = on_cpu[backend]
    case = CASES[1]
    problem = FreshProblem.of(random_problem(case.shape, lengths=(0, 20, 0, 0)), case.rotary)
    assert (problem.slots() < 0).sum() == 3
    out, pools = rotated(library, module, 1, problem)
    assert_written(problem.ready, pools)
    assert difference(loaded(out, BF16)[:, :, 0], problem.ready.q) <= TOLERANCE


@pytest.mark.parametrize("backend", ["cuda", "metal"])
@pytest.mark.parametrize(
    "rotary", [Rotary(64, HALVES, None), Rotary(48, HALVES, None), Rotary(64, NEIGHBOURS, None)]
)
def test_a_prompt_and_a_decode_step_leave_the_same_bits(
    backend, rotary, compile_cuda, compile_metal
):
    of = shape(8, 2, 64, BF16)
    problem = FreshProblem.of(random_problem(of, lengths=(1, 16, 17, 0, 90)), rotary)
    variant = AttentionVariant(1.0, None, None, sinks=False, divided=False, rotary=rotary)
    splits = plan(problem.ready.lengths, blocks_per_item=2, blocks_wanted=1)
    if backend == "cuda":
        module, compile_entries = cuda, compile_cuda
        launch = cuda.CudaLaunch.choose(of, DEVICE)
        attend, warps = cuda.attend_source(of, launch, variant), launch.warps
    else:
        module, compile_entries = metal, compile_metal
        attend, warps = metal.attend_source(of, variant), metal.SIMDGROUPS
    library = compile_entries([entry(attend, BF16), entry(module.rotate_source(of, rotary), BF16)])
    pages = pages_of(problem.unwritten(), splits)
    given = named(problem, pages) | {"arrivals": np.zeros(10, np.int32)}
    library.call(
        0,
        [given[name] for name in library.inputs(0)],
        [poison((5, 8 * 64), BF16), *(poison((1,), F32) for _ in attend.outputs[1:])],
        (2 * warps * 32, splits.work, 1),
        (warps * 32, 1, 1),
    )
    _, pools = rotated(library, module, 1, problem)
    for ours, theirs in zip(pools, pages[:2], strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_self_check_sees_wrong_queries_and_misplaced_tokens():
    class Turned(Portable):
        def rotate_and_write(self, *args, **how):
            return super().rotate_and_write(*args, **how) * 1.05

    class Misplaced(Portable):
        def rotate_and_write(self, qkv, rotations, head_norms, keys, values, slots, **how):
            slots = mx.where(slots < 0, 2, slots)
            return super().rotate_and_write(qkv, rotations, head_norms, keys, values, slots, **how)

    of, rotary = shape(8, 2, 64, F32), Rotary(64, HALVES, 1e-6)
    assert self_check(Portable(of), rotary=rotary) is None
    assert "rotated queries differ" in self_check(Turned(of), rotary=rotary)
    assert "rotated keys or their values" in self_check(Misplaced(of), rotary=rotary)
