"""A worker as the server sees it: real ones in this process, and one process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from here import Here, start_here
from pools import answer, events_of, open_pool, request
from tiny_models import make_tiny_model

from mlx_manager.mlx_server.core import Conversation, Event, Image, Message, Text
from mlx_manager.mlx_server.errors import (
    GenerationFailed,
    InvalidRequest,
    MLXManagerError,
    WorkerFailed,
)
from mlx_manager.mlx_server.models.pool import ModelPoolManager
from mlx_manager.mlx_server.workers.channel import Channel
from mlx_manager.mlx_server.workers.messages import Cancel, Look
from mlx_manager.mlx_server.workers.process import NO_LOG, ending, start_process
from mlx_manager.mlx_server.workers.worker import MemoryNews, Worker


@pytest.fixture(scope="module")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate("ab"):
        make_tiny_model(folder / name, seed=seed)
    return folder


@pytest.fixture
async def pool(models_dir: Path) -> AsyncIterator[ModelPoolManager]:
    async with open_pool(models_dir) as opened:
        yield opened


async def test_a_models_questions_are_answered_by_its_worker(pool: ModelPoolManager):
    async with pool.lease("a") as lease:
        found = await lease.backend.tokenize(Text("hello"), texts=True)
        assert len(found.texts) == len(found.ids)
        assert found.context_length == lease.facts.context_length
        assert "hello" in await lease.backend.detokenize(found.ids)
        assert "hello" in await lease.backend.render(Conversation((Message("user", "hello"),)))
        assert await lease.backend.leaves_room(request("a"))
        info = await lease.backend.tokenizer_info()
        assert info.context_length == found.context_length


async def test_an_error_of_the_workers_is_the_callers_and_ends_nothing_else(
    pool: ModelPoolManager,
):
    async with pool.lease("a") as lease:
        running = asyncio.create_task(answer(pool, "a", tokens=40))
        with pytest.raises(InvalidRequest) as refusal:
            async for _ in events_of(lease.backend, request("a", "word " * 5000)):
                pass
        assert refusal.value.code == "context_length_exceeded"
        assert await running


async def test_a_caller_who_leaves_ends_the_row(pool: ModelPoolManager):
    async with pool.lease("a") as lease:
        events = events_of(lease.backend, request("a", tokens=1500))
        await anext(events)
        await events.aclose()
        async with asyncio.timeout(30):
            while True:
                await pool.look()
                if not pool.rows():
                    break
        assert not lease.worker.busy


async def test_rows_and_questions_of_a_worker_that_ends_fail_and_others_go_on(
    pool: ModelPoolManager,
):
    other = asyncio.create_task(answer(pool, "b", tokens=60))
    async with pool.lease("a") as lease:
        events = events_of(lease.backend, request("a", tokens=1500))
        await anext(events)
        lease.worker.kill("it was ended by a test")
        with pytest.raises(WorkerFailed, match="The process of a has failed: it was ended by a"):
            async for _ in events:
                pass
        with pytest.raises(WorkerFailed, match="can be retried"):
            await lease.backend.tokenize(Text("x"))
    assert await other
    assert await answer(pool, "a")


async def test_an_answer_that_can_not_be_sent_fails_its_question_alone(models_dir: Path):
    async with open_pool(models_dir, start=(here := Here())) as pool, pool.lease("a") as lease:
        backend = here.models["a"].backend
        backend.detokenize = lambda ids: threading.Lock()
        with pytest.raises(GenerationFailed, match="cannot pickle"):
            await lease.backend.detokenize([1])
        assert await answer(pool, "a")


async def test_the_words_of_one_step_are_those_of_the_workers_own_backend(models_dir: Path):
    async with open_pool(models_dir, start=(here := Here())) as pool:
        async with pool.lease("a") as lease:
            through: list[Event] = []
            async for events in events_of(lease.backend, request("a", tokens=20)):
                through += events
            own: list[Event] = []
            async for events in events_of(here.models["a"].backend, request("a", tokens=20)):
                own += events
        assert [type(event) for event in through if event == own[-1]] == [type(own[-1])]
        texts = ["".join(getattr(e, "text", "") for e in some) for some in (through, own)]
        assert texts[0] == texts[1]


async def test_a_process_answers_before_a_model_is_loaded_and_says_how_it_ended():
    over: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def ended(worker: Worker, how: str) -> None:
        over.get_loop().call_soon_threadsafe(over.set_result, how)

    def heard(worker: Worker, news: MemoryNews) -> None:
        pass

    end, process = start_process("m", NO_LOG)
    worker = Worker("m", end, process, heard, ended)
    hello = await asyncio.wrap_future(worker.hello)
    assert hello.memory > hello.limit > 0
    with pytest.raises(MLXManagerError, match="not loaded"):
        await worker.ask(Look())
    os.kill(process.pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        assert await over == "it was ended by SIGKILL, as the kernel does when memory runs out"
    with pytest.raises(WorkerFailed, match="SIGKILL"):
        await worker.ask(Look())


class NoProcess:
    """A process that has ended."""

    pid = 0

    def kill(self, *, report: bool = False) -> None: ...

    def leave(self, seconds: float) -> None: ...

    def wait(self) -> str:
        return "it ended"


def connected() -> tuple[Worker, SimpleQueue[Any], Channel]:
    """Return a worker, what is sent to it, and its end of the connection."""
    ours, theirs = socket.socketpair()
    received: SimpleQueue[Any] = SimpleQueue()
    other = Channel(theirs, received.put, lambda: None, "worker")
    other.start()
    return Worker("m", ours, NoProcess(), lambda *_: None, lambda *_: None), received, other


async def test_the_rows_of_a_call_are_sent_with_their_prompt_once() -> None:
    worker, received, other = connected()
    shown = Image(b"x" * 100_000, "d", 8, 8, "messages")
    asked = replace(request("m"), prompt=Conversation((Message("user", (shown,)),)))
    tasks = [
        asyncio.create_task(worker.generate(replace(asked, request_id=f"{i}"), lambda *_: None))
        for i in range(3)
    ]
    asks = await asyncio.to_thread(received.get, timeout=30)
    assert [ask.question.request.request_id for ask in asks] == ["0", "1", "2"]
    assert len({id(ask.question.request.prompt) for ask in asks}) == 1
    tasks[1].cancel()
    assert await asyncio.to_thread(received.get, timeout=30) == Cancel(asks[1].number)
    other.close()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    kinds = [WorkerFailed, asyncio.CancelledError, WorkerFailed]
    assert [type(each) for each in found] == kinds


async def test_a_row_that_is_left_at_once_is_asked_for_before_it_is_cancelled() -> None:
    worker, received, other = connected()
    row = worker.generate(request("m"), lambda *_: None)
    row.send(None)
    row.close()
    [ask], cancel = [await asyncio.to_thread(received.get, timeout=30) for _ in range(2)]
    assert cancel == Cancel(ask.number)
    other.close()


@pytest.mark.parametrize(
    ("code", "said"), [(0, "exit code 0"), (-6, "SIGABRT"), (-200, "signal 200")]
)
def test_an_end_is_told_in_words(code: int, said: str):
    assert said in ending(code)


async def test_a_worker_that_ends_before_its_hello_fails_the_load(models_dir: Path):
    def dies(name: str, log: object) -> object:
        end, process = start_here(name)
        other = end.dup()
        other.shutdown(2)
        with suppress(OSError):
            other.close()
        return end, process

    async with open_pool(models_dir, start=dies) as pool:  # type: ignore[arg-type]
        with pytest.raises(WorkerFailed, match="The process of a has failed"):
            await answer(pool, "a")
        assert pool.grants.free() == pool.grants.limit
