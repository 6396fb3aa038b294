"""The other ranks' side: a share of the model, run as rank 0 says."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

import mlx.core as mx
from mlx import nn

from mlx_manager.mlx_server.devices.dtypes import dtype_named
from mlx_manager.mlx_server.devices.group import from_first
from mlx_manager.mlx_server.engine.kv.pages import PageTable
from mlx_manager.mlx_server.execution.compiled import WRONG
from mlx_manager.mlx_server.execution.decoder.forward import FusedForward
from mlx_manager.mlx_server.execution.forward import (
    Chunk,
    Decode,
    Forward,
    NotApplicable,
    Snapshot,
)
from mlx_manager.mlx_server.execution.group.leader import shared, span_of
from mlx_manager.mlx_server.execution.group.plan import (
    Abandon,
    Clear,
    Compare,
    Compiling,
    Drop,
    Finish,
    Forget,
    KeepPacked,
    Make,
    More,
    Order,
    Piece,
    Refer,
    Resize,
    Restore,
    Rows,
    Run,
    Serve,
    ShownRows,
    Snap,
    Warm,
)
from mlx_manager.mlx_server.execution.images import Features, Shown
from mlx_manager.mlx_server.execution.module.over_pages import OverPages
from mlx_manager.mlx_server.execution.reference import Reference
from mlx_manager.mlx_server.execution.select import Ways

log = logging.getLogger(__name__)
AHEAD = 2
"""Steps that a GPU may have been given and not done, as many as rank 0 has under way."""


class Follower:
    """A rank's share of a model. All methods are called on one thread.

    model: this rank's share.
    """

    def __init__(self, model: nn.Module, group: mx.distributed.Group) -> None:
        self._model = model
        self._group = group
        self._ways: Ways | None = None
        self._reference: Reference | None = None
        self._forward: Forward | None = None
        self._serves = False
        self._tables: dict[int, PageTable] = {}
        self._kept: dict[int, Snapshot] = {}
        self._under_way: deque[mx.array] = deque()
        # A pass of which some pieces have not been queued.
        self._waiting: mx.array | None = None

    def do(self, order: Order) -> str | None:
        """Do what rank 0 says; return why it can't be done, where rank 0 has asked.

        Raises:
            ValueError, RuntimeError, ...: the model can't be run; all ranks then end.
        """
        match order:
            case Refer(page_size, again=False):
                self._ways = Ways(self._model, page_size)
                self._reference = Reference.of(self._model, page_size)
                self._ways.check_chunks()
            case Refer():
                assert self._reference is not None
                self._reference.from_itself()
            case Make():
                return self._make(order)
            case Compare() | Warm():
                self._try(order)
            case Run() | Finish() | Abandon() | Serve() | Compiling():
                self._go_on(order)
            case Resize(pages):
                for store in self._runs.stores:
                    store.resize(pages)
            case Clear(pages=stale):
                for store in self._runs.stores:
                    store.clear(stale)
            case _:
                self._keep(order)
        return None

    @property
    def _runs(self) -> Forward:
        assert self._forward is not None, "rank 0 has it made before"
        return self._forward

    def _make(self, order: Make) -> str | None:
        assert self._ways is not None, "rank 0 has the model compared before"
        self._forward = None
        self._tables.clear()
        try:
            self._ways.vision = order.sight
            self._forward = self._ways.make(order.form, order.reading, order.kernels)
        except (NotApplicable, *WRONG) as error:
            return str(error)
        return None

    def _try(self, order: Compare | Warm) -> None:
        """Do with the fused decoder as rank 0 does, which finds what is wrong at the same place."""
        fused = self._runs
        assert isinstance(fused, FusedForward)
        wrong: str | None = None
        try:
            if isinstance(order, Compare):
                wrong = fused.compare(self._model)
            else:
                fused.warm()
        except WRONG as error:
            wrong = str(error)
        if wrong is not None:
            log.warning("this rank's share can't be run by the fused decoder: %s", wrong)

    def _go_on(self, order: Order) -> None:
        forward = self._runs
        match order:
            case Run() if self._serves:
                self._run(order)
            case Run():
                # While ways are compared, one may not do. Rank 0 finds so at the same place.
                try:
                    self._run(order)
                except WRONG as error:
                    log.debug("a way to run it can't be used: %s", error)
            case Finish():
                forward.finish()
                self._queue()
            case Abandon():
                forward.abandon()
            case Serve():
                self._reference, self._serves = None, True
                forward.serve()
            case Compiling():
                self._compile(order)

    def _keep(self, order: Order) -> None:
        forward = self._runs
        match order:
            case Forget(key):
                self._tables.pop(key, None)
                forward.forget(key)
            case Snap(key, number):
                if (kept := forward.snapshot(key)) is not None:
                    self._kept[number] = kept
            case Restore(key, number):
                forward.restore(key, self._kept[number])
            case Drop(numbers):
                for number in numbers:
                    self._kept.pop(number, None)
            case KeepPacked():
                forward.keep_packed()

    def _compile(self, order: Compiling) -> None:
        rows = self._runs.rows if isinstance(self._runs, OverPages) else None
        if rows is None:
            return
        if order.early is not None:
            rows.kinds.early = order.early
        if order.forget:
            rows.kinds.forget()
        if order.give_up:
            rows.kinds.give_up()

    def _run(self, order: Run) -> None:
        forward = self._runs
        for key, more in order.tables.items():
            self._extend(key, more)
        decode = None if order.rows is None else self._decode(order.rows)
        self._waiting = forward.run(decode, [self._chunk(piece) for piece in order.pieces])
        if not (self._serves and forward.unfinished):
            self._queue()

    def _queue(self) -> None:
        """Queue the last pass, from the same arrays as rank 0 does."""
        if self._waiting is None:
            return
        forward, logits, self._waiting = self._runs, self._waiting, None
        mx.async_eval(logits, forward.state())  # type: ignore[no-untyped-call]
        self._under_way.append(logits)
        most = AHEAD if forward.looks_ahead else 1
        while len(self._under_way) >= most:
            mx.eval(self._under_way.popleft())

    def _extend(self, key: int, more: More) -> None:
        if more.start == 0:
            self._tables[key] = PageTable()
        self._tables[key].extend(more.pages)

    def _decode(self, rows: Rows) -> Decode:
        tokens = from_first(self._group, mx.zeros((len(rows.keys),), mx.uint32))
        tables = [self._tables[key] for key in rows.keys]
        return Decode(rows.keys, tables, rows.lengths, tokens, rows.shifts, rows.waited)

    def _chunk(self, piece: Piece) -> Chunk:
        span = span_of(piece, self._tables[piece.key])
        shown = None if piece.shown is None else _blank(piece.shown)
        chunk = Chunk(piece.key, span, piece.tokens, piece.final, piece.every, shown, piece.angles)
        return shared(self._group, chunk)


def _blank(place: ShownRows) -> Shown:
    """Return rows of zeros, which take rank 0's rows on."""
    arrays: Sequence[mx.array] = [
        mx.zeros(place.shape, dtype_named(place.dtype)) for _ in range(1 + place.levels)
    ]
    return Shown(place.places, Features(arrays[0], tuple(arrays[1:])))
