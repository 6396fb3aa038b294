"""The step loop of an encoder: one batch of texts a step, of all callers, of about one length.

A batch takes a text of the request whose turn it is and its neighbours by length, so that little is
computed for padding. Turns go by priority; then, while several keys want the model, to the key
whose texts had the fewest tokens read; then to the request that will have been read first if
nothing else comes: tokens that had been read when it came, and its own that are left. A short
request passes a long one, unless it comes when as many tokens as the long one has have been read
since the long one came: no request waits for ever. The first text's request is read on with it
before others, and of several keys each has its part of the batch. How many tokens it may have is
learned: a batch takes about `ALONE` seconds. A long text is computed a part at a time, on a CPU
some layers, for about as many seconds a step, so that requests that come meanwhile have their turn.
Where any batch takes long whatever is in it, as on a GPU, whose host has to launch each operation,
other texts go with it.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import prod
from operator import attrgetter
from time import perf_counter
from typing import Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_manager.mlx_server.config import EngineLimits
from mlx_manager.mlx_server.engine.scheduler.cost import Cost
from mlx_manager.mlx_server.engine.scheduler.shares import Shares, by_owner
from mlx_manager.mlx_server.errors import (
    GenerationFailed,
    MLXManagerError,
    OutOfMemory,
    Overloaded,
)
from mlx_manager.mlx_server.utils.memory import Ledger, working_line
from mlx_manager.mlx_server.utils.text import sized

Vectors = list[NDArray[np.float32]]

ALONE = 0.1
"""Seconds of a batch: the time that a text that arrives meanwhile may have to wait."""
FIRST, MOST = 512, 32_768
"""Tokens, padding included, of the first batch and of any."""
WITH_IT = 1.0
"""Share of a batch's fixed seconds that its tokens may take at any time."""
TOKENS = 64
"""Unit in which tokens are counted for their cost, so that amounts are of the order of one."""
BOLDNESS = 4
"""Most tokens of a batch, as a multiple of the largest batch before."""
BEGUN_WITH = (1, 65)
"""Tokens of the texts that are read before any caller's, so that the code for them is compiled;
more than 64 tokens take other code."""
KEPT = 512
"""Tokens of a text that can always be read, whatever else the memory is used for."""
PADDED = 0.75
"""The shortest row of a batch has that share of the longest's tokens, at least."""

_keys = count()


class BatchReader(Protocol):
    """Model that reads a batch. padding: the id that fills up short rows."""

    @property
    def padding(self) -> int: ...

    def filled_up(self, rows: int, longest: int) -> tuple[int, int]:
        """Return the rows and tokens that a batch of so many is filled up to."""
        ...

    def working_bytes(self, rows: int, longest: int) -> int:
        """Return the bytes of a batch of `rows` rows, the longest of `longest` tokens, filled
        up."""
        ...

    def __call__(
        self,
        ids: mx.array,
        segments: mx.array,
        lengths: mx.array,
        made: list[mx.array] | None = None,
    ) -> mx.array:
        """Return (rows, numbers) for ids and segments (rows, longest) and lengths (rows,), int32.

        A segment is 1 in the second text of a pair. made: the arrays that the result is made from
        are appended to it, in order, not evaluated.
        """
        ...


def kept_bytes(model: BatchReader, longest: int) -> int:
    """Return the bytes that a model of texts up to `longest` keeps for as long as it is loaded."""
    return model.working_bytes(1, min(longest, KEPT))


@dataclass(frozen=True, slots=True)
class EncoderStats:
    """Figures of an encoder's engine; `running` and `waiting` count requests."""

    running: int
    waiting: int
    rows_waiting: int
    batches: int
    rows: int
    tokens: int
    padding: int


@dataclass(eq=False, slots=True)
class Request:
    """One caller's texts on their way. `future` gets their vectors, in order, all at once.

    `rows` (token ids) and `seconds` (for each, where its second text begins; None: it has none) go
    to the MLX thread. The future stays in the event loop, where `tell` is called when the first
    row is read. owner: name of the owner that it is counted for; owners share the engine
    evenly. priority: lower ones go first. came: how many tokens the engine had begun to read when
    the request came. queued: tokens of its rows that still wait to be taken.
    """

    rows: Sequence[Sequence[int]]
    seconds: Sequence[int | None]
    future: asyncio.Future[Vectors]
    tell: Callable[[], None]
    owner: str = ""
    priority: int = 0
    key: int = field(default_factory=_keys.__next__)
    came: int = 0
    queued: int = 0
    vectors: Vectors = field(default_factory=list)
    left: int = 0
    begun: bool = False
    given_up: bool = False


@dataclass(frozen=True, slots=True, order=True)
class Row:
    """A waiting text. Ordered by length, then by age."""

    length: int
    serial: int
    index: int = field(compare=False)
    reading: Request = field(compare=False)

    @property
    def owner(self) -> str:
        return self.reading.owner

    @property
    def remaining(self) -> int:
        return self.length


@dataclass(eq=False, slots=True)
class BatchPass:
    """A batch on its way through the model. left: arrays that `vectors` are made from and that
    are not computed yet, in order. seconds: time that the pass has taken so far."""

    rows: list[Row]
    longest: int
    vectors: mx.array
    left: deque[mx.array]
    seconds: float = 0.0


class EncoderEngine:
    """Engine that reads texts in batches. Every method runs on the MLX thread.

    Args:
        longest: tokens of the longest text that the model takes.

    Raises:
        OutOfMemory: there is no room for the memory that a short text takes, which is kept.
    """

    def __init__(
        self,
        name: str,
        model: BatchReader,
        longest: int,
        limits: EngineLimits,
        *,
        ledger: Ledger,
    ) -> None:
        self._model = model
        self._longest = longest
        self._line = working_line(name)
        self._kept = kept_bytes(model, longest)
        if not ledger.reserve_if_attainable(self._line, self._kept):
            raise OutOfMemory(
                f"To read a text {name} takes {sized(self._kept)}, and "
                f"{sized(ledger.attainable())} of {sized(ledger.total)} are left beside "
                "its weights.",
                retry_after=10,
            )
        self._max_waiting = limits.max_waiting
        self._ledger = ledger
        self._waiting: list[Row] = []
        self._readings: list[Request] = []
        self._shares = Shares()
        self._batch: list[Row] = []
        self._by_layers = mx.default_device() == mx.cpu
        self._pass: BatchPass | None = None
        # Bytes granted for the pass beyond those kept.
        self._granted = 0
        self._serial = 0
        # Tokens of all texts whose reading has begun.
        self._taken = 0
        self._cost = Cost(2)
        self._tried = 0
        self._steps = self._batches = self._rows = self._tokens = self._padded = 0

    def warm(self) -> None:
        """Read texts of `BEGUN_WITH` tokens, so that the code is compiled before anybody waits."""
        for tokens in BEGUN_WITH:
            ids = np.full(self._model.filled_up(1, min(tokens, self._longest)), self._model.padding)
            read = mx.array(ids, mx.int32)
            lengths = mx.ones(len(ids), mx.int32)
            mx.eval([self._model(read, mx.zeros_like(read), lengths)])

    def submit(self, reading: Request) -> None:
        if (refusal := self._refusal(reading)) is not None:
            settle(reading, refusal)
            return
        reading.left = len(reading.rows)
        reading.vectors = [np.empty(0, np.float32)] * reading.left
        reading.came = self._taken
        self._readings.append(reading)
        self._shares.enter(reading)
        for index, ids in enumerate(reading.rows):
            self._queue(Row(len(ids), self._serial, index, reading))
            self._serial += 1

    def _refusal(self, reading: Request) -> Overloaded | None:
        """Return an error if the request may not wait: there is no room, and its owner has its
        part."""
        waiting = [other for other in self._readings if not other.begun]
        if len(waiting) <= self._max_waiting:
            return None
        own = sum(other.owner == reading.owner for other in waiting)
        if own < self._shares.part(reading, self._max_waiting):
            return None
        return Overloaded(
            f"The queue is full: {len(waiting)} requests are waiting, and at most "
            f"{self._max_waiting} may (MLX_SERVER_MAX_WAITING). Try again shortly.",
            retry_after=2,
        )

    def cancel(self, reading: Request) -> None:
        """Drop a request: texts of it that have not been read are not read any more."""
        if reading in self._readings:
            reading.given_up = True
            self._dismiss(reading)
            self._waiting = [row for row in self._waiting if row.reading is not reading]
            under_way = self._pass
            if under_way and all(row.reading.given_up for row in under_way.rows):
                self._end_pass()

    @property
    def steps(self) -> int:
        """Return the number of steps begun."""
        return self._steps

    def has_work(self) -> bool:
        return bool(self._pass or self._waiting)

    def step(self) -> None:
        """Read some of the texts that wait."""
        started = perf_counter()
        self._steps += 1
        under_way = self._pass or self._begin()
        if under_way is None:
            return
        vectors = self._go_on(under_way, started)
        under_way.seconds += perf_counter() - started
        if vectors is None:
            return
        # Count first: a caller that has its answer may look at the metrics at once.
        self._count(under_way)
        self._deliver(under_way.rows, vectors)
        self._end_pass()

    def fail(self, error: Exception) -> None:
        """Fail the requests that have a text in the batch under way; the others go on."""
        self._ledger.heed(error)
        failure = (
            error
            if isinstance(error, MLXManagerError)
            else GenerationFailed("The model failed while reading. The request can be retried.")
        )
        lost = {id(row.reading): row.reading for row in self._batch}
        self._end_pass()
        for reading in lost.values():
            self.cancel(reading)
            settle(reading, failure)

    def close(self) -> None:
        """Fail what is left and give the memory back."""
        self._end_pass()
        self._ledger.record(self._line, 0)
        for reading in tuple(self._readings):
            self.cancel(reading)
            settle(reading, GenerationFailed("The model is being unloaded."))

    def stats(self) -> EncoderStats:
        begun = sum(reading.begun for reading in tuple(self._readings))
        return EncoderStats(
            begun,
            len(self._readings) - begun,
            len(self._waiting),
            self._batches,
            self._rows,
            self._tokens,
            self._padded,
        )

    # -- a batch -------------------------------------------------------------------------------

    def _begin(self) -> BatchPass | None:
        """Return the next batch's pass, put together; None if nothing can be read now."""
        if not self._waiting:
            return None
        self._batch = self._take(self._budget())
        granted = self._grant()
        if granted is None:
            return None
        self._granted = granted
        longest = longest_of(self._batch)
        made: list[mx.array] = []
        vectors = self._put_together(self._batch, longest, made if self._by_layers else None)
        self._pass = BatchPass(self._batch, longest, vectors, deque(made))
        return self._pass

    def _go_on(self, under_way: BatchPass, started: float) -> NDArray[np.float32] | None:
        """Compute the rest of the pass, or at least one part of it, but of a long pass no more than
        about `ALONE` seconds. Return its vectors once it is through, else None."""
        if self._is_short(under_way):
            under_way.left.clear()
        before = longest = 0.0
        while under_way.left:
            if before and before + longest > ALONE:
                return None
            mx.eval(under_way.left.popleft())
            spent = perf_counter() - started
            before, longest = spent, max(longest, spent - before)
        return np.array(under_way.vectors.astype(mx.float32))[: len(under_way.rows)]

    def _is_short(self, read: BatchPass) -> bool:
        """Return whether the whole pass is known to take `ALONE` seconds at most."""
        size = self._size(len(read.rows), read.longest)
        return self._cost.known and self._cost.of((size / TOKENS, 1.0)) <= ALONE

    def _end_pass(self) -> None:
        self._ledger.release(self._line, self._granted)
        self._granted = 0
        self._pass = None
        self._batch = []

    def _budget(self) -> int:
        """Return the most tokens of the next batch, padding included."""
        if not self._cost.known:
            return FIRST
        tokens, batch = self._cost.prices
        left = max(ALONE - batch, WITH_IT * batch)
        most = min(MOST, BOLDNESS * self._tried)
        return int(min(TOKENS * left / tokens, most)) if tokens else most

    def _take(self, budget: int) -> list[Row]:
        """Take from the queue the row whose turn it is and those that go with it, by turns."""
        first = self._first()
        batch = [first]
        shortest = longest = first.length
        too_long = first.length / PADDED + 1
        for row in self._company(first):
            low, high = min(shortest, row.length), max(longest, row.length)
            if high >= too_long or low < PADDED * high:
                continue
            if self._size(len(batch) + 1, high) > budget:
                if high == longest:
                    break
                too_long = high
                continue
            batch.append(row)
            shortest, longest = low, high
        self._unqueue(batch)
        return batch

    def _first(self) -> Row:
        contested = self._shares.contested

        def turn(reading: Request) -> tuple[int, int, int, int]:
            served = self._shares.served(reading) if contested else 0
            return reading.priority, served, reading.came + reading.queued, reading.key

        chosen = min((reading for reading in self._readings if reading.queued), key=turn)
        own = (row for row in self._waiting if row.reading is chosen)
        return min(own, key=attrgetter("serial"))

    def _company(self, first: Row) -> Iterable[Row]:
        """Return the rows whose lengths allow them to go with `first`, in the order of their
        turns."""
        waiting, place, length = self._waiting, bisect_left(self._waiting, first), first.length
        by_length = attrgetter("length")
        low = bisect_left(waiting, PADDED * length, hi=place, key=by_length)
        high = bisect_right(waiting, length / PADDED, lo=place, key=by_length)
        near = [*waiting[low:place][::-1], *waiting[place + 1 : high]]
        others = [row for row in near if row.reading is not first.reading]
        others.sort(key=lambda row: row.reading.priority)
        own = [row for row in near if row.reading is first.reading]
        if not self._shares.contested:
            return [*own, *others]

        def rank(row: Row) -> tuple[int, int]:
            return row.reading.priority, row is not first

        turns = self._shares.in_turn(by_owner([first, *own, *others]), rank)
        return (row for row in turns if row is not first)

    def _queue(self, row: Row) -> None:
        insort(self._waiting, row)
        row.reading.queued += row.length

    def _unqueue(self, batch: list[Row]) -> None:
        taken = frozenset(batch)
        start, end = bisect_left(self._waiting, min(batch)), bisect_right(self._waiting, max(batch))
        self._waiting[start:end] = [r for r in self._waiting[start:end] if r not in taken]
        for row in batch:
            row.reading.queued -= row.length

    def _size(self, rows: int, longest: int) -> int:
        """Return the tokens of a batch, padding included."""
        return prod(self._model.filled_up(rows, longest))

    def _grant(self) -> int | None:
        """Reserve and return the bytes of the batch beyond those kept. Shrink the batch until the
        ledger grants them, removing the last turns first. None: not even one row's are granted."""
        while True:
            nbytes = self._beyond_kept(len(self._batch), longest_of(self._batch))
            if not nbytes or self._ledger.reserve_if_attainable(self._line, nbytes):
                self._begin_readings()
                return nbytes
            if len(self._batch) == 1:
                self._put_off()
                return None
            keep = len(self._batch) - len(self._batch) // 2
            for row in self._batch[keep:]:
                self._queue(row)
            self._batch = self._batch[:keep]

    def _begin_readings(self) -> None:
        for row in self._batch:
            begin(row.reading)
            self._taken += row.length
            if self._shares.contested:
                self._shares.charge(row.reading, row.length)

    def _beyond_kept(self, rows: int, longest: int) -> int:
        return max(0, self._model.working_bytes(rows, longest) - self._kept)

    def _put_off(self) -> None:
        """Queue the batch's one text again while more memory is on its way; else fail it."""
        [row] = self._batch
        if self._ledger.more_to_come():
            self._queue(row)
            self._batch = []
            return
        self.fail(
            OutOfMemory(
                f"A text of {row.length} tokens takes "
                f"{sized(self._model.working_bytes(1, row.length))} to read, and "
                f"{sized(self._kept + max(self._ledger.attainable(), 0))} can be had."
            )
        )

    def _put_together(
        self, batch: list[Row], longest: int, made: list[mx.array] | None
    ) -> mx.array:
        ids = np.full(self._model.filled_up(len(batch), longest), self._model.padding, np.int32)
        segments = np.zeros_like(ids)
        # At least one token a row, since the mean of no tokens is NaN.
        lengths = np.ones(len(ids), np.int32)
        for place, row in enumerate(batch):
            ids[place, : row.length] = row.reading.rows[row.index]
            second = row.reading.seconds[row.index]
            if second is not None:
                segments[place, second : row.length] = 1
            lengths[place] = row.length
        return self._model(mx.array(ids), mx.array(segments), mx.array(lengths), made)

    def _deliver(self, batch: list[Row], vectors: NDArray[np.float32]) -> None:
        for row, vector in zip(batch, vectors, strict=True):
            reading = row.reading
            if reading.given_up:
                continue
            reading.vectors[row.index] = vector
            reading.left -= 1
            if not reading.left:
                self._dismiss(reading)
                settle(reading, reading.vectors)

    def _dismiss(self, reading: Request) -> None:
        self._readings.remove(reading)
        self._shares.leave(reading)

    def _count(self, read: BatchPass) -> None:
        tokens = sum(row.length for row in read.rows)
        size = self._size(len(read.rows), read.longest)
        self._batches += 1
        self._rows += len(read.rows)
        self._tokens += tokens
        self._padded += size - tokens
        self._cost.learn((size / TOKENS, 1.0), read.seconds)
        self._tried = max(self._tried, size, FIRST)


def longest_of(batch: Iterable[Row]) -> int:
    return max(row.length for row in batch)


def begin(reading: Request) -> None:
    """Tell the caller that its turn has come, once, unless nobody waits any more."""

    def tell() -> None:
        if not reading.future.done():
            reading.tell()

    loop = reading.future.get_loop()
    if not reading.begun and not loop.is_closed():
        loop.call_soon_threadsafe(tell)
    reading.begun = True


def settle(reading: Request, outcome: Vectors | MLXManagerError) -> None:
    """Tell the caller, unless nobody waits any more."""
    future = reading.future
    loop = future.get_loop()

    def tell() -> None:
        if future.done():
            return
        if isinstance(outcome, MLXManagerError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    if not loop.is_closed():
        loop.call_soon_threadsafe(tell)
