"""The calls under way: how long each may take, and how all of them are ended from outside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, Literal, TypeVar

from mlx_manager.mlx_server.config import TimeLimits
from mlx_manager.mlx_server.core import Admitted, Finished, GenerationRequest, Progress, Usage
from mlx_manager.mlx_server.errors import MLXManagerError, RequestNotFound, RequestTimedOut

T = TypeVar("T")
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

    Code that works on the call awaits through `wait`, so that `interrupt` ends that work and
    nothing else. While the caller handles earlier progress, as when a client does not read, nobody
    waits. An interruption then releases what the call holds (`letting_go`), and the caller gets the
    error when it asks for more.

    Attributes:
        requests: the rows.
        phase: phase of the first row; the others may be behind.
        usages: token usages of the rows that have finished.
        arrived: time of arrival by the event loop's clock, in seconds.
    """

    def __init__(self, requests: Sequence[GenerationRequest], limits: TimeLimits) -> None:
        self.requests = requests
        self.phase: Phase = "queue"
        self.usages: dict[int, Usage] = {}
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self.arrived = self._since = self._loop.time()
        self._queued = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Task[Any] | None = None
        self._held: AsyncExitStack | None = None
        self._letting_go: asyncio.Task[bool | None] | None = None
        self._error: MLXManagerError | None = None
        self._arm()

    def enter(self, phase: Phase) -> None:
        """Note that the first row has reached `phase`."""
        now = self._loop.time()
        if self.phase == "queue":
            self._queued += now - self._since
        self.phase = phase
        self._since = now
        self._arm()

    def follow(self, step: Progress) -> None:
        """Update the phase from the events of the call's rows."""
        for row, events in step:
            if type(end := events[-1]) is Finished:
                self.usages[row] = end.usage
        if self.phase == "answer":
            return
        begun = any(type(events[-1]) is not Admitted for _, events in step)
        phase: Phase = "answer" if begun else "prompt"
        if phase != self.phase:
            self.enter(phase)

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` and return its result.

        Raises:
            MLXManagerError: the error that interrupted the call; `work` is cancelled.
        """
        if self._error is not None:
            work.close()
            raise self._error
        task = self._waiter = asyncio.current_task()
        assert task is not None
        try:
            if self._letting_go is not None:
                await asyncio.shield(self._letting_go)
            return await work
        except asyncio.CancelledError:
            if self._error is None or task.uncancel() > 0:
                raise
            raise self._error from None
        finally:
            self._waiter = None

    @asynccontextmanager
    async def letting_go(self, held: AsyncExitStack) -> AsyncIterator[None]:
        """Open a context in which an interruption closes `held` if nobody waits."""
        self._held = held
        try:
            yield
        finally:
            self._held = None
            if self._letting_go is not None:
                await asyncio.shield(self._letting_go)

    def interrupt(self, error: MLXManagerError) -> None:
        """End the call with `error`; only the first error counts.

        Once all rows have finished, no error counts: then only the resources are released that are
        held until the caller has taken the last progress.
        """
        if self._error is not None or self._letting_go is not None:
            return
        finished = len(self.usages) == len(self.requests)
        if not finished:
            self._error = error
        if self._waiter is not None:
            if not finished:
                self._waiter.cancel()
        elif self._held is not None:
            why = (None, None, None) if finished else (type(error), error, None)
            self._letting_go = self._loop.create_task(self._held.pop_all().__aexit__(*why))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        self.close()
        due = [(moment, name) for moment, name in self._deadlines() if moment is not None]
        if due:
            moment, name = min(due)
            self._timer = self._loop.call_at(moment, self._expire, name)

    def _deadlines(self) -> Iterator[tuple[float | None, str]]:
        limits = self._limits
        if limits.total is not None:
            yield self.arrived + limits.total, "timeout"
        if limits.first_token is not None and self.phase != "answer":
            yield self.arrived + limits.first_token, "first_token_timeout"
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
    def enter(
        self, requests: Sequence[GenerationRequest], limits: TimeLimits = UNHURRIED
    ) -> Iterator[Call]:
        """Start a call, which is under way for the length of the context.

        Raises:
            MLXManagerError: the reason why no calls are taken.
        """
        if (refusal := self._refusal()) is not None:
            raise refusal
        call = Call(requests, limits)
        self._calls[call] = None
        self._none.clear()
        self._some.set()
        try:
            yield call
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
