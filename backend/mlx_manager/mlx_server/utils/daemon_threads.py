"""Threads for jobs that take long and can't be ended: the program can end while they run."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from typing import TypeVar

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
