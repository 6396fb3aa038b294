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
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)
from mlx_manager.mlx_server.engine.stream import EventStream, Outbox, merge
from mlx_manager.mlx_server.errors import GenerationFailed, OutOfMemory

DONE = Finished("stop", Usage(1, 2))


class CountingLoop(asyncio.SelectorEventLoop):
    """An event loop that knows how often another thread woke it up."""

    wakeups = 0

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any, **more: Any) -> Any:
        self.wakeups += 1
        return super().call_soon_threadsafe(callback, *args, **more)


def stream() -> EventStream:
    return EventStream(asyncio.get_running_loop())


# ---------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------


async def test_a_prompt_reader_gets_every_step_by_itself() -> None:
    outbox, own = Outbox(), stream()
    got = []
    for text in "abc":
        outbox.put(own, [TextDelta(text)])
        outbox.flush()
        got.append(await anext(own))
    assert got == [[TextDelta("a")], [TextDelta("b")], [TextDelta("c")]]


async def test_a_slow_reader_gets_fewer_and_longer_lists() -> None:
    outbox, own = Outbox(), stream()
    steps = [[Started(3)], [TextDelta("a")], [TextDelta("b")], [TextDelta("c"), DONE]]
    for events in steps:
        outbox.put(own, events)
        outbox.flush()
    await asyncio.sleep(0)
    assert [events async for events in own] == [[Started(3), TextDelta("abc"), DONE]]


async def test_a_slow_reader_does_not_delay_others() -> None:
    outbox, slow, quick = Outbox(), stream(), stream()
    for text in "abcdef":
        outbox.put(slow, [TextDelta(text)])
        outbox.put(quick, [TextDelta(text)])
        outbox.flush()
        assert await anext(quick) == [TextDelta(text)]
    assert await anext(slow) == [TextDelta("abcdef")]


async def test_the_stream_ends_after_finished() -> None:
    outbox, own = Outbox(), stream()
    outbox.put(own, [TextDelta("a"), DONE])
    outbox.flush()
    assert [events async for events in own] == [[TextDelta("a"), DONE]]
    assert own.ended
    with pytest.raises(StopAsyncIteration):
        await anext(own)


async def test_events_before_a_failure_are_given_first() -> None:
    outbox, own = Outbox(), stream()
    outbox.put(own, [Started(3), TextDelta("a")])
    outbox.fail(own, GenerationFailed("it broke"))
    outbox.flush()
    await asyncio.sleep(0)
    assert await anext(own) == [Started(3), TextDelta("a")]
    for _ in range(2):
        with pytest.raises(GenerationFailed, match="it broke"):
            await anext(own)
    assert own.ended


async def test_a_reader_that_already_waits_is_told_of_a_failure() -> None:
    outbox, own = Outbox(), stream()
    waiting = asyncio.ensure_future(anext(own))
    await asyncio.sleep(0)
    outbox.fail(own, OutOfMemory("full"))
    outbox.flush()
    with pytest.raises(OutOfMemory):
        await waiting


async def test_a_reader_that_was_cancelled_loses_nothing_and_disturbs_nobody() -> None:
    outbox, own, neighbour = Outbox(), stream(), stream()
    waiting = asyncio.ensure_future(anext(own))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    outbox.put(own, [TextDelta("a")])
    outbox.put(neighbour, [TextDelta("b")])
    outbox.flush()
    assert await anext(neighbour) == [TextDelta("b")]
    assert await anext(own) == [TextDelta("a")]


# ---------------------------------------------------------------------------------------------
# The shortcut
# ---------------------------------------------------------------------------------------------


class Taking:
    """What a shortcut has taken of a stream, if it is open."""

    def __init__(self, own: EventStream) -> None:
        self.taken: list[Event] = []
        self.open = True
        own.shorten(self)

    def __call__(self, events: list[Event]) -> bool:
        if self.open:
            self.taken += events
        return self.open


def letters(own: EventStream, text: str) -> None:
    """One step for each."""
    outbox = Outbox()
    for letter in text:
        outbox.put(own, [TextDelta(letter)])
        outbox.flush()


async def test_a_shortcut_takes_each_step_past_a_reader_that_waits_and_leaves_it_the_end() -> None:
    own = stream()
    shortcut = Taking(own)
    waiting = asyncio.ensure_future(anext(own))
    await asyncio.sleep(0)
    letters(own, "abc")
    await asyncio.sleep(0)
    assert shortcut.taken == [TextDelta("a"), TextDelta("b"), TextDelta("c")]
    assert not waiting.done()
    own.push([TextDelta("d"), DONE])
    assert await waiting == [TextDelta("d"), DONE]
    with pytest.raises(StopAsyncIteration):
        await anext(own)


async def test_a_shortcut_overtakes_nothing_that_has_not_been_read() -> None:
    own = stream()
    shortcut = Taking(own)
    letters(own, "ab")
    await asyncio.sleep(0)
    assert await anext(own) == [TextDelta("ab")]
    # Whoever has it may still be busy with it.
    letters(own, "c")
    await asyncio.sleep(0)
    assert await anext(own) == [TextDelta("c")]
    assert shortcut.taken == []


async def test_what_a_shortcut_does_not_take_is_read() -> None:
    own = stream()
    shortcut = Taking(own)
    waiting = asyncio.ensure_future(anext(own))
    await asyncio.sleep(0)
    shortcut.open = False
    own.push([TextDelta("a")])
    shortcut.open = True
    own.push([TextDelta("b")])
    assert await waiting == [TextDelta("ab")]
    assert shortcut.taken == []


async def test_a_shortcut_takes_nothing_for_a_reader_that_was_cancelled() -> None:
    own = stream()
    shortcut = Taking(own)
    waiting = asyncio.ensure_future(anext(own))
    await asyncio.sleep(0)
    waiting.cancel()
    letters(own, "a")
    await asyncio.wait([waiting])
    await asyncio.sleep(0)
    assert shortcut.taken == []
    assert await anext(own) == [TextDelta("a")]


async def test_a_shortcut_that_fails_fails_its_own_answer_alone() -> None:
    def fails(events: list[Event]) -> bool:
        raise ZeroDivisionError

    reported: list[BaseException] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
    before, broken, behind = stream(), stream(), stream()
    broken.shorten(fails)
    shortcuts = [Taking(before), Taking(behind)]
    waiting = [asyncio.ensure_future(anext(each)) for each in (before, broken, behind)]
    await asyncio.sleep(0)
    outbox = Outbox()
    for letter in "ab":
        for each in (before, broken, behind):
            outbox.put(each, [TextDelta(letter)])
        outbox.flush()
    await asyncio.sleep(0)
    # Its reader gets what it failed at.
    assert await waiting[1] == [TextDelta("ab")]
    assert [type(error) for error in reported] == [ZeroDivisionError]
    assert shortcuts[0].taken == [TextDelta("a"), TextDelta("b")]
    assert await waiting[2] == [TextDelta("ab")]
    waiting[0].cancel()


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
        outbox, own = Outbox(), stream()
        rest = [*events, DONE]
        got: list[Event] = []
        for cut in cuts:
            if rest[:cut]:
                outbox.put(own, rest[:cut])
                outbox.flush()
                rest = rest[cut:]
        if rest:
            outbox.put(own, rest)
            outbox.flush()
        async for more in own:
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
    streams = [EventStream(loop) for loop in loops for _ in range(10)]
    for own in streams:
        outbox.put(own, [TextDelta("a")])
        outbox.put(own, [DONE])
    outbox.fail(EventStream(loops[0]), GenerationFailed("one of them failed"))
    outbox.flush()
    assert [loop.wakeups for loop in loops] == [1, 1]
    outbox.flush()
    assert [loop.wakeups for loop in loops] == [1, 1]
    for loop in loops:
        loop.call_soon(loop.stop)
        loop.run_forever()
        loop.close()
    assert all(own.ended for own in streams)


def test_a_row_without_events_wakes_nobody() -> None:
    loop = CountingLoop()
    outbox = Outbox()
    outbox.put(EventStream(loop), [])
    outbox.flush()
    assert loop.wakeups == 0
    loop.close()


def test_readers_of_a_closed_loop_are_left_out() -> None:
    gone, here = CountingLoop(), CountingLoop()
    gone.close()
    outbox = Outbox()
    outbox.put(EventStream(gone), [TextDelta("a")])
    outbox.put(EventStream(here), [TextDelta("a")])
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
