"""Both kernel sources against plain arithmetic, run on a CPU through emulated GPU languages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import pytest
from thorough import every_other

from mlx_manager.mlx_server.devices.attention.check import (
    TOLERANCE,
    AttentionFeatures,
    AttentionProblem,
    FreshProblem,
    as_written,
    difference,
    random_problem,
)
from mlx_manager.mlx_server.devices.attention.kernel import AttentionShape, AttentionVariant, Rotary
from mlx_manager.mlx_server.devices.attention.kinds import HEAD_DIMS
from mlx_manager.mlx_server.devices.attention.splits import BlockKind, Splits, plan
from mlx_manager.mlx_server.devices.attention.writer import Pools
from mlx_manager.mlx_server.devices.cuda.attention import decode as cuda
from mlx_manager.mlx_server.devices.cuda.compiler.device import CudaDevice
from mlx_manager.mlx_server.devices.metal import attention as metal

DEVICE = CudaDevice(multiprocessors=4, block_memory=227 * 1024, multiprocessor_memory=228 * 1024)
AMPERE = replace(DEVICE, block_memory=163 * 1024, multiprocessor_memory=164 * 1024)
CONSUMER = replace(DEVICE, block_memory=99 * 1024, multiprocessor_memory=100 * 1024)
NOWHERE = 1 << 28
F32, I32 = mx.float32, mx.int32
PLAIN = AttentionFeatures()


@dataclass(frozen=True)
class Case:
    name: str
    shape: AttentionShape
    features: AttentionFeatures = PLAIN
    lengths: tuple[int, ...] = (1, 16, 17, 0, 90, 300)
    divided: bool = True
    grown: int = 0  # tokens that every query gained since the work was planned
    rotary: Rotary | None = None
    blocks: BlockKind = BlockKind.USUAL
    device: CudaDevice = DEVICE

    @property
    def launch(self) -> cuda.CudaLaunch:
        return cuda.launches_of(self.shape, self.device)[self.blocks]

    @property
    def variant(self) -> AttentionVariant:
        return AttentionVariant(
            scale=self.shape.head_dim**-0.5,
            window=self.features.window,
            softcap=self.features.softcap,
            sinks=self.features.sinks,
            divided=self.divided,
            rotary=self.rotary,
        )

    def problem(self, seed: int = 0) -> AttentionProblem:
        return random_problem(
            self.shape, self.features, self.lengths, seed=seed, unused_page=NOWHERE
        )

    def splits(self, problem: AttentionProblem, blocks: int) -> Splits:
        return plan(
            np.maximum(problem.lengths - self.grown, 0),
            blocks_per_item=blocks,
            blocks_wanted=10_000 if self.divided else 1,
            window=self.features.window,
            table_rows=problem.table_rows,
            min_tiles=2,
        )


def shape(q_heads: int, kv_heads: int, dim: int, dtype: mx.Dtype, page: int = 16) -> AttentionShape:
    return AttentionShape(q_heads, kv_heads, dim, page, dtype)


BF16, F16 = mx.bfloat16, mx.float16
CASES = [
    Case("llama-1b", shape(8, 2, 64, BF16)),
    Case("whole-contexts", shape(8, 2, 64, BF16), divided=False),
    Case("llama-8b-pages-of-32", shape(8, 2, 128, BF16, page=32)),
    Case("window", shape(4, 2, 128, F16), AttentionFeatures(window=50)),
    Case("multi-head-80", shape(2, 2, 80, F16)),
    Case("softcap-96", shape(6, 2, 96, BF16), AttentionFeatures(softcap=5.0)),
    Case("sinks-window", shape(16, 2, 64, BF16), AttentionFeatures(window=70, sinks=True)),
    Case("sinks-whole", shape(8, 1, 64, F16), AttentionFeatures(sinks=True), divided=False),
    Case("gemma-256", shape(4, 2, 256, BF16), AttentionFeatures(window=64, softcap=20.0)),
    Case("multi-query-16", shape(16, 1, 128, BF16)),
    Case("multi-query-20", shape(20, 1, 64, BF16), lengths=(40, 100)),
    Case("grown", shape(8, 2, 64, BF16), lengths=(41, 60, 170, 400), grown=40),
    Case(
        "grown-window",
        shape(8, 2, 64, BF16),
        AttentionFeatures(window=90),
        (91, 170, 400),
        grown=90,
    ),
    Case("group-of-7", shape(14, 2, 64, F16), lengths=(100, 3)),
    Case("wide", shape(8, 2, 512, BF16)),
    Case("wide-multi-head", shape(2, 2, 512, F16), divided=False),
    Case("wide-8-window", shape(8, 1, 512, BF16, page=32), AttentionFeatures(window=70)),
    Case("wide-16-sinks", shape(16, 1, 512, F16), AttentionFeatures(softcap=5.0, sinks=True)),
    Case(
        "wide-11", shape(11, 1, 512, BF16), AttentionFeatures(sinks=True), (1, 100), divided=False
    ),
    Case("wide-two-warps", shape(16, 2, 512, F16), device=AMPERE),
    Case("wide-one-warp", shape(16, 1, 512, BF16), device=CONSUMER),
]
SMALL_PLAIN = Case("small-blocks", shape(8, 2, 128, BF16), blocks=BlockKind.SMALL)
SMALL_FUSED = replace(SMALL_PLAIN, name="small-blocks-fused", rotary=Rotary(128, False, None))
TALL_FUSED = replace(SMALL_FUSED, name="tall-blocks-fused", blocks=BlockKind.TALL)
FUSED_CASES = [
    Case("llama", shape(8, 2, 64, BF16), rotary=Rotary(64, False, None)),
    Case("qwen3", shape(4, 2, 128, BF16, page=32), rotary=Rotary(128, False, 1e-6)),
    Case(
        "phi-96-sinks",
        shape(6, 2, 96, F16),
        AttentionFeatures(sinks=True),
        rotary=Rotary(96, False, None),
    ),
    Case("odd-halves-80", shape(2, 2, 80, BF16), rotary=Rotary(80, False, 1e-5)),
    Case("partial", shape(8, 1, 64, F16), rotary=Rotary(32, False, None), divided=False),
    Case("glm", shape(8, 1, 128, BF16), rotary=Rotary(64, True, None)),
    Case(
        "window-256",
        shape(4, 2, 256, BF16),
        AttentionFeatures(window=64),
        rotary=Rotary(256, False, 1e-6, values=True),
    ),
    Case("gated", shape(8, 2, 256, BF16), rotary=Rotary(64, False, 1e-6, gated=True)),
    Case("group-of-20", shape(20, 1, 64, BF16), lengths=(40, 100), rotary=Rotary(64, True, 1e-6)),
    Case("wide-fused", shape(8, 1, 512, BF16), rotary=Rotary(512, False, 1e-6)),
    Case("wide-neighbours", shape(2, 2, 512, F16, page=32), rotary=Rotary(512, True, None)),
    Case(
        "wide-16-partial",
        shape(16, 1, 512, F16),
        AttentionFeatures(window=64),
        rotary=Rotary(128, False, 1e-6, values=True),
    ),
    Case(
        "wide-gated-one-warp",
        shape(8, 2, 512, BF16),
        rotary=Rotary(128, True, 1e-6, gated=True),
        device=CONSUMER,
    ),
]
METAL_CASES = [
    *CASES,
    Case("float32", shape(4, 2, 64, F32)),
    Case("rows-in-constant-space", shape(4, 2, 80, BF16), lengths=(70,)),
    Case("72", shape(6, 2, 72, F16), AttentionFeatures(sinks=True)),
    Case("112-window", shape(8, 2, 112, BF16), AttentionFeatures(window=50)),
    Case("160-group-of-5", shape(5, 1, 160, F16), divided=False),
    Case("192-softcap", shape(8, 1, 192, BF16), AttentionFeatures(softcap=5.0)),
]
METAL_FUSED_CASES = [
    Case("72-fused", shape(6, 2, 72, BF16), rotary=Rotary(72, False, 1e-6, values=True)),
    Case("112-fused", shape(4, 2, 112, F16), rotary=Rotary(112, False, None)),
    Case("160-fused", shape(6, 1, 160, BF16), rotary=Rotary(40, True, 1e-6), divided=False),
    Case("192-fused", shape(4, 1, 192, F16), rotary=Rotary(64, False, 1e-6, gated=True)),
]


def stored(values: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """The bits that an array of `dtype` holds."""
    array = mx.array(values).astype(dtype)
    return np.array(array if dtype == F32 else array.view(mx.uint16))


def loaded(bits: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    array = mx.array(bits) if dtype == F32 else mx.array(bits).view(dtype)
    return np.array(array.astype(F32))


def poison(shape: tuple[int, ...], dtype: mx.Dtype) -> np.ndarray:
    return stored(np.full(shape, np.nan, np.float32), dtype)


def pages_of(problem: AttentionProblem, splits: Splits) -> list[np.ndarray]:
    dtype = problem.shape.dtype
    sinks = np.zeros(1, np.float32) if problem.sinks is None else problem.sinks
    return [
        stored(problem.k_pool, dtype),
        stored(problem.v_pool, dtype),
        problem.table,
        problem.lengths,
        np.array(splits.items),
        sinks,
    ]


def queries_of(problem: AttentionProblem | FreshProblem) -> list[np.ndarray]:
    match problem:
        case AttentionProblem():
            return [stored(problem.q, problem.shape.dtype)]
        case FreshProblem(ready, _, qkv, rotation, norms):
            bits = stored(norms, ready.shape.dtype)
            return [stored(qkv, ready.shape.dtype), rotation, bits[0].copy(), bits[1].copy()]


PAGES = ("k_pool", "v_pool", "table", "lengths", "items", "sinks")
FRESH = ("qkv", "rotation", "q_norm", "k_norm")
QUERIES = {AttentionProblem: ("q",), FreshProblem: FRESH}


def types_of(dtype: mx.Dtype) -> dict[str, mx.Dtype]:
    """Return the type of each input that a kernel of attention may have."""
    floats = dict.fromkeys(("q", "qkv", "q_norm", "k_norm", "k_pool", "v_pool"), dtype)
    numbers = dict.fromkeys(("table", "lengths", "items", "arrivals", "slots", "written"), I32)
    return {**floats, **numbers, "rotation": F32, "sinks": F32, "codes": mx.int8, "scales": BF16}


def named(problem: AttentionProblem | FreshProblem, pages: Sequence[np.ndarray]) -> dict:
    """Return the arrays of a problem by the names that they have among a kernel's inputs."""
    queries = zip(QUERIES[type(problem)], queries_of(problem), strict=True)
    return dict(queries) | dict(zip(PAGES, pages, strict=False))


def written_of(problem: AttentionProblem | FreshProblem) -> list[np.ndarray]:
    return [np.zeros(1, np.int32)] if isinstance(problem, AttentionProblem) else []


def assert_written(problem: AttentionProblem, pages: list[np.ndarray]) -> None:
    for pool, expected in zip(pages[:2], (problem.k_pool, problem.v_pool), strict=True):
        assert as_written(loaded(pool, problem.shape.dtype), expected)


def cuda_entry(case):
    dtype = case.shape.dtype
    source = cuda.attend_source(case.shape, case.launch, case.variant)
    types = types_of(dtype)
    return source, tuple(types[name] for name in source.inputs), (dtype, F32)


class Cuda:
    def __init__(self, compile_cuda, cases):
        self.cases = {case.name: i for i, case in enumerate(cases)}
        self.library = compile_cuda([cuda_entry(case) for case in cases])

    def attend(self, case: Case, problem: AttentionProblem | FreshProblem) -> np.ndarray:
        shape = case.shape
        ready = problem if isinstance(problem, AttentionProblem) else problem.unwritten()
        launch = case.launch
        blocks = cuda.blocks_per_item(shape)
        splits = case.splits(ready, blocks)
        assert splits.divided == case.divided
        out = poison(ready.q.shape, shape.dtype)
        partial = splits.work * blocks * cuda.heads_per_block(shape)
        arrivals = np.zeros(len(ready.lengths) * blocks, np.int32)
        pages = pages_of(ready, splits)
        given = named(problem, pages) | {"arrivals": arrivals, "written": np.zeros(1, np.int32)}
        number = self.cases[case.name]
        self.library.call(
            number,
            [given[name] for name in self.library.inputs(number)],
            [out, poison((partial * (shape.head_dim + 2),), F32)],
            (blocks * launch.warps * 32, splits.work, 1),
            (launch.warps * 32, 1, 1),
        )
        assert not arrivals.any()
        if isinstance(problem, FreshProblem):
            assert_written(problem.ready, pages)
        return loaded(out, shape.dtype)


class Metal:
    def __init__(self, compile_metal, cases):
        self.cases = {case.name: 2 * i for i, case in enumerate(cases)}
        entries = []
        for case in cases:
            dtype = case.shape.dtype
            attend = metal.attend_source(case.shape, case.variant)
            queries = (dtype,) if case.rotary is None else (dtype, F32, dtype, dtype)
            after = (I32,) if case.rotary is None else ()
            inputs = (*queries, dtype, dtype, I32, I32, I32, F32, *after)
            entries.append((attend, inputs, (dtype, F32, F32)))
            merge = metal.merge_source(case.shape, sinks=case.features.sinks)
            entries.append((merge, (F32, F32, I32, F32), (dtype,)))
        self.library = compile_metal(entries)

    def attend(self, case: Case, problem: AttentionProblem | FreshProblem) -> np.ndarray:
        shape = case.shape
        ready = problem if isinstance(problem, AttentionProblem) else problem.unwritten()
        heads = metal.heads_per_block(shape)
        blocks = shape.kv_heads * -(-shape.group // heads)
        splits = case.splits(ready, blocks)
        assert splits.divided == case.divided
        out = poison(ready.q.shape, shape.dtype)
        count = splits.work * blocks * heads
        partial, figures = poison((count * shape.head_dim,), F32), poison((count * 2,), F32)
        pages = pages_of(ready, splits)
        self.library.call(
            self.cases[case.name],
            [*queries_of(problem), *pages, *written_of(problem)],
            [out, partial, figures],
            (blocks * metal.SIMDGROUPS * 32, splits.work, 1),
            (metal.SIMDGROUPS * 32, 1, 1),
        )
        if splits.divided:
            self.library.call(
                self.cases[case.name] + 1,
                [partial, figures, pages[4], pages[5]],
                [out],
                (shape.q_heads * shape.head_dim, splits.work, 1),
                (shape.head_dim, 1, 1),
            )
        if isinstance(problem, FreshProblem):
            assert_written(problem.ready, pages)
        return loaded(out, shape.dtype)


@pytest.fixture(scope="module")
def cuda_on_cpu(compile_cuda) -> Cuda:
    return Cuda(compile_cuda, [*CASES, *FUSED_CASES, SMALL_PLAIN, SMALL_FUSED, TALL_FUSED])


@pytest.fixture(scope="module")
def metal_on_cpu(compile_metal) -> Metal:
    return Metal(compile_metal, [*METAL_CASES, *FUSED_CASES, *METAL_FUSED_CASES])


@pytest.mark.parametrize("case", [*CASES, SMALL_PLAIN], ids=lambda case: case.name)
def test_cuda_attention_is_the_reference(cuda_on_cpu, case):
    problem = case.problem()
    assert difference(cuda_on_cpu.attend(case, problem), problem.expected()) <= TOLERANCE


@pytest.mark.parametrize(
    "case",
    [CASES[8], FUSED_CASES[1], FUSED_CASES[9], SMALL_FUSED, TALL_FUSED],
    ids=lambda case: case.name,
)
def test_nvidia_s_compiler_takes_attention(nvidia_accepts, case):
    nvidia_accepts([cuda_entry(case)])


@pytest.mark.parametrize("case", every_other(METAL_CASES), ids=lambda case: case.name)
def test_metal_attention_is_the_reference(metal_on_cpu, case):
    problem = case.problem()
    assert difference(metal_on_cpu.attend(case, problem), problem.expected()) <= TOLERANCE


@pytest.mark.parametrize("case", [SMALL_FUSED, TALL_FUSED], ids=lambda case: case.name)
def test_blocks_of_another_kind_do_the_same_in_a_fused_step(cuda_on_cpu, case):
    problem = FreshProblem.of(case.problem(), case.rotary)
    assert difference(cuda_on_cpu.attend(case, problem), problem.ready.expected()) <= TOLERANCE


USUAL, SMALL, TALL = BlockKind


@pytest.mark.parametrize(
    ("lengths", "window", "blocks"),
    [
        ([144] * 34, None, SMALL),
        ([144] * 33, None, USUAL),
        ([640] * 64, None, USUAL),
        ([640] * 64, 256, SMALL),
        ([8192, *[64] * 31], None, USUAL),
        ([1024, *[64] * 63], None, SMALL),
        ([4096] * 16, None, TALL),
        ([4096] * 16 + [0] * 4, None, TALL),
        ([4096] * 16, 512, USUAL),
        ([4096] * 15 + [9000], None, USUAL),
        ([4096] * 17, None, USUAL),
        ([4096] * 9, None, USUAL),
        ([], None, USUAL),
    ],
)
def test_blocks_suit_the_contexts(lengths, window, blocks):
    rooms = {USUAL: 264, SMALL: 700, TALL: 132}
    given = np.array(lengths, np.int64)
    assert cuda.blocks_for(given, window, blocks_per_item=8, rooms=rooms) is blocks


@pytest.mark.parametrize("device", [DEVICE, AMPERE, CONSUMER], ids=["hopper", "ampere", "consumer"])
@pytest.mark.parametrize("group", [1, 8, 16])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_no_kind_of_block_is_larger_than_the_device_has_room_for(head_dim, group, device):
    for launch in cuda.launches_of(shape(2 * group, 2, head_dim, BF16), device).values():
        assert launch.shared_memory <= device.block_memory


@pytest.mark.parametrize(("device", "warps"), [(DEVICE, 3), (AMPERE, 2), (CONSUMER, 1)])
def test_blocks_of_wide_heads_have_as_many_warps_as_there_is_room_for(device, warps):
    launches = cuda.launches_of(shape(8, 1, 512, BF16), device)
    # Others would leave room for no more of them.
    assert {(launch.warps, launch.stages) for launch in launches.values()} == {(warps, 2)}


@pytest.mark.parametrize(
    ("lengths", "window", "waves"),
    [
        ([4096] * 32, None, 1),
        ([4096] * 24 + [4600] * 8 + [0] * 8, None, 1),
        ([8192] + [64] * 31, None, 2),
        ([8192] + [1024] * 31, 512, 1),
        ([9000], None, 1),
        ([0, 0], None, 1),
    ],
)
def test_contexts_that_are_alike_are_read_in_one_wave(
    lengths: list[int], window: int | None, waves: int
) -> None:
    assert cuda.waves_for(np.array(lengths), window) == waves


@pytest.mark.parametrize(
    ("backend", "case"),
    [(backend, case) for backend in ("cuda_on_cpu", "metal_on_cpu") for case in FUSED_CASES]
    + [("metal_on_cpu", case) for case in METAL_FUSED_CASES],
    ids=lambda value: getattr(value, "name", value),
)
def test_fused_step_writes_the_newest_token_and_attends_to_it(backend, case, request):
    kernels = request.getfixturevalue(backend)
    problem = FreshProblem.of(case.problem(), case.rotary)
    assert difference(kernels.attend(case, problem), problem.ready.expected()) <= TOLERANCE


def test_queries_may_share_a_row_of_pages(cuda_on_cpu, metal_on_cpu):
    case = CASES[0]
    problem = random_problem(case.shape, lengths=(60, 61, 62))
    lengths = np.array([60, 61, 62], np.int32)
    shared = replace(problem, lengths=lengths, table_rows=np.array([2, 2, 2], np.int32))
    for kernels in (cuda_on_cpu, metal_on_cpu):
        divided = replace(case, divided=True)
        assert difference(kernels.attend(divided, shared), shared.expected()) <= TOLERANCE


@pytest.mark.parametrize("backend", ["cuda", "metal"])
@pytest.mark.parametrize(
    ("layout", "key_dim", "value_dim"),
    [("rows", 80, 80), ("chunk", 80, 80), ("strided", 80, 80), ("rows", 96, 16), ("chunk", 16, 72)],
)
def test_write_puts_tokens_into_their_slots_and_nowhere_else(
    backend, layout, key_dim, value_dim, compile_cuda, compile_metal
):
    written = Pools(4, key_dim, value_dim, BF16)
    sources, compile_entries = (
        (cuda.write_source, compile_cuda)
        if backend == "cuda"
        else (metal.write_source, compile_metal)
    )
    library = compile_entries([(sources(written), (BF16, BF16, BF16, BF16, I32), (I32,))])
    rng = np.random.default_rng(0)
    tokens = {"rows": (5, 1), "chunk": (1, 5), "strided": (5, 1)}[layout]
    k, v = (
        stored(rng.normal(size=(tokens[0], 4, tokens[1], dim)).astype(np.float32), BF16)
        for dim in (key_dim, value_dim)
    )
    if layout == "chunk":
        k = np.ascontiguousarray(k.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    if layout == "strided":
        v = np.asfortranarray(v)
    slots = np.array([31, 0, -1, 7, 16], np.int32)
    k_pool, v_pool = (np.full((4, 48, dim), 7, np.uint16) for dim in (key_dim, value_dim))
    expected = [pool.copy() for pool in (k_pool, v_pool)]
    for pool, new in zip(expected, (k, v), strict=True):
        for slot, values in zip(slots, new.transpose(0, 2, 1, 3).reshape(5, 4, -1), strict=True):
            if slot >= 0:
                pool[:, slot] = values
    widest = written.widest
    grid, group = (
        ((384, 5, 1), (128, 1, 1)) if backend == "cuda" else ((4 * widest, 5, 1), (widest, 1, 1))
    )
    done = np.zeros(1, np.int32)
    if backend == "cuda":
        # MLX makes a CUDA kernel's inputs contiguous.
        k, v = map(np.ascontiguousarray, (k, v))
    library.call(0, [k_pool, v_pool, k, v, slots], [done], grid, group)
    np.testing.assert_array_equal(k_pool, expected[0])
    np.testing.assert_array_equal(v_pool, expected[1])
    assert done[0] == 0
