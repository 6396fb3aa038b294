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
    """Raised in a job that nobody waits for any more."""


class Waiting:
    """The wait of a caller for a job that has begun; the job is stopped when nobody waits.

    seconds: the time that the job may take in all.
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
        """End the wait: stop the job's current work, and let the job begin nothing else."""
        with self._lock:
            self._over = True
            if self._stop is not None:
                self._stop()

    @contextmanager
    def stopping(self, stop: Callable[[], object]) -> Iterator[None]:
        """Enter a context in which `stop`, callable on any thread, stops the job's current work.

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
    """Threads, at most `most` at a time, each for one job; further jobs wait.

    Keys take turns, and the jobs of one key follow each other. The program's end does not wait for
    these threads, unlike an executor's.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        # Jobs by key. The key whose turn is next is first; keys without jobs are removed.
        self._jobs: OrderedDict[str, deque[tuple[Future[object], Callable[[], None]]]] = (
            OrderedDict()
        )
        self._running = 0

    async def run(
        self, function: Callable[[], T], key: str = "", waiting: Waiting | None = None
    ) -> T:
        """Run a function as `asyncio.to_thread` does, on one of these threads.

        A caller that is cancelled withdraws a job that has not begun. key: the group of jobs that
        takes turns with others. waiting: ended when the caller is cancelled.
        """
        outcome = self.submit(function, key)
        try:
            return await asyncio.wrap_future(outcome)
        except asyncio.CancelledError:
            if waiting is not None:
                waiting.end()
            raise

    def submit(self, function: Callable[[], T], key: str = "") -> Future[T]:
        """Run a function on one of these threads, and return its outcome, which may be cancelled
        before the function has begun. key: as in `run`."""
        outcome: Future[T] = Future()
        context = copy_context()

        def job() -> None:
            # This imports huggingface_hub, for which the server's start need not wait.
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
        return outcome

    def _start(self) -> None:
        """Begin the next job on a thread of its own, if there is one and a thread is free."""
        with self._lock:
            job = self._next() if self._running < self._most else None
            if job is None:
                return
            self._running += 1
        threading.Thread(target=self._do, args=(job,), daemon=True).start()

    def _next(self) -> Callable[[], None] | None:
        """Remove and return the oldest job of the key whose turn it is; skip cancelled ones."""
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
