"""Streams of OpenAI's API as events: our own, which come back as they were, and odd ones."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_manager.mlx_server.core import (
    Caller,
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
from mlx_manager.mlx_server.errors import RemoteFailed
from mlx_manager.mlx_server.protocols.answer import AnswerHead
from mlx_manager.mlx_server.protocols.chat import ChatStream
from mlx_manager.mlx_server.protocols.completions import CompletionStream
from mlx_manager.mlx_server.remotes.answers import NO_ID, Lines, Reader
from mlx_manager.mlx_server.timeline import RowTimeline, Timeline

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
LOGPROB = st.floats(-50, 0)
TOKEN = st.builds(
    TokenLogprob,
    st.just(NO_ID),
    st.binary(min_size=1, max_size=4),
    LOGPROB,
    st.lists(st.tuples(st.just(NO_ID), st.binary(max_size=3), LOGPROB), max_size=2).map(tuple),
)
CALL = st.tuples(TEXT, TEXT, st.lists(TEXT, max_size=3))
USAGE = st.builds(
    Usage, *[st.integers(0, 99)] * 4, st.just(0), st.integers(0, 9), st.integers(0, 9)
)


def read(stream: bytes, cuts: list[int]) -> list[Event]:
    """Read a stream that comes in pieces, cut at any bytes."""
    places = sorted({0, *(cut % (len(stream) + 1) for cut in cuts), len(stream)})
    lines, reader = Lines(), Reader("http://there")
    found: list[Event] = []
    for begin, end in pairwise(places):
        for data in lines.split(stream[begin:end]):
            if data != b"[DONE]":
                found += reader.read(json.loads(data))
    return [*found, reader.end()]


@given(
    pieces=st.lists(
        st.builds(TextDelta, TEXT, st.lists(TOKEN, max_size=2).map(tuple))
        | st.builds(ReasoningDelta, TEXT),
        max_size=6,
    ),
    calls=st.lists(CALL, max_size=3),
    usage=USAGE,
    stop=st.none() | TEXT,
    ids=st.lists(st.integers(0, 99), max_size=3).map(tuple),
    cuts=st.lists(st.integers(0, 10_000), max_size=8),
)
def test_a_chats_stream_comes_back_as_it_was(
    pieces: list[Event],
    calls: list[tuple[str, str, list[str]]],
    usage: Usage,
    stop: str | None,
    ids: tuple[int, ...],
    cuts: list[int],
) -> None:
    said = list(pieces)
    for index, (call_id, name, arguments) in enumerate(calls):
        said.append(ToolCallStarted(index, call_id, name))
        said += [ToolCallDelta(index, piece) for piece in arguments]
    reason = "tool_calls" if calls else "stop"
    end = Finished(reason, usage, stop, ids)
    begun = Started(usage.prompt_tokens, usage.cached_tokens, ids)
    head = AnswerHead("chatcmpl-1", "m", include_usage=True, counts_all_along=True, return_ids=True)
    timeline = Timeline("m", Caller(), (RowTimeline(started=begun),))
    writer = ChatStream(head, timeline)
    stream = writer.write([(0, [begun, *said])]) + writer.write([(0, [end])]) + writer.end()
    assert read(stream, cuts) == [begun, *said, end]


@given(tokens=st.lists(TOKEN, min_size=1, max_size=4))
def test_the_logprobs_of_a_completion_come_back_as_they_were(tokens: list[TokenLogprob]) -> None:
    head = AnswerHead("cmpl-1", "m", include_usage=True, logprobs=2)
    writer = CompletionStream(head, Timeline("m", Caller(), (RowTimeline(),)))
    end = Finished("length", Usage(3, 4))
    sent = [Started(3), TextDelta("text", tuple(tokens)), end]
    [_, found, last] = read(writer.write([(0, sent)]) + writer.end(), [])
    assert last == end
    assert isinstance(found, TextDelta)
    assert [each.piece for each in found.logprobs] == [each.piece for each in tokens]
    assert [each.logprob for each in found.logprobs] == [each.logprob for each in tokens]
    for own, token in zip(found.logprobs, tokens, strict=True):
        best = {piece: value for _, piece, value in own.top}
        assert best.keys() == {token.piece, *(piece for _, piece, _ in token.top)}


def events(*deltas: dict[str, Any], **last: Any) -> list[Event]:
    reader = Reader("http://there")
    found: list[Event] = []
    for delta in deltas:
        found += reader.read({"choices": [{"delta": delta}]})
    found += reader.read({"choices": [{"delta": {}, "finish_reason": "stop", **last}]})
    return [*found[1:], reader.end()]


def test_calls_without_numbers_and_ids_get_them() -> None:
    first, piece, second, end = events(
        {"tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]},
        {"tool_calls": [{"id": "b", "function": {"name": "g", "arguments": None}}]},
    )
    assert (first, piece) == (ToolCallStarted(0, "a", "f"), ToolCallDelta(0, "{}"))
    assert second == ToolCallStarted(1, "b", "g")
    assert isinstance(end, Finished)
    assert end.reason == "tool_calls"


def test_an_end_that_is_no_end_of_ours_is_an_error() -> None:
    with pytest.raises(RemoteFailed, match="content_filter"):
        events({"content": "a"}, finish_reason="content_filter")


def test_a_stop_string_is_known_by_sglangs_name_too() -> None:
    [end] = events(matched_stop="END")
    assert isinstance(end, Finished)
    assert end.stop_sequence == "END"


def test_more_alternatives_of_a_token_than_were_asked_for_are_left_out() -> None:
    reader, other = Reader("http://there", top=0), {"token": "b", "logprob": -2.0}
    entry = {"token": "a", "logprob": -1.0, "top_logprobs": [other]}
    chunk = {"choices": [{"delta": {"content": "a"}, "logprobs": {"content": [entry]}}]}
    _, said = reader.read(chunk)
    assert said == TextDelta("a", (TokenLogprob(NO_ID, b"a", -1.0, ()),))


@pytest.mark.parametrize("name", ["stop_reason", "matched_stop"])
def test_a_token_that_ended_the_answer_is_no_stop_string(name: str) -> None:
    [end] = events(**{name: 128001})
    assert isinstance(end, Finished)
    assert end.stop_sequence is None
