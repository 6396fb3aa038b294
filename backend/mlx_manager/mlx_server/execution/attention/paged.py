"""Attention over pages: a step's plan, the portable implementation, and the way into modules.

mlx-lm's modules call `cache.update_and_fetch(keys, values)` and then their module's
`scaled_dot_product_attention(..., cache=cache, ...)`. `PagedLayer` is that cache: it writes the
step's keys and values into pages, and `route` makes the module's attention function ask the cache
to attend whenever the cache is one of ours. Modules that compute attention by themselves get the
pages gathered into the padded arrays they expect (`KeyAccess.GATHERED`).

A step is ragged: every new token is a row of its own, (tokens, 1), whether it is the next token of
a running row or one of many of a prompt's chunk, so projections run as one product and nothing is
padded. `StepPlan` says which tokens belong together.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import takewhile
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from mlx import nn
from numpy.typing import NDArray

from mlx_manager.mlx_server.devices import table as devices
from mlx_manager.mlx_server.devices.attention.kernel import (
    AttentionShape,
    CodedKernels,
    PagedKernels,
)
from mlx_manager.mlx_server.devices.attention.kernel_set import KernelSet
from mlx_manager.mlx_server.devices.attention.splits import Splits
from mlx_manager.mlx_server.devices.cpu.powers import (
    LEAST_PAGE,
    attend_causal,
    attend_pages,
    attend_rows,
    block_of,
    pays,
)
from mlx_manager.mlx_server.devices.cuda.attention.chunk_plan import ChunkPlan, QueryRun
from mlx_manager.mlx_server.devices.cuda.attention.chunks import ChunkKernels
from mlx_manager.mlx_server.devices.cuda.mapped import send
from mlx_manager.mlx_server.devices.kernel import Unsupported
from mlx_manager.mlx_server.devices.namespaces import namespaces_of
from mlx_manager.mlx_server.engine.kv.coded import CodedStore
from mlx_manager.mlx_server.engine.kv.pages import PageTable
from mlx_manager.mlx_server.engine.kv.store import LayerStore, Numbers, Sent
from mlx_manager.mlx_server.execution.images import Insertion

F = TypeVar("F")

# A row at least this long, whose pages are neighbours, is read in place; shorter ones are
# gathered together, since one larger product beats many small ones.
SLICE_TOKENS = 192
# Larger blocks of queries only compute more scores that are masked away.
BLOCK = 128
# Spans of so few queries are attended a query at a time: tiles of them would leave most of a GPU
# without work (16 queries after 8 000 tokens take 348 us as a tile on an H200).
FEW_QUERIES = 16
# Rows of a gathered group differ in pages by at most this factor: the limit of padding's cost.
GROUP_SPREAD = 1.5


@dataclass(frozen=True, slots=True)
class Span:
    """The part of one sequence that a step computes.

    table: the sequence's pages. length: tokens visible at its end, the step's own included.
    queries: how many of those are the step's own. runs: (first, behind the last) of the places
    whose tokens see all of their run; others see none that follows them. windowed: they do so only
    in layers with a window, and within it.
    """

    table: PageTable
    length: int
    queries: int = 1
    runs: tuple[tuple[int, int], ...] = ()
    windowed: bool = False

    def ahead(self, window: int | None) -> tuple[tuple[int, int], ...]:
        """Return the runs whose tokens see ones that follow them, in layers with that window."""
        return () if self.windowed and window is None else self.runs


@dataclass(frozen=True, slots=True)
class Window:
    """Sliding-window mask: each token sees only the last `size` tokens, itself included."""

    size: int


@dataclass(frozen=True, slots=True)
class Paged:
    """The pages of several rows, and their mask.

    table: (rows, n), the pages of each row. hidden: (rows, 1, n, 1, page_size), added to the scores
    of the pages' tokens: 0, or -inf for tokens that are not seen.
    """

    table: Numbers
    hidden: mx.array


@dataclass(frozen=True, slots=True)
class Group:
    """Spans attended in one call: tokens `start` to `start + rows * queries` of the step.

    source: slot range of a single span, or the page table (rows, n) to gather.
    keys: the number of gathered keys that are read.
    mask: None, "causal", or bool, broadcastable to (rows, heads, queries, keys).
    pages: the pages of gathered rows, for attention that reads them in place.
    """

    start: int
    rows: int
    queries: int
    source: tuple[int, int] | Numbers
    keys: int
    mask: mx.array | str | None
    pages: Paged | None = None
    _parts: dict[int, list[Group]] = field(default_factory=dict, compare=False)

    def parts(self, most: int) -> list[Group]:
        """Return the group as groups of at most `most` keys, or of one row; made once a step for
        all layers."""
        at_once = max(1, most // self.keys)
        if self.pages is None or self.rows <= at_once:
            return [self]
        if at_once not in self._parts:
            firsts = range(0, self.rows, at_once)
            self._parts[at_once] = [self._part(i, min(i + at_once, self.rows)) for i in firsts]
        return self._parts[at_once]

    def _part(self, first: int, behind: int) -> Group:
        """Return some of a gathered group's rows."""
        assert self.pages is not None
        table, mask = self.pages.table.of_rows(first, behind), self.mask
        if isinstance(mask, mx.array):
            mask = mask[first:behind]
        pages = Paged(table, self.pages.hidden[first:behind])
        return Group(self.start + first, behind - first, 1, table, self.keys, mask, pages)

    @property
    def hidden(self) -> mx.array:
        """Return the mask of gathered rows as it is added to scores, (rows, 1, 1, keys)."""
        assert self.pages is not None
        return self.pages.hidden.reshape(self.rows, 1, 1, -1)[..., : self.keys]

    def read(self, store: LayerStore) -> tuple[mx.array, mx.array]:
        if isinstance(self.source, tuple):
            return store.slice(*self.source)
        keys, values = store.gather(self.source)
        return keys[:, :, : self.keys], values[:, :, : self.keys]


class Decoding:
    """The spans of few queries that a step begins with, for the kernels: each query by itself.

    Attributes:
        spans: the number of spans. queries: the number of all their queries.
        table: (spans, pages) int32, padded to the longest.
        lengths: (queries,) int32, tokens that each query sees.
    """

    def __init__(self, spans: Sequence[Span], page_size: int) -> None:
        mine = list(takewhile(lambda span: span.queries <= FEW_QUERIES and not span.runs, spans))
        self.spans = len(mine)
        self._lengths = _places(mine) + 1
        self._rows = np.repeat(np.arange(len(mine)), [span.queries for span in mine])
        self.queries = len(self._lengths)
        self.table = send(padded_table(mine, page_size))
        self.lengths = send(self._lengths)
        self._splits: dict[tuple[AttentionShape, int | None], Splits] = {}

    def splits(self, kernels: PagedKernels | CodedKernels, window: int | None) -> Splits:
        kind = (kernels.shape, window)
        if kind not in self._splits:
            self._splits[kind] = kernels.plan(self._lengths, window=window, table_rows=self._rows)
        return self._splits[kind]


class Chunked:
    """Spans for kernels that take queries in tiles: those that come after `Decoding`, or all.

    padding: the number of queries behind the spans that see nothing.

    Attributes:
        table: (spans, pages) int32, padded to the longest. runs: those of the spans' queries.
    """

    def __init__(self, spans: Sequence[Span], page_size: int, padding: int = 0) -> None:
        self.table = send(padded_table(spans, page_size))
        self.runs: list[QueryRun] = []
        first = 0
        for row, span in enumerate(spans):
            sees = span.length - span.queries + 1
            self.runs.append(QueryRun(first, span.queries, row, sees))
            first += span.queries
        self.runs += [QueryRun(first + number, 1, 0, 0) for number in range(padding)]
        self._plans: dict[tuple[AttentionShape, int | None], ChunkPlan] = {}

    def plan(self, kernels: ChunkKernels, window: int | None) -> ChunkPlan:
        """Return the queries' plan, made once a step for all layers."""
        kind = (kernels.shape, window)
        if kind not in self._plans:
            self._plans[kind] = kernels.plan(self.runs, window)
        return self._plans[kind]


def padded_table(spans: Sequence[Span], page_size: int) -> NDArray[np.int32]:
    """Return the pages that each span reads, (spans, n), padded to the longest."""
    return _padded([span.table.pages[: -(-span.length // page_size)] for span in spans])


def _padded(used: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    """Return the pages of each row, (rows, n), padded by the row's own last page.

    Another row's page may hold NaN, which would do harm even where it is masked.
    """
    table = np.zeros((len(used), max(map(len, used), default=0)), np.int32)
    for row, pages in enumerate(used):
        table[row, : len(pages)] = pages
        table[row, len(pages) :] = pages[-1]
    return table


class StepPlan:
    """Plan of one forward pass: everything its layers need to know.

    Args:
        spans: in the order of the step's tokens. Decoding spans (one query) are best ordered by
            length, so that those of similar length are neighbours.
        page_size: tokens a page.
        padding: tokens after those of the spans, for kernels alone: they belong to no sequence, and
            are not stored.
        angles: (tokens,) or (3, tokens), the positions by which the spans' tokens are rotated;
            None: their places.

    Attributes:
        positions: (tokens,) int32, each token's place in its sequence; 0 for padding.
        angles: `positions`, or the positions by which tokens are rotated where these are others.
        numbers: (tokens,) of the slots that the tokens' keys and values are written to; -1 for
            padding.
        slots: `numbers`, or a slice where the slots are neighbours.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        page_size: int,
        padding: int = 0,
        angles: NDArray[np.int32] | None = None,
    ) -> None:
        self.spans = spans
        self.page_size = page_size
        self.padding = padding
        places = _places(spans)
        slots = _slots(spans, places, page_size)
        self.positions = send(np.pad(places, (0, padding)))
        self.angles = self.positions
        if angles is not None:
            self.angles = send(np.pad(angles, [(0, 0)] * (angles.ndim - 1) + [(0, padding)]))
        first = int(slots[0])
        neighbours = len(slots) == 1 or (
            int(slots[-1]) - first == len(slots) - 1 and bool((np.diff(slots) == 1).all())
        )
        self.numbers = Numbers(np.pad(slots, (0, padding), constant_values=-1))
        self.slots: Numbers | slice = (
            slice(first, first + len(slots)) if neighbours else self.numbers
        )
        self._groups: dict[tuple[int | None, bool], list[Group]] = {}
        self._found: dict[Hashable, Any] = {}

    @property
    def first_position(self) -> int:
        """Position of the first span's first token: the single offset that modules take for a
        chunk."""
        return self.spans[0].length - self.spans[0].queries

    @property
    def longest(self) -> int:
        """Tokens visible at the end of the longest span."""
        return max(span.length for span in self.spans)

    @cached_property
    def sees_ahead(self) -> bool:
        """Return whether some tokens see tokens that follow them."""
        return any(span.runs for span in self.spans)

    @cached_property
    def decoding(self) -> Decoding:
        """The spans of few queries that the step begins with, as the kernels take them."""
        return Decoding(self.spans, self.page_size)

    @cached_property
    def chunked(self) -> Chunked | None:
        """The spans that are not in `decoding`, if there are any, as the kernels take them."""
        rest = self.spans[self.decoding.spans :]
        return Chunked(rest, self.page_size) if rest else None

    def once(self, kind: Hashable, by: Callable[[], F]) -> F:
        """Return the result of `by`, which is called once a step for each `kind`."""
        if kind not in self._found:
            self._found[kind] = by()
        found: F = self._found[kind]
        return found

    def groups(self, window: int | None, *, decoding: bool = True) -> list[Group]:
        """Return the groups of spans to attend, for layers that see `window` tokens back (None:
        all).

        Without `decoding`, the groups leave out the spans that `self.decoding` holds.
        """
        kind = (window, decoding)
        if kind not in self._groups:
            self._groups[kind] = list(self._make_groups(window, decoding))
        return self._groups[kind]

    def _make_groups(self, window: int | None, decoding: bool) -> list[Group]:
        groups: list[Group] = []
        start, i = (0, 0) if decoding else (self.decoding.queries, self.decoding.spans)
        while i < len(self.spans):
            span = self.spans[i]
            taken = [span] if span.queries > 1 else self._alike(i)
            if len(taken) == 1 and (span.queries > 1 or span.table.neighbours):
                groups.append(self._single(span, start, window))
            else:
                groups.append(self._gathered(taken, start, window))
            start += len(taken) * span.queries
            i += len(taken)
        return groups

    def _alike(self, i: int) -> list[Span]:
        """Return the decoding spans from `i` on that may be padded to one another."""
        first = self.spans[i]
        if first.length >= SLICE_TOKENS and first.table.neighbours:
            return [first]
        most = len(first.table) * GROUP_SPREAD + 2
        least = len(first.table) / GROUP_SPREAD - 2
        j = i + 1
        while j < len(self.spans):
            span = self.spans[j]
            if span.queries > 1 or not least <= len(span.table) <= most:
                break
            if span.length >= SLICE_TOKENS and span.table.neighbours:
                break
            j += 1
        return list(self.spans[i:j])

    def _single(self, span: Span, start: int, window: int | None) -> Group:
        seen_from = 0 if window is None else max(0, span.length - span.queries - window + 1)
        if not span.windowed:
            seen_from = min([seen_from, *(first for first, _ in span.runs)])
        from_page = seen_from // self.page_size
        base = from_page * self.page_size
        pages = span.table.pages[from_page : -(-span.length // self.page_size)]
        source: tuple[int, int] | Numbers
        if span.table.neighbours:
            first = int(pages[0]) * self.page_size
            source, base = (first + seen_from - base, first + span.length - base), seen_from
        else:
            source = Numbers(pages[None])
        keys = span.length - base
        return Group(start, 1, span.queries, source, keys, _mask(span, base, window))

    def _gathered(self, spans: list[Span], start: int, window: int | None) -> Group:
        size = self.page_size
        if window is None:
            froms = [0] * len(spans)
        else:
            froms = [max(0, s.length - window) // size for s in spans]
        ends = [-(-s.length // size) for s in spans]
        of = zip(spans, froms, ends, strict=True)
        table = _padded([s.table.pages[first:end] for s, first, end in of])
        pages = table.shape[1]
        base = np.asarray(froms, np.int32) * size
        last = np.asarray([s.length for s in spans], np.int32) - base
        places = np.arange(pages * size, dtype=np.int32)
        visible = places < last[:, None]
        if window is not None:
            visible &= places >= (last - window)[:, None]
        source, keys = Numbers(table), int(last.max())
        # The mask is lazy: it is computed once for all layers, and only where it is used.
        hidden = mx.where(mx.array(visible.reshape(-1, 1, pages, 1, size)), 0.0, -mx.inf)
        visible = visible[:, :keys]
        mask = None if visible.all() else mx.array(visible[:, None, None])
        return Group(start, len(spans), 1, source, keys, mask, Paged(source, hidden))

    # -- for modules that attend by themselves ------------------------------------------------

    @cached_property
    def table(self) -> Numbers:
        """Pages of all spans, (rows, n), padded to the longest."""
        return Numbers(padded_table(self.spans, self.page_size))

    def dense_mask(self, window: int | None) -> mx.array:
        """Return a bool mask (rows, 1, queries, keys) over the gathered table: True where a token
        sees a key."""
        keys = self.table.array.shape[1] * self.page_size
        queries = self.spans[0].queries
        if self.sees_ahead:
            # Such a plan is of one chunk.
            return mx.array(_visible(self.spans[0], 0, keys, window))[None, None]
        ends = mx.array([s.length for s in self.spans], mx.int32)[:, None, None, None]
        here = ends - queries + mx.arange(queries)[:, None]
        places = mx.arange(keys)
        visible = places <= here
        if window is not None:
            visible = visible & (places > here - window)
        return visible


def newest_slots(lengths: mx.array, table: mx.array, page_size: int) -> mx.array:
    """Return the slots of the newest tokens, (rows,); -1 for rows without tokens.

    lengths: (rows,) int32, tokens of each row. table: (rows, n), the rows' pages.
    """
    newest = mx.maximum(lengths - 1, 0)
    pages = mx.take_along_axis(table, (newest // page_size)[:, None], axis=1)[:, 0]
    return mx.where(lengths > 0, pages * page_size + newest % page_size, -1)


ReadBy = tuple[AttentionShape, int | None]
"""Key of one kind of attention: its shape, and the number of tokens that it sees back (None:
all)."""


@dataclass(frozen=True, slots=True)
class DecodingRows:
    """Counterpart of `Decoding` for rows that are on the device, each of one query."""

    table: mx.array
    lengths: mx.array
    cuts: Mapping[ReadBy, Splits]

    @property
    def queries(self) -> int:
        return int(self.lengths.size)

    def splits(self, kernels: PagedKernels, window: int | None) -> Splits:
        return self.cuts[kernels.shape, window]


@dataclass(frozen=True, slots=True)
class RowsPlan:
    """Plan of a decode step whose rows' lengths are on the device alone, for kernels alone.

    A graph that is put together by this plan is right for all steps of the same kind that follow.

    positions: (rows,) int32, those of the newest tokens. angles: `positions`, or those by which the
    tokens are rotated where these are others. numbers: those tokens' slots; -1 for padding.
    """

    positions: mx.array
    angles: mx.array
    numbers: Sent
    decoding: DecodingRows

    @staticmethod
    def of(
        before: mx.array,
        table: mx.array,
        cuts: Mapping[ReadBy, Splits],
        page_size: int,
        shifts: Sequence[mx.array] = (),
    ) -> RowsPlan:
        """Return the plan of a decode step of these rows.

        before: (rows,) int32, the rows' lengths without their newest tokens, 0 for padding. table:
        (rows, n), the rows' pages. cuts: the splits of each kind of attention. shifts: see
        `DeviceBatch`.
        """
        lengths = mx.where(before > 0, before + 1, 0)
        numbers = Sent(newest_slots(lengths, table, page_size))
        angles = sum(shifts, before)
        return RowsPlan(before, angles, numbers, DecodingRows(table, lengths, cuts))

    @property
    def chunked(self) -> None:
        """None: such a step has no chunks."""
        return None


class KeyAccess(Enum):
    """Ways in which a module gets its keys and values.

    PAGES: the module attends through mlx-lm's function, which reads pages. HANDED_ON: the same, and
    in place of keys and values the module is given the layer, which it hands on to layers without a
    cache of their own (Gemma 4). GATHERED: the module is given padded arrays and a mask (rows, 1,
    queries, keys). GROUPED: the same, with a mask for scores that have an axis of query groups
    (rows, 1, 1, queries, keys), as Gemma 2's have.
    """

    PAGES = "pages"
    HANDED_ON = "handed on"
    GATHERED = "gathered"
    GROUPED = "grouped"


@dataclass(slots=True)
class Pass:
    """The forward pass under way, seen by all layers.

    chunk: whether the pass is one sequence's chunk, (1, tokens), instead of ragged, (tokens, 1).
    insertion: rows of pictures, if there are any.
    readers: the kernels of each kind of attention that has run in any pass.
    """

    plan: StepPlan | RowsPlan | None = None
    chunk: bool = False
    insertion: Insertion | None = None
    readers: dict[ReadBy, PagedKernels] = field(default_factory=dict)

    def begin(
        self,
        plan: StepPlan | RowsPlan,
        insertion: Insertion | None = None,
        *,
        chunk: bool = False,
    ) -> None:
        """Begin another pass."""
        self.plan, self.insertion, self.chunk = plan, insertion, chunk

    @property
    def angles(self) -> mx.array | None:
        """Positions by which tokens are rotated, (tokens,) or (3, tokens), if they are others than
        the tokens' places."""
        plan = self.plan
        return None if plan is None or plan.angles is plan.positions else plan.angles


class PagedLayer:
    """One layer's cache with mlx-lm's interface, over pages.

    Attributes:
        unread: whether keys and values have been written to it, and no attention has ever read it.
            A module that reads its cache in another way has been given the step's own keys and
            values alone.
    """

    def __init__(self, store: LayerStore, reading: KeyAccess, current: Pass) -> None:
        self.store = store
        self.reading = reading
        self.unread = False
        self._attended = False
        self._pass = current

    @property
    def plan(self) -> StepPlan | RowsPlan:
        assert self._pass.plan is not None
        return self._pass.plan

    @property
    def _spans(self) -> StepPlan:
        """Plan of the pass, whose spans the host knows."""
        return of_spans(self.plan)

    @property
    def chunk(self) -> bool:
        return self._pass.chunk

    @property
    def offset(self) -> mx.array | int:
        return self._spans.first_position if self.chunk else self.plan.positions

    @property
    def keys(self) -> mx.array:
        """Keys of all pages.

        The setter ignores its value. Modules set `keys` to shorten the graphs of caches that
        nothing reads (DeepSeek V3.2's indexer); pages are evaluated at every step anyway.
        """
        return self.store.keys

    @keys.setter
    def keys(self, _: mx.array) -> None:
        pass

    @property
    def values(self) -> mx.array:
        """Values of all pages. The setter ignores its value, as that of `keys` does."""
        return self.store.values

    @values.setter
    def values(self, _: mx.array) -> None:
        pass

    def make_mask(
        self, n: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | Window | None:
        window = self.store.shape.window if window_size is None else window_size
        match self.reading:
            case KeyAccess.PAGES | KeyAccess.HANDED_ON:
                return None if window is None else Window(window)
            case KeyAccess.GATHERED:
                return self._spans.dense_mask(window)
            case KeyAccess.GROUPED:
                return self._spans.dense_mask(window)[:, None]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> KeysAndValues:
        """Write (rows, kv_heads, queries, dim); return the keys and values for the module's
        attention."""
        slots = self.plan.numbers if self.store.writes_in_place else self._spans.slots
        if self.chunk:
            self.store.write(keys[0], values[0], slots)
        else:
            self.store.write(keys[:, :, 0].swapaxes(0, 1), values[:, :, 0].swapaxes(0, 1), slots)
        if self.reading is KeyAccess.PAGES:
            self.unread = not self._attended
            return keys, values
        return self.keys_and_values()

    def keys_and_values(self) -> KeysAndValues:
        """Return the keys and values for later layers that share this one's (Gemma 3n)."""
        match self.reading:
            case KeyAccess.PAGES:
                return self.store.keys, self.store.values
            case KeyAccess.HANDED_ON:
                return self, self
            case _:
                return self.store.read(self._spans.table)

    def attend(
        self, queries: mx.array, scale: float, mask: Window | None, sinks: mx.array | None
    ) -> mx.array:
        """Return the attention of the step's queries over their own sequences' pages.

        Args:
            queries: (tokens, heads, 1, dim), or (1, heads, tokens, dim) for a chunk.
            sinks: (heads,) logits that join each softmax (gpt-oss), or None.

        Returns:
            An array of the queries' shape, with the values' dim.
        """
        self.unread, self._attended = False, True
        window = self.store.shape.window if mask is None else mask.size
        if self.store.kernels is not None:
            shape = self.store.attention(queries.shape[1])
            if (shape, window) not in self._pass.readers:
                self._pass.readers[shape, window] = self.store.kernels[shape]
        if self.chunk and self.store.kernels is not None and not self._spans.sees_ahead:
            by_token = queries.transpose(2, 1, 0, 3)
            out = attend(by_token, self.store, self.plan, scale, window, sinks)
            return out.transpose(2, 1, 0, 3)
        if self.chunk:
            group, turned = self._spans.groups(window)[0], self.store.turned
            return turned(_attend_chunk(turned(queries), group, self.store, scale, sinks))
        return attend(queries, self.store, self.plan, scale, window, sinks)


def of_spans(plan: StepPlan | RowsPlan) -> StepPlan:
    """Return `plan`, which must be one whose spans the host knows."""
    assert isinstance(plan, StepPlan)
    return plan


def prepare(q_heads: int, store: LayerStore, plan: StepPlan, window: int | None) -> None:
    """Send the arrays that `attend` takes of `plan` with kernels, for queries of `q_heads`
    heads."""
    if store.kernels is None:
        return
    shape = store.attention(q_heads)
    decoding, chunked = plan.decoding, plan.chunked
    if decoding.queries:
        decoding.splits(store.kernels[shape], window)
    if chunked is not None and not isinstance(tiler := store.kernels.chunks(shape), Unsupported):
        chunked.plan(tiler, window)


def attend(  # noqa: PLR0917
    queries: mx.array,
    store: LayerStore,
    plan: StepPlan | RowsPlan,
    scale: float,
    window: int | None,
    sinks: mx.array | None = None,
    softcap: float | None = None,
) -> mx.array:
    """Return the attention of a step's queries, (tokens, heads, 1, dim), over their own sequences'
    pages.

    sinks, softcap: as `PagedKernels.attend` takes them.

    Returns:
        (tokens, heads, 1, the values' dim).
    """
    if store.kernels is not None:
        parts = _attend_with(store.kernels, queries, store, plan, scale, window, sinks, softcap)
        lacking = len(queries) - sum(map(len, parts))
        if lacking:
            parts.append(mx.zeros((lacking, *parts[0].shape[1:]), queries.dtype))
    else:
        own, decoding = store.turned(queries), True
        parts = []
        if isinstance(store, CodedStore) and (reader := store.reader(queries.shape[1])):
            parts, decoding = (
                _attend_codes(reader, own, store, plan, scale, window, sinks, softcap),
                False,
            )
        parts += [
            _attend_group(own, part, store, scale, sinks, softcap)
            for group in of_spans(plan).groups(window, decoding=decoding)
            for part in group.parts(store.keys_at_once)
        ]
    return store.turned(parts[0] if len(parts) == 1 else mx.concatenate(parts))


def _attend_codes(  # noqa: PLR0917
    reader: CodedKernels,
    turned: mx.array,
    store: CodedStore,
    plan: StepPlan | RowsPlan,
    scale: float,
    window: int | None,
    sinks: mx.array | None,
    softcap: float | None,
) -> list[mx.array]:
    """Return the attention of the step's queries in `decoding`, if there are any, over pages in 8
    bits."""
    decoding = of_spans(plan).decoding
    if not decoding.queries:
        return []
    out = reader.attend_codes(
        turned[: decoding.queries],
        store.codes,
        store.scales,
        decoding.table,
        decoding.lengths,
        scale=scale,
        splits=decoding.splits(reader, window),
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
    return [out]


def _attend_with(  # noqa: PLR0917
    kernels: KernelSet,
    queries: mx.array,
    store: LayerStore,
    plan: StepPlan | RowsPlan,
    scale: float,
    window: int | None,
    sinks: mx.array | None,
    softcap: float | None,
) -> list[mx.array]:
    shape = store.attention(queries.shape[1])
    decoding, chunked = plan.decoding, plan.chunked
    parts = []
    if decoding.queries:
        reader = kernels[shape]
        parts.append(
            reader.attend(
                queries[: decoding.queries],
                store.keys,
                store.values,
                decoding.table,
                decoding.lengths,
                store.written,
                scale=scale,
                splits=decoding.splits(reader, window),
                window=window,
                softcap=softcap,
                sinks=sinks,
            )
        )
    if chunked is None:
        return parts
    tiler = kernels.chunks(shape)
    if isinstance(tiler, Unsupported) or of_spans(plan).sees_ahead:
        # Kernels know of no tokens that see ahead. The launch that made the queries may also have
        # written the pages: read after it.
        store.read_after(queries)
        groups = of_spans(plan).groups(window, decoding=False)
        parts += [_attend_group(queries, group, store, scale, sinks, softcap) for group in groups]
        return parts
    out = tiler.attend(
        queries[decoding.queries :],
        store.keys,
        store.values,
        chunked.table,
        chunked.plan(tiler, window),
        store.written,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
    parts.append(out)
    return parts


def _attend_group(  # noqa: PLR0917
    queries: mx.array,
    group: Group,
    store: LayerStore,
    scale: float,
    sinks: mx.array | None,
    softcap: float | None,
) -> mx.array:
    own = queries[group.start : group.start + group.rows * group.queries]
    if group.queries > 1:
        out = _attend_chunk(own.transpose(2, 1, 0, 3), group, store, scale, sinks, softcap)
        return out.transpose(2, 1, 0, 3)
    rows, heads, _, dim = own.shape
    # The query heads that share a key head are its queries: one product instead of several.
    shared = own.reshape(rows, store.shape.kv_heads, heads // store.shape.kv_heads, dim)
    plain = sinks is None and softcap is None
    by_powers = plain and pays(shared, rows * heads * group.keys)
    in_pages = store.attends_in_pages and store.page_size >= LEAST_PAGE
    if by_powers and in_pages and group.pages is not None:
        out = attend_pages(shared, store, group.pages.table, scale, group.pages.hidden)
        return out.reshape(rows, heads, 1, out.shape[-1])
    keys, values = group.read(store)
    own = store.after_write(own)
    if sinks is not None:
        return mx.fast.scaled_dot_product_attention(
            own, keys, values, scale=scale, mask=group.mask, sinks=sinks
        )
    shared = store.after_write(shared)
    if by_powers and (group.mask is None or group.pages is not None):
        hidden = None if group.mask is None else group.hidden
        out = attend_rows(shared, keys, values, scale, hidden)
    elif softcap is not None:
        out = _attend_capped(shared, keys, values, scale, softcap, group.mask)
    else:
        out = mx.fast.scaled_dot_product_attention(
            shared, keys, values, scale=scale, mask=group.mask
        )
    return out.reshape(rows, heads, 1, out.shape[-1])


def _attend_capped(  # noqa: PLR0917
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    softcap: float,
    mask: mx.array | str | None,
) -> mx.array:
    """Return attention with capped scores, which MLX's own function does not support."""
    rows, heads, count, dim = queries.shape
    kv_heads, seen = keys.shape[1:3]
    own = (queries * scale).reshape(rows, kv_heads, heads // kv_heads, count, dim)
    scores = (own @ keys[:, :, None].swapaxes(3, 4)).astype(mx.float32)
    scores = softcap * mx.tanh(scores / softcap)
    if isinstance(mask, str):
        mask = mx.array(np.tri(count, seen, seen - count, dtype=bool))
    if mask is not None:
        by_row = mask[:, :, None] if mask.ndim == 4 else mask
        scores = mx.where(by_row, scores, -mx.inf)
    weights = mx.softmax(scores, axis=-1).astype(values.dtype)
    return (weights @ values[:, :, None]).reshape(rows, heads, count, values.shape[3])


def _attend_chunk(  # noqa: PLR0917
    queries: mx.array,
    group: Group,
    store: LayerStore,
    scale: float,
    sinks: mx.array | None,
    softcap: float | None = None,
) -> mx.array:
    """Return the attention of one span's queries, (1, heads, queries, dim)."""
    keys, values = group.read(store)
    queries = store.after_write(queries)
    count, seen = queries.shape[2], keys.shape[2]
    plain = sinks is None and softcap is None
    causal = isinstance(group.mask, str) and plain and seen >= 2 * count
    by_powers = causal and pays(queries, queries.shape[1] * count * seen)
    block = _block(queries, keys, values, softcap)
    if by_powers:
        block = min(block, block_of(queries.shape[1], seen))
    parts = []
    for start in range(0, count, block):
        stop = min(start + block, count)
        # Nothing after a block's last query is visible to it.
        mask = group.mask[start:stop] if isinstance(group.mask, mx.array) else group.mask
        upto = seen - count + stop if isinstance(mask, str) else seen
        own = queries[:, :, start:stop], keys[:, :, :upto], values[:, :, :upto]
        if by_powers:
            parts.append(attend_causal(*own, scale))
        elif softcap is not None:
            parts.append(_attend_capped(*own, scale, softcap, mask))
        else:
            parts.append(
                mx.fast.scaled_dot_product_attention(*own, scale=scale, mask=mask, sinks=sinks)
            )
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


def _block(queries: mx.array, keys: mx.array, values: mx.array, softcap: float | None) -> int:
    """Return the number of a chunk's queries that are attended at a time. Where MLX holds all
    scores, the limit of scores sets that number."""
    device = devices.current()
    heads, count, dim = queries.shape[1:]
    holds = softcap is not None or not is_flash(dim, values.shape[3])
    if device.scores is None or not holds:
        return count
    most = max(1, device.scores // (heads * keys.shape[2]))
    return min(most, BLOCK) if device.kind == "cpu" else most


def is_flash(key_dim: int, value_dim: int) -> bool:
    """Return whether MLX's attention of many queries holds no scores for heads of these sizes."""
    return key_dim == value_dim and key_dim in devices.current().flash_dims


KeysAndValues = tuple[mx.array, mx.array] | tuple[PagedLayer, PagedLayer]


def route(model: nn.Module) -> None:
    """Make the attention function of `model`'s modules honour `PagedLayer`.

    This is the one place where mlx-lm is patched: each module of `mlx_lm.models` that this model is
    built from and that imported `scaled_dot_product_attention` from `base` gets the function
    wrapped. Caches of any other type are served by the original, so other models are not affected.
    """
    for namespace in namespaces_of(model):
        original = namespace.get("scaled_dot_product_attention")
        if original is not None and not isinstance(original, _Routed):
            namespace["scaled_dot_product_attention"] = _Routed(original)


class _Routed:
    """Wrapper of mlx-lm's attention function: a cache of ours that reads pages attends by
    itself."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __call__(  # noqa: PLR0917 mlx-lm's signature
        self,
        queries: mx.array,
        keys: mx.array | PagedLayer,
        values: mx.array | PagedLayer,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> Any:
        layer = keys if isinstance(keys, PagedLayer) else cache
        if isinstance(layer, PagedLayer) and layer.reading in (
            KeyAccess.PAGES,
            KeyAccess.HANDED_ON,
        ):
            if mask is not None and not isinstance(mask, Window):
                raise TypeError("this module brings a mask of its own; pages cannot honour it")
            return layer.attend(queries, scale, mask, sinks)
        return self._original(
            queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
        )


def _places(spans: Sequence[Span]) -> NDArray[np.int32]:
    """Return each token's position in its sequence, (tokens,)."""
    if all(span.queries == 1 for span in spans):
        return np.array([span.length - 1 for span in spans], np.int32)
    return np.concatenate(
        [np.arange(span.length - span.queries, span.length, dtype=np.int32) for span in spans]
    )


def _slots(spans: Sequence[Span], places: NDArray[np.int32], page_size: int) -> NDArray[np.int32]:
    """Return the slot of each of `places`, (tokens,)."""
    index = places // page_size
    if len(places) == len(spans):
        pages = np.array([s.table.pages[i] for s, i in zip(spans, index, strict=True)], np.int32)
    else:
        ends = np.cumsum([span.queries for span in spans])
        pages = np.concatenate(
            [s.table.pages[index[e - s.queries : e]] for s, e in zip(spans, ends, strict=True)]
        )
    slots: NDArray[np.int32] = pages * np.int32(page_size) + places % page_size
    return slots


def _mask(span: Span, base: int, window: int | None) -> mx.array | str | None:
    """Return the mask of a single span's queries over its keys from position `base` on.

    The mask is None for a query that sees all of them, "causal", or bool (queries, keys).
    """
    if span.ahead(window):
        return mx.array(_visible(span, base, span.length, window))
    if window is None or span.length - base <= window:
        return None if span.queries == 1 else "causal"
    return mx.array(_visible(span, base, span.length, window))


def _visible(span: Span, first: int, behind: int, window: int | None) -> NDArray[np.bool_]:
    """Return whether each query sees each of the places from `first` to `behind`, (queries,
    places)."""
    here = np.arange(span.length - span.queries, span.length)[:, None]
    places = np.arange(first, behind)
    visible = places <= here
    if window is not None:
        visible &= places > here - window
    for start, end in span.ahead(window):
        own = (start <= here) & (here < end) & (start <= places) & (places < end)
        if span.windowed and window is not None:
            own &= places > here - window
        # Of Gemma 3 also beyond the window: transformers joins both masks with "or".
        visible |= own
    return visible
