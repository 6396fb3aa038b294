from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai_spec import check
from timelines import timeline

from mlx_manager.mlx_server.core import (
    Conversation,
    Event,
    Finished,
    GenerationRequest,
    Message,
    NamedTool,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)
from mlx_manager.mlx_server.errors import InvalidParameter, UnsupportedParameter
from mlx_manager.mlx_server.protocols import chat, sse
from mlx_manager.mlx_server.protocols.answer import AnswerHead
from mlx_manager.mlx_server.protocols.chat import ChatAnswer, ChatStream
from mlx_manager.mlx_server.schemas.openai import ChatCompletionChunk, ChatCompletionRequest

DEMO = "mlx-manager/demo"
HEAD = AnswerHead(id="chatcmpl-1", model=DEMO, created=5)
USAGE = Usage(
    prompt_tokens=7,
    completion_tokens=3,
    cached_tokens=2,
    reasoning_tokens=1,
    accepted_prediction_tokens=5,
    rejected_prediction_tokens=2,
)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def ask(*messages: dict[str, Any], **fields: Any) -> list[GenerationRequest]:
    given = list(messages) or [{"role": "user", "content": "hi"}]
    body = ChatCompletionRequest.model_validate({"messages": given} | fields)
    return chat.requests(body, chat.head(body, DEMO))


def conversation(*messages: dict[str, Any], **fields: Any) -> Conversation:
    prompt = ask(*messages, **fields)[0].prompt
    assert isinstance(prompt, Conversation)
    return prompt


# Body → requests


def test_n_answers_are_n_rows_of_the_same_prompt():
    rows = ask(n=3, seed=1)
    assert len(rows) == 3
    assert all(row.prompt is rows[0].prompt for row in rows)
    assert [row.sampling.seed for row in rows] == [1, 2, 3]


def test_both_names_of_max_tokens_are_understood_and_must_agree():
    assert ask()[0].max_tokens is None
    assert ask(max_tokens=5)[0].max_tokens == 5
    assert ask(max_completion_tokens=6)[0].max_tokens == 6
    assert ask(max_tokens=6, max_completion_tokens=6)[0].max_tokens == 6
    with pytest.raises(InvalidParameter, match="max_completion_tokens"):
        ask(max_tokens=5, max_completion_tokens=6)


def test_developer_messages_are_system_messages():
    assert conversation({"role": "developer", "content": "Be brief."}).messages == (
        Message("system", "Be brief."),
    )


def test_text_parts_are_joined_line_by_line():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert conversation({"role": "user", "content": parts}).messages[0].content == "a\nb"


def test_an_assistant_turn_keeps_its_calls_its_reasoning_and_its_refusal():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"}
    refusal = {"role": "assistant", "content": None, "refusal": "I can't."}
    result = {"role": "tool", "content": "42", "tool_call_id": "c1"}
    assert conversation(turn, result, refusal).messages == (
        Message("assistant", "", reasoning="hm", tool_calls=(ToolCall("c1", "f", "{}"),)),
        Message("tool", "42", tool_call_id="c1"),
        Message("assistant", "I can't."),
    )


@pytest.mark.parametrize("role", ["system", "user", "tool", "developer"])
def test_a_message_without_text_is_refused(role: str):
    with pytest.raises(InvalidParameter) as caught:
        ask({"role": "user", "content": "hi"}, {"role": role, "content": None})
    assert caught.value.param == "messages[1].content"


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
def test_content_that_is_not_text_is_refused_by_name(kind: str):
    with pytest.raises(UnsupportedParameter, match=kind) as caught:
        ask({"role": "user", "content": [{"type": "text", "text": "see"}, {"type": kind}]})
    assert caught.value.param == "messages[0].content[1].type"


@pytest.mark.parametrize("kind", ["input_audio", "file", "video_url"])
def test_the_refusal_of_a_part_is_right_for_models_that_see_as_well(kind: str):
    with pytest.raises(UnsupportedParameter) as caught:
        ask({"role": "user", "content": [{"type": kind}]})
    assert "is not read here" in caught.value.message
    assert "text only" not in caught.value.message


@pytest.mark.parametrize("name", ["audio", "function_call"])
def test_older_and_other_parts_of_a_message_are_refused_by_name(name: str):
    with pytest.raises(UnsupportedParameter) as caught:
        ask({"role": "assistant", "content": "hi", name: {"id": "x"}})
    assert caught.value.param == f"messages[0].{name}"


def test_a_text_part_without_text_is_refused():
    with pytest.raises(InvalidParameter) as caught:
        ask({"role": "user", "content": [{"type": "text"}]})
    assert caught.value.param == "messages[0].content[0].text"


def test_tools_and_their_choice_reach_the_conversation():
    asked = conversation(tools=[WEATHER], tool_choice="none", parallel_tool_calls=False)
    assert asked.tools == (Tool("weather", parameters={"type": "object"}),)
    assert asked.tool_choice == "none"
    assert not asked.parallel_tool_calls
    assert conversation().tool_choice == "auto"
    assert conversation().parallel_tool_calls


def test_tools_may_be_demanded_and_named():
    named = {"type": "function", "function": {"name": "weather"}}
    assert conversation(tools=[WEATHER], tool_choice=named).tool_choice == NamedTool("weather")
    assert conversation(tools=[WEATHER], tool_choice="required").tool_choice == "required"


def test_thinking_is_asked_for_in_two_ways_that_must_agree():
    asked = ask(reasoning={"effort": "low", "max_tokens": 9, "enabled": True})[0]
    assert asked.thinking_budget == 9
    assert asked.prompt.template_args == {"reasoning_effort": "low", "enable_thinking": True}
    assert ask(thinking_token_budget=0)[0].thinking_budget == 0
    with pytest.raises(InvalidParameter, match="thinking_token_budget"):
        ask(thinking_token_budget=1, reasoning={"max_tokens": 2})


def test_template_arguments_are_handed_on_and_reasoning_effort_with_them():
    args = conversation(reasoning_effort="low", chat_template_kwargs={"x": 1}).template_args
    assert dict(args) == {"reasoning_effort": "low", "x": 1}
    off = conversation(reasoning_effort="none").template_args
    assert dict(off) == {"reasoning_effort": "none", "enable_thinking": False}


def test_the_last_message_is_left_open_only_when_asked():
    assert conversation().add_generation_prompt
    assert not conversation(add_generation_prompt=False).add_generation_prompt
    open_end = conversation(continue_final_message=True)
    assert open_end.continue_final_message
    assert not open_end.add_generation_prompt
    with pytest.raises(InvalidParameter, match="continue_final_message"):
        ask(continue_final_message=True, add_generation_prompt=True)
    call = {"id": "a", "function": {"name": "f", "arguments": "{}"}}
    for last in ({"content": ""}, {"content": " \n"}, {}, {"content": "x", "tool_calls": [call]}):
        with pytest.raises(InvalidParameter, match="no tool calls"):
            ask({"role": "assistant", **last}, continue_final_message=True)


# Events → chunks, events → body


def stream(steps: list[list[Event]], head: AnswerHead = HEAD) -> list[dict[str, Any]]:
    writer = ChatStream(head, timeline(head.rows))
    data = b"".join(writer.write([(0, events)]) for events in steps) + writer.end()
    assert data.endswith(b"data: [DONE]\n\n")
    chunks = list(sse.parse(data))
    for chunk in chunks:
        check("CreateChatCompletionStreamResponse", chunk)
        ChatCompletionChunk.model_validate(chunk)
    return chunks


def collected(steps: list[list[Event]], head: AnswerHead = HEAD) -> dict[str, Any]:
    answer = ChatAnswer(head, timeline(head.rows))
    for events in steps:
        answer.add([(0, events)])
    body = json.loads("".join(answer.body()))
    check("CreateChatCompletionResponse", body)
    return body


def deltas(chunks: list[dict[str, Any]], name: str) -> str:
    return "".join(chunk["choices"][0]["delta"].get(name) or "" for chunk in chunks)


def test_the_first_chunk_has_the_role_and_the_last_the_finish_reason():
    chunks = stream(
        [[Started(7)], [TextDelta("Hel")], [TextDelta("lo")], [Finished("stop", USAGE)]]
    )
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant"},
        {"content": "Hel"},
        {"content": "lo"},
        {},
    ]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None, None, None, "stop"]
    assert all("usage" not in chunk for chunk in chunks)
    assert {chunk["id"] for chunk in chunks} == {"chatcmpl-1"}


@given(st.permutations(range(4)))
def test_choices_begin_in_order_whichever_is_the_first_to_have_a_token(order: list[int]):
    writer = ChatStream(AnswerHead(id="c", model=DEMO, n=4, rows=4), timeline(4))
    steps: list[list[Event]] = [[Started(7)], [TextDelta("I am ")], [TextDelta("row ")]]
    data = b"".join(writer.write([(row, events)]) for row in order for events in steps)
    for row in reversed(order):
        data += writer.write([(row, [TextDelta(f"{row}"), Finished("stop", USAGE)])])
    # OpenAI's SDK takes a choice for the one whose index is the place where it first turned up.
    state: Any = ChatCompletionStreamState()
    for chunk in sse.parse(data):
        state.handle_chunk(openai.types.chat.ChatCompletionChunk.model_validate(chunk))
    choices = state.get_final_completion().choices
    assert [choice.message.content for choice in choices] == [f"I am row {i}" for i in range(4)]


def test_usage_comes_last_without_choices_and_is_null_before():
    head = AnswerHead(id="c", model="m", include_usage=True)
    *chunks, last = stream([[Started(7)], [TextDelta("x"), Finished("length", USAGE)]], head)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {
            "reasoning_tokens": 1,
            "accepted_prediction_tokens": 5,
            "rejected_prediction_tokens": 2,
        },
    }


@given(st.text())
def test_any_text_survives_the_wire(text: str):
    steps: list[list[Event]] = [[Started(1)], [TextDelta(text)], [Finished("stop", USAGE)]]
    assert deltas(stream(steps), "content") == text


def test_a_lone_surrogate_does_not_break_the_stream():
    chunks = stream([[TextDelta("\ud83d")], [Finished("stop", USAGE)]])
    assert deltas(chunks, "content") == "\ud83d"


CALLS: list[list[Event]] = [
    [Started(7)],
    [ReasoningDelta("Let me "), ReasoningDelta("look.")],
    [ToolCallStarted(0, "call_a", "weather"), ToolCallDelta(0, '{"city":')],
    [ToolCallDelta(0, ' "Rome"}')],
    [ToolCallStarted(1, "call_b", "add"), ToolCallDelta(1, "{}")],
    [Finished("tool_calls", USAGE)],
]


def test_reasoning_and_calls_stream_in_openais_shape():
    chunks = stream(CALLS)
    assert deltas(chunks, "reasoning_content") == "Let me look."
    assert deltas(chunks, "content") == ""
    calls = [c for chunk in chunks for c in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert calls == [
        {
            "index": 0,
            "id": "call_a",
            "type": "function",
            "function": {"name": "weather", "arguments": ""},
        },
        {"index": 0, "function": {"arguments": '{"city":'}},
        {"index": 0, "function": {"arguments": ' "Rome"}'}},
        {
            "index": 1,
            "id": "call_b",
            "type": "function",
            "function": {"name": "add", "arguments": ""},
        },
        {"index": 1, "function": {"arguments": "{}"}},
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_the_body_holds_what_the_stream_told():
    choice = collected(CALLS)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] is None
    assert message["reasoning_content"] == "Let me look."
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "weather", "arguments": '{"city": "Rome"}'},
        {"name": "add", "arguments": "{}"},
    ]


def test_a_plain_answer_has_text_and_nothing_else():
    body = collected([[Started(7), TextDelta("Hel")], [TextDelta("lo"), Finished("stop", USAGE)]])
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]


def test_an_answer_without_any_text_is_an_empty_string():
    body = collected([[Started(7)], [Finished("stop", USAGE)]])
    assert body["choices"][0]["message"]["content"] == ""


def test_several_answers_count_their_prompt_once():
    answer = ChatAnswer(AnswerHead(id="c", model="m", n=2, rows=2), timeline(2))
    for row in (1, 0):
        answer.add([(row, [Started(7), TextDelta(f"row {row}"), Finished("stop", USAGE)])])
    body = json.loads("".join(answer.body()))
    contents = [choice["message"]["content"] for choice in body["choices"]]
    assert contents == ["row 0", "row 1"]
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (7, 6)
    check("CreateChatCompletionResponse", body)


def test_thinking_may_go_by_its_other_name():
    head = AnswerHead(id="c", model=DEMO, created=5, reasoning_field="reasoning")
    step = [(0, [Started(1), ReasoningDelta("Hm."), TextDelta("Yes"), Finished("stop", USAGE)])]
    answer = ChatAnswer(head, timeline(head.rows))
    answer.add(step)
    message = json.loads("".join(answer.body()))["choices"][0]["message"]
    assert message["reasoning"] == "Hm."
    assert "reasoning_content" not in message
    deltas = [
        c["choices"][0]["delta"]
        for c in sse.parse(ChatStream(head, timeline(head.rows)).write(step))
    ]
    assert {"reasoning": "Hm."} in deltas


def test_scores_of_text_are_written_as_openai_does():
    head = AnswerHead(id="c", model=DEMO, created=5, logprobs=1)
    token = TokenLogprob(1, b"a", -0.5, ((1, b"a", -0.5),))
    step = [(0, [Started(1), TextDelta("a", (token,)), Finished("stop", USAGE)])]
    entry = {"token": "a", "logprob": -0.5, "bytes": [97]}
    expected = {"content": [entry | {"top_logprobs": [entry]}], "refusal": None}
    answer = ChatAnswer(head, timeline(head.rows))
    answer.add(step)
    body = json.loads("".join(answer.body()))
    check("CreateChatCompletionResponse", body)
    assert body["choices"][0]["logprobs"] == expected
    chunks = list(sse.parse(ChatStream(head, timeline(head.rows)).write(step)))
    for chunk in chunks:
        check("CreateChatCompletionStreamResponse", chunk)
    assert chunks[1]["choices"][0]["logprobs"] == expected


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_scores_are_asked_for(fields: dict[str, Any], asked: int | None):
    assert ask(**fields)[0].logprobs == asked


def test_alternatives_are_scored_only_with_the_tokens_themselves():
    with pytest.raises(InvalidParameter, match="logprobs"):
        ask(top_logprobs=2)
