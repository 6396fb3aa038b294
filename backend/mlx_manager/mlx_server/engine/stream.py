"""Delivery of rows' events from one thread to their readers: one message a step for all rows,
coalesced for slow readers in an event loop."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from mlx_manager.mlx_server.core import Admitted, Event, Finished, ReasoningDelta, Taker, TextDelta
from mlx_manager.mlx_server.errors import MLXManagerError


class Home(Protocol):
    """Destination of rows' events; the events of a step are delivered together."""

    def deliver(self, batch: list[Delivery]) -> None:
        """Deliver events and failures, in order, without waiting. Safe on any thread."""
        ...


class Sink(Protocol):
    """Receiver of a row's events."""

    @property
    def home(self) -> Home: ...

    def shorten(self, take: Taker) -> None:
        """Hand events to `take`; see `core.Started.shortcut`."""
        ...


@dataclass(frozen=True, slots=True)
class LoopHome:
    """Home of the streams that one event loop reads."""

    loop: asyncio.AbstractEventLoop

    def deliver(self, batch: list[Delivery]) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(_deliver, batch)


class EventStream:
    """One request's events on their way to its reader.

    Other threads never touch it: they put what a step has to tell into an `Outbox`, and the event
    loop delivers that. Iterating gives all events that have come since the last time,
    neighbouring text merged, so a slow reader gets fewer, longer lists and delays nobody.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.home = LoopHome(loop)
        self._take: Taker | None = None
        self._events: list[Event] = []
        self._error: MLXManagerError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.ended = False

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> list[Event]:
        """Return the events since the last call; `Admitted` is returned alone.

        Raises:
            MLXManagerError: the request failed; events before the failure are given first.
        """
        while not self._events:
            if self._error is not None:
                raise self._error
            if self.ended:
                raise StopAsyncIteration
            self._waiter = self.home.loop.create_future()
            await self._waiter
        if type(self._events[0]) is Admitted:
            return [self._events.pop(0)]
        events, self._events = self._events, []
        return events if len(events) == 1 else merge(events)

    def shorten(self, take: Taker) -> None:
        """Hand events to `take`; see `core.Started.shortcut`."""
        self._take = take

    def push(self, events: list[Event]) -> None:
        """Hand `events` to the shortcut, if there is one and the reader has read all before; events
        that end the stream, or that the shortcut does not take, are kept for the reader."""
        taken = False
        try:
            if self._take is not None and self._reader() and type(events[-1]) is not Finished:
                taken = self._take(events)
        finally:
            # If the shortcut raises, the reader raises again on these events, and answers for it.
            if not taken:
                self.keep(events)

    def keep(self, events: list[Event]) -> None:
        """Keep `events` for the reader, and wake it."""
        self._events.extend(events)
        if type(events[-1]) is Finished:
            self._end()
        self._wake()

    def fail(self, error: MLXManagerError) -> None:
        self._error = error
        self._end()
        self._wake()

    def _end(self) -> None:
        self.ended = True
        # The shortcut refers to the answer, which the row's last step would keep in memory.
        self._take = None

    def _wake(self) -> None:
        if (reader := self._reader()) is not None:
            reader.set_result(None)

    def _reader(self) -> asyncio.Future[None] | None:
        """Return the future that the reader waits for; None if it does not wait."""
        waiter = self._waiter
        return None if waiter is None or waiter.done() else waiter


Delivery = tuple[Any, list[Event] | MLXManagerError]
"""A sink, of the kind that its home serves, and its events or its failure."""


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


class Outbox:
    """Events and failures of a step, by home; `flush` sends one message to each home."""

    def __init__(self) -> None:
        self._by_home: defaultdict[Home, list[Delivery]] = defaultdict(list)

    def put(self, sink: Sink, events: list[Event]) -> None:
        if events:
            self._by_home[sink.home].append((sink, events))

    def fail(self, sink: Sink, error: MLXManagerError) -> None:
        self._by_home[sink.home].append((sink, error))

    def flush(self) -> None:
        batches, self._by_home = self._by_home, defaultdict(list)
        for home, batch in batches.items():
            home.deliver(batch)


def _deliver(batch: list[Delivery]) -> None:
    rest = iter(batch)
    try:
        _hand_over(rest, EventStream.push)
    finally:
        # If a shortcut raises, the other streams still get their events.
        _hand_over(rest, EventStream.keep)


def _hand_over(rest: Iterator[Delivery], how: Callable[[EventStream, list[Event]], None]) -> None:
    for stream, outcome in rest:
        if isinstance(outcome, MLXManagerError):
            stream.fail(outcome)
        else:
            how(stream, outcome)
