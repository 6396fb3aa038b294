from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseItem, ResponseStreamEvent
from sdk_models import events, strictly

from mlx_manager.mlx_server.core import (
    Conversation,
    Event,
    Finished,
    GenerationRequest,
    JsonObject,
    JsonSchema,
    Message,
    NamedTool,
    ReasoningDelta,
    Sampling,
    Started,
    TextDelta,
    TokenLogprob,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)
from mlx_manager.mlx_server.errors import (
    GenerationFailed,
    InvalidParameter,
    ItemNotFound,
    MLXManagerError,
    Overloaded,
    UnsupportedParameter,
)
from mlx_manager.mlx_server.protocols import responses
from mlx_manager.mlx_server.protocols.responses import (
    ResponseAnswer,
    ResponseHead,
    ResponseStream,
    Shortened,
)
from mlx_manager.mlx_server.schemas.responses import NO_EFFECT, Items, ResponsesRequest

WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}
USER = {"role": "user", "content": "hi"}


def head(**fields: Any) -> ResponseHead:
    body = ResponsesRequest.model_validate_json(json.dumps({"input": "hi"} | fields))
    return ResponseHead("m", body, id="resp_1", created=5)


def ask(*history: dict[str, Any], **fields: Any) -> GenerationRequest:
    asked = head(**fields)
    items = responses.input_items(asked.body, {})
    return responses.request(asked, responses.kept_items(history), items)


def conversation(*history: dict[str, Any], **fields: Any) -> Conversation:
    prompt = ask(*history, **fields).prompt
    assert isinstance(prompt, Conversation)
    return prompt


# Body → request


def test_text_is_a_users_message_and_instructions_come_first():
    assert conversation(USER, instructions="Be brief.").messages == (
        Message("system", "Be brief."),
        Message("user", "hi"),
        Message("user", "hi"),
    )


def test_what_an_assistant_did_between_two_others_is_one_message():
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "S"}]},
        USER,
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So"}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "g", "arguments": '{"x":1}'},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "2"}]},
    ]  # fmt: skip
    assert conversation(input=items).messages == (
        Message("system", "S"),
        Message("user", "hi"),
        Message(
            "assistant",
            "So",
            reasoning="Hm",
            tool_calls=(ToolCall("a", "f", "{}"), ToolCall("b", "g", '{"x":1}')),
        ),
        Message("tool", "1", tool_call_id="a"),
        Message("tool", "2", tool_call_id="b"),
    )


@pytest.mark.parametrize(
    ("choice", "expected", "offered"),
    [
        (None, "auto", ["weather", "time"]),
        ("required", "required", ["weather", "time"]),
        ({"type": "function", "name": "time"}, NamedTool("time"), ["weather", "time"]),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "time"}]},
            "required",
            ["time"],
        ),
    ],
)  # fmt: skip
def test_tools_and_their_choice(choice: Any, expected: object, offered: list[str]):
    tools = [WEATHER, WEATHER | {"name": "time", "strict": None}]
    prompt = conversation(tools=tools, tool_choice=choice, parallel_tool_calls=False)
    assert prompt.tool_choice == expected
    assert [tool.name for tool in prompt.tools] == offered
    assert prompt.tools[-1] == Tool("time", None, {"type": "object"}, False)
    assert not prompt.parallel_tool_calls


def test_format_sampling_and_limits_are_taken_over():
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    request = ask(text={"format": schema}, temperature=0, top_p=0.5, max_output_tokens=7)
    assert request.constraint == JsonSchema('{"type": "object"}', strict=True)
    assert (request.sampling.temperature, request.sampling.top_p) == (0, 0.5)
    assert request.max_tokens == 7
    assert request.logprobs is None
    assert ask(text={"format": {"type": "json_object"}}).constraint == JsonObject()
    assert ask(text={"format": {"type": "text"}}).constraint is None
    assert ask(include=["message.output_text.logprobs"]).logprobs == 0
    assert ask(top_logprobs=3).logprobs == 3


def test_effort_reaches_the_template():
    assert conversation(reasoning={"effort": "low", "summary": "auto"}).template_args == {
        "reasoning_effort": "low"
    }
    assert conversation(reasoning={"effort": "none"}).template_args["enable_thinking"] is False


def test_hints_are_accepted_and_unknown_fields_are_told():
    given: dict[str, Any] = dict.fromkeys(NO_EFFECT - {"max_tool_calls"}, "x")
    body = ResponsesRequest.model_validate({"input": "hi", "max_tool_calls": 1, "later": 1} | given)
    assert body.unknown_fields() == ["later"]
    assert responses.request(ResponseHead("m", body), [], responses.input_items(body, {}))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "hologram"}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice"),
        (
            {
                "tools": [WEATHER, {"type": "web_search"}],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "web_search"}],
                },
            },
            "tool_choice",
        ),
        ({"input": [{"type": "hologram", "id": "x"}]}, "input[0].type"),
        (
            {"input": [{"type": "compaction", "encrypted_content": "x"}]},
            "input[0].encrypted_content",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
    ],
)
def test_what_cant_be_honoured_is_refused_by_name(fields: dict[str, Any], param: str):
    with pytest.raises(UnsupportedParameter) as caught:
        ask(**fields)
    assert caught.value.param == param
    assert param.removesuffix(".type").removesuffix(".encrypted_content") in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"include": ["everything"]}, "include[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.tools"),
        (
            {
                "tools": [WEATHER],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "time"}],
                },
            },
            "tool_choice.tools",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(fields: dict[str, Any], param: str):
    with pytest.raises(InvalidParameter) as caught:
        ask(**fields)
    assert caught.value.param == param


def test_the_oldest_turns_are_left_out_first_and_system_text_never():
    answer = {"role": "assistant", "content": "x"}
    request = ask(USER, answer, USER, answer, instructions="S", input="last")
    lengths = []
    for each in Shortened(request):
        assert isinstance(each.prompt, Conversation)
        lengths.append(len(each.prompt.messages))
        assert each.prompt.messages[0] == Message("system", "S")
        assert each.prompt.messages[-1] == Message("user", "last")
        assert each.prompt.messages[1].role == "user"
    assert lengths == [6, 4, 2]


# Events → stream and body


def end(reason: Any = "stop", tokens: int = 9) -> Finished:
    return Finished(reason, Usage(7, tokens, cached_tokens=4, reasoning_tokens=2))


def streamed(happened: list[Event], **fields: Any) -> list[dict[str, Any]]:
    stream = ResponseStream(head(**fields))
    wire = b"".join(stream.write([(0, [event])]) for event in happened) + stream.end()
    return checked(wire)


def checked(wire: bytes) -> list[dict[str, Any]]:
    found = events(wire.decode())
    for number, (name, data) in enumerate(found):
        strictly(ResponseStreamEvent, data)
        assert name == data["type"]
        assert data["sequence_number"] == number
    return [data for _, data in found]


def collected(happened: list[Event], **fields: Any) -> dict[str, Any]:
    return written(head(**fields), happened)


def written(asked: ResponseHead, happened: list[Event]) -> dict[str, Any]:
    answer = ResponseAnswer(ResponseStream(asked))
    answer.add([(0, happened)])
    body: dict[str, Any] = json.loads("".join(answer.body()))
    strictly(Response, body)
    return body


def nameless(value: Any) -> Any:
    """Without ids and times, which differ from answer to answer, and what the SDK adds."""
    match value:
        case dict():
            return {
                key: nameless(item)
                for key, item in value.items()
                if key not in {"id", "item_id", "completed_at", "parsed", "parsed_arguments"}
            }
        case list():
            return [nameless(item) for item in value]
    return value


def kinds(data: list[dict[str, Any]]) -> list[str]:
    """Types of events, each run of the same once."""
    return [kind.removeprefix("response.") for kind, _ in itertools.groupby(data, lambda e: e["type"])]  # fmt: skip


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


def test_a_full_answer_has_openais_sequence():
    data = streamed(FULL, tools=[WEATHER])
    opened = ["output_item.added", "content_part.added"]
    closed = ["content_part.done", "output_item.done"]
    arguments = "function_call_arguments"
    assert kinds(data) == [
        *["created", "in_progress"],
        *[*opened, "reasoning_text.delta", "reasoning_text.done", *closed],
        *[*opened, "output_text.delta", "output_text.done", *closed],
        *["output_item.added", f"{arguments}.delta", f"{arguments}.done", "output_item.done"],
        *["output_item.added", f"{arguments}.done", "output_item.done"],
        "completed",
    ]
    added = [event for event in data if event["type"] == "response.output_item.added"]
    assert [event["output_index"] for event in added] == [0, 1, 2, 3]
    done = [event["item"] for event in data if event["type"] == "response.output_item.done"]
    assert data[-1]["response"]["output"] == done
    ids = {event["item"]["id"] for event in added}
    assert {event["item_id"] for event in data if "item_id" in event} == ids
    ends = [event for event in data if event["type"] == f"response.{arguments}.done"]
    assert [event["name"] for event in ends] == ["weather", "time"]


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_a_stream_repeats_no_number_that_json_does_not_have(number: float):
    tool = {"type": "function", "name": "f", "parameters": {"maximum": number}}
    form = {"format": {"type": "json_schema", "name": "n", "schema": {"minimum": number}}}
    first, *_, last = streamed([STARTED, TextDelta("1"), end()], tools=[tool], text=form)
    for response in (first["response"], last["response"]):
        assert response["tools"][0]["parameters"] == {"maximum": None}
        assert response["text"]["format"]["schema"] == {"minimum": None}


def test_a_whole_answer_is_what_the_stream_ends_with():
    body = collected(FULL, tools=[WEATHER])
    assert nameless(body) == nameless(streamed(FULL, tools=[WEATHER])[-1]["response"])
    reasoning, message, call, _ = body["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"][0]["text"] == "Let me see."
    assert (call["call_id"], call["arguments"]) == ("call_a", '{"city": "Rome"}')
    assert body["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 16,
    }


def test_an_answer_cut_off_by_its_length_is_incomplete():
    data = streamed([STARTED, TextDelta("a"), end("length")])
    assert data[-1]["type"] == "response.incomplete"
    response = data[-1]["response"]
    assert response["status"] == response["output"][0]["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["completed_at"] is None


@pytest.mark.parametrize(
    ("error", "code"),
    [(GenerationFailed("broken"), "server_error"), (Overloaded("full"), "rate_limit_exceeded")],
)
def test_a_failure_in_a_stream_is_a_failed_response(error: MLXManagerError, code: str):
    stream = ResponseStream(head())
    wire = stream.write([(0, FULL[:6])]) + stream.fail(error)
    last = checked(wire)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": code, "message": error.message}


def test_a_failure_after_mere_signs_of_life_is_that_of_a_response_which_has_begun():
    data = checked(ResponseStream(head()).fail(Overloaded("full")))
    assert kinds(data) == ["created", "in_progress", "failed"]
    state: Any = ResponseStreamState(input_tools=[], text_format=omit)
    for event in data:
        state.handle_event(strictly(ResponseStreamEvent, event))


def test_logprobs_go_with_the_text():
    token = TokenLogprob(5, b"a", -0.5, ((5, b"a", -0.5), (6, b"b", -1.0)))
    happened: list[Event] = [STARTED, TextDelta("a", (token,)), TextDelta("b"), end()]
    data = streamed(happened, top_logprobs=2)
    delta = next(event for event in data if event["type"] == "response.output_text.delta")
    assert delta["logprobs"][0]["top_logprobs"][1] == {"token": "b", "logprob": -1.0}
    begun = next(event for event in data if event["type"] == "response.content_part.added")
    assert begun["part"] == {
        "type": "output_text",
        "text": "",
        "annotations": [],
        "logprobs": [],
    }
    part = collected(happened, top_logprobs=2)["output"][0]["content"][0]
    assert part["logprobs"][0]["bytes"] == [97]


def test_thinking_comes_back_from_what_the_client_kept():
    [item] = collected([STARTED, ReasoningDelta("Hm."), end()], include=["reasoning.encrypted_content"])["output"]  # fmt: skip
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": item["encrypted_content"]}
    assert conversation(sealed).messages[0].reasoning == "Hm."
    for content in ("gAAAA", "mlx-manager:a", "mlx-manager:é", "mlx-manager:/w=="):
        foreign = sealed | {"encrypted_content": content}
        assert conversation(foreign).messages[0].reasoning is None


def test_items_are_numbered_as_the_request_has_them():
    call = {"type": "hologram", "id": "x"}
    with pytest.raises(UnsupportedParameter) as caught:
        ask(USER, USER, input=[USER, call])
    assert caught.value.param == "input[1].type"


@pytest.mark.parametrize(
    "reference",
    [
        {"type": "item_reference", "id": "msg_1"},
        {"type": None, "id": "msg_1"},
        {"id": "msg_1"},
    ],
)
def test_an_item_that_was_kept_stands_where_it_is_referred_to(reference: dict[str, Any]):
    said = {"type": "message", "id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": "So"}]}  # fmt: skip
    body = head(input=[USER, reference, USER]).body
    assert responses.references(body) == ["msg_1"]
    items = responses.input_items(body, {"msg_1": said})
    assert items == responses.kept_items([USER, said, USER])
    with pytest.raises(ItemNotFound, match=r"`input\[1\]` .*'msg_1'.*`store: false`") as caught:
        responses.input_items(body, {})
    assert caught.value.param == "input[1]"


def test_an_item_with_an_id_and_a_role_is_a_message():
    body = head(input=[USER | {"id": "msg_1"}]).body
    assert not responses.references(body)
    assert responses.input_items(body, {}) == responses.kept_items([USER | {"id": "msg_1"}])


def test_what_is_included_of_thinking_that_was_kept_can_be_read_again():
    happened = [Started(1), ReasoningDelta("Hm"), TextDelta("So"), Finished("stop", Usage(1, 2))]
    kept = collected(happened)["output"]
    assert responses.including(kept, []) == kept
    told = responses.including(kept, ["reasoning.encrypted_content"])
    at_once = collected(happened, include=["reasoning.encrypted_content"])["output"]
    assert told[0]["encrypted_content"] == at_once[0]["encrypted_content"]
    assert "encrypted_content" not in kept[0]
    assert told[1] == kept[1]
    closed = {"type": "reasoning", "summary": [], "encrypted_content": told[0]["encrypted_content"]}
    foreign = closed | {"encrypted_content": "of another server"}
    unread = {"type": "reasoning", "summary": []}
    shown = responses.listed(Items.validate_python([closed, foreign, unread, USER]))
    assert responses.including(shown, ["reasoning.encrypted_content"]) == shown


def test_log_probabilities_that_nobody_asked_for_can_not_be_included_later():
    scored = TextDelta("a", (TokenLogprob(1, b"a", -0.5, ()),))
    happened = [Started(1), ReasoningDelta("Hm"), scored, Finished("stop", Usage(1, 2))]
    wanted = ["reasoning.encrypted_content", "message.output_text.logprobs"]
    [_, told] = responses.including(collected(happened, top_logprobs=2)["output"], wanted)
    assert told["content"][0]["logprobs"][0]["logprob"] == -0.5
    said = [{"role": "assistant", "content": "So"}]
    for kept in (
        collected([TextDelta("a"), Finished("stop", Usage(1, 2))])["output"],
        responses.listed(Items.validate_python(said)),
    ):
        with pytest.raises(UnsupportedParameter, match="logprobs") as caught:
            responses.including(kept, wanted)
        assert caught.value.param == "include[1]"
    users = responses.listed(Items.validate_python([USER]))
    assert responses.including(users, wanted) == users


def test_listed_items_have_ids_of_their_own():
    given = [{"type": "message", "role": "user", "content": text, "id": "x"} for text in "abc"]
    shown = responses.listed(Items.validate_python(given))
    assert shown[0]["id"] == "x"
    assert len({item["id"] for item in shown}) == 3


def test_items_of_a_request_are_listed_in_the_sdks_shape_and_mean_the_same():
    given = [
        USER,
        {"role": "assistant", "content": "So"},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "So"}]},
        {"type": "reasoning", "summary": None, "encrypted_content": "mlx-manager:SG0="},
    ]
    shown = responses.listed(Items.validate_python(given))
    for item in shown:
        strictly(ResponseItem, item)
    assert len({item["id"] for item in shown}) == len(shown)
    assert conversation(input=shown) == conversation(input=given)


def test_what_no_json_number_can_be_is_listed_as_null():
    given = json.loads('[{"type": "reasoning", "summary": [], "score": 1e999}]')
    [shown] = responses.listed(Items.validate_python(given))
    assert shown["score"] is None


def test_functions_of_a_namespace_are_called_by_their_full_names_and_told_by_their_own():
    space = {"type": "namespace", "name": "agents", "description": "All.", "tools": [WEATHER]}
    assert [tool.name for tool in conversation(tools=[space]).tools] == ["agents__weather"]
    happened: list[Event] = [STARTED, ToolCallStarted(0, "a", "agents__weather"), end("tool_calls")]
    body = collected(happened, tools=[space])
    [call] = body["output"]
    assert (call["namespace"], call["name"]) == ("agents", "weather")
    assert conversation(call).messages[0].tool_calls == (ToolCall("a", "agents__weather", ""),)
    streamed(happened, tools=[space])
    nested = space | {"tools": [space]}
    with pytest.raises(UnsupportedParameter, match=r"tools\[0\].tools\[0\].type"):
        ask(tools=[nested])


def added(*tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "additional_tools", "role": "developer", "tools": list(tools)}


def test_tools_are_added_by_an_item_and_called_as_what_they_are():
    code = {"type": "custom", "name": "run", "description": "Run code."}
    space = {"type": "namespace", "name": "functions", "description": "All.", "tools": [code]}
    first = [added(space, {"type": "web_search"}), USER]
    prompt = conversation(input=first)
    assert [tool.name for tool in prompt.tools] == ["functions__run"]
    assert prompt.messages == conversation(input=[USER]).messages
    items = responses.input_items(head(input=first).body, {})
    asked = replace(head(input=first), added=responses.added_tools(items))
    assert asked.body.ignored_tools() == ["web_search"]
    happened: list[Event] = [
        *(STARTED, ToolCallStarted(0, "a", "functions__run")),
        *(ToolCallDelta(0, '{"input": "x"}'), end("tool_calls")),
    ]
    [call] = written(asked, happened)["output"]
    assert (call["type"], call["namespace"], call["name"]) == (
        "custom_tool_call",
        "functions",
        "run",
    )
    assert call["input"] == "x"


def test_a_tool_that_is_added_later_is_told_of_and_takes_the_place_of_one_of_its_name():
    other = WEATHER | {"description": "Of all cities"}
    kept = responses.listed(Items.validate_python([USER, added(other)]))
    assert [strictly(ResponseItem, item).type for item in kept] == ["message", "additional_tools"]
    prompt = conversation(*kept, tools=[WEATHER])
    assert [(tool.name, tool.description) for tool in prompt.tools] == [
        ("weather", "Of all cities")
    ]
    assert prompt.messages[1] == Message("system", "The tool weather can be called now.")
    with pytest.raises(UnsupportedParameter, match=r"input\[1\].tools\[0\].type"):
        ask(input=[USER, added({"type": "hologram"})])


def test_settings_hold_from_an_item_on_until_another_changes_them():
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}

    def update(**fields: Any) -> dict[str, Any]:
        return {"type": "configuration_update", **fields}

    low, shaped = update(reasoning={"effort": "low"}), update(text={"format": schema})
    asked = ask(low, USER, shaped, reasoning={"effort": "high"})
    assert isinstance(asked.prompt, Conversation)
    assert asked.prompt.template_args == {"reasoning_effort": "low"}
    assert asked.prompt.messages == conversation(USER).messages
    assert isinstance(asked.constraint, JsonSchema)
    plain = update(reasoning={"effort": "none"}, text={"format": {"type": "text"}})
    asked = ask(low, shaped, input=[USER, plain])
    assert isinstance(asked.prompt, Conversation)
    assert asked.prompt.template_args == {"reasoning_effort": "none", "enable_thinking": False}
    assert asked.constraint is None
    kept = responses.listed(Items.validate_python([low]))
    assert strictly(ResponseItem, kept[0]).type == "configuration_update"


def test_what_an_agent_says_to_another_is_read_as_a_users():
    task = {
        "type": "agent_message",
        "author": "/root",
        "recipient": "/root/helper",
        "content": [
            {"type": "input_text", "text": "Payload:"},
            {"type": "encrypted_content", "encrypted_content": "Look about."},
        ],
    }
    said = Message("user", "/root to /root/helper:\nPayload:\nLook about.")
    assert conversation(input=[task]).messages == (said,)
    kept = responses.listed(Items.validate_python([task]))
    assert conversation(*kept, input=[USER]).messages[0] == said
    picture = task | {"content": [{"type": "input_image", "image_url": "x"}]}
    with pytest.raises(UnsupportedParameter, match=r"input\[0\].content\[0\]"):
        ask(input=[picture])


words = st.text(max_size=6)
texts = st.builds(TextDelta, words) | st.builds(ReasoningDelta, words)


@st.composite
def answers(draw: st.DrawFn) -> list[Event]:
    happened: list[Event] = [STARTED, *draw(st.lists(texts, max_size=8))]
    for index in range(draw(st.integers(0, 3))):
        happened.append(ToolCallStarted(index, f"call_{index}", draw(words)))
        happened += [ToolCallDelta(index, piece) for piece in draw(st.lists(words, max_size=3))]
    return [*happened, end()]


@settings(max_examples=50)
@given(answers())
def test_what_the_sdk_accumulates_is_the_whole_answer(happened: list[Event]):
    state: Any = ResponseStreamState(input_tools=[], text_format=omit)
    final: Any = None
    for event in streamed(happened):
        for fired in state.handle_event(strictly(ResponseStreamEvent, event)):
            final = fired
    accumulated = Response.model_validate(final.response.model_dump())
    whole = Response.model_validate(collected(happened))
    assert nameless(accumulated.model_dump()) == nameless(whole.model_dump())


def test_a_response_shows_how_its_model_draws_where_the_request_is_silent():
    body = ResponsesRequest(input="hi", top_p=0.5)
    head = ResponseHead("m", body, lambda: {"temperature": 0.2, "top_p": 0.9})
    shown = responses.ResponseStream(head).response()
    assert (shown["temperature"], shown["top_p"]) == (0.2, 0.5)
    asked = responses.request(head, [], responses.input_items(body, {}))
    assert asked.sampling == Sampling(temperature=0.2, top_p=0.5)
