from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from random import Random
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from mlx_manager.mlx_server.api.sse import EventStreamResponse
from mlx_manager.mlx_server.core import (
    Event,
    Finished,
    Progress,
    Started,
    TextDelta,
    Usage,
)
from mlx_manager.mlx_server.engine.stream import LoopRow, Outbox, Steps, Work
from mlx_manager.mlx_server.errors import GenerationFailed, MLXManagerError, ModelNotFound

LONG = 3600.0


class Words:
    """Writes each delta's text in capitals."""

    media_type = "text/event-stream"
    keep_alive = b"alive"

    def write(self, progress: Progress) -> bytes:
        said = (getattr(e, "text", "") for _, events in progress for e in events)
        return "".join(said).upper().encode()

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

    async def call(self, work: Work, keepalive: float = LONG, **state: object) -> None:
        response = EventStreamResponse(work, Words(), keepalive=keepalive, headers={"x-a": "b"})
        await response({"type": "http", "state": state}, self.receive, self.send)


def text(*pieces: str) -> Progress:
    return [(0, [TextDelta(piece) for piece in pieces])]


def slowly(progress: Callable[[], AsyncGenerator[Progress, None]]) -> Work:
    """Return work whose steps come when all before have been read."""

    async def work(inbox: Steps) -> None:
        async with aclosing(progress()) as steps:
            async for step in steps:
                inbox.put(step)
                await inbox.taken()

    return work


async def test_each_step_is_one_message_and_the_end_completes_the_response():
    async def progress() -> AsyncGenerator[Progress, None]:
        yield text("a", "b")
        yield text("c")

    caller = Caller()
    await caller.call(slowly(progress))
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
    await caller.call(slowly(progress))
    assert caller.bodies == [b"A", b"END"]


async def test_a_failure_before_the_first_byte_is_raised_and_nothing_is_sent():
    async def progress() -> AsyncGenerator[Progress, None]:
        raise ModelNotFound("no such model")
        yield []

    caller = Caller()
    with pytest.raises(ModelNotFound):
        await caller.call(slowly(progress))
    assert caller.sent == []


async def test_a_failure_later_is_the_last_event_and_there_is_no_end():
    async def progress() -> AsyncGenerator[Progress, None]:
        yield text("a")
        raise GenerationFailed("the step failed")

    caller = Caller()
    await caller.call(slowly(progress))
    assert caller.bodies == [b"A", b"FAILED generation_failed"]
    assert caller.sent[-1]["more_body"] is False


async def test_silence_is_filled_with_signs_of_life_and_the_headers_go_with_the_first():
    gate = asyncio.Event()

    async def progress() -> AsyncGenerator[Progress, None]:
        await gate.wait()
        yield text("a")

    caller = Caller()
    call = asyncio.create_task(caller.call(slowly(progress), keepalive=0.001))
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
    call = asyncio.create_task(caller.call(slowly(progress), keepalive=0.001))
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
    call = asyncio.create_task(caller.call(slowly(progress)))
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
    call = asyncio.create_task(caller.call(slowly(progress)))
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

    call = asyncio.create_task(Caller().call(slowly(progress)))
    await waiting.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


class Connection:
    """Takes pieces at once, as long as the caller keeps up."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.keeps_up = True

    def are_taken(self) -> bool:
        return self.keeps_up

    def write(self, data: bytes) -> None:
        self.caller.sent.append({"type": "chunk", "body": data})


class Answering:
    """An answer under way: steps are put into it as they are told."""

    def __init__(self, caller: Caller, connection: Connection | None, keepalive: float = LONG):
        self.steps: asyncio.Queue[Progress | None] = asyncio.Queue()
        state = {} if connection is None else {"chunks": connection}
        self.call = asyncio.create_task(caller.call(self._work, keepalive, **state))
        self._inbox: asyncio.Future[Steps] = asyncio.get_running_loop().create_future()
        self._over = asyncio.Event()

    async def _work(self, inbox: Steps) -> None:
        self._inbox.set_result(inbox)
        await self._over.wait()

    async def put(self, *events: Event, row: int = 0) -> None:
        (await self._inbox).put([(row, list(events))])

    async def say(self, *texts: str) -> None:
        for piece in texts:
            await self.put(TextDelta(piece))
            # The reader is quick.
            for _ in range(5):
                await asyncio.sleep(0)

    async def end(self) -> None:
        self._over.set()
        await self.call


@pytest.mark.parametrize("server", ["ours", "another"])
async def test_a_caller_that_keeps_up_gets_each_step_by_itself(server: str):
    caller = Caller()
    answer = Answering(caller, Connection(caller) if server == "ours" else None)
    await answer.put(Started(3), TextDelta("a"))
    await caller.got.wait()
    await answer.say("b", "c")
    await answer.put(TextDelta("d"), Finished("stop", Usage(3, 4)))
    await answer.end()
    pieces = [m["body"] for m in caller.sent[1:]]
    assert pieces == [b"A", b"B", b"C", b"D", b"END"]
    by = {m["body"]: m["type"] for m in caller.sent[1:]}
    assert by[b"B"] == by[b"D"] == ("chunk" if server == "ours" else "http.response.body")
    assert by[b"A"] == by[b"END"] == "http.response.body"


async def test_a_step_that_says_nothing_ends_no_answer():
    caller = Caller()
    answer = Answering(caller, Connection(caller))
    await answer.put(Started(3), TextDelta("a"))
    await caller.got.wait()
    await answer.say("", "b")
    await answer.put(Finished("stop", Usage(3, 3)))
    await answer.end()
    assert [m["body"] for m in caller.sent[1:]] == [b"A", b"B", b"END"]


async def test_a_caller_that_falls_behind_gets_all_of_it_in_order():
    class Stuck(Caller):
        def __init__(self) -> None:
            super().__init__()
            self.takes = asyncio.Event()

        async def send(self, message: Any) -> None:
            await self.takes.wait()
            await super().send(message)

    caller = Stuck()
    caller.takes.set()
    connection = Connection(caller)
    answer = Answering(caller, connection)
    await answer.put(Started(3), TextDelta("a"))
    await caller.got.wait()
    await answer.say("b")
    caller.takes.clear()
    connection.keeps_up = False
    await answer.say("c", "d", "e")
    # The connection is free again, and what lies before it has not been sent yet.
    connection.keeps_up = True
    await answer.say("f")
    caller.takes.set()
    await answer.put(Finished("stop", Usage(3, 7)))
    await answer.end()
    assert [m["body"] for m in caller.sent[1:]] == [b"A", b"B", b"C", b"DEF", b"END"]


async def test_rows_side_by_side_keep_their_order_each():
    """The rows do not wait for the caller, who may be behind with both."""

    class Hesitant(Caller):
        async def send(self, message: Any) -> None:
            for _ in range(3):
                await asyncio.sleep(0)
            await super().send(message)

    caller = Hesitant()
    connection = Connection(caller)
    answer = Answering(caller, connection, keepalive=0.001)
    for row in range(2):
        await answer.put(Started(3), row=row)
    chance = Random(1)
    for number in range(200):
        connection.keeps_up = chance.random() < 0.7
        for row, letter in enumerate("ab"):
            await answer.put(TextDelta(f"{letter}{number},"), row=row)
        for _ in range(chance.choice((0, 1, 2, 5, 6, 7, 20))):
            await asyncio.sleep(0)
    for row in range(2):
        await answer.put(Finished("stop", Usage(3, 200)), row=row)
    await answer.end()
    assert {m["type"] for m in caller.sent[1:]} == {"chunk", "http.response.body"}
    said = b"".join(m.get("body", b"") for m in caller.sent).replace(b"alive", b"").decode()
    pieces = said.removesuffix("END").split(",")
    for letter in "AB":
        own = [piece[1:] for piece in pieces if piece.startswith(letter)]
        assert own == [str(number) for number in range(200)]


class FakeClock(asyncio.SelectorEventLoop):
    ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead


def test_what_is_written_at_once_is_a_sign_of_life():
    async def run() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, FakeClock)
        caller = Caller()
        answer = Answering(caller, Connection(caller))
        await answer.put(Started(3), TextDelta("a"))
        await caller.got.wait()
        for _ in range(4):
            loop.ahead += 0.6 * LONG
            await answer.say("b")
        assert b"alive" not in caller.bodies
        loop.ahead += 1.1 * LONG
        caller.got.clear()
        await caller.got.wait()
        assert caller.bodies[-1] == b"alive"
        await answer.put(Finished("stop", Usage(3, 3)))
        await answer.end()

    with asyncio.Runner(loop_factory=FakeClock) as runner:
        runner.run(run())


async def test_a_writer_that_fails_fails_its_own_answer_alone():
    class Broken(Words):
        def write(self, progress: Progress) -> bytes:
            if any(event == TextDelta("b") for _, events in progress for event in events):
                raise ZeroDivisionError
            return super().write(progress)

    reported: list[BaseException] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
    outbox, callers, answers, rows = Outbox(), [Caller() for _ in range(3)], [], list[LoopRow]()
    for caller, writer in zip(callers, (Words(), Broken(), Words()), strict=True):

        async def work(inbox: Steps) -> None:
            row = LoopRow(lambda events, _: inbox.put([(0, events)]))
            rows.append(row)
            await row.over(lambda: None)

        response = EventStreamResponse(work, writer, keepalive=LONG, headers={})
        scope = {"type": "http", "state": {"chunks": Connection(caller)}}
        answers.append(asyncio.create_task(response(scope, caller.receive, caller.send)))
    while len(rows) < len(callers):  # noqa: ASYNC110 they begin meanwhile
        await asyncio.sleep(0)
    for events in ([Started(3), TextDelta("a")], [TextDelta("b")], [TextDelta("c")]):
        for row in rows:
            outbox.put(row, events)
        outbox.flush()
        for _ in range(5):
            await asyncio.sleep(0)
    for row in rows:
        outbox.put(row, [Finished("stop", Usage(3, 3))])
    outbox.flush()
    found = await asyncio.gather(*answers, return_exceptions=True)
    assert [type(end) for end in found] == [type(None), ZeroDivisionError, type(None)]
    assert [type(error) for error in reported] == [ZeroDivisionError]
    for caller in (callers[0], callers[2]):
        assert [m["body"] for m in caller.sent[1:]] == [b"A", b"B", b"C", b"END"]


async def test_no_task_is_left_behind():
    async def progress() -> AsyncGenerator[Progress, None]:
        yield text("a")

    before = asyncio.all_tasks()
    await Caller().call(slowly(progress), keepalive=0.001)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
