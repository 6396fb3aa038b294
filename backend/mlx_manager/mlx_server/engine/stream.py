"""Delivery of rows' events from one thread to an event loop, and there to whoever reads them.

The order of delivery. A client gets the events of a row in the order in which the engine made them:

1. On the MLX thread the events of a step are put into an `Outbox` and sent by `flush`: one message
   to each home. A worker's home is the connection to the server, which keeps the order of messages.
   There the connection's thread puts them into an outbox again, whose homes are event loops.
2. An event loop runs the deliveries of a home in their order (`call_soon_threadsafe`), and hands
   each row its events there and then (`LoopRow.push`). All that follows happens in that callback:
   the call writes its timeline first (`services.calls.Call.push`), then it puts the step into an
   `Inbox`.
3. The inbox has the step taken at once while its reader waits: then the reader has done with all
   that came before, so that nothing can be overtaken. Otherwise the step is kept. The reader gets
   all that was kept as one step, with neighbouring text merged.
4. A row ends, or fails, with its last delivery, and a call after its last row; the inbox tells its
   reader of an end after all that was kept.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from mlx_manager.mlx_server.core import (
    Event,
    Finished,
    Progress,
    Push,
    ReasoningDelta,
    TextDelta,
)
from mlx_manager.mlx_server.errors import MLXManagerError

# ---------------------------------------------------------------------------------------------
# From a thread
# ---------------------------------------------------------------------------------------------


class Home(Protocol):
    """Destination of rows' events; the events of a step are delivered together."""

    def deliver(self, batch: list[Delivery]) -> None:
        """Deliver events and failures, in order, without waiting. Safe on any thread."""
        ...


class Sink(Protocol):
    """Receiver of a row's events.

    drawn: returns the number of tokens drawn for the row so far, on any thread. The backend sets it
    before it submits the row.
    """

    drawn: Callable[[], int]

    @property
    def home(self) -> Home: ...


Delivery = tuple[Any, list[Event] | MLXManagerError, int]
"""A sink, of the kind that its home serves; its events or its failure; tokens drawn so far."""


class Outbox:
    """Events and failures of a step, by home; `flush` sends one message to each home."""

    def __init__(self) -> None:
        self._by_home: defaultdict[Home, list[Delivery]] = defaultdict(list)

    def put(self, sink: Sink, events: list[Event]) -> None:
        if events:
            self._by_home[sink.home].append((sink, events, sink.drawn()))

    def fail(self, sink: Sink, error: MLXManagerError) -> None:
        self._by_home[sink.home].append((sink, error, sink.drawn()))

    def forward(self, row: LoopRow, outcome: list[Event] | MLXManagerError, tokens: int) -> None:
        """Put what another process has told of a row: `tokens` have been drawn for it so far."""
        self._by_home[row.home].append((row, outcome, tokens))

    def flush(self) -> None:
        batches, self._by_home = self._by_home, defaultdict(list)
        for home, batch in batches.items():
            home.deliver(batch)


# ---------------------------------------------------------------------------------------------
# In an event loop
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoopHome:
    """Home of the rows that one event loop serves."""

    loop: asyncio.AbstractEventLoop

    def deliver(self, batch: list[Delivery]) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(_hand_over, iter(batch))


def _hand_over(rest: Iterator[Delivery]) -> None:
    complete = False
    try:
        for row, outcome, tokens in rest:
            if isinstance(outcome, MLXManagerError):
                row.fail(outcome)
            else:
                row.push(outcome, tokens)
        complete = True
    finally:
        if not complete:
            # Whatever raised concerns one row (see `Inbox.put`). The others still get their events.
            _hand_over(rest)


class LoopRow:
    """One row whose events are pushed in an event loop, where it is made and waited for."""

    def __init__(self, push: Push, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.home = LoopHome(asyncio.get_running_loop() if loop is None else loop)
        self.drawn: Callable[[], int] = int
        self._push: Push | None = push
        self._end: asyncio.Future[None] = self.home.loop.create_future()

    def push(self, events: list[Event], tokens: int) -> None:
        """Push the events of a step. Does nothing once nobody waits for the row any more."""
        if self._push is None:
            return
        try:
            self._push(events, tokens)
        finally:
            if type(events[-1]) is Finished:
                self._leave()
                _wake(self._end)

    def fail(self, error: MLXManagerError) -> None:
        if self._push is not None:
            self._leave()
            if not self._end.done():
                self._end.set_exception(error)

    async def over(self, cancel: Callable[[], None]) -> None:
        """Wait for the row's end; call `cancel` if that is not waited for any more.

        Raises:
            MLXManagerError: the row's failure.
        """
        try:
            await self._end
        finally:
            if self._push is not None:
                self._leave()
                cancel()

    def _leave(self) -> None:
        # Both refer to what refers to the row, and would be kept until the collector finds them.
        self._push, self.drawn = None, int


class Steps(Protocol):
    """Destination of the steps of an answer; `Inbox` is one."""

    def put(self, step: Progress) -> None:
        """Take a step, without waiting."""
        ...

    async def taken(self) -> None:
        """Wait until nothing that was put has yet to be read.

        Raises:
            MLXManagerError: the reader's, which could not make anything of it.
        """
        ...


Work = Callable[[Steps], Coroutine[Any, Any, None]]
"""Work on an answer, whose steps are put where the argument says. Cancelling it ends all of it."""


class Unread:
    """Steps that nobody reads."""

    def put(self, step: Progress) -> None: ...

    async def taken(self) -> None: ...


UNREAD = Unread()


class Inbox:
    """Steps of an answer on their way to whoever reads it, in an event loop. See "The order of
    delivery".

    at_once: takes a step there and then, and returns True; False if it can't do that now. None:
    all steps are for the reader.
    """

    def __init__(self, at_once: Callable[[Progress], bool] | None = None) -> None:
        self._at_once = at_once
        self._kept: Progress = []
        self._reader: asyncio.Future[None] | None = None
        self._emptied: asyncio.Future[None] | None = None
        self._refusal: MLXManagerError | None = None
        self._ended = False

    # -- putting -------------------------------------------------------------------------------

    def put(self, step: Progress) -> None:
        """Have the step taken at once, or keep it for the reader."""
        taken, reader = False, self._reader
        try:
            if self._at_once is not None and reader is not None and not reader.done():
                taken = self._at_once(step)
        finally:
            # Where `at_once` raises, the reader raises again on this step, and answers for it.
            if not taken:
                self._kept += step
                _wake(reader)

    async def taken(self) -> None:
        """Wait until the reader has taken all that was put, and waits for more.

        Raises:
            MLXManagerError: the reader's, which could not make anything of it.
        """
        while self._kept or self._reader is None or self._reader.done():
            self._emptied = asyncio.get_running_loop().create_future()
            await self._emptied
        if self._refusal is not None:
            raise self._refusal

    def end(self) -> None:
        """End the iteration, after all that was put."""
        self._ended = True
        # It refers to the answer, which refers to this: both would stay until the collector comes.
        self._at_once = None
        _wake(self._reader)

    # -- reading -------------------------------------------------------------------------------

    def refuse(self, error: MLXManagerError) -> None:
        """Let the answer fail with `error`, since nothing can be made of what was taken."""
        self._refusal = error

    def __aiter__(self) -> Inbox:
        return self

    async def __anext__(self) -> Progress:
        """Return all that has been kept since the last time."""
        while not self._kept:
            if self._ended:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            _wake(self._emptied)
            await self._reader
        kept, self._kept = self._kept, []
        return kept if len(kept) == 1 else coalesced(kept)


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


def coalesced(progress: Progress) -> Progress:
    """Return several steps as one: each row once, in the order of their first events."""
    rows: defaultdict[int, list[Event]] = defaultdict(list)
    for row, events in progress:
        rows[row] += events
    return [(row, merge(events)) for row, events in rows.items()]


def merge(events: list[Event]) -> list[Event]:
    """Join neighbouring deltas of the same kind; their text and log-probabilities are kept."""
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        match last, event:
            case (TextDelta(), TextDelta()):
                merged[-1] = TextDelta(last.text + event.text, last.logprobs + event.logprobs)
            case (ReasoningDelta(), ReasoningDelta()):
                merged[-1] = ReasoningDelta(last.text + event.text, last.logprobs + event.logprobs)
            case _:
                merged.append(event)
    return merged


# ---------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------


@asynccontextmanager
async def working(work: Work, inbox: Inbox) -> AsyncIterator[asyncio.Task[None]]:
    """Run `work` in a task of its own, whose end is the inbox's. Leaving the context cancels it."""
    task = asyncio.create_task(work(inbox))
    task.add_done_callback(lambda _: inbox.end())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])
        error = None if task.cancelled() else task.exception()
        # Whoever leaves early does not ask for a failure any more, unless nobody foresaw it.
        if error is not None and not isinstance(error, MLXManagerError):
            raise error


async def steps(work: Work) -> AsyncGenerator[Progress, None]:
    """Yield the steps of `work`. Closing the iterator cancels the work.

    Raises:
        MLXManagerError: the work's failure, after all steps before it.
    """
    inbox = Inbox()
    async with working(work, inbox) as task:
        async for step in inbox:
            yield step
        await task
