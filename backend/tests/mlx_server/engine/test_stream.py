from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from engine.rig import Rig
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make_tiny_model

from mlx_manager.mlx_server.core import (
    Event,
    Finished,
    Progress,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)
from mlx_manager.mlx_server.engine.stream import Inbox, LoopRow, Outbox, merge, steps, working
from mlx_manager.mlx_server.errors import GenerationFailed, OutOfMemory

DONE = Finished("stop", Usage(1, 2))


class CountingLoop(asyncio.SelectorEventLoop):
    """An event loop that knows how often another thread woke it up."""

    wakeups = 0

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any, **more: Any) -> Any:
        self.wakeups += 1
        return super().call_soon_threadsafe(callback, *args, **more)


# ---------------------------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------------------------


class Told:
    """A row, what has been pushed of it, and the task that waits for its end."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.tokens = 0
        self.cancelled = False
        self.row = LoopRow(self.push)
        self.over = asyncio.create_task(self.row.over(self.cancel))

    def push(self, events: list[Event], tokens: int) -> None:
        self.events += events
        self.tokens = tokens

    def cancel(self) -> None:
        self.cancelled = True


def letters(row: LoopRow, text: str) -> None:
    """One step for each."""
    outbox = Outbox()
    for letter in text:
        outbox.put(row, [TextDelta(letter)])
        outbox.flush()


async def test_a_row_is_told_each_step_and_the_number_of_its_tokens_then() -> None:
    told, outbox = Told(), Outbox()
    told.row.drawn = iter((1, 2, 5)).__next__
    for text in "abc":
        outbox.put(told.row, [TextDelta(text)])
        outbox.flush()
    assert told.events == []
    await asyncio.sleep(0)
    assert told.events == [TextDelta("a"), TextDelta("b"), TextDelta("c")]
    assert told.tokens == 5


async def test_a_row_ends_with_its_last_event() -> None:
    told, outbox = Told(), Outbox()
    outbox.put(told.row, [TextDelta("a"), DONE])
    outbox.flush()
    await told.over
    assert told.events == [TextDelta("a"), DONE]
    assert not told.cancelled


async def test_events_before_a_failure_are_told_first() -> None:
    told, outbox = Told(), Outbox()
    outbox.put(told.row, [Started(3), TextDelta("a")])
    outbox.fail(told.row, OutOfMemory("full"))
    outbox.flush()
    with pytest.raises(OutOfMemory):
        await told.over
    assert told.events == [Started(3), TextDelta("a")]
    assert not told.cancelled


async def test_a_row_that_is_not_waited_for_is_cancelled_and_told_nothing_more() -> None:
    told, neighbour, outbox = Told(), Told(), Outbox()
    await asyncio.sleep(0)
    told.over.cancel()
    await asyncio.wait([told.over])
    assert told.cancelled
    for each in (told, neighbour):
        outbox.put(each.row, [TextDelta("a"), DONE])
    outbox.fail(told.row, GenerationFailed("late"))
    outbox.flush()
    await neighbour.over
    assert (told.events, neighbour.events) == ([], [TextDelta("a"), DONE])


async def test_a_push_that_fails_keeps_nothing_from_the_rows_behind_it() -> None:
    def fails(events: list[Event], tokens: int) -> None:
        raise ZeroDivisionError

    reported: list[BaseException] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
    before, behind, outbox = Told(), Told(), Outbox()
    rows = [before.row, LoopRow(fails), LoopRow(fails), behind.row]
    for letter in "ab":
        for row in rows:
            outbox.put(row, [TextDelta(letter)])
        outbox.flush()
    await asyncio.sleep(0)
    assert [type(error) for error in reported] == [ZeroDivisionError] * 2
    for told in (before, behind):
        assert told.events == [TextDelta("a"), TextDelta("b")]
        told.over.cancel()


# ---------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------


def say(inbox: Inbox, text: str, row: int = 0) -> None:
    """One step for each letter."""
    for letter in text:
        inbox.put([(row, [TextDelta(letter)])])


async def test_a_prompt_reader_gets_every_step_by_itself() -> None:
    inbox, got = Inbox(), []
    for text in "abc":
        say(inbox, text)
        got.append(await anext(inbox))
    assert got == [[(0, [TextDelta(text)])] for text in "abc"]


async def test_a_slow_reader_gets_all_rows_as_one_step() -> None:
    inbox = Inbox()
    for row in (1, 0):
        inbox.put([(row, [Started(3)])])
        say(inbox, "ab", row)
    inbox.put([(0, [DONE])])
    inbox.end()
    found = [step async for step in inbox]
    assert found == [[(1, [Started(3), TextDelta("ab")]), (0, [Started(3), TextDelta("ab"), DONE])]]


async def test_work_ends_with_its_reader_and_the_reader_after_its_work() -> None:
    ended = asyncio.Event()

    async def work(inbox: Inbox) -> None:
        try:
            say(inbox, "ab")
            await inbox.taken()
            say(inbox, "c")
            await asyncio.Event().wait()
        finally:
            ended.set()

    progress = steps(work)
    assert await anext(progress) == [(0, [TextDelta("ab")])]
    assert await anext(progress) == [(0, [TextDelta("c")])]
    await progress.aclose()
    assert ended.is_set()


async def test_a_failure_comes_after_all_that_was_put_before_it() -> None:
    async def work(inbox: Inbox) -> None:
        say(inbox, "a")
        raise GenerationFailed("it broke")

    progress = steps(work)
    assert await anext(progress) == [(0, [TextDelta("a")])]
    with pytest.raises(GenerationFailed, match="it broke"):
        await anext(progress)


async def test_a_reader_that_can_make_nothing_of_it_fails_the_work() -> None:
    async def work(inbox: Inbox) -> None:
        say(inbox, "a")
        await inbox.taken()

    inbox = Inbox()
    async with working(work, inbox) as task:
        async for _ in inbox:
            inbox.refuse(GenerationFailed("no body"))
        with pytest.raises(GenerationFailed, match="no body"):
            await task


# ---------------------------------------------------------------------------------------------
# At once
# ---------------------------------------------------------------------------------------------


class Writing:
    """An inbox whose steps are taken at once, if it is open, and a reader that waits."""

    def __init__(self) -> None:
        self.taken: list[Event] = []
        self.open = True
        self.inbox = Inbox(self.take)

    def take(self, step: Progress) -> bool:
        if self.open:
            self.taken += [event for _, events in step for event in events]
        return self.open

    def read(self) -> asyncio.Future[Progress]:
        return asyncio.ensure_future(anext(self.inbox))


async def test_steps_are_taken_at_once_while_the_reader_waits() -> None:
    writing = Writing()
    waiting = writing.read()
    await asyncio.sleep(0)
    say(writing.inbox, "abc")
    writing.inbox.put([(0, [DONE])])
    await writing.inbox.taken()
    assert writing.taken == [TextDelta("a"), TextDelta("b"), TextDelta("c"), DONE]
    writing.inbox.end()
    with pytest.raises(StopAsyncIteration):
        await waiting


async def test_nothing_overtakes_what_has_not_been_read() -> None:
    writing = Writing()
    say(writing.inbox, "ab")
    assert await anext(writing.inbox) == [(0, [TextDelta("ab")])]
    # The reader may still be busy with it.
    say(writing.inbox, "c")
    assert await anext(writing.inbox) == [(0, [TextDelta("c")])]
    assert writing.taken == []


async def test_what_is_not_taken_at_once_is_read_with_all_that_follows() -> None:
    writing = Writing()
    waiting = writing.read()
    await asyncio.sleep(0)
    writing.open = False
    say(writing.inbox, "a")
    writing.open = True
    say(writing.inbox, "b")
    assert await waiting == [(0, [TextDelta("ab")])]
    assert writing.taken == []


async def test_nothing_is_taken_at_once_for_a_reader_that_was_cancelled() -> None:
    writing = Writing()
    waiting = writing.read()
    await asyncio.sleep(0)
    waiting.cancel()
    say(writing.inbox, "a")
    await asyncio.wait([waiting])
    assert writing.taken == []
    assert await anext(writing.inbox) == [(0, [TextDelta("a")])]


async def test_a_step_at_which_taking_fails_is_read_again_with_all_that_follows() -> None:
    def fails(step: Progress) -> bool:
        raise ZeroDivisionError

    inbox = Inbox(fails)
    waiting = asyncio.ensure_future(anext(inbox))
    await asyncio.sleep(0)
    with pytest.raises(ZeroDivisionError):
        say(inbox, "a")
    say(inbox, "b")
    assert await waiting == [(0, [TextDelta("ab")])]


# ---------------------------------------------------------------------------------------------
# Merging
# ---------------------------------------------------------------------------------------------

LOGPROBS = st.lists(
    st.builds(TokenLogprob, st.integers(0, 9), st.just("x"), st.floats(-5, 0)), max_size=2
).map(tuple)
EVENTS = st.lists(
    st.one_of(
        st.builds(TextDelta, st.text(max_size=3), LOGPROBS),
        st.builds(ReasoningDelta, st.text(max_size=3), LOGPROBS),
        st.builds(ToolCallStarted, st.just(0), st.just("call_1"), st.just("f")),
        st.builds(ToolCallDelta, st.integers(0, 1), st.text(max_size=3)),
        st.just(Started(3)),
    ),
    max_size=12,
)


def content(events: list[Event]) -> list[object]:
    """What events say, letter by letter and logprob by logprob, whatever they are cut into."""
    said: list[object] = []
    for event in events:
        match event:
            case TextDelta(text, logprobs) | ReasoningDelta(text, logprobs):
                said += [(type(event), letter) for letter in text]
                said += [(type(event), logprob) for logprob in logprobs]
            case _:
                said.append(event)
    return said


def of_kind(said: list[object], kind: type) -> list[object]:
    return [part for part in said if isinstance(part, tuple) and isinstance(part[1], kind)]


@settings(max_examples=300)
@given(events=EVENTS)
def test_merging_keeps_every_letter_and_every_logprob_in_order(events: list[Event]) -> None:
    merged = merge(list(events))
    for kind in (str, TokenLogprob):
        assert of_kind(content(merged), kind) == of_kind(content(events), kind)
    for left, right in pairwise(merged):
        assert type(left) is not type(right) or not isinstance(left, TextDelta | ReasoningDelta)
    others = (ToolCallStarted, ToolCallDelta, Started)
    assert [e for e in merged if isinstance(e, others)] == [
        e for e in events if isinstance(e, others)
    ]


@settings(max_examples=100)
@given(events=EVENTS.filter(bool), cuts=st.lists(st.integers(1, 4), min_size=1, max_size=12))
def test_a_reader_gets_the_same_content_however_steps_are_coalesced(
    events: list[Event], cuts: list[int]
) -> None:
    async def read() -> list[Event]:
        inbox, rest = Inbox(), [*events, DONE]
        got: list[Event] = []
        for cut in [*cuts, len(rest)]:
            if rest[:cut]:
                inbox.put([(0, rest[:cut])])
                rest = rest[cut:]
        inbox.end()
        async for [(_, more)] in inbox:
            got += more
        return got

    got = asyncio.run(read())
    assert merge(got) == merge([*events, DONE])


# ---------------------------------------------------------------------------------------------
# Waking up
# ---------------------------------------------------------------------------------------------


def test_a_step_wakes_each_loop_once_whatever_it_delivers() -> None:
    loops = [CountingLoop(), CountingLoop()]
    outbox = Outbox()
    told = list[Event]()
    rows = [LoopRow(lambda events, _: told.extend(events), loop) for loop in loops for _ in "abc"]
    for own in rows:
        outbox.put(own, [TextDelta("a")])
        outbox.put(own, [DONE])
    outbox.fail(LoopRow(print, loops[0]), GenerationFailed("one of them failed"))
    outbox.flush()
    assert [loop.wakeups for loop in loops] == [1, 1]
    outbox.flush()
    assert [loop.wakeups for loop in loops] == [1, 1]
    for loop in loops:
        loop.call_soon(loop.stop)
        loop.run_forever()
        loop.close()
    assert told == [TextDelta("a"), DONE] * len(rows)


def test_a_row_without_events_wakes_nobody() -> None:
    loop = CountingLoop()
    outbox = Outbox()
    outbox.put(LoopRow(print, loop), [])
    outbox.flush()
    assert loop.wakeups == 0
    loop.close()


def test_readers_of_a_closed_loop_are_left_out() -> None:
    gone, here = CountingLoop(), CountingLoop()
    gone.close()
    outbox = Outbox()
    outbox.put(LoopRow(print, gone), [TextDelta("a")])
    outbox.put(LoopRow(print, here), [TextDelta("a")])
    outbox.flush()
    assert (gone.wakeups, here.wakeups) == (0, 1)
    here.close()


def test_a_running_engine_wakes_the_loop_once_a_step(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m", "llama")

    async def serve() -> tuple[int, int]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, CountingLoop)
        async with Rig(folder) as rig:
            rows = [rig.row([3 + i, 4, 5], 20) for i in range(16)]
            before = loop.wakeups
            rig.submit_together(rows)
            await asyncio.gather(*(row.finished() for row in rows))
            return loop.wakeups - before, rig.engine.stats().steps

    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        wakeups, steps = runner.run(serve())
    assert wakeups <= steps + 1
    assert steps < 60
