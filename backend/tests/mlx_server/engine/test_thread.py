from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections.abc import Iterator

import mlx.core as mx
import pytest

from mlx_manager.mlx_server.devices import table as devices
from mlx_manager.mlx_server.devices.cuda import graphs
from mlx_manager.mlx_server.engine.thread import MLXThread
from mlx_manager.mlx_server.errors import ServerNotReady


class Work:
    """An engine that does so many steps, and may break at some of them."""

    def __init__(self, steps: int = 0, breaks_at: frozenset[int] = frozenset()) -> None:
        self.left = steps
        self.breaks_at = breaks_at
        self.done = 0
        self.threads: set[int] = set()
        self.failures: list[str] = []
        self.idle_steps = 0
        self.finished = threading.Event()

    @property
    def steps(self) -> int:
        return self.done

    def has_work(self) -> bool:
        return self.left > 0

    def step(self) -> None:
        self.threads.add(threading.get_ident())
        if self.left == 0:
            self.idle_steps += 1
            return
        self.left -= 1
        self.done += 1
        if self.left == 0:
            self.finished.set()
        if self.done in self.breaks_at:
            raise RuntimeError(f"step {self.done} broke")

    def fail(self, error: Exception) -> None:
        self.failures.append(str(error))

    def add(self, steps: int) -> None:
        self.finished.clear()
        self.left += steps


@pytest.fixture
def thread() -> Iterator[MLXThread]:
    made = MLXThread()
    made.start()
    yield made
    made.close()
    assert not made.alive


@pytest.mark.parametrize("kind", ["CPU", "CUDA", "METAL"])
def test_whole_steps_are_recorded_on_an_nvidia_gpu_alone(monkeypatch, kind: str) -> None:
    """Metal reads the same variables, and macOS ends recordings of seconds."""
    for name in graphs.SETTINGS:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(devices, "current", lambda: getattr(devices, kind))
    thread = MLXThread()
    thread.start()
    thread.close()
    found = {name for name in graphs.SETTINGS if name in os.environ}
    assert found == (set(graphs.SETTINGS) if kind == "CUDA" else set())


async def done(work: Work) -> None:
    assert await asyncio.to_thread(work.finished.wait, 30)


async def test_a_call_returns_what_the_function_returns_on_the_one_thread(
    thread: MLXThread,
) -> None:
    here = threading.get_ident()
    idents = [await thread.call(threading.get_ident) for _ in range(3)]
    assert len(set(idents)) == 1
    assert idents[0] != here


async def test_a_call_raises_what_the_function_raises(thread: MLXThread) -> None:
    def broken() -> None:
        raise LookupError("not there")

    with pytest.raises(LookupError, match="not there"):
        await thread.call(broken)
    assert await thread.call(lambda: 1) == 1


async def test_messages_are_handled_in_the_order_they_were_sent(thread: MLXThread) -> None:
    seen: list[int] = []
    for n in range(50):
        thread.post(lambda n=n: seen.append(n))  # type: ignore[misc]
    await thread.call(lambda: None)
    assert seen == list(range(50))


async def test_a_message_that_raises_is_logged_and_the_thread_lives_on(
    thread: MLXThread, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise KeyError("lost")

    thread.post(broken)
    assert await thread.call(lambda: "alive") == "alive"
    assert "lost" in caplog.text


async def test_a_caller_that_gave_up_does_not_disturb_the_thread(thread: MLXThread) -> None:
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, about: complaints.append(about))
    gate = threading.Event()
    impatient = asyncio.ensure_future(thread.call(gate.wait))
    await asyncio.sleep(0)
    impatient.cancel()
    with pytest.raises(asyncio.CancelledError):
        await impatient
    gate.set()
    assert await thread.call(lambda: 2) == 2
    assert not complaints


def test_a_caller_whose_loop_is_gone_does_not_disturb_the_thread(thread: MLXThread) -> None:
    gate = threading.Event()

    async def abandon() -> None:
        task = asyncio.ensure_future(thread.call(gate.wait))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(abandon())
    gate.set()

    async def ask() -> int:
        return await thread.call(lambda: 3)

    assert asyncio.run(ask()) == 3


async def test_arrays_made_on_the_thread_are_computed_there(thread: MLXThread) -> None:
    array = await thread.call(lambda: mx.arange(4) * 2)
    assert await thread.call(array.tolist) == [0, 2, 4, 6]


async def test_an_engine_without_work_is_not_stepped_and_the_thread_blocks(
    thread: MLXThread,
) -> None:
    asked = 0

    class Idle(Work):
        def has_work(self) -> bool:
            nonlocal asked
            asked += 1
            return super().has_work()

    idle = Idle()
    await thread.call(lambda: thread.attach(idle))
    before = asked
    # Work that leaves the interpreter free: a polling thread would ask many times over.
    await asyncio.to_thread(hashlib.sha256, bytes(32 << 20))
    assert asked - before <= 4
    assert (idle.done, idle.idle_steps) == (0, 0)
    thread.post(lambda: idle.add(3))
    await done(idle)
    assert (idle.done, idle.idle_steps) == (3, 0)


async def test_an_engine_that_raises_is_failed_and_stepped_on(thread: MLXThread) -> None:
    broken = Work(6, frozenset({2, 3}))
    await thread.call(lambda: thread.attach(broken))
    await done(broken)
    await thread.call(lambda: None)
    assert broken.failures == ["step 2 broke", "step 3 broke"]
    assert broken.done == 6


async def test_a_detached_engine_is_not_stepped_any_more(thread: MLXThread) -> None:
    work = Work(1_000_000)

    def detach() -> int:
        thread.detach()
        return work.done

    await thread.call(lambda: thread.attach(work))
    stopped_at = await thread.call(detach)
    await thread.call(lambda: None)
    assert work.done == stopped_at


async def test_messages_get_in_between_the_steps_of_a_busy_engine(thread: MLXThread) -> None:
    work = Work(1_000_000)
    await thread.call(lambda: thread.attach(work))
    seen = [await thread.call(lambda: work.done) for _ in range(10)]
    assert seen == sorted(seen)
    assert seen[-1] < 1_000_000
    await thread.call(thread.detach)


async def test_a_message_sent_by_another_waits_for_the_engines_to_step(thread: MLXThread) -> None:
    work = Work(3)
    seen: list[int] = []

    def piece() -> None:
        seen.append(work.done)
        if work.has_work():
            thread.post(piece)

    def begin() -> None:
        thread.attach(work)
        piece()

    await thread.call(begin)
    await done(work)
    await thread.call(lambda: None)
    assert seen == [0, 1, 2, 3]


async def test_a_closed_thread_refuses() -> None:
    thread = MLXThread()
    with pytest.raises(ServerNotReady):
        await thread.call(lambda: 1)
    thread.start()
    assert await thread.call(lambda: 1) == 1
    thread.close()
    assert not thread.alive
    with pytest.raises(ServerNotReady):
        await thread.call(lambda: 1)
    thread.close()


async def test_what_was_sent_before_closing_is_still_done() -> None:
    thread = MLXThread()
    thread.start()
    gate, seen = threading.Event(), []
    thread.post(lambda: gate.wait(30))
    for n in range(5):
        thread.post(lambda n=n: seen.append(n))  # type: ignore[misc]
    last = asyncio.ensure_future(thread.call(lambda: "last"))
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(asyncio.to_thread(thread.close))
    gate.set()
    await closing
    assert seen == list(range(5))
    assert await last == "last"


async def test_closing_does_not_wait_for_a_busy_engine_to_finish() -> None:
    thread = MLXThread()
    thread.start()
    work = Work(10**9)
    await thread.call(lambda: thread.attach(work))
    await asyncio.to_thread(thread.close)
    assert not thread.alive
    assert work.left > 0
