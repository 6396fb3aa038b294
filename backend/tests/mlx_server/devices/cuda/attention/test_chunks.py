"""Attention of prompt chunks against plain arithmetic, its source run on a CPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from devices.attention.test_kernels import (
    BF16,
    DEVICE,
    F16,
    F32,
    I32,
    NOWHERE,
    loaded,
    poison,
    shape,
    stored,
)
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from thorough import one_in_turn

from mlx_manager.mlx_server.devices.attention import check
from mlx_manager.mlx_server.devices.attention.check import (
    TOLERANCE,
    AttentionFeatures,
    chunk_problem,
    difference,
)
from mlx_manager.mlx_server.devices.attention.kernel import AttentionVariant
from mlx_manager.mlx_server.devices.attention.kinds import CHUNKS
from mlx_manager.mlx_server.devices.cuda.attention import chunks
from mlx_manager.mlx_server.devices.cuda.attention.chunk_plan import Blocks, QueryRun, cut
from mlx_manager.mlx_server.devices.cuda.attention.chunk_tiles import (
    GroupTiles,
    Tiles,
    blocks_of,
    tiles_for,
)
from mlx_manager.mlx_server.devices.kernel import Unsupported

CASES = {
    "llama-1b": (shape(8, 2, 64, BF16), AttentionFeatures()),
    "llama-8b-pages-of-32": (shape(8, 2, 128, BF16, page=32), AttentionFeatures()),
    "window": (shape(4, 2, 128, F16), AttentionFeatures(window=50)),
    "multi-head-80": (shape(2, 2, 80, F16), AttentionFeatures()),
    "softcap-96": (shape(6, 2, 96, BF16), AttentionFeatures(softcap=5.0)),
    "sinks-window": (shape(16, 2, 64, BF16), AttentionFeatures(window=70, sinks=True)),
    "gemma-256": (shape(4, 2, 256, BF16), AttentionFeatures(window=64, softcap=20.0)),
    "group-of-7": (shape(14, 2, 64, F16), AttentionFeatures()),
    "multi-query-20": (shape(20, 1, 64, BF16), AttentionFeatures(sinks=True)),
}
# Queries and the tokens that the last of them sees: a whole prompt, a piece, one alone.
RUNS = ((37, 37), (20, 90), (1, 130), (70, 200))


# The forms of the kernel for compute capability 9.0 that the cases take in turn.
GROUPS = (
    GroupTiles(1, 32),
    GroupTiles(2, 64),
    GroupTiles(1, 48, 3),
    GroupTiles(2, 32, 4),
    GroupTiles(3, 32),
    GroupTiles(2, 32, 5),
    GroupTiles(2, 48),
)


class Kernels:
    def __init__(self, compile_cuda, forms: list[Tiles]) -> None:
        self.forms = dict(zip(CASES, forms, strict=True))
        self.library = compile_cuda([entry(name, form) for name, form in self.forms.items()])


def entry(name: str, form: Tiles):
    of, features = CASES[name]
    source = chunks.chunk_source(of, form, variant(of, features))
    inputs = (of.dtype, of.dtype, of.dtype, I32, I32, F32, I32, I32)
    return source, inputs, (of.dtype, F32, F32)


@pytest.mark.parametrize("device", [DEVICE, replace(DEVICE, multiplies_in_groups=True)])
def test_nvidia_s_compiler_takes_attention_of_chunks(nvidia_accepts, device):
    form = tiles_for(CASES["llama-1b"][0], device)[0]
    assert isinstance(form, GroupTiles) == device.multiplies_in_groups
    nvidia_accepts([entry("llama-1b", form)])


def test_heads_too_wide_for_registers_are_not_served():
    found = chunks.chunk_kernels(shape(8, 1, 512, BF16))
    assert isinstance(found, Unsupported)
    assert "heads of 512" in found.reason


@pytest.fixture(scope="module")
def in_warps(compile_cuda) -> Kernels:
    return Kernels(compile_cuda, [tiles_for(of, DEVICE)[0] for of, _ in CASES.values()])


@pytest.fixture(scope="module")
def in_groups(compile_cuda) -> Kernels:
    return Kernels(compile_cuda, [form for form, _ in zip(cycle(GROUPS), CASES)])


def variant(of, features: AttentionFeatures) -> AttentionVariant:
    return AttentionVariant(
        of.head_dim**-0.5, features.window, features.softcap, features.sinks, divided=False
    )


def attended(kernels: Kernels, name: str, *, whole: bool) -> float:
    """How far the kernel is off, contexts left whole or cut wherever they can be."""
    of, features = CASES[name]
    form = kernels.forms[name]
    problem, runs = chunk_problem(of, features, RUNS, unused_page=NOWHERE)
    blocks = replace(blocks_of(form, of, DEVICE), at_once=1 if whole else 1000)
    plan = cut(runs, blocks, features.window, start=0, merge=0, least=1)
    assert (plan.parts == 0) == whole
    out = poison(problem.q.shape, of.dtype)
    figures = max(plan.parts * of.kv_heads * form.rows, 1)
    arrivals = np.zeros(plan.parts * of.kv_heads + 1, np.int32)
    sinks = np.zeros(1, np.float32) if problem.sinks is None else problem.sinks
    pools = (stored(problem.k_pool, of.dtype), stored(problem.v_pool, of.dtype))
    work = [problem.table, np.array(plan.items), sinks, arrivals, np.zeros(1, np.int32)]
    kernels.library.call(
        list(CASES).index(name),
        [stored(problem.q, of.dtype), *pools, *work],
        [out, poison((figures * of.head_dim,), F32), poison((figures * 2,), F32)],
        (of.kv_heads * form.threads, plan.work, 1),
        (form.threads, 1, 1),
    )
    assert not arrivals.any()
    return difference(loaded(out, of.dtype), problem.expected())


@pytest.mark.parametrize(("name", "kernels"), one_in_turn(list(CASES), ["in_warps", "in_groups"]))
def test_chunks_attend_to_what_each_query_may_see(kernels, name, request):
    assert attended(request.getfixturevalue(kernels), name, whole=True) <= TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_parts_of_a_context_come_to_the_same(in_groups, name):
    assert attended(in_groups, name, whole=False) <= TOLERANCE


@pytest.mark.parametrize("name", ["sinks-window", "softcap-96"])
def test_so_do_those_of_warps(in_warps, name):
    assert attended(in_warps, name, whole=False) <= TOLERANCE


runs_of_a_step = st.lists(
    st.tuples(st.integers(1, 300), st.integers(0, 9000)), min_size=1, max_size=6
)


@given(runs_of_a_step, st.sampled_from([None, 100, 4096]), st.sampled_from([1, 8, 132, 2000]))
def test_every_query_is_in_one_tile_and_sees_its_context_once(given_runs, window, at_once):
    runs, first = [], 5
    for row, (count, before) in enumerate(given_runs):
        runs.append(QueryRun(first, count, row, before + 1))
        first += count
    plan = cut(runs, Blocks(32, 128, 4, at_once), window)
    items = np.array(plan.items)
    assert (np.diff(items[:, 5] - items[:, 4]) <= 0).all(), "those that take longest come first"
    whole = items[items[:, 6] == 0]
    queries = sorted(q for first, n in whole[:, :2] for q in range(first, first + n))
    assert queries == list(range(5, first))
    places = []
    for first, count, row, length, *_ in whole:
        parts = items[items[:, 0] == first]
        parts = parts[np.argsort(parts[:, 6])]
        assert (parts[:, 7] == len(parts)).all()
        assert (
            parts[:, :4] == (first, count, row, runs[row].length + first - runs[row].first)
        ).all()
        assert parts[0, 4] <= max(length - (window or length), 0)
        assert parts[-1, 5] >= length + count - 1
        assert (parts[1:, 4] == parts[:-1, 5]).all()
        assert (parts[:, 5] > parts[:, 4]).all()
        if len(parts) > 1:
            places += [*(parts[:, 8] + parts[:, 6])]
    assert sorted(places) == list(range(plan.parts))


def test_contexts_are_cut_where_that_ends_sooner():
    blocks = Blocks(32, 128, 8, 132)
    longest = {
        queries: int(np.ptp(np.array(cut([QueryRun(0, queries, 0, 7681)], blocks).items)[0, 4:6]))
        for queries in (64, 256, 512)
    }
    assert longest[64] < longest[256] < longest[512] == 64 * 128


class Reference:
    """`ChunkKernels` by plain arithmetic, wrong by a factor."""

    def __init__(self, of, name: str, factor: float) -> None:
        self.shape, self.factor = of, factor
        self.tiles = SimpleNamespace(name=name)

    def of_heads(self, kv_heads: int):
        few = replace(self.shape, q_heads=self.shape.group * kv_heads, kv_heads=kv_heads)
        return Reference(few, self.tiles.name, self.factor)

    def plan(self, runs, window=None):
        return list(runs)

    def attend(self, q, k_pool, v_pool, table, plan, dep, *, scale, **_):
        out = []
        for run in plan:
            slots = (np.array(table)[run.row][:, None] * self.shape.page_size).astype(np.int64)
            slots = (slots + np.arange(self.shape.page_size)).ravel()
            for i in range(run.count):
                seen = mx.array(slots[: run.length + i])
                own = q[run.first + i][None]
                keys, values = (pool[None, :, seen] for pool in (k_pool, v_pool))
                out.append(mx.fast.scaled_dot_product_attention(own, keys, values, scale=scale)[0])
        return mx.stack(out) * self.factor


def test_kernels_that_fail_their_check_are_passed_over_with_a_reason(caplog):
    of = shape(8, 4, 64, F16)
    wrong, right = Reference(of, "quick", 1.5), Reference(of, "slow", 1.0)
    assert replace(CHUNKS, build=lambda _: [wrong, right]).serving(of) is right
    assert "not used: quick: chunks differ from the reference by 0.5" in caplog.text
    assert "slow" not in caplog.text
    none = replace(CHUNKS, build=lambda _: [wrong]).serving(of)
    assert isinstance(none, Unsupported)
    assert none.reason.startswith("quick: chunks differ from the reference by 0.5")


@given(arrays(np.float32, 8, elements=st.floats(width=32, allow_nan=False)))
def test_random_numbers_are_rounded_as_mlx_rounds_them(values):
    for dtype in (F16, BF16, mx.float32):
        with np.errstate(over="ignore"):
            found = check.exact(values, dtype)
        expected = np.array(mx.array(values).astype(dtype).astype(mx.float32))
        assert found.tolist() == expected.tolist()
