from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from mlx_manager.mlx_server.api.sse import EventStreamResponse
from mlx_manager.mlx_server.core import Progress, TextDelta
from mlx_manager.mlx_server.errors import GenerationFailed, MLXManagerError, ModelNotFound

LONG = 3600.0


class Words:
    """Writes each delta's text in capitals."""

    keep_alive = b"alive"

    def write(self, progress: Progress) -> bytes:
        return "".join(e.text for _, events in progress for e in events).upper().encode()

    def end(self) -> bytes:
        return b"END"

    def fail(self, error: MLXManagerError) -> bytes:
        return f"FAILED {error.code}".encode()


class Caller:
    """The other end of one response."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.leaves = asyncio.Event()
        self.got = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        self.got.set()

    @property
    def bodies(self) -> list[bytes]:
        return [m["body"] for m in self.sent if m["type"] == "http.response.body"]

    async def call(self, progress: AsyncGenerator[Progress, None], keepalive: float = LONG) -> None:
        response = EventStreamResponse(progress, Words(), keepalive=keepalive, headers={"x-a": "b"})
        await response({"type": "http"}, self.receive, self.send)


def text(*pieces: str) -> Progress:
    return [(0, [TextDelta(piece) for piece in pieces])]


async def test_each_step_is_one_message_and_the_end_completes_the_response():
    async def progress() -> AsyncGenerator[Progress, None]:
        yield text("a", "b")
        yield text("c")

    caller = Caller()
    await caller.call(progress())
    assert caller.bodies == [b"AB", b"C", b"END"]
    assert [m.get("more_body") for m in caller.sent] == [None, True, True, False]
    headers = dict(caller.sent[0]["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert headers[b"x-a"] == b"b"
    assert b"content-length" not in headers


async def test_steps_with_nothing_to_say_send_nothing():
    async def progress() -> AsyncGenerator[Progress, None]:
        yield []
        yield text("a")

    caller = Caller()
    await caller.call(progress())
    assert caller.bodies == [b"A", b"END"]


async def test_a_failure_before_the_first_byte_is_raised_and_nothing_is_sent():
    async def progress() -> AsyncGenerator[Progress, None]:
        raise ModelNotFound("no such model")
        yield []

    caller = Caller()
    with pytest.raises(ModelNotFound):
        await caller.call(progress())
    assert caller.sent == []


async def test_a_failure_later_is_the_last_event_and_there_is_no_end():
    async def progress() -> AsyncGenerator[Progress, None]:
        yield text("a")
        raise GenerationFailed("the step failed")

    caller = Caller()
    await caller.call(progress())
    assert caller.bodies == [b"A", b"FAILED generation_failed"]
    assert caller.sent[-1]["more_body"] is False


async def test_silence_is_filled_with_signs_of_life_and_the_headers_go_with_the_first():
    gate = asyncio.Event()

    async def progress() -> AsyncGenerator[Progress, None]:
        await gate.wait()
        yield text("a")

    caller = Caller()
    call = asyncio.create_task(caller.call(progress(), keepalive=0.001))
    while len(caller.bodies) < 3:
        caller.got.clear()
        await caller.got.wait()
    gate.set()
    await call
    assert caller.sent[0]["type"] == "http.response.start"
    assert set(caller.bodies[:3]) == {b"alive"}
    assert caller.bodies[-2:] == [b"A", b"END"]


async def test_a_failure_after_a_comment_is_an_event():
    gate = asyncio.Event()

    async def progress() -> AsyncGenerator[Progress, None]:
        await gate.wait()
        raise ModelNotFound("no such model")
        yield []

    caller = Caller()
    call = asyncio.create_task(caller.call(progress(), keepalive=0.001))
    await caller.got.wait()
    gate.set()
    await call
    assert b"model_not_found" in caller.bodies[-1]


@pytest.mark.parametrize("steps_before", [0, 1])
async def test_hanging_up_closes_the_progress_at_once(steps_before: int):
    closed = asyncio.Event()
    waiting = asyncio.Event()

    async def progress() -> AsyncGenerator[Progress, None]:
        try:
            for _ in range(steps_before):
                yield text("a")
            waiting.set()
            await asyncio.Event().wait()
        finally:
            closed.set()

    caller = Caller()
    call = asyncio.create_task(caller.call(progress()))
    await waiting.wait()
    caller.leaves.set()
    with pytest.raises(ClientDisconnect):
        await call
    assert closed.is_set()


async def test_hanging_up_while_a_write_is_stuck_closes_the_progress():
    closed = asyncio.Event()
    stuck = asyncio.Event()

    async def progress() -> AsyncGenerator[Progress, None]:
        try:
            yield text("a")
        finally:
            closed.set()

    class SlowCaller(Caller):
        async def send(self, message: Any) -> None:
            stuck.set()
            await asyncio.Event().wait()

    caller = SlowCaller()
    call = asyncio.create_task(caller.call(progress()))
    await stuck.wait()
    caller.leaves.set()
    with pytest.raises(ClientDisconnect):
        await call
    assert closed.is_set()


async def test_a_server_that_stops_cancels_without_calling_it_a_hang_up():
    waiting = asyncio.Event()

    async def progress() -> AsyncGenerator[Progress, None]:
        waiting.set()
        await asyncio.Event().wait()
        yield []

    call = asyncio.create_task(Caller().call(progress()))
    await waiting.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_no_task_is_left_behind():
    async def progress() -> AsyncGenerator[Progress, None]:
        yield text("a")

    before = asyncio.all_tasks()
    await Caller().call(progress(), keepalive=0.001)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
