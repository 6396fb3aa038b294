"""Attention over pages against dense arithmetic, one token at a time, in double precision."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from devices.portable import Portable, PortableCoded
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx import nn
from mlx_lm.models import llama

from mlx_manager.mlx_server.devices import table as devices
from mlx_manager.mlx_server.devices.attention import codes, splits
from mlx_manager.mlx_server.devices.attention.kernel import AttentionShape
from mlx_manager.mlx_server.devices.attention.kernel_set import KernelSet
from mlx_manager.mlx_server.devices.attention.kinds import HEAD_DIMS
from mlx_manager.mlx_server.devices.attention.splits import Splits
from mlx_manager.mlx_server.devices.cuda.attention import chunk_plan
from mlx_manager.mlx_server.devices.namespaces import namespaces_of
from mlx_manager.mlx_server.engine.kv import store
from mlx_manager.mlx_server.engine.kv.coded import CodedStore
from mlx_manager.mlx_server.engine.kv.pages import PageTable
from mlx_manager.mlx_server.engine.kv.store import LayerShape, LayerStore, Numbers
from mlx_manager.mlx_server.execution.attention import paged as attention
from mlx_manager.mlx_server.execution.attention.paged import (
    GROUP_SPREAD,
    SLICE_TOKENS,
    KeyAccess,
    PagedLayer,
    Pass,
    Span,
    StepPlan,
    attend,
    prepare,
)

TOLERANCE = {mx.float32: 2e-5, mx.float16: 5e-3, mx.bfloat16: 4e-2}
# What lies in places that nobody may read: finite, and ruinous.
POISON = 1e4


@dataclass(frozen=True)
class Row:
    """A sequence of `length` tokens, the last `queries` of which are the step's own.

    `ahead` pages beyond its last token are in its table already.
    """

    length: int
    queries: int = 1
    scattered: bool = False
    ahead: int = 0


@dataclass(frozen=True)
class Case:
    rows: tuple[Row, ...]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 8
    value_dim: int | None = None
    dtype: mx.Dtype = mx.float32
    page_size: int = 16
    window: int | None = None
    sinks: bool = False
    seed: int = 0
    coded: bool = False

    @property
    def shape(self) -> LayerShape:
        return LayerShape(
            self.kv_heads, self.dim, self.value_dim or self.dim, self.dtype, self.window
        )


def tables(rows: Sequence[Row], page_size: int, seed: int) -> tuple[list[PageTable], int]:
    """A table for each row, and how many pages there are; pages 0 and the last are nobody's."""
    chance = random.Random(seed)
    made: list[PageTable] = []
    first = 1
    scattered: list[tuple[int, int]] = []
    for row in rows:
        count = -(-row.length // page_size) + row.ahead
        made.append(PageTable(() if row.scattered else range(first, first + count)))
        if row.scattered:
            scattered += [(len(made) - 1, i) for i in range(count)]
        else:
            first += count
    pages = list(range(first, first + 2 * len(scattered)))
    chance.shuffle(pages)
    for (row_index, _), page in zip(scattered, pages, strict=False):
        made[row_index].extend([page])
    return made, first + 2 * len(scattered) + 1


@dataclass
class Scene:
    """A case with its numbers: pages that hold each row's past, and the step's own tokens."""

    case: Case
    kernels: KernelSet | None = None
    tables: list[PageTable] = field(init=False)
    store: LayerStore = field(init=False)

    def __post_init__(self) -> None:
        case = self.case
        numbers = np.random.default_rng(case.seed)
        size, shape = case.page_size, case.shape

        def draw(*dims: int) -> np.ndarray:
            wide = mx.array(numbers.standard_normal(dims), mx.float32)
            return np.array(wide.astype(case.dtype).astype(mx.float32))

        def kept(heads: np.ndarray) -> np.ndarray:
            """Keys or values as the store keeps them."""
            if not case.coded:
                return heads
            group = codes.group_of(case.dim)
            assert group is not None
            turn = codes.turn_of(case.dim)
            found = codes.decoded(*codes.encoded(mx.array(heads) @ turn, group), mx.float32)
            return np.array(found @ turn)

        self.keys = [kept(draw(case.kv_heads, row.length, case.dim)) for row in case.rows]
        self.values = [kept(draw(case.kv_heads, row.length, shape.value_dim)) for row in case.rows]
        self.queries = [draw(case.heads, row.queries, case.dim) for row in case.rows]
        self.sinks = draw(case.heads) if case.sinks else None
        self.scale = case.dim**-0.5
        self.tables, pages = tables(case.rows, size, case.seed)
        self.store = self._poisoned(pages)
        for row, table, k, v in zip(case.rows, self.tables, self.keys, self.values, strict=True):
            past = row.length - row.queries
            if past:
                places = np.arange(past)
                slots = Numbers(table.pages[places // size] * size + places % size)
                self.store.write(self._cast(k[:, :past]), self._cast(v[:, :past]), slots)
        mx.eval(self.store.held)

    def _poisoned(self, pages: int) -> LayerStore:
        case = self.case
        if case.coded:
            coded = CodedStore(case.shape, case.page_size, self.kernels)
            coded.resize(pages)
            coded.codes = mx.full(coded.codes.shape, codes.MOST, mx.int8)
            coded.scales = mx.full(coded.scales.shape, POISON / codes.MOST, codes.SCALE)
            return coded
        store = LayerStore(case.shape, case.page_size, self.kernels)
        store.resize(pages)
        store.keys = mx.full(store.keys.shape, POISON, case.dtype)
        store.values = mx.full(store.values.shape, POISON, case.dtype)
        return store

    def _cast(self, numbers: np.ndarray) -> mx.array:
        return mx.array(numbers).astype(self.case.dtype)

    @property
    def spans(self) -> list[Span]:
        return [
            Span(table, row.length, row.queries)
            for row, table in zip(self.case.rows, self.tables, strict=True)
        ]

    def fresh(self, arrays: Sequence[np.ndarray]) -> mx.array:
        """The step's own tokens of all rows, as a module has them: (tokens, heads, 1, dim)."""
        own = [a[:, -row.queries :] for a, row in zip(arrays, self.case.rows, strict=True)]
        return self._cast(np.concatenate(own, axis=1).swapaxes(0, 1)[:, :, None])

    def attend(self, reading: KeyAccess = KeyAccess.PAGES) -> np.ndarray:
        """(tokens, heads, value_dim) as the paged layer computes it, all rows in one pass."""
        layer = PagedLayer(
            self.store, reading, Pass(StepPlan(self.spans, self.case.page_size), chunk=False)
        )
        layer.update_and_fetch(self.fresh(self.keys), self.fresh(self.values))
        mask = layer.make_mask(1)
        sinks = None if self.sinks is None else self._cast(self.sinks)
        out = layer.attend(self.fresh(self.queries), self.scale, mask, sinks)  # type: ignore[arg-type]
        assert out.dtype == self.case.dtype
        return np.array(out.astype(mx.float32))[:, :, 0]

    def attend_chunk(self) -> np.ndarray:
        """The same for a single row that goes through the model as (1, tokens)."""
        layer = PagedLayer(
            self.store, KeyAccess.PAGES, Pass(StepPlan(self.spans, self.case.page_size), chunk=True)
        )

        def chunk(arrays: list[np.ndarray]) -> mx.array:
            return self._cast(arrays[0][None, :, -self.case.rows[0].queries :])

        layer.update_and_fetch(chunk(self.keys), chunk(self.values))
        mask = layer.make_mask(self.case.rows[0].queries)
        sinks = None if self.sinks is None else self._cast(self.sinks)
        out = layer.attend(chunk(self.queries), self.scale, mask, sinks)  # type: ignore[arg-type]
        return np.array(out.astype(mx.float32))[0].swapaxes(0, 1)

    def expected(self) -> np.ndarray:
        tokens = [
            self._one(i, place)
            for i, row in enumerate(self.case.rows)
            for place in range(row.length - row.queries, row.length)
        ]
        return np.stack(tokens)

    def _one(self, i: int, place: int) -> np.ndarray:
        """(heads, value_dim): the token at `place` of row `i` over all that it may see."""
        case, row = self.case, self.case.rows[i]
        first = 0 if case.window is None else max(0, place - case.window + 1)
        shared = case.heads // case.kv_heads
        keys = np.repeat(self.keys[i][:, first : place + 1], shared, axis=0).astype(np.float64)
        values = np.repeat(self.values[i][:, first : place + 1], shared, axis=0)
        query = self.queries[i][:, place - (row.length - row.queries)]
        scores = np.einsum("hd,hkd->hk", query, keys) * self.scale
        if self.sinks is not None:
            scores = np.concatenate([scores, self.sinks[:, None]], axis=1)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        return np.einsum("hk,hkd->hd", weights[:, : values.shape[1]], values)


def agree(case: Case, got: np.ndarray, wanted: np.ndarray) -> None:
    assert got.shape == wanted.shape
    assert np.abs(got - wanted).max() <= TOLERANCE[case.dtype]


MIXED = (
    Row(1),
    Row(17, scattered=True),
    Row(40, scattered=True),
    Row(41),
    Row(70, scattered=True, ahead=1),
    Row(SLICE_TOKENS + 9),
    Row(SLICE_TOKENS + 30, scattered=True),
    Row(20, queries=20),
    Row(53, queries=21, scattered=True),
    Row(33, queries=1, ahead=2),
)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (4, 1), (2, 2)])
def test_a_mixed_step_is_what_dense_attention_gives(
    heads: int, kv_heads: int, dim: int, dtype: mx.Dtype
) -> None:
    case = Case(MIXED, heads, kv_heads, dim, dtype=dtype, seed=dim)
    scene = Scene(case)
    agree(case, scene.attend(), scene.expected())


@pytest.mark.parametrize(
    ("dim", "holds"), [(64, False), (80, False), (96, True), (128, False), (256, True), (512, True)]
)
@pytest.mark.parametrize("window", [None, 40])
def test_a_mac_holds_the_scores_of_few_queries_at_a_time(
    dim: int, holds: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the scores that a Mac holds where its attention does not make them on the way.

    Those of 32 heads of 2 048 queries after 32 000 tokens are 4 GB.
    """
    case = Case((Row(300, queries=100),), 8, 2, dim, window=window)
    monkeypatch.setattr(devices, "current", lambda: replace(devices.METAL, scores=8 * 300 * 16))
    # Those are for CPUs.
    monkeypatch.setattr(attention, "pays", lambda *_: False)
    held, attend = [], mx.fast.scaled_dot_product_attention

    def counting(q: mx.array, k: mx.array, v: mx.array, **how: Any) -> mx.array:
        held.append(q.shape[1] * q.shape[2] * k.shape[2])
        return attend(q, k, v, **how)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", counting)
    scene = Scene(case, KernelSet(Portable))
    agree(case, scene.attend(), scene.expected())
    assert (len(held) > 1) is holds
    assert max(held) <= 8 * 300 * 16 or not holds


def test_rows_of_wide_heads_go_through_a_kernel_where_chunks_beside_them_do_not() -> None:
    attended = []

    class Counting(Portable):
        def attend(self, q: mx.array, *pages: mx.array, **how: Any) -> mx.array:
            attended.append(len(q))
            return super().attend(q, *pages, **how)

    rows = (Row(17), Row(40, scattered=True), Row(60, queries=30), Row(20, queries=20))
    scene = Scene(Case(rows, 8, 1, 512), KernelSet(Counting))
    agree(scene.case, scene.attend(), scene.expected())
    assert attended == [2]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("window", [None, 1, 7, 32, 64, 500])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_windows_and_sinks(window: int | None, sinks: bool, dtype: mx.Dtype) -> None:
    case = Case(MIXED, 8, 2, 64, dtype=dtype, window=window, sinks=sinks)
    scene = Scene(case)
    agree(case, scene.attend(), scene.expected())


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("window", [None, 7, 64])
@pytest.mark.parametrize("dim", [64, 80])
def test_keys_and_values_in_8_bits_are_attended_as_what_the_codes_stand_for(
    window: int | None, dim: int, dtype: mx.Dtype
) -> None:
    rows = (*MIXED, Row(700, queries=32), Row(580, scattered=True), Row(640, scattered=True))
    case = Case(rows, 8, 2, dim, dtype=dtype, window=window, coded=True)
    scene = Scene(case)
    agree(case, scene.attend(), scene.expected())


def test_a_group_in_parts_reads_and_hides_what_it_does_as_a_whole() -> None:
    rows = tuple(Row(length, scattered=True) for length in (100, 104, 110, 118, 120))
    scene = Scene(Case(rows, 8, 2, 64, coded=True))
    scene.attend()
    [group] = StepPlan(scene.spans, 16).groups(None)
    assert group.parts(5 * 120) == [group]
    parts = group.parts(250)
    assert [(part.start, part.rows) for part in parts] == [(0, 2), (2, 2), (4, 1)]
    assert group.parts(240) is parts
    read = [part.read(scene.store) for part in parts]
    for which, whole in enumerate(group.read(scene.store)):
        own = mx.concatenate([both[which] for both in read])
        np.testing.assert_array_equal(np.array(whole), np.array(own))
    hidden = mx.concatenate([part.hidden for part in parts])
    np.testing.assert_array_equal(np.array(group.hidden), np.array(hidden))


@pytest.mark.parametrize("window", [None, 64])
def test_kernels_read_the_codes_of_running_rows_and_chunks_are_read_beside_them(
    window: int | None,
) -> None:
    attended = []

    class Counting(PortableCoded):
        def attend_codes(self, q: mx.array, *pages: mx.array, **how: Any) -> mx.array:
            attended.append(len(q))
            return super().attend_codes(q, *pages, **how)

    rows = (Row(17), Row(40, scattered=True), Row(60, queries=5), Row(70, queries=30))
    case = Case(rows, 8, 2, 64, window=window, sinks=True, coded=True)
    scene = Scene(case, KernelSet(Portable, build_coded=Counting))
    agree(case, scene.attend(), scene.expected())
    assert attended == [7]


def test_keys_and_values_may_differ_in_size() -> None:
    case = Case(MIXED, 4, 1, 72, value_dim=40)
    scene = Scene(case)
    agree(case, scene.attend(), scene.expected())


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_chunks_of_long_prompts_are_what_dense_attention_gives(sinks: bool) -> None:
    rows = (
        Row(SLICE_TOKENS + 30, scattered=True),
        Row(700, queries=32),
        Row(610, queries=130, scattered=True),
        Row(500, queries=300),
    )
    scene = Scene(Case(rows, 8, 2, 64, sinks=sinks))
    agree(scene.case, scene.attend(), scene.expected())


def test_rows_and_chunks_of_one_step_are_exactly_what_they_are_by_themselves() -> None:
    rows = (*[Row(length, scattered=True) for length in (580, 600, 640)], Row(1100, queries=24))
    scene = Scene(Case((*rows, Row(70, queries=30)), 4, 2, 64))
    together = scene.attend()
    queries = scene.fresh(scene.queries)
    for spans, tokens in ((slice(0, 3), slice(0, 3)), (slice(3, None), slice(3, None))):
        plan = StepPlan(scene.spans[spans], 16)
        apart = attend(queries[tokens], scene.store, plan, scene.scale, None)
        np.testing.assert_array_equal(together[tokens], np.array(apart)[:, :, 0])


@pytest.mark.parametrize("window", [None, 190, 500])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_many_rows_are_what_dense_attention_gives(window: int | None, sinks: bool) -> None:
    lengths = (*range(170, 186), SLICE_TOKENS - 1)
    crowd = [Row(length, scattered=length % 2 == 0) for length in lengths]
    equal = [Row(SLICE_TOKENS + 16, scattered=True)] * 12
    long = [Row(1500), Row(1400, scattered=True)]
    scene = Scene(Case((*crowd, *equal, *long), 8, 2, 64, window=window, sinks=sinks))
    agree(scene.case, scene.attend(), scene.expected())


@st.composite
def cases(draw: st.DrawFn) -> Case:
    page_size = draw(st.sampled_from([1, 2, 3, 16, 32]))
    lengths = st.one_of(
        st.integers(1, 50), st.integers(SLICE_TOKENS - 2, SLICE_TOKENS + 2 * page_size)
    )
    rows = []
    for _ in range(draw(st.integers(1, 7))):
        length = draw(lengths)
        queries = draw(st.one_of(st.just(1), st.integers(1, length)))
        rows.append(Row(length, queries, draw(st.booleans()), draw(st.integers(0, 2))))
    if draw(st.booleans()):
        rows.sort(key=lambda row: (row.queries > 1, row.length))
    heads, kv_heads = draw(st.sampled_from([(4, 2), (4, 1), (2, 2), (6, 2)]))
    return Case(
        tuple(rows),
        heads,
        kv_heads,
        page_size=page_size,
        window=draw(st.one_of(st.none(), st.integers(1, 60))),
        sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
        coded=draw(st.booleans()),
    )


@settings(max_examples=120)
@given(case=cases())
def test_any_step_is_what_dense_attention_gives(case: Case) -> None:
    scene = Scene(case)
    agree(case, scene.attend(), scene.expected())


@settings(max_examples=60)
@given(case=cases())
def test_a_chunk_by_itself_is_what_dense_attention_gives(case: Case) -> None:
    case = Case(**{**vars(case), "rows": case.rows[:1]})
    scene = Scene(case)
    agree(case, scene.attend_chunk(), scene.expected())


@settings(max_examples=60)
@given(case=cases(), one_chunk=st.booleans())
def test_gathered_arrays_and_their_mask_give_the_same(case: Case, one_chunk: bool) -> None:
    """For modules that compute attention themselves: running rows, or one chunk."""
    rows = case.rows[:1] if one_chunk else tuple(Row(r.length, 1, r.scattered) for r in case.rows)
    case = Case(**{**vars(case), "rows": rows, "sinks": False})
    scene = Scene(case)
    queries = rows[0].queries
    plan = StepPlan(scene.spans, case.page_size)

    def whole(arrays: list[np.ndarray]) -> mx.array:
        """(rows, heads, queries, dim)."""
        return mx.array(np.stack([a[:, -queries:] for a in arrays]))

    layer = PagedLayer(scene.store, KeyAccess.GATHERED, Pass(plan, chunk=one_chunk))
    keys, values = layer.update_and_fetch(whole(scene.keys), whole(scene.values))
    mask = layer.make_mask(queries)
    assert isinstance(mask, mx.array)
    out = mx.fast.scaled_dot_product_attention(
        whole(scene.queries), keys, values, scale=scene.scale, mask=mask
    )
    got = np.array(out).swapaxes(1, 2).reshape(-1, case.heads, case.shape.value_dim)
    agree(case, got, scene.expected())
    grouped = PagedLayer(scene.store, KeyAccess.GROUPED, Pass(plan, chunk=one_chunk))
    with_groups = grouped.make_mask(queries)
    assert isinstance(with_groups, mx.array)
    assert mx.array_equal(with_groups[:, 0], mask)


def test_a_write_touches_the_slots_of_its_own_tokens_alone() -> None:
    scene = Scene(Case(MIXED, page_size=4))
    before = np.array(scene.store.keys)
    plan = StepPlan(scene.spans, 4)
    scene.attend()
    after = np.array(scene.store.keys)
    own = {
        int(table.pages[place // 4]) * 4 + place % 4
        for row, table in zip(MIXED, scene.tables, strict=True)
        for place in range(row.length - row.queries, row.length)
    }
    changed = set(np.flatnonzero((before != after).any(axis=(0, 2))).tolist())
    assert changed == own
    assert plan.positions.tolist() == [
        place for row in MIXED for place in range(row.length - row.queries, row.length)
    ]


# ---------------------------------------------------------------------------------------------
# What it costs
# ---------------------------------------------------------------------------------------------


def tokens_read(plan: StepPlan, window: int | None = None) -> int:
    """Places whose keys a step reads, padding and masked ones included."""
    read = 0
    for group in plan.groups(window):
        if isinstance(group.source, tuple):
            read += group.source[1] - group.source[0]
        else:
            rows, pages = group.source.array.shape
            read += rows * pages * plan.page_size
    return read


def decoding(lengths: Sequence[int], *, scattered: bool, page_size: int = 16) -> StepPlan:
    rows = [Row(length, scattered=scattered) for length in sorted(lengths)]
    made, _ = tables(rows, page_size, seed=1)
    return StepPlan([Span(t, r.length) for t, r in zip(made, rows, strict=True)], page_size)


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(
    "lengths",
    [
        [8192] + [64] * 31,
        [30_000] + [200] * 10,
        [4096] * 8,
        [64 * (i + 1) for i in range(32)],
        [2**i for i in range(5, 14)] * 4,
    ],
    ids=["long-and-short", "agent", "uniform", "ladder", "powers"],
)
def test_nobody_is_padded_to_the_longest(lengths: list[int], scattered: bool) -> None:
    read = tokens_read(decoding(lengths, scattered=scattered))
    assert read <= GROUP_SPREAD * sum(lengths)


@settings(max_examples=150)
@given(
    lengths=st.lists(st.integers(1, 4000), min_size=1, max_size=40),
    scattered=st.booleans(),
    page_size=st.sampled_from([8, 16, 64]),
)
def test_padding_is_bounded_whatever_the_lengths(
    lengths: list[int], scattered: bool, page_size: int
) -> None:
    read = tokens_read(decoding(lengths, scattered=scattered, page_size=page_size))
    # Rows of a few pages may be padded by a few pages: that is cheaper than another call.
    assert read <= sum(GROUP_SPREAD * length + 4 * page_size for length in lengths)
    assert read >= sum(lengths)


def test_a_window_reads_no_more_than_itself() -> None:
    lengths = [5000, 4990, 4000, 300, 290, 90]
    for scattered in (False, True):
        read = tokens_read(decoding(lengths, scattered=scattered), window=64)
        assert read <= sum(min(64, length) + 2 * 16 for length in lengths)


def test_layers_with_kernels_and_without_are_told_of_their_own_spans() -> None:
    """In one step: kernels take what it begins with, and other layers all of it."""
    spans = [Span(PageTable([0, 1]), 20), Span(PageTable([2, 3, 4]), 40, 30)]
    for order in ((True, False), (False, True)):
        plan = StepPlan(spans, 16)
        starts = {
            decoding: [group.start for group in plan.groups(None, decoding=decoding)]
            for decoding in order
        }
        assert starts == {True: [0, 1], False: [1]}


def test_a_lone_row_of_neighbouring_pages_is_read_where_it_lies() -> None:
    plan = decoding([SLICE_TOKENS * 4], scattered=False)
    (group,) = plan.groups(None)
    assert group.source == (16, 16 + SLICE_TOKENS * 4)
    assert group.mask is None


@pytest.mark.parametrize("chunks", [(), (Row(900, queries=20),)], ids=["rows", "and a chunk"])
@pytest.mark.parametrize("scattered", [False, True])
def test_writing_a_step_does_not_copy_the_pool(scattered: bool, chunks: tuple[Row, ...]) -> None:
    rows = tuple(Row(length, scattered=scattered) for length in (30, 45, 61, 100))
    scene = Scene(Case((*rows, *chunks), 2, 1, 64))
    scene.store.resize(8192)
    pool = scene.store.keys.nbytes
    assert pool >= 32 << 20
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(3):
        scene.attend()
        mx.eval(scene.store.keys, scene.store.values)
        assert mx.get_peak_memory() - before < pool // 8


def test_resizing_keeps_what_the_remaining_pages_hold() -> None:
    store = LayerStore(LayerShape(2, 4, 6, mx.float32), 4)
    store.resize(3)
    numbers = mx.arange(2 * 12 * 4, dtype=mx.float32).reshape(2, 12, 4)
    values = mx.arange(2 * 12 * 6, dtype=mx.float32).reshape(2, 12, 6)
    store.write(numbers, values, slice(0, 12))
    store.resize(5)
    assert store.keys.shape == (2, 20, 4)
    assert mx.array_equal(store.keys[:, :12], numbers)
    store.resize(2)
    assert mx.array_equal(store.keys, numbers[:, :8])
    assert mx.array_equal(store.values, values[:, :8])
    assert store.keys.nbytes + store.values.nbytes == 8 * store.shape.token_bytes
    store.resize(0)
    assert store.keys.nbytes == store.values.nbytes == 0


def test_a_long_chunk_of_many_heads_does_not_hold_all_its_scores_at_once() -> None:
    heads, queries, context = 32, 600, 8000
    store = LayerStore(LayerShape(2, 16, 16, mx.float32), 16)
    store.resize(context // 16)
    span = Span(PageTable(range(context // 16)), context, queries)
    layer = PagedLayer(store, KeyAccess.PAGES, Pass(StepPlan([span], 16)))
    given_queries = mx.random.normal((queries, heads, 1, 16))
    mx.eval(given_queries)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(layer.attend(given_queries, 0.25, None, None))
    # All at once take several times the scores themselves.
    scores = heads * queries * context * 4
    assert mx.get_peak_memory() - before < scores / 2


class Planning:
    """Kernels that plan as on a GPU, and attend to nothing."""

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape

    def plan(self, lengths: Any, *, window: int | None = None, table_rows: Any = None) -> Splits:
        cut = {"blocks_per_item": 2, "blocks_wanted": 264}
        return splits.plan(lengths, window=window, table_rows=table_rows, **cut)

    def attend(self, queries: mx.array, *given: Any, splits: Splits, **options: Any) -> mx.array:
        return queries


class PlanningChunks(Planning):
    def plan(self, runs: Any, window: int | None = None) -> chunk_plan.ChunkPlan:  # type: ignore[override]
        return chunk_plan.cut(runs, chunk_plan.Blocks(64, 64, 2, 132), window)

    def attend(self, queries: mx.array, *given: Any, **options: Any) -> mx.array:
        return queries


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize(
    "spans",
    [
        [Span(PageTable([0, 1, 2]), 40), Span(PageTable([3]), 9)],
        [Span(PageTable([0, 1, 2]), 40, 20)],
        [Span(PageTable([0, 1, 2]), 40), Span(PageTable([3, 4]), 30, 30)],
    ],
    ids=["rows", "a chunk", "both"],
)
def test_what_has_been_prepared_is_all_that_is_sent_to_attend(
    spans: list[Span], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []
    for module in (attention, store, splits, chunk_plan):
        monkeypatch.setattr(module, "send", lambda numbers: sent.append(1) or mx.array(numbers))
    kernels = KernelSet(Planning, PlanningChunks)  # type: ignore[arg-type]
    layer = LayerStore(LayerShape(2, 16, 16, mx.float32), 16, kernels)
    plan = StepPlan(spans, 16)
    prepare(4, layer, plan, window)
    before = len(sent)
    queries = mx.zeros((len(plan.positions), 4, 1, 16))
    attend(queries, layer, plan, 1.0, window)
    assert before > 1
    assert len(sent) == before


def test_names_are_found_where_modules_of_a_model_look_them_up() -> None:
    own: dict[str, Any] = {"__name__": "brought_by_a_folder", "nn": nn, "helper": object()}
    exec("class Own(nn.Linear):\n  def __call__(self, x):\n    return helper", own)
    model = nn.Sequential(
        own["Own"](2, 2), llama.MLP(SimpleNamespace(hidden_size=2, intermediate_size=2))
    )
    spaces = namespaces_of(model)
    assert any(space is own for space in spaces)
    assert any(space is vars(llama) for space in spaces)
