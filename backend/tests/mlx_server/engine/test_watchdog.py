from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from mlx_manager.mlx_server.engine.thread import MLXThread
from mlx_manager.mlx_server.engine.watchdog import Fault, find_fault, revive
from mlx_manager.mlx_server.errors import MLXThreadFailed, ServerNotReady

LIMIT = 0.2


class Stuck:
    """An engine that goes round in Python for ever, or steps without doing anything."""

    def __init__(self, *, spins: bool) -> None:
        self.spins = spins
        self.failure: Exception | None = None
        self.over = threading.Event()

    steps = 0

    def has_work(self) -> bool:
        return self.failure is None

    def step(self) -> None:
        while self.spins:
            pass

    def wait(self, thread: MLXThread) -> None:
        """Until it has failed; the interrupt may also meet the thread between two steps."""
        while thread.alive and not self.over.wait(0.01):
            pass

    def fail(self, error: Exception) -> None:
        self.failure = error
        self.over.set()


@pytest.fixture
def thread() -> Iterator[MLXThread]:
    made = MLXThread()
    made.start()
    yield made
    made.close()


def end_thread() -> None:
    raise SystemExit


@pytest.mark.parametrize("spins", [True, False])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_step_that_never_ends_or_does_nothing_is_found_and_interrupted(
    thread: MLXThread, spins: bool
):
    engine = Stuck(spins=spins)
    await thread.call(lambda: thread.attach(engine))
    assert await find_fault(thread, LIMIT) is Fault.STALLED
    assert await revive(thread, LIMIT)
    await asyncio.to_thread(engine.wait, thread)
    if thread.alive:
        assert isinstance(engine.failure, MLXThreadFailed)
        assert await thread.call(lambda: 7) == 7


async def test_a_thread_that_hangs_in_native_code_is_given_up(thread: MLXThread):
    release = threading.Event()
    thread.post(lambda: release.wait() and None)
    assert await find_fault(thread, LIMIT) is Fault.STALLED
    assert not await revive(thread, LIMIT)
    release.set()


async def test_an_idle_thread_is_not_at_fault(thread: MLXThread):
    await thread.call(lambda: None)
    finding = asyncio.create_task(find_fault(thread, LIMIT))
    await asyncio.sleep(3 * LIMIT)
    assert not finding.done()
    finding.cancel()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_thread_that_dies_is_found_and_answers_everybody_who_waits(thread: MLXThread):
    held, release = threading.Event(), threading.Event()
    thread.post(lambda: held.set() or (release.wait() and None))
    await asyncio.to_thread(held.wait)
    waiting = [asyncio.create_task(thread.call(job)) for job in (end_thread, lambda: None)]
    await asyncio.sleep(0)
    release.set()
    for asked in waiting:
        with pytest.raises(ServerNotReady):
            await asked
    assert await find_fault(thread, 0) is Fault.DEAD
    with pytest.raises(ServerNotReady):
        await thread.call(lambda: None)
