"""Rank 0's way of running a model on several devices.

The engine sees one `Forward`. Whatever it does to that, the other ranks are told to do to theirs,
in the same order: passes, pages, snapshots. The tokens that rows have drawn are on rank 0's device
and may not have been read there, so they go through the group, in front of the pass.

All ranks evaluate a pass by itself, from the same arrays, so that they come to the group's
operations in the same order. Rank 0 alone draws tokens, after that.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import mlx.core as mx

from mlx_manager.mlx_server.devices.attention.kernel_set import KernelSet
from mlx_manager.mlx_server.devices.dtypes import dtype_name
from mlx_manager.mlx_server.devices.group import from_first
from mlx_manager.mlx_server.engine.kv.pages import PageTable
from mlx_manager.mlx_server.engine.kv.store import LayerShape
from mlx_manager.mlx_server.execution.attention.paged import Span
from mlx_manager.mlx_server.execution.compiled import Kinds
from mlx_manager.mlx_server.execution.forward import (
    Chunk,
    Decode,
    Forward,
    NotApplicable,
    PageStore,
    Prefixes,
    Snapshot,
)
from mlx_manager.mlx_server.execution.group.crew import Crew
from mlx_manager.mlx_server.execution.group.plan import (
    Abandon,
    Clear,
    Compiling,
    Drop,
    Finish,
    Forget,
    KeepPacked,
    More,
    Piece,
    Resize,
    Restore,
    Rows,
    Run,
    Serve,
    ShownRows,
    Snap,
)
from mlx_manager.mlx_server.execution.images import Features, Shown


class ToldStore:
    """The first layer's pages. Whatever is done to them, the other ranks do to those of all
    layers: the engine treats all layers alike."""

    def __init__(self, store: PageStore, crew: Crew) -> None:
        self._store = store
        self._crew = crew
        self._pages = 0

    @property
    def shape(self) -> LayerShape:
        return self._store.shape

    @property
    def format(self) -> str:
        return self._store.format

    @property
    def token_bytes(self) -> int:
        return self._store.token_bytes

    def resize(self, pages: int) -> bool:
        """Change the number of pages; see `LayerStore.resize`."""
        if pages != self._pages:
            self._pages = pages
            self._crew.tell(Resize(pages))
        return self._store.resize(pages)

    def clear(self, pages: Sequence[int]) -> None:
        """Fill pages with zeros; see `LayerStore.clear`."""
        self._crew.tell(Clear(list(pages)))
        self._store.clear(pages)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class GroupSnapshot(Snapshot):
    """A snapshot of which every rank keeps its share, under a number. nbytes counts all shares
    that are in this memory."""

    number: int = 0
    copies: int = 1

    @property
    def nbytes(self) -> int:
        # A dataclass with slots is made anew, so `super()` without arguments does not find it.
        return self.copies * Snapshot.nbytes.fget(self)  # type: ignore[attr-defined, no-any-return]


class GroupKinds:
    """Kinds of step, as `compiled.Kinds`, of which all ranks compile the same ones: compiled or
    not, a step may have the group's operations in another order."""

    def __init__(self, own: Kinds, crew: Crew) -> None:
        self._own = own
        self._crew = crew

    @property
    def compiled(self) -> int:
        return self._own.compiled

    @property
    def early(self) -> bool:
        return self._own.early

    @early.setter
    def early(self, early: bool) -> None:
        self._crew.tell(Compiling(early))
        self._own.early = early

    def forget(self) -> None:
        self._crew.tell(Compiling(forget=True))
        self._own.forget()

    def give_up(self) -> None:
        self._crew.tell(Compiling(give_up=True))
        self._own.give_up()


class GroupForward:
    """Forward of rank 0: `inner` runs this rank's share, and the crew runs the others'."""

    def __init__(self, inner: Forward, crew: Crew) -> None:
        self.inner = inner
        self._crew = crew
        self._tables: dict[int, tuple[PageTable, int]] = {}
        self._numbers = count()
        self._dropped: deque[int] = deque()
        self._serving = False
        # A pass that has been put together and not been queued.
        self._waiting: mx.array | None = None
        self.kind = inner.kind
        self.prefixes: Prefixes = inner.prefixes
        self.worth = inner.worth
        self.looks_ahead = inner.looks_ahead
        self.puts_together_ahead = inner.puts_together_ahead
        self.horizon = inner.horizon
        self.grain = inner.grain
        self.abreast = inner.abreast
        self.attends_whole = inner.attends_whole
        self.copies = crew.copies
        own = sum(store.shape.token_bytes for store in inner.stores)
        # Shares of other ranks in the same memory count as this rank's.
        self.token_bytes = crew.copies * (inner.token_bytes + own) - own
        self.row_bytes = crew.copies * inner.row_bytes
        self.stores: Sequence[PageStore] = inner.stores
        if inner.stores:
            first, *others = inner.stores
            self.stores = [ToldStore(first, crew), *others]

    def compiling(self, own: Kinds) -> GroupKinds:
        """Return this rank's kinds of step, of which all ranks compile the same ones."""
        return GroupKinds(own, self._crew)

    def keep_hidden(self, *, fed: bool = False) -> bool:
        return False

    @property
    def hidden(self) -> mx.array | None:
        return None

    def keep_in_8_bits(self, readers: KernelSet | None = None) -> None:
        raise NotApplicable("the pages of several ranks are kept as they are")

    def serve(self) -> None:
        self._crew.tell(Serve())
        self._serving = True
        self.inner.serve()

    def order(self, keys: Sequence[int], lengths: Sequence[int]) -> list[int]:
        return self.inner.order(keys, lengths)

    def run(self, decode: Decode | None, chunks: Sequence[Chunk]) -> mx.array:
        self._drop()
        tables: dict[int, More] = {}
        rows = None
        if decode is not None:
            rows = Rows(decode.keys, decode.lengths, decode.shifts, decode.waited)
            for key, table in zip(decode.keys, decode.tables, strict=True):
                self._tell_table(tables, key, table)
        for chunk in chunks:
            self._tell_table(tables, chunk.key, chunk.span.table)
        self._crew.tell(Run(rows, [_piece(chunk) for chunk in chunks], tables))
        group = self._crew.group
        if decode is not None:
            tokens = from_first(group, decode.tokens[: len(decode.keys)])
            decode = replace(decode, tokens=tokens)
        logits = self.inner.run(decode, [shared(group, chunk) for chunk in chunks])
        self._waiting = logits
        if not self._serving:
            self.queue()
        return logits

    def queue(self) -> None:
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            mx.async_eval(waiting, self.inner.state())  # type: ignore[no-untyped-call]

    @property
    def repeats(self) -> bool:
        return self.inner.repeats

    @property
    def unfinished(self) -> bool:
        return self.inner.unfinished

    def finish(self) -> None:
        self._crew.tell(Finish())
        self.inner.finish()

    def abandon(self) -> None:
        """Drop the rest of a failed step, and give the ranks up: nobody knows how far they have
        come with it. While a model is loaded, each pass ends before the next begins."""
        self._waiting = None
        if self._serving:
            self._crew.lose("a step has failed on one of them")
        else:
            self._crew.tell(Abandon())
        self.inner.abandon()

    def forget(self, key: int) -> None:
        self._tables.pop(key, None)
        self._crew.tell(Forget(key))
        self.inner.forget(key)

    def state(self) -> list[mx.array]:
        return self.inner.state()

    def tokens_at_once(self, tokens: int) -> int:
        return self.inner.tokens_at_once(tokens)

    def unpacked_bytes(self, tokens: int) -> int:
        return self.inner.unpacked_bytes(tokens)

    def keep_packed(self) -> None:
        self._crew.tell(KeepPacked())
        self.inner.keep_packed()

    def snapshot(self, key: int) -> Snapshot | None:
        own = self.inner.snapshot(key)
        if own is None:
            return None
        number = next(self._numbers)
        self._crew.tell(Snap(key, number))
        found = GroupSnapshot(own.leaves, own.caches, number, self._crew.copies)
        # It goes with the last reference to it, on whatever thread that is.
        weakref.finalize(found, self._dropped.append, number)
        return found

    def restore(self, key: int, snapshot: Snapshot) -> None:
        assert isinstance(snapshot, GroupSnapshot)
        self._crew.tell(Restore(key, snapshot.number))
        self.inner.restore(key, snapshot)

    def _drop(self) -> None:
        numbers = []
        while self._dropped:
            numbers.append(self._dropped.popleft())
        if numbers:
            self._crew.tell(Drop(numbers))

    def _tell_table(self, told: dict[int, More], key: int, table: PageTable) -> None:
        """Add to `told` what the others do not know of a sequence's table."""
        known, size = self._tables.get(key, (None, 0))
        if known is not table or size > len(table):
            size = 0
        if size < len(table) or known is not table:
            told[key] = More(size, table.pages[size:].tolist())
            self._tables[key] = table, len(table)


def _piece(chunk: Chunk) -> Piece:
    span, shown = chunk.span, chunk.shown
    place = None
    if shown is not None:
        rows = shown.features.rows
        levels = len(shown.features.levels)
        place = ShownRows(shown.places, rows.shape, dtype_name(rows.dtype), levels)
    return Piece(
        chunk.key,
        span.length,
        chunk.tokens,
        chunk.final,
        chunk.every,
        span.runs,
        span.windowed,
        place,
        chunk.angles,
    )


def shared(group: mx.distributed.Group, chunk: Chunk) -> Chunk:
    """Return the chunk with rank 0's rows of pictures. They are evaluated: nothing else would order
    them among the group's operations."""
    if chunk.shown is None:
        return chunk
    features = chunk.shown.features
    rows, *levels = (_now(group, array) for array in (features.rows, *features.levels))
    return replace(chunk, shown=Shown(chunk.shown.places, Features(rows, tuple(levels))))


def _now(group: mx.distributed.Group, array: mx.array) -> mx.array:
    found = from_first(group, array)
    mx.eval(found)
    return found


def span_of(piece: Piece, table: PageTable) -> Span:
    return Span(table, piece.length, len(piece.tokens), piece.runs, piece.windowed)
