"""The calls under way: their timelines, their time limits, and their end from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from mlx_manager.mlx_server.config import TimeLimits
from mlx_manager.mlx_server.core import Admitted, Event, GenerationRequest
from mlx_manager.mlx_server.engine.stream import UNREAD, Steps
from mlx_manager.mlx_server.errors import MLXManagerError, RequestNotFound, RequestTimedOut
from mlx_manager.mlx_server.services.accounts import UNLIMITED, Account
from mlx_manager.mlx_server.timeline import Timeline

Phase = Literal["load", "queue", "prompt", "answer"]
UNHURRIED = TimeLimits()

WHERE: dict[Phase, str] = {
    "load": "its model was still being loaded",
    "queue": "it was still waiting for its turn",
    "prompt": "its prompt was still being processed",
    "answer": "its answer was not complete",
}


class Call:
    """One call, from its arrival to the end of its last row, with the clock that may end it.

    Every event of the call's rows passes through `push`, the only observer of them: it writes the
    timeline, which all others read.

    Attributes:
        requests: the rows.
        timeline: moments and token counts of the call and its rows.
        phase: phase of the first row; the others may be behind.
        steps: destination of the rows' events.
    """

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        limits: TimeLimits = UNHURRIED,
        account: Account = UNLIMITED,
    ) -> None:
        self.requests = requests
        self.timeline = Timeline.of(requests)
        self.phase: Phase = "queue"
        self.steps: Steps = UNREAD
        self._limits = limits
        self._account = account
        self._loop = asyncio.get_running_loop()
        self._arrived = self._since = self._loop.time()
        self._queued = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._running: asyncio.Task[Any] | None = None
        self._lingering: asyncio.Task[Any] | None = None
        self._let_go = False
        self._error: MLXManagerError | None = None

    def enter(self, phase: Phase) -> None:
        """Note that the first row has reached `phase`."""
        now = self._loop.time()
        if self.phase == "queue":
            self._queued += now - self._since
        self.phase = phase
        self._since = now
        self.watch_clock()

    def push(self, row: int, events: list[Event], tokens: int) -> None:
        """Write down the events of one step of a row, and put them where the call's steps go.

        tokens: number drawn for the row's answer so far.
        """
        timeline = self.timeline
        line = timeline.rows[row]
        waited = line.started is None
        timeline.follow(row, events, tokens)
        if waited:
            if line.started is not None and row in timeline.prompts:
                # At once, so that the key's next request finds them used.
                self._account.charge(line.started.prompt_tokens)
            phase: Phase = "prompt" if type(events[-1]) is Admitted else "answer"
            if self.phase not in (phase, "answer"):
                self.enter(phase)
        self.steps.put([(row, events)])

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Open a context that `interrupt` ends, in one task.

        Raises:
            MLXManagerError: the error that interrupted the call; what the context waited for is
                cancelled.
        """
        if self._error is not None:
            raise self._error
        task = self._running = asyncio.current_task()
        assert task is not None
        try:
            yield
        except asyncio.CancelledError:
            if self._error is None or task.uncancel() > 0:
                raise
            raise self._error from None
        finally:
            self._running = None

    async def linger(self) -> None:
        """Wait until the steps have been read. An interruption ends the wait, and is no failure.

        Raises:
            MLXManagerError: nothing can be made of the steps.
        """
        if self._let_go:
            return
        task = self._lingering = asyncio.current_task()
        assert task is not None
        try:
            await self.steps.taken()
        except asyncio.CancelledError:
            if not self._let_go or task.uncancel() > 0:
                raise
        finally:
            self._lingering = None

    def interrupt(self, error: MLXManagerError) -> None:
        """End the call with `error`; only the first error counts.

        Once all rows have finished, no error counts, and the call ends though its steps may not
        have been read.
        """
        if self._error is not None or self._let_go:
            return
        if self.timeline.finished:
            self._let_go = True
            if self._lingering is not None:
                self._lingering.cancel()
            return
        self._error = error
        if self._running is not None:
            self._running.cancel()

    def watch_clock(self) -> None:
        """Set the timer to the limit that is reached next."""
        self.close()
        due = [(moment, name) for moment, name in self._deadlines() if moment is not None]
        if due:
            moment, name = min(due)
            self._timer = self._loop.call_at(moment, self._expire, name)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _deadlines(self) -> Iterator[tuple[float | None, str]]:
        limits = self._limits
        if limits.total is not None:
            yield self._arrived + limits.total, "timeout"
        if limits.first_token is not None and self.phase != "answer":
            yield self._arrived + limits.first_token, "first_token_timeout"
        if limits.queue is not None and self.phase == "queue":
            yield self._since + limits.queue - self._queued, "queue_timeout"

    def _expire(self, name: str) -> None:
        limits = self._limits
        seconds = {
            "timeout": limits.total,
            "first_token_timeout": limits.first_token,
            "queue_timeout": limits.queue,
        }[name]
        self.interrupt(
            RequestTimedOut(
                f"The request ran into its `{name}` of {seconds:g} s: {WHERE[self.phase]}.",
                param=name,
            )
        )


class Calls:
    """Every call under way. Belongs to the event loop.

    refusal: returns the reason why no more calls are taken; None if they are.
    """

    def __init__(self, refusal: Callable[[], MLXManagerError | None] = lambda: None) -> None:
        self._calls: dict[Call, None] = {}
        self._refusal = refusal
        self._none = asyncio.Event()
        self._none.set()
        self._some = asyncio.Event()

    def __iter__(self) -> Iterator[Call]:
        """Iterate over the calls, the oldest first."""
        return iter(tuple(self._calls))

    def __len__(self) -> int:
        return len(self._calls)

    @contextmanager
    def enter(self, call: Call) -> Iterator[None]:
        """Start a call, which is under way for the length of the context.

        Raises:
            MLXManagerError: the reason why no calls are taken.
        """
        if (refusal := self._refusal()) is not None:
            raise refusal
        self._calls[call] = None
        self._none.clear()
        self._some.set()
        call.watch_clock()
        try:
            yield
        finally:
            call.close()
            del self._calls[call]
            if not self._calls:
                self._none.set()
                self._some.clear()

    def find(self, request_id: str) -> list[Call]:
        """Return the calls of an HTTP request, by the id of the request or of its answer.

        Raises:
            RequestNotFound: none of that id is under way.
        """
        found = [
            call
            for call in self
            if request_id in (call.requests[0].request_id, call.requests[0].caller.request_id)
        ]
        if not found:
            raise RequestNotFound(f"No request {request_id!r} is under way.", param="id")
        return found

    def interrupt(self, why: Callable[[], MLXManagerError]) -> None:
        """End every call under way."""
        for call in self:
            call.interrupt(why())

    async def begun(self) -> None:
        """Wait until a call is under way."""
        await self._some.wait()

    async def ended(self, seconds: float | None = None) -> bool:
        """Wait at most `seconds` until no call is under way, and return whether none is."""
        try:
            async with asyncio.timeout(seconds):
                await self._none.wait()
        except TimeoutError:
            return False
        return True
