"""The one thread that owns every mlx call: load, step, free.

MLX's streams are thread-local, so an array made here can only be computed here. Everybody else
sends messages: `call` (awaits the result), `post` (does not wait). Between messages the thread
steps the engines that have work; with neither it blocks in the queue and never polls.

This is one of the two places that catch every exception (the other is `api/errors.py`): whatever
a step raises fails the rows of that engine alone, and the thread lives on.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

from mlx_manager.mlx_server.errors import ServerNotReady
from mlx_manager.mlx_server.utils.allocator import keep_freed_memory
from mlx_manager.mlx_server.utils.graphs import record_whole_steps

T = TypeVar("T")
log = logging.getLogger(__name__)


class Engine(Protocol):
    """What the thread steps. All methods are called on the MLX thread."""

    def has_work(self) -> bool: ...

    def step(self) -> None: ...

    def fail(self, error: Exception) -> None:
        """Fail every row with `error` and become sound again; must not raise."""
        ...


class MLXThread:
    """Runs callables and engine steps, one after the other, on a thread of its own."""

    def __init__(self) -> None:
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._engines: list[Engine] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="mlx", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        keep_freed_memory()
        record_whole_steps()
        self._thread.start()

    def post(self, message: Callable[[], None]) -> None:
        """Run `message` between steps. What it raises is logged: nobody waits for it."""
        self._inbox.put(message)

    async def call(self, function: Callable[[], T]) -> T:
        """Run `function` between steps and return what it returns.

        Raises:
            ServerNotReady: the thread has been closed.
            Exception: whatever `function` raises.
        """
        if self._closing or not self.alive:
            raise ServerNotReady("The server is shutting down.")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(set_outcome: Callable[[], None]) -> None:
            def unless_cancelled() -> None:
                if not future.done():
                    set_outcome()

            loop.call_soon_threadsafe(unless_cancelled)

        def message() -> None:
            try:
                result = function()
            except Exception as error:  # noqa: BLE001 the caller gets it
                failure = error
                settle(lambda: future.set_exception(failure))
            else:
                settle(lambda: future.set_result(result))

        self._inbox.put(message)
        return await future

    def attach(self, engine: Engine) -> None:
        """Step `engine` whenever it has work. On the MLX thread only."""
        self._engines.append(engine)

    def detach(self, engine: Engine) -> None:
        """Stop stepping `engine`. On the MLX thread only."""
        self._engines.remove(engine)

    def close(self, timeout: float = 30.0) -> None:
        """Finish the messages sent so far, then end the thread. Safe to call twice."""
        if not self._closing:
            self._closing = True
            self._inbox.put(lambda: None)
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self) -> None:
        import mlx.core as mx

        try:
            while True:
                working = any(engine.has_work() for engine in self._engines)
                self._read_inbox(block=not working and not self._closing)
                if self._closing:
                    break
                self._step_all()
            self._read_inbox(block=False)
        finally:
            mx.clear_streams()

    def _read_inbox(self, *, block: bool) -> None:
        while True:
            try:
                message = self._inbox.get(block=block)
            except Empty:
                return
            block = False
            try:
                message()
            except Exception:
                log.exception("a message to the MLX thread failed")

    def _step_all(self) -> None:
        """No name in `_run` may keep an engine alive, whose model a message may be unloading."""
        for engine in tuple(self._engines):
            if not engine.has_work():
                continue
            try:
                engine.step()
            except Exception as error:
                log.exception("a step failed; its rows are failed and the engine goes on")
                engine.fail(error)
