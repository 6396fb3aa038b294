from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from contextvars import ContextVar
from functools import partial

import pytest

from mlx_manager.mlx_server.utils.daemon_threads import (
    AbandonedError,
    DaemonThreads,
    Waiting,
)

request: ContextVar[str] = ContextVar("request")


async def test_jobs_beyond_the_threads_wait_in_order():
    threads, gate = DaemonThreads(2), threading.Event()
    running = most = 0
    lock = threading.Lock()
    begun: list[int] = []

    def job(number: int) -> int:
        nonlocal running, most
        with lock:
            begun.append(number)
            running += 1
            most = max(most, running)
        assert gate.wait(30)
        with lock:
            running -= 1
        return number

    jobs = [asyncio.create_task(threads.run(lambda number=number: job(number))) for number in range(9)]  # fmt: skip
    await asyncio.sleep(0)
    gate.set()
    assert await asyncio.gather(*jobs) == list(range(9))
    assert most <= 2
    assert sorted(begun) == list(range(9))


async def test_a_job_whose_caller_has_left_is_not_begun():
    threads, gate = DaemonThreads(1), threading.Event()
    begun: list[str] = []
    first = asyncio.create_task(threads.run(lambda: gate.wait(30)))
    second = asyncio.create_task(threads.run(lambda: begun.append("second")))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    gate.set()
    assert await first
    await threads.run(lambda: begun.append("third"))
    assert begun == ["third"]


async def test_keys_take_turns():
    threads, gate = DaemonThreads(1), threading.Event()
    begun: list[str] = []
    first = asyncio.create_task(threads.run(lambda: gate.wait(30)))
    await asyncio.sleep(0)
    jobs = [
        asyncio.create_task(threads.run(partial(begun.append, name), name[0]))
        for name in ("a1", "a2", "a3", "b1", "b2", "c1")
    ]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(first, *jobs)
    assert begun == ["a1", "b1", "c1", "a2", "b2", "a3"]


async def test_a_job_is_told_when_nobody_waits_any_more():
    waiting, stopped, begun = Waiting(), threading.Event(), threading.Event()
    ended: list[str] = []

    def job() -> None:
        try:
            with waiting.stopping(stopped.set):
                begun.set()
                assert stopped.wait(30)
        except AbandonedError:
            ended.append("abandoned")
            raise

    threads = DaemonThreads(1)
    task = asyncio.create_task(threads.run(job, waiting=waiting))
    await asyncio.to_thread(begun.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await threads.run(lambda: None)
    assert ended == ["abandoned"]
    with pytest.raises(AbandonedError), waiting.stopping(lambda: None):
        pytest.fail("nobody waits for this")


def test_a_job_s_time_is_over_when_it_is():
    assert not Waiting().late
    assert not Waiting(60).late
    assert Waiting(-1).late


async def test_what_a_job_raises_its_caller_gets():
    with pytest.raises(KeyError, match="path"):
        await DaemonThreads(1).run(lambda: {}["path"])


class Panic(BaseException):
    """As PyO3 makes of Rust's."""


async def test_a_job_that_kills_its_thread_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def panic() -> None:
        raise Panic

    threads = DaemonThreads(1)
    async with asyncio.timeout(30):
        with pytest.raises(RuntimeError, match="its thread has died"):
            await threads.run(panic)
        assert await threads.run(lambda: "after") == "after"


async def test_a_job_knows_what_its_caller_knows():
    request.set("req-1")
    assert await DaemonThreads(1).run(request.get) == "req-1"


ENDLESS = """
import asyncio, threading
from mlx_manager.mlx_server.utils.daemon_threads import DaemonThreads

async def main():
    begun = threading.Event()
    def endless():
        begun.set()
        threading.Event().wait()
    job = asyncio.create_task(DaemonThreads(1).run(endless))
    await asyncio.to_thread(begun.wait)
    job.cancel()
    await asyncio.wait([job])

asyncio.run(main())
print("ended")
"""


def test_the_program_can_end_while_a_job_runs():
    done = subprocess.run(
        [sys.executable, "-c", ENDLESS], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "ended\n"
