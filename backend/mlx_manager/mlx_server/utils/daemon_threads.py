"""Threads for jobs that take long and may never end: the program can end while they run."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import copy_context
from time import monotonic
from typing import Generic, TypeVar

from mlx_manager.mlx_server.errors import MLXManagerError

T = TypeVar("T")

AGAIN_SECONDS = 1.0
"""Until a function that has been interrupted, and goes on, is interrupted again."""


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
            from mlx_manager.mlx_server.utils.steps import BROKEN

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


class Interrupted(SystemExit):
    """Raised in a job that has had its time, once it is back in Python. Ends its thread quietly."""


class Job(Generic[T]):
    """A function on a daemon thread of its own, which can be given up."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._outcome: Future[T] = Future()
        self._context = copy_context()
        self._lock = threading.Lock()
        self._over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Return whether the job is still under way, waited for or not."""
        return self._thread.is_alive()

    async def result(self, seconds: float | None) -> T:
        """Return the function's result. A caller that is cancelled, or has waited so long,
        interrupts the job.

        Raises:
            TimeoutError: it has taken so many seconds.
            Exception: what the function raises.
        """
        waiting = asyncio.wrap_future(self._outcome)
        try:
            done, _ = await asyncio.wait([waiting], timeout=seconds)
        except asyncio.CancelledError:
            self._interrupt()
            waiting.cancel()
            raise
        if not done:
            self._interrupt()
            waiting.cancel()
            raise TimeoutError
        return waiting.result()

    def _run(self) -> None:
        with suppress(Interrupted):
            self._do()

    def _do(self) -> None:
        from mlx_manager.mlx_server.utils.steps import BROKEN

        try:
            result = self._context.run(self._function)
        except (MLXManagerError, *BROKEN) as error:
            self._end()
            if self._outcome.set_running_or_notify_cancel():
                self._outcome.set_exception(error)
        else:
            self._end()
            if self._outcome.set_running_or_notify_cancel():
                self._outcome.set_result(result)
        finally:
            self._end()
            if not self._outcome.done():
                self._outcome.set_exception(RuntimeError("its thread has died"))

    def _end(self) -> None:
        """Be interrupted no more."""
        with self._lock:
            self._over = True

    def _interrupt(self) -> None:
        threading.Thread(target=self._insist, daemon=True).start()

    def _insist(self) -> None:
        """Raise in the function until it has ended: a callback of the garbage collector, or a
        finalizer, swallows what is raised in it."""
        while self._raise():
            self._thread.join(AGAIN_SECONDS)

    def _raise(self) -> bool:
        """Only while the function runs: nothing may come between its end and the news of it."""
        with self._lock:
            if self._over or self._thread.ident is None:
                return False
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._thread.ident), ctypes.py_object(Interrupted)
            )
            return True
