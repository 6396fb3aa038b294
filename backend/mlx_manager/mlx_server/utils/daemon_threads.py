"""Threads for jobs that take long and may never end: the program can end while they run."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from typing import Generic, TypeVar

from mlx_manager.mlx_server.errors import MLXManagerError

T = TypeVar("T")


class DaemonThreads:
    """At most `most` at a time, each for one job; jobs beyond that wait their turn.

    Nobody waits for them when the program ends, as for an executor's.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._jobs: deque[Callable[[], None]] = deque()
        self._running = 0

    async def run(self, function: Callable[[], T]) -> T:
        """`asyncio.to_thread` on one of these. Who is cancelled takes back what has not begun."""
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
            self._jobs.append(job)
        self._start()
        return await asyncio.wrap_future(outcome)

    def _start(self) -> None:
        """Begin the oldest job if there is one, and a thread for it."""
        with self._lock:
            if not self._jobs or self._running == self._most:
                return
            self._running += 1
            job = self._jobs.popleft()
        threading.Thread(target=self._do, args=(job,), daemon=True).start()

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
        """Whether it is still under way, waited for or not."""
        return self._thread.is_alive()

    async def result(self, seconds: float | None) -> T:
        """What the function returns. Who is cancelled, or has waited so long, interrupts it.

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
        """Only while the function runs: nothing may come between its end and the news of it."""
        with self._lock:
            if self._over or self._thread.ident is None:
                return
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._thread.ident), ctypes.py_object(Interrupted)
            )
