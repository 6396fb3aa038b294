"""Latent attention over pages against plain arithmetic, its source run on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import pytest
from devices.attention.test_kernels import BF16, DEVICE, F16, F32, I32, NOWHERE, poison
from thorough import slow

from mlx_manager.mlx_server.devices.attention.check import TOLERANCE, difference, numbers
from mlx_manager.mlx_server.devices.cuda.attention.chunk_plan import Blocks, QueryRun, cut
from mlx_manager.mlx_server.devices.cuda.compiler.device import CudaDevice
from mlx_manager.mlx_server.devices.cuda.mla import latent
from mlx_manager.mlx_server.devices.cuda.mla.check import (
    LatentProblem,
    WriteProblem,
    check_latent,
)
from mlx_manager.mlx_server.devices.cuda.mla.latent import LatentForm, LatentKernels
from mlx_manager.mlx_server.devices.cuda.mla.shape import LatentShape
from mlx_manager.mlx_server.devices.kernel import KernelSource, Unsupported

# With the shared memory of an H100, and with what most others have.
LARGE = DEVICE
SMALL = CudaDevice(4, 99 * 1024, 100 * 1024)
HALVES, NEIGHBOURS = False, True

LENGTHS = (1, 15, 16, 17, 0, 33, 150)
# A text from its start, padding, queries of one, and some far into others.
RUNS = ((21, 21), (1, 0), (1, 40), (6, 50), (1, 1), (9, 120))


@dataclass(frozen=True)
class Case:
    name: str
    shape: LatentShape
    traditional: bool
    device: CudaDevice = LARGE

    def kernels(self, multiprocessors: int = 1) -> LatentKernels:
        device = replace(self.device, multiprocessors=multiprocessors)
        forms = [LatentForm.choose(self.shape, device, chunks=chunks) for chunks in (False, True)]
        assert None not in forms
        return LatentKernels(self.shape, device, *forms)


def shape(
    q_heads: int, rank: int, dims: int, plain: int, dtype: mx.Dtype, page: int = 16
) -> LatentShape:
    return LatentShape(q_heads, rank, dims, plain, q_heads * (plain + dims), page, dtype, plain)


CASES = [
    Case("two-heads", shape(2, 128, 32, 16, BF16), HALVES),
    Case("deepseek-lite", shape(16, 512, 64, 128, F16, page=32), NEIGHBOURS),
    Case("glm-flash", shape(20, 512, 64, 192, BF16), NEIGHBOURS),
    Case("minicpm-40", shape(40, 192, 32, 64, F16), HALVES),
    Case("two-blocks-of-64", shape(128, 128, 64, 8, BF16), NEIGHBOURS),
    Case("two-uneven-blocks", shape(67, 64, 16, 16, BF16), HALVES),
    Case("little-memory", shape(20, 512, 64, 64, BF16, page=64), HALVES, SMALL),
    Case("least-memory", shape(16, 512, 64, 64, F16), NEIGHBOURS, CudaDevice(4, 65536, 66 * 1024)),
]
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def every_second(first: int) -> pytest.MarkDecorator:
    """The cases by name, of which the others are slow ones."""
    cases = [
        pytest.param(case, id=case.name, marks=slow if (n - first) % 2 else [])
        for n, case in enumerate(CASES)
    ]
    return pytest.mark.parametrize("case", cases)


class Emulated:
    """A kernel that is called as MLX's are, and compiled for a CPU by its first call.

    What it writes in place is memory that NumPy shares with MLX.
    """

    def __init__(self, compile_cuda, text: KernelSource) -> None:
        self._compile, self._text = compile_cuda, text
        self._library = None

    def __call__(self, *, inputs, grid, threadgroup, output_shapes, output_dtypes):
        if self._library is None:
            entry = (self._text, [array.dtype for array in inputs], output_dtypes)
            self._library = self._compile([entry])
        mx.eval(inputs)
        outputs = [
            poison(of, dtype) for of, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]
        self._library.call(0, [bits(array) for array in inputs], outputs, grid, threadgroup)
        return [
            mx.array(out) if dtype in (F32, I32) else mx.array(out).view(dtype)
            for out, dtype in zip(outputs, output_dtypes, strict=True)
        ]


def bits(array: mx.array) -> np.ndarray:
    return np.array(array if array.dtype in (F32, I32) else array.view(mx.uint16), copy=False)


@pytest.fixture(autouse=True)
def on_cpu(compile_cuda, monkeypatch) -> Callable:
    def compiled(text: KernelSource, **_) -> Emulated:
        return Emulated(compile_cuda, text)

    monkeypatch.setattr(latent, "CudaKernel", compiled)
    return compiled


@pytest.fixture
def cut_wherever_possible(monkeypatch) -> None:
    for name, value in (("LEAST_TILES", 2), ("START", 0), ("MERGE", 0), ("LEAST", 1)):
        monkeypatch.setattr(latent, name, value)


def problem_of(case: Case, runs: Sequence[tuple[int, int]]) -> LatentProblem:
    return LatentProblem.of(case.shape, runs, traditional=case.traditional, unused_page=NOWHERE)


def off_in_a_step(case: Case, kernels: LatentKernels, *, divided: bool, grown: int = 0) -> float:
    """How far the kernel is off for a plan that was made `grown` tokens ago."""
    problem = problem_of(case, [(1, length) for length in LENGTHS])
    plan = kernels.plan(np.maximum(problem.lengths - grown, 0))
    assert plan.divided == divided
    out = kernels.attend(
        *problem.arrays(),
        mx.array(problem.lengths),
        scale=problem.scale,
        splits=plan,
        traditional=case.traditional,
    )
    return difference(numbers(out), problem.expected())


def off_in_chunks(case: Case, kernels: LatentKernels, *, divided: bool) -> float:
    problem = problem_of(case, RUNS)
    plan = kernels.chunk_plan(problem.runs)
    assert (plan.parts > 0) == divided
    out = kernels.attend_chunks(
        *problem.arrays(), plan, scale=problem.scale, traditional=case.traditional
    )
    assert not np.array(kernels._arrivals).any()
    return difference(numbers(out), problem.expected())


@by_name
def test_a_step_attends_to_all_that_its_rows_see(case):
    assert off_in_a_step(case, case.kernels(), divided=False) <= TOLERANCE


@by_name
@pytest.mark.usefixtures("cut_wherever_possible")
def test_splits_of_a_context_come_to_the_same(case):
    assert off_in_a_step(case, case.kernels(1000), divided=True) <= TOLERANCE


@pytest.mark.usefixtures("cut_wherever_possible")
def test_a_plan_outlives_the_steps_that_lengthen_its_rows():
    case = CASES[0]
    assert off_in_a_step(case, case.kernels(1000), divided=True, grown=40) <= TOLERANCE


# A kernel is the same for whole contexts and for parts of them.
@every_second(0)
def test_chunks_attend_to_what_each_query_sees(case):
    assert off_in_chunks(case, case.kernels(), divided=False) <= TOLERANCE


@every_second(1)
@pytest.mark.usefixtures("cut_wherever_possible")
def test_parts_of_a_chunk_s_context_come_to_the_same(case):
    assert off_in_chunks(case, case.kernels(1000), divided=True) <= TOLERANCE


def test_queries_may_share_a_row_of_pages():
    case, lengths = CASES[0], np.array([60, 61, 62], np.int32)
    kernels, problem = case.kernels(), problem_of(case, [(3, 62)])
    out = kernels.attend(
        *problem.arrays(),
        mx.array(lengths),
        scale=problem.scale,
        splits=kernels.plan(lengths, table_rows=np.zeros(3, np.int32)),
        traditional=case.traditional,
    )
    assert difference(numbers(out), problem.expected()) <= TOLERANCE


@by_name
def test_a_write_finishes_what_the_first_product_gives(case):
    # One or the other: each is a kernel of its own to compile.
    normed = case.name not in ("deepseek-lite", "two-uneven-blocks", "little-memory")
    slots = [2 * case.shape.page_size - 1, -1, 0, 7]
    problem = WriteProblem.of(case.shape, slots, traditional=case.traditional, normed=normed)
    pools = problem.pools()
    queries = numbers(problem.written(case.kernels(), pools))
    assert queries.shape == (len(slots), case.shape.queried)
    assert difference(queries, problem.expected()[0]) <= TOLERANCE
    assert problem.arrived(pools)


def test_a_product_of_too_short_rows_is_refused():
    case = CASES[0]
    problem = WriteProblem.of(case.shape, [0], traditional=HALVES, normed=False)
    for width in (problem.projected.shape[1] - 24, problem.projected.shape[1] - 1):
        short = replace(problem, projected=problem.projected[:, :width])
        with pytest.raises(ValueError, match="rows of"):
            short.written(case.kernels(), problem.pools())


@by_name
def test_blocks_have_room_on_their_device(case):
    for chunks in (False, True):
        form = LatentForm.choose(case.shape, case.device, chunks=chunks)
        assert form is not None
        room = case.device.multiprocessor_memory // form.resident - 1024
        assert form.shared_memory(case.shape) <= min(room, case.device.block_memory)
        assert form.blocks(case.shape) * form.heads >= case.shape.q_heads
        assert form.rows <= 64
        assert form.queries == 1 or chunks


def test_on_an_h100_two_blocks_share_a_multiprocessor_where_heads_are_few():
    found = {
        heads: LatentForm.choose(shape(heads, 512, 64, 128, BF16), LARGE, chunks=False)
        for heads in (16, 20, 64, 128)
    }
    assert [(form.heads, form.tokens, form.stages, form.resident) for form in found.values()] == [
        (16, 32, 2, 2),
        (20, 32, 2, 2),
        (64, 32, 3, 1),
        (64, 32, 3, 1),
    ]


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        (shape(4, 576, 64, 64, BF16), "latent vectors of 576"),
        (shape(4, 96, 64, 64, BF16), "latent vectors of 96"),
        (shape(4, 512, 24, 64, BF16), "heads of 64 and 24"),
        (shape(4, 512, 64, 60, BF16), "heads of 60 and 64"),
        (shape(4, 512, 64, 64, BF16, page=24), "page size 24"),
    ],
)
def test_shapes_that_are_not_served_are_named(of, reason):
    kernels = latent.build(of)
    assert isinstance(kernels, Unsupported)
    assert reason in kernels.reason


@pytest.mark.skipif(mx.default_device().type == mx.gpu, reason="there is a GPU")
def test_without_a_gpu_that_is_the_reason():
    assert isinstance(latent.build(CASES[0].shape), Unsupported)


def test_too_little_shared_memory_is_a_reason():
    assert (
        LatentForm.choose(CASES[2].shape, CudaDevice(4, 48 * 1024, 50 * 1024), chunks=True) is None
    )


@pytest.mark.parametrize("at_once", [1, 100])
def test_padding_among_runs_keeps_its_item(at_once):
    runs = [QueryRun(0, 1, 0, 0), QueryRun(1, 1, 1, 900), QueryRun(2, 1, 2, 0)]
    for given in (runs, runs[:1]):
        items = np.array(cut(given, Blocks(3, 32, 1, at_once), least=64).items)
        whole = items[items[:, 6] == 0]
        assert sorted(whole[:, 0]) == [run.first for run in given]
        padding = items[items[:, 3] == 0]
        assert (padding[:, 4:8] == (0, 0, 0, 1)).all()


class _Turned(LatentKernels):
    def write(self, *args, **how):
        return super().write(*args, **how) * 1.05


class _Misplaced(LatentKernels):
    def write(self, projected, rotation, norms, latents, turned, slots, **how):
        slots = mx.where(slots < 0, 2, slots)
        return super().write(projected, rotation, norms, latents, turned, slots, **how)


class _Short(LatentKernels):
    def attend(self, *args, **how):
        return super().attend(*args[:-1], mx.maximum(args[-1] - 1, 0), **how)


class _Noisy(LatentKernels):
    def attend_chunks(self, *args, **how):
        return super().attend_chunks(*args, **how) * 1.05


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (LatentKernels, None),
        (_Turned, "normalised queries differ"),
        (_Misplaced, "latent vectors or rotated ones did not arrive"),
        (_Short, "attention differs"),
        (_Noisy, "chunks differ"),
    ],
)
def test_the_check_sees_what_is_wrong(kind, wrong):
    of = shape(2, 64, 16, 16, F16)
    forms = [LatentForm.choose(of, LARGE, chunks=chunks) for chunks in (False, True)]
    kernels = kind(of, replace(LARGE, multiprocessors=132), *forms)
    found = check_latent(kernels, traditional=HALVES)
    assert found is None if wrong is None else wrong in found


@pytest.mark.parametrize(
    "case",
    [CASES[2], pytest.param(CASES[4], marks=slow), CASES[6]],
    ids=lambda case: case.name,
)
def test_nvidia_s_compiler_takes_latent_attention(nvidia_accepts, case):
    of, element = case.shape, case.shape.dtype
    attending = latent.Attending(0.1, case.traditional)
    writing = latent.Writing(case.traditional, 1e-6, normed=True)
    step, chunk = (LatentForm.choose(of, case.device, chunks=chunks) for chunks in (False, True))
    inputs = (element, element, F32, element, element, I32, I32, I32)
    results = (element, F32, F32)
    nvidia_accepts(
        [
            (latent.step_source(of, step, attending), inputs, results),
            (latent.chunk_source(of, chunk, attending), inputs, results),
            (latent.merge_source(of, step), (element, F32, F32, I32), (element,)),
            (
                latent.write_source(of, writing),
                (element, F32, element, element, element, element, I32),
                (element,),
            ),
        ]
    )
