"""What Anthropic's and OpenAI's streams are whatever happens: complete, cut off, broken, left.

Every event is judged by the SDK's own model (nothing missing, nothing unknown), and the sequence
by a small machine that knows which event may follow which.
"""

from __future__ import annotations

from typing import Any

import pytest
from anthropic.types import RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import ResponseStreamEvent
from sdk_models import events, strictly

from mlx_manager.mlx_server.core import (
    Event,
    Finished,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)
from mlx_manager.mlx_server.errors import GenerationFailed
from mlx_manager.mlx_server.protocols.messages import MessageHead, MessageStream
from mlx_manager.mlx_server.protocols.responses import ResponseHead, ResponseStream
from mlx_manager.mlx_server.schemas.responses import ResponsesRequest

TOOLS: Any = [{"type": "function", "name": "weather", "parameters": {}, "strict": False}]
words = st.text(max_size=5)
ENDS: dict[str, Finished | GenerationFailed | None] = {
    "stop": Finished("stop", Usage(7, 9, 4, 2)),
    "tool_calls": Finished("tool_calls", Usage(7, 9)),
    "length": Finished("length", Usage(7, 9)),
    "error": GenerationFailed("It broke."),
    "cancelled": None,
}


@st.composite
def happenings(draw: st.DrawFn) -> list[Event]:
    """Thinking and text in any order, then parallel calls, cut anywhere."""
    pieces = st.builds(TextDelta, words) | st.builds(ReasoningDelta, words)
    happened: list[Event] = [Started(7, 4), *draw(st.lists(pieces, max_size=6))]
    for index in range(draw(st.integers(0, 3))):
        happened.append(ToolCallStarted(index, f"call_{index}", "weather"))
        happened += [ToolCallDelta(index, piece) for piece in ('{"a":', " 1}")]
    return happened[: draw(st.integers(0, len(happened)))]


def written(stream: Any, happened: list[Event], ending: str) -> list[dict[str, Any]]:
    """The events that a client gets, until it leaves or the answer ends."""
    wire = b"".join(stream.write([(0, [event])]) for event in happened)
    match ENDS[ending]:
        case Finished() as last:
            wire += stream.write([(0, [last])]) + stream.end()
        case GenerationFailed() as error:
            wire += stream.fail(error)
        case None:
            pass
    found = events(wire.decode())
    assert all(name == data["type"] for name, data in found)
    return [data for _, data in found]


def check_messages(data: list[dict[str, Any]], ending: str) -> None:
    for event in data:
        strictly(ErrorResponse if event["type"] == "error" else RawMessageStreamEvent, event)
    kinds = [event["type"] for event in data]
    match ending:
        case "cancelled":
            body = data
        case "error":
            assert kinds[-1] == "error"
            body = data[:-1]
        case _:
            assert kinds[-2:] == ["message_delta", "message_stop"]
            body = data[:-2]
    if body:
        assert body[0]["type"] == "message_start"
    blocks, is_open = 0, False
    for event in body[1:]:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                is_open = True
            case "content_block_delta":
                assert is_open
            case "content_block_stop":
                assert is_open
                is_open = False
        assert event["index"] == blocks
        blocks += event["type"] == "content_block_stop"
    assert not is_open or ending in ("cancelled", "error")


def check_responses(data: list[dict[str, Any]], ending: str) -> None:
    for number, event in enumerate(data):
        strictly(ResponseStreamEvent, event)
        assert event["sequence_number"] == number
    kinds = [event["type"].removeprefix("response.") for event in data]
    last = {"error": "failed", "length": "incomplete", "cancelled": None}.get(ending, "completed")
    if last is not None:
        assert kinds[-1] == last
    inner = data[2:] if last is None else data[2:-1]
    assert kinds[:2] == ["created", "in_progress"][: len(kinds)]
    items, is_open, part = 0, False, False
    for event in inner:
        kind = event["type"].removeprefix("response.")
        assert event["output_index"] == items
        match kind:
            case "output_item.added":
                assert not is_open
                is_open = True
            case "content_part.added":
                assert is_open
                assert not part
                part = True
            case "content_part.done":
                assert part
                part = False
            case "output_item.done":
                assert is_open
                assert not part
                is_open = False
                items += 1
            case "output_text.delta" | "output_text.done":
                assert part
            case "reasoning_text.delta" | "reasoning_text.done":
                assert part
            case "function_call_arguments.delta" | "function_call_arguments.done":
                assert is_open
                assert not part
            case _:
                raise AssertionError(kind)
    assert not is_open or ending in ("cancelled", "error")


@pytest.mark.parametrize("ending", ENDS)
@settings(max_examples=40)
@given(happened=happenings())
def test_messages_are_well_formed_to_their_last_event(ending: str, happened: list[Event]):
    head = MessageHead(model="m", request_id="req-1", max_tokens=9)
    check_messages(written(MessageStream(head), happened or [Started(7)], ending), ending)


@pytest.mark.parametrize("ending", ENDS)
@settings(max_examples=40)
@given(happened=happenings())
def test_responses_are_well_formed_to_their_last_event(ending: str, happened: list[Event]):
    body = ResponsesRequest(input="hi", tools=TOOLS)
    stream = ResponseStream(ResponseHead("m", body))
    check_responses(written(stream, happened or [Started(7)], ending), ending)
