"""The server's side of a worker: its questions, its news, its end. Everything between the two goes
through here; `proxy` is its face as a `core.Backend`."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import count
from time import monotonic
from typing import Any

from mlx_manager.mlx_server.core import Event, Finished, GenerationRequest, Push, TextDelta
from mlx_manager.mlx_server.engine.stream import LoopRow, Outbox
from mlx_manager.mlx_server.errors import MLXManagerError, WorkerFailed
from mlx_manager.mlx_server.workers.channel import Channel
from mlx_manager.mlx_server.workers.messages import (
    Alive,
    Ask,
    Begun,
    Broken,
    Cancel,
    DeviceFull,
    Doing,
    Embed,
    Failed,
    GaveBack,
    Generate,
    Hello,
    Need,
    News,
    Question,
    Rank,
    Result,
    RowNews,
    Using,
    WorkerFigures,
)
from mlx_manager.mlx_server.workers.process import Process

log = logging.getLogger(__name__)
MemoryNews = Need | GaveBack | DeviceFull | Using
ON_PURPOSE = "the server has ended it"


@dataclass(slots=True)
class Pending:
    """A question that somebody in an event loop waits for. served: whether its answer is what a
    model is for. begun: called there when an encoder has begun with it."""

    outcome: Future[Any]
    loop: asyncio.AbstractEventLoop
    served: bool
    begun: Callable[[], None] | None = None


class Worker:
    """A worker of this server. Any thread, and any event loop, may ask.

    on_memory: told, on the connection's thread, what it needs and gives back. on_end: told when
    it has ended, and how.

    Attributes:
        name: its model's.
        doing: what its load is at, in a person's words; progress: how often that has changed.
        served: requests that have been answered to their end.
        wanted: False if this server has ended the worker on purpose.
        figures: as it told them last.
        over: how it ended, once it has.
        parting: seconds that it gets to write prefixes to disk when the server ends it.
    """

    def __init__(
        self,
        name: str,
        end: socket.socket,
        process: Process,
        on_memory: Callable[[Worker, MemoryNews], None],
        on_end: Callable[[Worker, str], None],
    ) -> None:
        self.name = name
        self.process = process
        self.doing = "its process starts"
        self.progress = 0
        self.served = 0
        self.wanted = True
        self.parting = 0.0
        self.over: Future[str] = Future()
        self.figures = WorkerFigures()
        self.hello: Future[Hello] = Future()
        self._on_memory = on_memory
        self._on_end = on_end
        self._numbers = count(1)
        self._rows: dict[int, LoopRow] = {}
        self._asked: dict[int, Pending] = {}
        # Rows that are to be asked for at the end of this turn of the event loop.
        self._posted: list[Ask] = []
        self._outbox = Outbox()
        self._lock = threading.Lock()
        self._ended: str | None = None
        self._reason: str | None = None
        self._heard = monotonic()
        self._silence = 0.0
        self._channel = Channel(end, self._take, self._end, name)
        self._channel.start()

    # -- asking --------------------------------------------------------------------------------

    async def ask(
        self, question: Question, key: str = "", begun: Callable[[], None] | None = None
    ) -> Any:
        """Return the answer to a question. Cancelling the call cancels the work.

        Raises:
            MLXManagerError: the worker's own, or that it has ended.
        """
        served = isinstance(question, Embed | Rank)
        pending = Pending(Future(), asyncio.get_running_loop(), served, begun)
        number = self._enter(self._asked, pending)
        self._channel.send(Ask(number, question, key))
        try:
            return await asyncio.wrap_future(pending.outcome)
        finally:
            if self._asked.pop(number, None) is not None:
                self._channel.send(Cancel(number))

    async def generate(self, request: GenerationRequest, push: Push) -> None:
        """Answer a request; see `core.Backend`."""
        row = LoopRow(push)
        number = self._enter(self._rows, row)
        with self._lock:
            self._posted.append(Ask(number, Generate(request), request.caller.key))
        row.home.loop.call_soon(self._send_posted)
        await row.over(partial(self._cancel, number))

    def _send_posted(self) -> None:
        """Send all rows of a call together: they have one prompt, which may have many pictures."""
        with self._lock:
            if self._posted:
                self._channel.send(self._posted)
                self._posted = []

    def _cancel(self, number: int) -> None:
        self._send_posted()
        if self._rows.pop(number, None) is not None:
            self._channel.send(Cancel(number))

    def begin(self, what: str) -> None:
        """Note what its load is at now."""
        self.doing = what
        self.progress += 1

    def send(self, message: object) -> None:
        """Send what has no answer."""
        self._channel.send(message)

    def _enter(self, table: dict[int, Any], entry: Any) -> int:
        """
        Raises:
            WorkerFailed: the worker has ended.
        """
        number = next(self._numbers)
        with self._lock:
            if self._ended is not None:
                raise self.failure()
            if not self.busy:
                self._heard, self._silence = monotonic(), 0.0
            table[number] = entry
        return number

    # -- watching it ---------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Return whether somebody waits for an answer."""
        return bool(self._rows or self._asked)

    @property
    def silence(self) -> float:
        """Return the seconds without a step while there is work, or without a sign of life."""
        return max(monotonic() - self._heard, self._silence) if self.busy else 0.0

    @property
    def ended(self) -> bool:
        return self._ended is not None

    def kill(self, reason: str | None = None) -> None:
        """End the process, unless something else does already. reason: what is wrong with it, for
        those who wait for it; the process then writes first where it is, for two seconds at
        most."""
        with self._lock:
            if self._reason is not None or self._ended is not None:
                return
            self.wanted = reason is not None
            self._reason = reason or ON_PURPOSE
        if reason is None and self.parting:
            # It ends by itself once the connection has; `_end` sees to that.
            self._channel.close()
        elif reason is None:
            self._kill(report=False)
        else:
            # One that is stopped writes nothing, and keeps nobody waiting for that.
            name = f"{self.name} killed"
            threading.Thread(target=self._kill, args=(True,), name=name, daemon=True).start()

    def _kill(self, report: bool) -> None:
        self.process.kill(report=report)
        self._channel.close()

    # -- on the connection's thread ------------------------------------------------------------

    def _take(self, message: object) -> None:
        self._heard = monotonic()
        match message:
            case News(rows):
                self._silence = 0.0
                self._deliver(rows)
            case Result(number, result):
                pending = self._asked.get(number)
                self.served += pending is not None and pending.served
                self._settle(number, lambda outcome: outcome.set_result(result))
            case Failed(number, error):
                self._fail(number, error)
            case Alive(silence):
                self._silence = silence
            case Broken(why):
                with self._lock:
                    self._reason = self._reason or why
            case Begun(number):
                self._tell_begun(number)
            case Doing(what):
                self.begin(what)
                log.debug("%s: %s", self.name, what)
            case Hello():
                # Its load may have been given up.
                if self.hello.set_running_or_notify_cancel():
                    self.hello.set_result(message)
            case Need() | GaveBack() | DeviceFull() | Using():
                self._on_memory(self, message)

    def _deliver(self, rows: list[RowNews]) -> None:
        for number, tokens, told in rows:
            row = self._rows.get(number)
            if row is None:
                # Nobody waits for it any more.
                continue
            events: list[Event] = [TextDelta(told)] if isinstance(told, str) else told
            if type(events[-1]) is Finished:
                # Its caller may have left at this moment.
                self._rows.pop(number, None)
                self.served += 1
            self._outbox.forward(row, events, tokens)
        self._outbox.flush()

    def _tell_begun(self, number: int) -> None:
        pending = self._asked.get(number)
        if pending is not None and pending.begun is not None and not pending.loop.is_closed():
            pending.loop.call_soon_threadsafe(pending.begun)

    def _settle(self, number: int, settle: Callable[[Future[Any]], None]) -> None:
        pending = self._asked.pop(number, None)
        if pending is not None and pending.outcome.set_running_or_notify_cancel():
            settle(pending.outcome)

    def _fail(self, number: int, error: MLXManagerError) -> None:
        row = self._rows.pop(number, None)
        if row is not None:
            self._outbox.fail(row, error)
            self._outbox.flush()
        self._settle(number, lambda outcome: outcome.set_exception(error))

    def failure(self) -> WorkerFailed:
        """Return the error of those who waited for its answers."""
        return WorkerFailed(
            f"The process of {self.name} has failed: {self._ended}. The request can be retried."
        )

    def _end(self) -> None:
        """End the process, unless it has ended, after its connection has; fail all who wait."""
        if self._reason is ON_PURPOSE:
            self.process.leave(self.parting)
        self.process.kill()
        how = self.process.wait()
        with self._lock:
            self._ended = self._reason or how
        # A caller that hears of the end and asks again must find no worker, or a new one.
        self._on_end(self, self._ended)
        if not self.hello.done():
            self.hello.set_exception(self.failure())
        for number in (*self._rows, *self._asked):
            self._fail(number, self.failure())
        self.over.set_result(self._ended)
