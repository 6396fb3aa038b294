from __future__ import annotations

import itertools
import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message as SdkMessage
from anthropic.types import RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from hypothesis import given, settings
from hypothesis import strategies as st
from sdk_models import events, strictly

from mlx_manager.mlx_server.core import (
    Conversation,
    Event,
    Finished,
    GenerationRequest,
    JsonSchema,
    Message,
    NamedTool,
    ReasoningDelta,
    Started,
    TextDelta,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)
from mlx_manager.mlx_server.errors import (
    ContextLengthExceeded,
    GenerationFailed,
    HeadersTooLarge,
    InvalidParameter,
    MLXManagerError,
    Overloaded,
    RequestTooLarge,
    UnsupportedParameter,
)
from mlx_manager.mlx_server.protocols import messages
from mlx_manager.mlx_server.protocols.messages import MessageAnswer, MessageHead, MessageStream
from mlx_manager.mlx_server.schemas.anthropic import NO_EFFECT, MessagesRequest

HEAD = MessageHead(model="m", request_id="req-1", max_tokens=50, id="msg_1")
HI = {"role": "user", "content": "hi"}
WEATHER = {"name": "weather", "description": "Tells it", "input_schema": {"type": "object"}}


def ask(*said: dict[str, Any], **fields: Any) -> GenerationRequest:
    given = {"max_tokens": 50, "messages": list(said) or [HI]} | fields
    return messages.request(MessagesRequest.model_validate_json(json.dumps(given)), HEAD)


def conversation(*said: dict[str, Any], **fields: Any) -> Conversation:
    prompt = ask(*said, **fields).prompt
    assert isinstance(prompt, Conversation)
    return prompt


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


# Body → request


def test_the_system_text_is_a_system_message_and_its_blocks_are_lines():
    assert conversation(system="Be brief.").messages[0] == Message("system", "Be brief.")
    blocks = [text("Be brief.", cache_control={"type": "ephemeral"}), text("Be kind.")]
    assert conversation(system=blocks).messages[0] == Message("system", "Be brief.\nBe kind.")
    assert conversation(HI, {"role": "system", "content": [text("New.")]}, HI).messages[1] == (
        Message("system", "New.")
    )


@pytest.mark.parametrize("content", ["", []])
def test_an_empty_system_message_after_the_users_is_none(content: Any):
    empty = {"role": "system", "content": content, "output_config": {"effort": "low"}}
    assert conversation(HI, empty).messages == conversation(HI).messages
    assert conversation(HI, empty, empty, HI) == conversation(HI, HI)
    answer = {"role": "assistant", "content": "b"}
    assert conversation(HI, answer, empty).messages[-1] == Message("system")


def test_a_system_message_may_hold_the_effort_of_its_turn_alone():
    low = {"role": "system", "output_config": {"effort": "low"}}
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "1"}
    answer = {"role": "assistant", "content": "b"}
    for before in ([], [HI, answer]):
        assert conversation(*before, HI, low).messages == conversation(*before, HI).messages
    turn = [
        HI,
        low,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    for asked, effort in (
        ([HI, low], "low"),
        (turn, "low"),
        ([*turn, {"role": "system", "output_config": {"effort": "max"}}], "max"),
        ([HI, low, answer, HI], "high"),
        ([HI, low, answer, HI, {"role": "system", "content": "x", "output_config": {}}], "high"),
    ):
        told = conversation(*asked, output_config={"effort": "high"}).template_args
        assert told == {"reasoning_effort": effort}


@pytest.mark.parametrize("as_text", [True, False])
def test_a_text_that_is_cleared_is_shown_until_the_user_speaks_again(as_text: bool):
    content = "Hurry." if as_text else [text("Hurry.")]
    note = {"role": "system", "content": content, "clear_at": "next_user_message"}
    answer = {"role": "assistant", "content": "b"}
    assert conversation(HI, note).messages[-1] == Message("system", "Hurry.")
    assert conversation(HI, note, answer, HI) == conversation(HI, answer, HI)
    stays = note | {"clear_at": "never"}
    assert conversation(HI, stays, answer, HI).messages[1] == Message("system", "Hurry.")


def test_a_tool_is_offered_also_where_the_text_about_it_is_cleared():
    added = {"type": "tool_definition", "definition": {"name": "f", "input_schema": {}}}
    content = [text("Hurry."), {"type": "tool_addition", "tool": added}]
    note = {"role": "system", "content": content, "clear_at": "next_user_message"}
    prompt = conversation(HI, note, HI)
    assert prompt.messages[1] == Message("system", "The tool f can be called now.")
    assert [tool.name for tool in prompt.tools] == ["f"]


@pytest.mark.parametrize("as_text", [True, False])
def test_what_changes_with_every_request_is_left_out_of_the_system_text(as_text: bool):
    def system(nonce: str) -> Any:
        line = f"x-anthropic-billing-header: cc_version=2.1; cch={nonce};"
        return f"{line}\nYou help." if as_text else [text(line), text("You help.")]

    first, second = (conversation(system=system(nonce)) for nonce in ("00abc", "5f1"))
    assert first == second
    assert first.messages[0] == Message("system", "You help.")


def test_calls_thinking_and_results_find_their_place():
    said = [
        HI,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "whatever"},
                {"type": "redacted_thinking", "data": "abc"},
                text("Let me see."),
                {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Köln"}},
                {"type": "tool_use", "id": "b", "name": "weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [text("1"), text("2")]},
                {"type": "tool_result", "tool_use_id": "b", "content": "no", "is_error": True},
                text("And?"),
            ],
        },
    ]
    assert conversation(*said).messages[1:] == (
        Message(
            "assistant",
            "Let me see.",
            reasoning="Hm.",
            tool_calls=(
                ToolCall("a", "weather", '{"city": "Köln"}'),
                ToolCall("b", "weather", "{}"),
            ),
        ),
        Message("tool", "1\n2", tool_call_id="a"),
        Message("tool", "Error: no", tool_call_id="b"),
        Message("user", "And?"),
    )


def test_neighbours_of_the_same_role_become_one_message():
    answer = {"role": "assistant", "content": "b"}
    assert conversation(HI, HI, answer, answer, HI).messages == (
        Message("user", "hi\nhi"),
        Message("assistant", "b\nb"),
        Message("user", "hi"),
    )


def test_an_answer_at_the_end_is_gone_on_from():
    prompt = conversation(HI, {"role": "assistant", "content": "The answer is"})
    assert (prompt.continue_final_message, prompt.add_generation_prompt) == (True, False)
    call = {"type": "tool_use", "id": "a", "name": "weather", "input": {}}
    for content in (" ", [call]):
        with pytest.raises(InvalidParameter, match="gone on from"):
            conversation(HI, {"role": "assistant", "content": content})


def test_an_empty_answer_at_the_end_is_the_one_to_be_given():
    for content in ("", []):
        prompt = conversation(HI, {"role": "assistant", "content": content})
        assert prompt.messages == (Message("user", "hi"),)
        assert (prompt.continue_final_message, prompt.add_generation_prompt) == (False, True)


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        ({"type": "auto"}, "auto", True),
        ({"type": "any"}, "required", True),
        ({"type": "none"}, "none", True),
        ({"type": "tool", "name": "weather"}, NamedTool("weather"), True),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
    ],
)
def test_tools_and_their_choice(choice: dict[str, Any], expected: object, parallel: bool):
    prompt = conversation(tools=[WEATHER | {"strict": True}], tool_choice=choice)
    assert prompt.tools == (Tool("weather", "Tells it", {"type": "object"}, True),)
    assert (prompt.tool_choice, prompt.parallel_tool_calls) == (expected, parallel)


SEARCH = {"name": "search", "input_schema": {"type": "object"}}
DEFERRED = WEATHER | {"defer_loading": True}


def searched(*found: dict[str, Any] | str) -> list[dict[str, Any]]:
    """A turn in which a search for tools found these."""
    content = [
        {"type": "tool_reference", "tool_name": each} if isinstance(each, str) else each
        for each in found
    ]
    call = {"type": "tool_use", "id": "a", "name": "search", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": content}
    return [HI, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]


def test_a_deferred_tool_is_offered_once_a_result_has_referred_to_it():
    tools = [DEFERRED, SEARCH, DEFERRED | {"name": "time"}]
    assert [tool.name for tool in conversation(tools=tools).tools] == ["search"]
    prompt = conversation(*searched(text("Found:"), "weather"), HI, tools=tools)
    assert [(tool.name, tool.param) for tool in prompt.tools] == [
        ("weather", "tools[0]"),
        ("search", "tools[1]"),
    ]
    assert prompt.messages[2].content == "Found:\nThe tool weather can be called now."


@pytest.mark.parametrize("deferred", [False, None])
def test_a_tool_that_is_not_deferred_is_offered_and_may_be_referred_to(deferred: bool | None):
    tools = [WEATHER | {"defer_loading": deferred}]
    assert [tool.name for tool in conversation(tools=tools).tools] == ["weather"]
    assert len(conversation(*searched("weather"), tools=tools).tools) == 1


def changed(kind: str, **tool: Any) -> dict[str, Any]:
    return {"role": "system", "content": [{"type": f"tool_{kind}", "tool": tool}]}


def named(kind: str, name: str) -> dict[str, Any]:
    return changed(kind, type="tool_reference", name=name)


def test_a_system_message_adds_tools_and_takes_them_back():
    added, removed = named("addition", "weather"), named("removal", "weather")
    prompts = [
        conversation(HI, *said, HI, tools=[DEFERRED, SEARCH])
        for said in ([added], [added, removed], [removed, added], [named("removal", "search")])
    ]
    assert [[tool.name for tool in prompt.tools] for prompt in prompts] == [
        ["weather", "search"],
        ["search"],
        ["weather", "search"],
        [],
    ]
    assert prompts[1].messages[1] == Message(
        "system",
        "The tool weather can be called now.\nThe tool weather can't be called any more.",
    )


def test_a_tool_that_a_message_defines_is_offered_in_place_of_one_of_its_name():
    changes = [
        changed("addition", type="tool_definition", definition=tool)
        for tool in (SEARCH | {"description": "Newer"}, WEATHER)
    ]
    offered = conversation(HI, *changes, named("removal", "weather"), tools=[SEARCH]).tools
    assert [(tool.name, tool.description, tool.param) for tool in offered] == [
        ("search", "Newer", "messages[1].content[0].tool.definition")
    ]


def document(source: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "document", "source": source, **more}


PLAIN = {"type": "text", "media_type": "text/plain", "data": "Rome is hot."}
FOUND = {"type": "search_result", "source": "https://x.org", "title": "Rome", "content": [text("21 degrees."), text("Dry.")]}  # fmt: skip


@pytest.mark.parametrize(
    ("block", "read"),
    [
        (document(PLAIN), "Rome is hot."),
        (
            document(PLAIN, title="Rome", context="From June.", citations={"enabled": False}),
            "Title: Rome\nContext: From June.\nRome is hot.",
        ),
        (document({"type": "content", "content": "Hot."}, title="Rome"), "Title: Rome\nHot."),
        (document({"type": "content", "content": [text("Hot."), text("Dry.")]}), "Hot.\nDry."),
        (FOUND | {"citations": {}}, "Title: Rome\nSource: https://x.org\n21 degrees.\nDry."),
    ],
)
def test_documents_and_search_results_are_read_as_text(block: dict[str, Any], read: str):
    asked = {"role": "user", "content": [text("Look:"), block, text("So?")]}
    assert conversation(asked).messages == (Message("user", f"Look:\n{read}\nSo?"),)
    prompt = conversation(*searched(text("Found:"), block), tools=[SEARCH])
    assert prompt.messages[2].content == f"Found:\n{read}"


def test_thinking_and_effort_reach_the_template_and_the_budget_the_engine():
    request = ask(thinking={"type": "enabled", "budget_tokens": 9}, output_config={"effort": "low"})
    assert isinstance(request.prompt, Conversation)
    args = {"reasoning_effort": "low", "enable_thinking": True}
    assert request.prompt.template_args == args
    assert request.thinking_budget == 9
    assert conversation(thinking={"type": "disabled"}).template_args == {"enable_thinking": False}
    for thinking in ({"type": "adaptive"}, None):
        assert conversation(thinking=thinking).template_args == {}


def test_sampling_ends_and_format_are_taken_over():
    schema = {"type": "object"}
    request = ask(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        stop_sequences=["X"],
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert request.stop.strings == ("X",)
    assert request.max_tokens == 50
    assert request.constraint == JsonSchema('{"type": "object"}', strict=True)


def test_a_format_has_its_elder_name_too():
    asked = {"type": "json_schema", "schema": {"type": "object"}}
    named = {"output_format": asked}, {"output_config": {"format": asked}}
    elder, newer = (ask(**fields).constraint for fields in named)
    assert elder == newer == JsonSchema('{"type": "object"}', strict=True)
    assert [each.param for each in (elder, newer)] == ["output_format", "output_config.format"]


def test_an_answer_that_has_not_begun_is_held_to_its_format():
    empty = {"role": "assistant", "content": ""}
    for said in ([HI], [HI, empty], [HI, BEGUN, HI]):
        assert ask(*said, output_config={"format": JSON}).constraint is not None
    assert ask(HI, BEGUN, output_config={"effort": "low"}).constraint is None


def test_hints_are_accepted_and_unknown_fields_are_told():
    hints: dict[str, Any] = {name: {"type": "ephemeral"} for name in NO_EFFECT}
    given = {"max_tokens": 5, "messages": [HI], "later": 1} | hints
    body = MessagesRequest.model_validate(given)
    assert body.unknown_fields() == ["later"]
    assert messages.request(body, HEAD)


IMAGE: dict[str, Any] = {"type": "image", "source": {"type": "url", "url": "x"}}


WEB = {"type": "web_search_20250305", "name": "web_search"}


def of_user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"system": [IMAGE]}, "system[0].type"),
        ({"system": [FOUND]}, "system[0].type"),
        (of_user(document(IMAGE["source"])), "messages[0].content[0].source.type"),
        (
            of_user(text("hi"), document({"type": "base64", "data": "x"})),
            "messages[0].content[1].source.type",
        ),
        (
            of_user(document({"type": "content", "content": [text("hi"), IMAGE]})),
            "messages[0].content[0].source.content[1].type",
        ),
        (of_user(FOUND | {"content": [IMAGE]}), "messages[0].content[0].content[0].type"),
        (
            of_user(document(PLAIN, citations={"enabled": True})),
            "messages[0].content[0].citations",
        ),
        (
            {"messages": searched(FOUND | {"citations": {"enabled": True}})},
            "messages[2].content[0].content[0].citations",
        ),
        ({"messages": searched(IMAGE)}, "messages[2].content[0].content[0].type"),
        ({"tools": [{"type": "hologram", "name": "find"}]}, "tools[0].type"),
        ({"tools": [WEB], "tool_choice": {"type": "any"}}, "tool_choice"),
        (
            {"tools": [WEB, WEATHER], "tool_choice": {"type": "tool", "name": "web_search"}},
            "tool_choice.name",
        ),
        ({"tools": [WEATHER | {"input_examples": [{}]}]}, "tools[0].input_examples"),
        (
            {"messages": [HI, changed("addition", type="mcp_toolset_reference", server_name="x")]},
            "messages[1].content[0].tool.type",
        ),
        (
            {"messages": [HI, changed("addition", type="tool_definition", definition=WEB)]},
            "messages[1].content[0].tool.definition.type",
        ),
        ({"thread": {"type": "continue", "previous_message_id": "msg_0"}}, "thread"),
        ({"compaction": {"type": "summarize"}}, "compaction"),
    ],
)
def test_what_cant_be_honoured_is_refused_by_name(fields: dict[str, Any], param: str):
    with pytest.raises(UnsupportedParameter) as caught:
        ask(**fields)
    assert caught.value.param == param
    assert param.removesuffix(".type") in caught.value.message


TOOL_USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
BEGUN = {"role": "assistant", "content": '{"city": '}
JSON = {"type": "json_schema", "schema": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": ""}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": [TOOL_USE]}]}, "messages[0].content[0].type"),
        (
            {"messages": [HI, {"role": "assistant", "content": [RESULT]}]},
            "messages[1].content[0].type",
        ),
        (
            {"messages": [HI, {"role": "assistant", "content": [document(PLAIN)]}]},
            "messages[1].content[0].type",
        ),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"output_format": JSON, "output_config": {"format": JSON}}, "output_format"),
        ({"messages": [HI, BEGUN], "output_format": JSON}, "output_format"),
        ({"messages": [HI, BEGUN], "output_config": {"format": JSON}}, "output_config.format"),
        (
            {"tools": [DEFERRED], "messages": searched("time")},
            "messages[2].content[0].content[0].tool_name",
        ),
        ({"tools": [{"defer_loading": True, "input_schema": {}}]}, "tools[0].name"),
        ({"messages": [{"role": "system", "output_config": {"effort": "low"}}]}, "messages"),
        ({"messages": [HI, {"role": "system"}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "output_config": {}}]}, "messages[0].output_config"),
        ({"messages": [HI | {"output_config": {}}]}, "messages[0].output_config"),
        ({"messages": [HI | {"clear_at": "never"}]}, "messages[0].clear_at"),
        (
            {"tools": [DEFERRED], "messages": [HI, named("addition", "time")]},
            "messages[1].content[0].tool.name",
        ),
        (
            of_user(named("addition", "weather")["content"][0]) | {"tools": [DEFERRED]},
            "messages[0].content[0].type",
        ),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(fields: dict[str, Any], param: str):
    with pytest.raises(InvalidParameter) as caught:
        ask(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "caller",
    [
        {},
        {"caller": None},
        {"caller": {"type": "direct"}},
        {"caller": {"type": "code_execution_20250825", "tool_id": "x"}},
    ],
)
def test_a_call_is_read_whoever_made_it(caller: dict[str, Any]):
    said = {"role": "assistant", "content": [TOOL_USE | caller]}
    result = {"role": "user", "content": [RESULT]}
    assert len(conversation(HI, said, result).messages) == 3


# Events → stream and body


def end(reason: Any = "stop", stop: str | None = None, tokens: int = 9) -> Finished:
    return Finished(reason, Usage(7, tokens, cached_tokens=4, reasoning_tokens=2), stop)


def streamed(happened: list[Event], head: MessageHead = HEAD) -> list[dict[str, Any]]:
    stream = MessageStream(head)
    wire = b"".join(stream.write([(0, [event])]) for event in happened) + stream.end()
    found = events(wire.decode())
    for name, data in found:
        strictly(RawMessageStreamEvent, data)
        assert name == data["type"]
    return [data for _, data in found]


def collected(happened: list[Event], head: MessageHead = HEAD) -> dict[str, Any]:
    answer = MessageAnswer(head)
    answer.add([(0, happened)])
    body: dict[str, Any] = json.loads("".join(answer.body()))
    strictly(SdkMessage, body)
    return body


def accumulated(data: list[dict[str, Any]]) -> dict[str, Any]:
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for event in data:
        model = strictly(RawMessageStreamEvent, event)
        snapshot = accumulate_event(event=model, current_snapshot=snapshot, json_bufs=buffers)
    found: dict[str, Any] = snapshot.model_dump()
    return found


def kinds(data: list[dict[str, Any]]) -> list[str]:
    """Types of events, those of deltas by their own, each run of the same once."""
    named = [event["delta"]["type"] if "index" in event and "delta" in event else event["type"] for event in data]  # fmt: skip
    return [kind for kind, _ in itertools.groupby(named)]


STARTED = Started(7, 4)
FULL: list[Event] = [
    STARTED,
    ReasoningDelta("Hm"),
    ReasoningDelta("."),
    TextDelta("Let me "),
    TextDelta("see."),
    ToolCallStarted(0, "call_a", "weather"),
    ToolCallDelta(0, '{"city": '),
    ToolCallDelta(0, '"Rome"}'),
    ToolCallStarted(1, "call_b", "time"),
    end("tool_calls"),
]


def test_a_full_answer_has_anthropics_sequence():
    data = streamed(FULL)
    assert kinds(data) == [
        "message_start",
        *["content_block_start", "thinking_delta", "signature_delta", "content_block_stop"],
        *["content_block_start", "text_delta", "content_block_stop"],
        *["content_block_start", "input_json_delta", "content_block_stop"],
        *["content_block_start", "content_block_stop"],
        "message_delta",
        "message_stop",
    ]
    indexes = [event["index"] for event in data if event["type"] == "content_block_start"]
    assert indexes == [0, 1, 2, 3]
    assert data[0]["message"]["usage"]["cache_read_input_tokens"] == 4
    assert data[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert data[-2]["usage"]["input_tokens"] == 3


def test_a_whole_answer_has_its_blocks_in_order():
    body = collected(FULL)
    assert [block["type"] for block in body["content"]] == [
        "thinking",
        "text",
        "tool_use",
        "tool_use",
    ]
    assert body["content"][2]["input"] == {"city": "Rome"}
    assert body["content"][3] == {"type": "tool_use", "id": "call_b", "name": "time", "input": {}}
    assert body["usage"] == {
        "input_tokens": 3,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 9,
        "output_tokens_details": {"thinking_tokens": 2},
    }


def test_a_thinking_block_is_taken_back_as_it_was_given():
    thinking = collected(FULL)["content"][0]
    prompt = conversation(HI, {"role": "assistant", "content": [thinking, text("So.")]}, HI)
    assert prompt.messages[1].reasoning == "Hm."


def asking(**thinking: Any) -> MessageHead:
    given = {"max_tokens": 50, "messages": [HI], "thinking": thinking}
    return messages.head(MessagesRequest.model_validate(given), "m", "req-1")


OMITTED = asking(type="adaptive", display="omitted")


def test_thinking_that_is_omitted_is_signed_and_not_shown():
    data = streamed(FULL, OMITTED)
    assert kinds(data)[:4] == [
        "message_start",
        *["content_block_start", "signature_delta", "content_block_stop"],
    ]
    assert kinds(data)[4:] == kinds(streamed(FULL))[5:]
    whole = collected(FULL, OMITTED)
    assert whole["content"][0]["thinking"] == ""
    assert whole["usage"] == collected(FULL)["usage"]
    assert accumulated(data)["content"] == SdkMessage.model_validate(whole).model_dump()["content"]


@pytest.mark.parametrize("thinking", ["Hm.", "Köln \U0001f600\n"])
def test_thinking_that_is_omitted_comes_back_to_the_model(thinking: str):
    block = collected([STARTED, ReasoningDelta(thinking), end()], OMITTED)["content"][0]
    prompt = conversation(HI, {"role": "assistant", "content": [block, text("So.")]}, HI)
    assert prompt.messages[1] == Message("assistant", "So.", reasoning=thinking)


@pytest.mark.parametrize("signature", ["", "EqQBCkYIBxgC", "mlx-manager:%", "mlx-manager:gICA"])
def test_a_signature_from_elsewhere_breaks_no_conversation(signature: str):
    block = {"type": "thinking", "thinking": "", "signature": signature}
    seen = block | {"thinking": "Hm."}
    answers = [{"role": "assistant", "content": [each, text("So.")]} for each in (block, seen)]
    unseen, shown = (conversation(HI, answer, HI).messages[1] for answer in answers)
    assert (unseen.reasoning, shown.reasoning) == (None, "Hm.")


@pytest.mark.parametrize(
    "display", [{}, {"display": None}, {"display": "summarized"}, {"display": "updates"}]
)
def test_thinking_is_given_as_it_is_unless_it_is_to_be_omitted(display: dict[str, Any]):
    head = asking(type="enabled", budget_tokens=9, **display)
    assert collected(FULL, head)["content"] == collected(FULL)["content"]
    assert collected(FULL)["content"][0]["thinking"] == "Hm."


@pytest.mark.parametrize(
    ("finish", "reason", "sequence"),
    [
        (end("stop"), "end_turn", None),
        (end("stop", "X"), "stop_sequence", "X"),
        (end("length", tokens=50), "max_tokens", None),
        (end("length", tokens=49), "model_context_window_exceeded", None),
        (end("tool_calls"), "tool_use", None),
    ],
)
def test_why_an_answer_ended_is_told(finish: Finished, reason: str, sequence: str | None):
    happened: list[Event] = [STARTED, TextDelta("a"), finish]
    body = collected(happened)
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)
    told = streamed(happened)[-2]["delta"]
    assert told == {"stop_reason": reason, "stop_sequence": sequence}


def test_an_answer_cut_off_within_a_call_keeps_what_is_whole():
    cut: list[Event] = [
        STARTED,
        ToolCallStarted(0, "a", "f"),
        ToolCallDelta(0, '{"city": "Rome", "day": "Mon'),
        end("length"),
    ]
    assert collected(cut)["content"][0]["input"] == {"city": "Rome"}
    assert (
        accumulated(streamed(cut))["content"]
        == SdkMessage.model_validate(collected(cut)).model_dump()["content"]
    )


@pytest.mark.parametrize("arguments", ["[1]", "nonsense", '{"a" 1}'])
def test_a_call_with_what_is_no_object_fails(arguments: str):
    with pytest.raises(GenerationFailed, match="no JSON object"):
        collected(
            [STARTED, ToolCallStarted(0, "a", "f"), ToolCallDelta(0, arguments), end("tool_calls")]
        )


def test_half_a_character_in_a_call_is_given_as_what_stands_for_it():
    arguments = r'{"a\ud83d": ["x\ude00y", "\ud83d\ude00"]}'
    call = [ToolCallStarted(0, "a", "f"), ToolCallDelta(0, arguments)]
    [block] = collected([STARTED, *call, end("tool_calls")])["content"]
    assert block["input"] == {"a\ufffd": ["x\ufffdy", "\U0001f600"]}


def nested(levels: int) -> str:
    return '{"a": ' * levels + "1" + "}" * levels


@pytest.mark.parametrize("cut", [nested(2000)[:1500], nested(2000)[:9000], '{"a" 1', '"tex'])
def test_of_an_answer_cut_off_within_a_call_that_can_not_be_read_the_rest_is_given(cut: str):
    body = collected(
        [
            STARTED,
            TextDelta("So."),
            ToolCallStarted(0, "a", "f"),
            ToolCallDelta(0, nested(220)),
            ToolCallStarted(1, "b", "f"),
            ToolCallDelta(1, cut),
            end("length"),
        ]
    )
    given, whole, beginning = body["content"]
    assert given["text"] == "So."
    assert whole["input"] == json.loads(nested(220))
    assert beginning == {"type": "tool_use", "id": "b", "name": "f", "input": {}}


def written(levels: int) -> bool:
    """Whether an answer with a call so deep has a body.

    Raises:
        GenerationFailed: it has none.
    """
    answer = MessageAnswer(HEAD)
    call = [ToolCallStarted(0, "a", "f"), ToolCallDelta(0, nested(levels))]
    answer.add([(0, [STARTED, *call, end("tool_calls")])])
    return nested(levels).replace(" ", "") in "".join(answer.body())


def test_a_call_is_written_as_deep_as_it_is():
    assert all(written(levels) for levels in (150, 201, 240))


def test_a_call_that_is_too_deep_to_be_written_fails_by_name():
    for levels in range(241, 260):
        with suppress(GenerationFailed):
            assert written(levels)
    for levels in (260, 2000):
        with pytest.raises(GenerationFailed, match=r"called f with .* nested too deep"):
            written(levels)


words = st.text(max_size=6)
texts = st.builds(TextDelta, words) | st.builds(ReasoningDelta, words)
arguments = st.dictionaries(words, words | st.integers(), max_size=3).map(json.dumps)


@st.composite
def answers(draw: st.DrawFn) -> list[Event]:
    happened: list[Event] = [STARTED, *draw(st.lists(texts, max_size=8))]
    for index in range(draw(st.integers(0, 3))):
        whole = draw(arguments)
        cut = draw(st.integers(0, len(whole)))
        happened.append(ToolCallStarted(index, f"call_{index}", draw(words)))
        happened += [ToolCallDelta(index, piece) for piece in (whole[:cut], whole[cut:]) if piece]
    return [*happened, draw(st.sampled_from([end(), end("length"), end("stop", "X")]))]


@settings(max_examples=50)
@given(answers(), st.sampled_from([HEAD, replace(HEAD, omits_thinking=True)]))
def test_what_the_sdk_accumulates_is_the_whole_answer(happened: list[Event], head: MessageHead):
    whole = SdkMessage.model_validate(collected(happened, head)).model_dump()
    assert accumulated(streamed(happened, head)) == whole


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidParameter("no"), "invalid_request_error"),
        (Overloaded("full"), "rate_limit_error"),
        (GenerationFailed("broken"), "api_error"),
        (ContextLengthExceeded("5 > 4"), "invalid_request_error"),
    ],
)
def test_an_error_in_a_stream_has_anthropics_shape(error: MLXManagerError, kind: str):
    [(name, body)] = events(MessageStream(HEAD).fail(error).decode())
    assert name == "error"
    strictly(ErrorResponse, body)
    assert body["error"]["type"] == kind
    assert body["request_id"] == "req-1"
    assert error.message in body["error"]["message"]


@pytest.mark.parametrize("error", [RequestTooLarge("no"), HeadersTooLarge("no")])
def test_a_request_that_is_too_large_is_the_clients_fault(error: MLXManagerError):
    body = messages.error_body(error, "req-1")
    strictly(ErrorResponse, body)
    assert body["error"]["type"] == "invalid_request_error"


def test_a_prompt_that_is_too_long_is_told_in_anthropics_words():
    body = messages.error_body(ContextLengthExceeded.counted(9, 8), "req-1")
    assert body["error"]["message"] == "prompt is too long: 9 tokens > 8 maximum"
