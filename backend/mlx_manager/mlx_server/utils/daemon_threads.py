"""Threads for jobs that take long and may never end: the program can end while they run."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import copy_context
from time import monotonic
from typing import TypeVar

from mlx_manager.mlx_server.errors import MLXManagerError

T = TypeVar("T")


class AbandonedError(RuntimeError):
    """Nobody waits for the job any more."""


class Waiting:
    """Tells a job that has begun whether its caller still waits, and ends it when nobody does.

    seconds: how long the job may take in all.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._deadline = None if seconds is None else monotonic() + seconds
        self._lock = threading.Lock()
        self._over = False
        self._stop: Callable[[], object] | None = None

    @property
    def late(self) -> bool:
        """Return whether the job's time is over."""
        return self._deadline is not None and monotonic() > self._deadline

    def end(self) -> None:
        """Nobody waits any more: what the job is at is stopped, and nothing else is begun."""
        with self._lock:
            self._over = True
            if self._stop is not None:
                self._stop()

    @contextmanager
    def stopping(self, stop: Callable[[], object]) -> Iterator[None]:
        """A context in which `stop` ends what the job is at; callable on any thread.

        Raises:
            AbandonedError: nobody waits any more, on entering or on leaving.
        """
        with self._lock:
            if self._over:
                raise AbandonedError
            self._stop = stop
        try:
            yield
        finally:
            with self._lock:
                self._stop = None
                if self._over:
                    raise AbandonedError


class DaemonThreads:
    """At most `most` at a time, each for one job; jobs beyond that wait their turn.

    Keys take turns, and the jobs of one key follow each other. Nobody waits for these threads when
    the program ends, as for an executor's.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        # By key, the one whose turn is next first; no key without jobs.
        self._jobs: OrderedDict[str, deque[tuple[Future[object], Callable[[], None]]]] = (
            OrderedDict()
        )
        self._running = 0

    async def run(
        self, function: Callable[[], T], key: str = "", waiting: Waiting | None = None
    ) -> T:
        """`asyncio.to_thread` on one of these. Who is cancelled takes back what has not begun.

        key: who asks. waiting: told when nobody waits for what has begun.
        """
        outcome: Future[T] = Future()
        context = copy_context()

        def job() -> None:
            # It imports huggingface_hub, which the server's start need not wait for.
            from mlx_manager.mlx_server.utils.broken import BROKEN

            if not outcome.set_running_or_notify_cancel():
                return
            try:
                outcome.set_result(context.run(function))
            except (MLXManagerError, *BROKEN) as error:
                outcome.set_exception(error)
            finally:
                if not outcome.done():
                    outcome.set_exception(RuntimeError("its thread has died"))

        with self._lock:
            self._jobs.setdefault(key, deque()).append((outcome, job))  # type: ignore[arg-type]
        self._start()
        try:
            return await asyncio.wrap_future(outcome)
        except asyncio.CancelledError:
            if waiting is not None:
                waiting.end()
            raise

    def _start(self) -> None:
        """Begin the next job if there is one, and a thread for it."""
        with self._lock:
            job = self._next() if self._running < self._most else None
            if job is None:
                return
            self._running += 1
        threading.Thread(target=self._do, args=(job,), daemon=True).start()

    def _next(self) -> Callable[[], None] | None:
        """The next job that somebody waits for: the oldest of the key whose turn it is."""
        while self._jobs:
            key, jobs = self._jobs.popitem(last=False)
            outcome, job = jobs.popleft()
            if jobs:
                self._jobs[key] = jobs
            if not outcome.cancelled():
                return job
        return None

    def _do(self, job: Callable[[], None]) -> None:
        try:
            job()
        finally:
            with self._lock:
                self._running -= 1
            self._start()
