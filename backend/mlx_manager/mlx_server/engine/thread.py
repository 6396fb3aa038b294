"""The one thread that owns every mlx call: load, step, free.

MLX's streams are thread-local, so an array made here can only be computed here. Everybody else
sends messages: `call` (awaits the result), `post` (does not wait). Between messages the thread
steps the engine, if it has work; with neither it blocks in the queue and never polls.

This is one of the three places that catch every exception (the others are `api/errors.py` and
`workers/host.py`): whatever a step raises fails the rows of that engine alone, and the thread lives
on. What ends the thread
all the same (SystemExit, say) fails every message that waits for it, and with it ends the process
(`workers/host.py`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Protocol, TypeVar

from mlx_manager.mlx_server.devices.cuda.graphs import (
    keep_cpu_kernels,
    keep_kernels,
    record_whole_steps,
)
from mlx_manager.mlx_server.devices.metal.faults import GPUFaults
from mlx_manager.mlx_server.errors import ServerNotReady

T = TypeVar("T")
log = logging.getLogger(__name__)


class Engine(Protocol):
    """Engine that the thread steps. All methods are called on the MLX thread."""

    @property
    def steps(self) -> int:
        """Return the number of steps begun."""
        ...

    def has_work(self) -> bool: ...

    def step(self) -> None: ...

    def fail(self, error: Exception) -> None:
        """Fail every row with `error` and become sound again; must not raise."""
        ...


class ThreadMessage(Protocol):
    def run(self) -> Exception | None:
        """Run the message; return its error if whoever waits has been told of it, else None."""
        ...

    def abandon(self) -> None:
        """Give the message up: the thread has ended and will never run it."""
        ...


class Post:
    """Message whose result nobody waits for."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def run(self) -> None:
        self._function()

    def abandon(self) -> None:
        pass


class Question:
    """Message whose result or error a caller in an event loop waits for."""

    def __init__(self, function: Callable[[], T], answer: asyncio.Future[T]) -> None:
        self._function = function
        self._answer = answer

    def run(self) -> Exception | None:
        try:
            result = self._function()
        except Exception as error:  # noqa: BLE001 the caller gets it
            self._fail(error)
            return error
        except BaseException:
            self.abandon()
            raise
        else:
            self._settle(lambda: self._answer.set_result(result))
        return None

    def abandon(self) -> None:
        self._fail(ServerNotReady("The MLX thread has ended."))

    def _fail(self, error: Exception) -> None:
        self._settle(lambda: self._answer.set_exception(error))

    def _settle(self, set_outcome: Callable[[], None]) -> None:
        def unless_cancelled() -> None:
            if not self._answer.done():
                set_outcome()

        loop = self._answer.get_loop()
        if not loop.is_closed():
            loop.call_soon_threadsafe(unless_cancelled)


def ready_device() -> None:
    """Set MLX up for the device, before anything is computed."""
    keep_kernels()
    from mlx_manager.mlx_server.devices import table as devices

    device = devices.current()
    if device.records_steps:
        record_whole_steps()
    if device.kind == "cpu":
        keep_cpu_kernels()


class MLXThread:
    """Thread that runs callables and the steps of one engine, one after the other."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._inbox: SimpleQueue[ThreadMessage] = SimpleQueue()
        self._engine: Engine | None = None
        self._closing = False
        self._ended = False
        self._clock = clock
        self._faults = GPUFaults(clock)
        self._progress: float | None = None
        self._thread = threading.Thread(target=self._run, name="mlx", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._ended

    @property
    def lost_gpu(self) -> str | None:
        """Return why the GPU takes no more work from this process; None while it does."""
        return self._faults.fatal

    @property
    def silence(self) -> float:
        """Return the seconds since the last message or step was done; 0 without work to do."""
        progress = self._progress
        return 0.0 if progress is None else self._clock() - progress

    def start(self) -> None:
        ready_device()
        self._thread.start()

    def post(self, message: Callable[[], None]) -> None:
        """Run `message` between steps. Its errors are logged, since nobody waits for it."""
        self._put(Post(message))

    async def call(self, function: Callable[[], T]) -> T:
        """Run `function` between steps and return what it returns.

        Raises:
            ServerNotReady: the thread has been closed, or has died.
            Exception: whatever `function` raises.
        """
        if self._closing or not self.alive:
            raise ServerNotReady("The server is shutting down.")
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._put(Question(function, answer))
        return await answer

    def _put(self, message: ThreadMessage) -> None:
        self._inbox.put(message)
        if self._ended:
            # Whoever waits must know, and no message may keep what it speaks of in memory.
            self._abandon_inbox()

    def attach(self, engine: Engine) -> None:
        """Step `engine` whenever it has work. On the MLX thread only."""
        self._engine = engine

    def detach(self) -> None:
        """Step no engine. On the MLX thread only."""
        self._engine = None

    def close(self, timeout: float = 30.0) -> None:
        """Finish the messages sent so far, then end the thread. Safe to call twice."""
        if not self._closing:
            self._closing = True
            self.post(lambda: None)
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self) -> None:
        import mlx.core as mx

        try:
            while True:
                working = self._engine is not None and self._engine.has_work()
                self._read_inbox(block=not working and not self._closing)
                if self._closing:
                    break
                self._step()
            self._read_inbox(block=False)
        finally:
            self._ended = True
            self._engine = None
            self._abandon_inbox()
            mx.clear_streams()

    def _read_inbox(self, *, block: bool) -> None:
        """Run the messages that are there, or with `block` the next one.

        Messages sent meanwhile wait for a step: a caller that sends one at each answer would keep
        the engine from its steps.
        """
        if block:
            self._progress = None
        for _ in range(max(self._inbox.qsize(), block)):
            self._run_message(self._inbox.get())

    def _run_message(self, message: ThreadMessage) -> None:
        self._progress = self._clock()
        try:
            error = message.run()
        except Exception as raised:
            log.exception("a message to the MLX thread failed")
            error = raised
        if error is not None:
            self._faults.note(error)
        self._progress = self._clock()

    def _abandon_inbox(self) -> None:
        while True:
            try:
                self._inbox.get(block=False).abandon()
            except Empty:
                return

    def _step(self) -> None:
        engine = self._engine
        if engine is None or not engine.has_work():
            return
        before = engine.steps
        try:
            engine.step()
        except Exception as error:
            log.exception("a step failed; its rows are failed and the engine goes on")
            self._faults.note(error)
            engine.fail(error)
            self._progress = self._clock()
        if engine.steps != before:
            self._progress = self._clock()
