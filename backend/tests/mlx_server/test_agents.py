"""What agents do, with the official SDKs of both houses, against the server and its own model."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic.types import RawMessageStreamEvent
from live import LiveServer, live_server
from openai.types.responses import ResponseStreamEvent
from sdk_models import strictly

from mlx_manager.mlx_server.protocols.compaction import Compacted

MODEL = "mlx-manager/demo"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CLAUDE_TOOL: Any = {"name": "get_weather", "description": "Get the weather of a city", "input_schema": SCHEMA}  # fmt: skip
OPENAI_TOOL: Any = {"type": "function", "name": "get_weather", "description": "Get the weather of a city", "parameters": SCHEMA, "strict": False}  # fmt: skip
QUESTION = "What is the weather in Rome?"
RESULT = '{"temperature": 21}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("agents")
    aliases = f"claude-*={MODEL},gpt-*={MODEL}"
    with live_server(
        folder / "log.txt", model_aliases=aliases, response_store=folder / "kept.db"
    ) as running:
        yield running
    log = (folder / "log.txt").read_text()
    assert "Traceback" not in log, log
    assert running.process.returncode == 0


@pytest.fixture(scope="module")
def claude(server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def gpt(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def said(message: Any) -> list[Any]:
    """A message's blocks without the ids of its calls."""
    return [block.model_dump(exclude={"id", "parsed_output"}) for block in message.content]


def test_anthropics_sdk_holds_a_conversation_with_a_tool(claude: anthropic.Anthropic):
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    asked: Any = {
        "model": "claude-sonnet-9",
        "max_tokens": 60,
        "tools": [CLAUDE_TOOL],
        "extra_body": {"temperature": 0},
    }
    whole = claude.messages.create(messages=messages, **asked)
    with claude.messages.stream(messages=messages, **asked) as stream:
        streamed = stream.get_final_message()
    assert said(streamed) == said(whole)
    assert streamed.stop_reason == whole.stop_reason == "tool_use"
    [call] = [block for block in streamed.content if block.type == "tool_use"]
    assert (call.name, call.input) == ("get_weather", {"city": "Rome"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": RESULT}
    messages += [
        {"role": "assistant", "content": streamed.content},
        {"role": "user", "content": [result]},
    ]
    answer = claude.messages.create(messages=messages, **asked)
    assert answer.stop_reason == "end_turn"
    assert "21" in answer.content[0].text
    counted = claude.messages.count_tokens(model=MODEL, messages=messages, tools=[CLAUDE_TOOL])
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert usage.cache_read_input_tokens


def test_anthropics_sdk_forces_a_tool_stops_and_goes_on(claude: anthropic.Anthropic):
    hello: Any = [{"role": "user", "content": "Hello!"}]
    asked: Any = {"model": MODEL, "max_tokens": 60, "messages": hello}
    forced = claude.messages.create(
        **asked, tools=[CLAUDE_TOOL], tool_choice={"type": "tool", "name": "get_weather"}
    )
    assert [block.type for block in forced.content] == ["tool_use"]
    greedy = asked | {"extra_body": {"temperature": 0}}
    text = claude.messages.create(**greedy).content[0].text
    stop = text[4:9]
    cut = claude.messages.create(**greedy, stop_sequences=[stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == text[: text.index(stop)]
    begun = [*hello, {"role": "assistant", "content": text[:5]}]
    more = claude.messages.create(**greedy | {"messages": begun})
    assert text[:5] + more.content[0].text == text


def test_anthropics_sdk_is_offered_a_deferred_tool_once_it_has_been_found(
    claude: anthropic.Anthropic,
):
    search: Any = {"name": "find_tools", "input_schema": {"type": "object"}}
    tools: Any = [CLAUDE_TOOL | {"defer_loading": True}, search]
    asked: Any = [{"role": "user", "content": QUESTION}]
    forced: Any = {"model": MODEL, "max_tokens": 60, "tools": tools, "tool_choice": {"type": "any"}}
    [call] = claude.messages.create(messages=asked, **forced).content
    assert call.type == "tool_use"
    assert call.name == "find_tools"
    found = {"type": "tool_reference", "tool_name": "get_weather"}
    asked += [
        {"role": "assistant", "content": [call]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call.id, "content": [found]}],
        },
    ]
    named: Any = {"tool_choice": {"type": "tool", "name": "get_weather"}}
    [call] = claude.messages.create(messages=asked, **forced | named).content
    assert call.type == "tool_use"
    assert call.name == "get_weather"


def test_openais_sdk_holds_a_conversation_with_a_tool(gpt: openai.OpenAI):
    asked: Any = {"model": "gpt-9", "tools": [OPENAI_TOOL], "temperature": 0}
    whole = gpt.responses.create(input=QUESTION, **asked)
    with gpt.responses.stream(input=QUESTION, **asked) as stream:
        streamed = stream.until_done().get_final_response()
    call: Any = streamed.output[0]
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Rome"})
    assert call.arguments == whole.output[0].arguments  # type: ignore[union-attr]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    going_on = gpt.responses.create(input=[output], previous_response_id=streamed.id, **asked)
    by_hand = gpt.responses.create(
        input=[{"role": "user", "content": QUESTION}, *streamed.output, output], **asked
    )  # fmt: skip
    assert "21" in going_on.output_text
    assert by_hand.output_text == going_on.output_text
    assert by_hand.usage
    assert going_on.usage
    assert by_hand.usage.input_tokens == going_on.usage.input_tokens
    counted = gpt.responses.input_tokens.count(
        input=[output], previous_response_id=streamed.id, model=MODEL, tools=[OPENAI_TOOL]
    )
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == going_on.usage.input_tokens
    assert gpt.responses.retrieve(going_on.id).output_text == going_on.output_text
    assert [item.type for item in gpt.responses.input_items.list(streamed.id)] == ["message"]
    logprobs: Any = ["message.output_text.logprobs"]
    assert gpt.responses.input_items.list(streamed.id, include=logprobs).data
    with pytest.raises(openai.BadRequestError, match="logprobs") as caught:
        gpt.responses.retrieve(going_on.id, include=logprobs)
    assert caught.value.param == "include[0]"
    gpt.responses.delete(going_on.id)
    with pytest.raises(openai.NotFoundError):
        gpt.responses.retrieve(going_on.id)


def test_openais_sdk_refers_to_what_was_said_instead_of_sending_it(gpt: openai.OpenAI):
    asked: Any = {"model": "gpt-9", "tools": [OPENAI_TOOL], "temperature": 0}
    first = gpt.responses.create(input=QUESTION, **asked)
    call: Any = first.output[0]
    [question] = gpt.responses.input_items.list(first.id).data
    output = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    refers: Any = [{"type": "item_reference", "id": question.id}, {"id": call.id}, output]
    by_reference = gpt.responses.create(input=refers, **asked)
    going_on = gpt.responses.create(input=[output], previous_response_id=first.id, **asked)
    assert by_reference.output_text == going_on.output_text
    assert "21" in by_reference.output_text
    listed = gpt.responses.input_items.list(by_reference.id, order="asc").data
    assert [item.type for item in listed] == ["message", "function_call", "function_call_output"]
    assert [item.id for item in listed[:2]] == [question.id, call.id]
    gpt.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match=r"`input\[0\]`.*`store: false`") as caught:
        gpt.responses.create(input=refers, **asked)
    assert caught.value.param == "input[0]"


def test_openais_sdk_adds_a_tool_and_settings_by_items(gpt: openai.OpenAI):
    added: Any = {"type": "additional_tools", "role": "developer", "tools": [OPENAI_TOOL]}
    asked: Any = [added, {"role": "user", "content": QUESTION}]
    first = gpt.responses.create(model=MODEL, input=asked, temperature=0)
    call: Any = first.output[0]
    assert (call.type, call.name) == ("function_call", "get_weather")
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    named: Any = {"type": "function", "name": "get_weather"}
    again = gpt.responses.create(
        model=MODEL, input=[output], previous_response_id=first.id, tool_choice=named
    )
    assert again.output[0].type == "function_call"
    kept = gpt.responses.input_items.list(first.id, order="asc").data
    assert [item.type for item in kept] == ["additional_tools", "message"]
    # A model of this size may add properties, or fill a string, without end.
    limited = {"city": {"type": "string", "maxLength": 30}}
    city = SCHEMA | {"properties": limited, "additionalProperties": False}
    shape: Any = {"type": "json_schema", "name": "place", "schema": city, "strict": True}
    update: Any = {"type": "configuration_update", "text": {"format": shape}}
    told = gpt.responses.create(model=MODEL, input=[*asked[1:], update], max_output_tokens=200)
    assert json.loads(told.output_text).keys() >= {"city"}


def test_anthropics_sdk_asks_for_updates_and_less_effort(claude: anthropic.Anthropic):
    answer = claude.beta.messages.create(
        model=MODEL,
        max_tokens=20,
        thinking={"type": "adaptive", "display": "updates"},
        messages=[
            {"role": "user", "content": "Hello!"},
            {"role": "system", "output_config": {"effort": "low"}},
        ],
    )
    assert answer.content[0].type == "text"


def test_openais_sdk_gets_json_and_is_told_of_a_cut(gpt: openai.OpenAI):
    # A model of this size may fill a string without end.
    city = {"type": "string", "maxLength": 30}
    schema = SCHEMA | {"properties": {"city": city}, "additionalProperties": False}
    told = gpt.responses.create(
        model=MODEL,
        input=QUESTION,
        text={"format": {"type": "json_schema", "name": "place", "schema": schema, "strict": True}},
    )
    assert json.loads(told.output_text).keys() == {"city"}
    cut = gpt.responses.create(model=MODEL, input=QUESTION, max_output_tokens=2, store=False)
    assert cut.status == "incomplete"
    assert cut.incomplete_details
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_errors_are_the_sdks_own(claude: anthropic.Anthropic, gpt: openai.OpenAI):
    asked: Any = {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    with pytest.raises(anthropic.NotFoundError) as missing:
        claude.messages.create(model="other", **asked)
    assert missing.value.type == "not_found_error"
    assert missing.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        claude.messages.create(
            model=MODEL, max_tokens=5, messages=[{"role": "user", "content": "word " * 20_000}]
        )
    with pytest.raises(openai.BadRequestError, match="web_search"):
        gpt.responses.create(
            model=MODEL, input="hi", tools=[{"type": "web_search"}], tool_choice="required"
        )


def test_all_protocols_give_the_same_tokens_and_share_one_prefix(server: LiveServer):
    system = "You help with this very server. " * 4
    turns = [
        {"role": "user", "content": "How do I start the server?"},
        {"role": "assistant", "content": "With one command."},
        {"role": "user", "content": "And how do I stop it?"},
    ]
    limit = {"temperature": 0, "max_tokens": 30}
    with httpx.Client(base_url=server.url, timeout=60) as http:

        def ask(path: str, **body: Any) -> Any:
            response = http.post(path, json=body)
            assert response.status_code == 200, response.text
            return response.json()

        first = {"role": "system", "content": system}
        chat = ask("/v1/chat/completions", messages=[first, *turns], **limit)
        message = ask("/v1/messages", system=system, messages=turns, **limit)
        response = ask(
            "/v1/responses", instructions=system, input=turns, temperature=0, max_output_tokens=30
        )
    text = chat["choices"][0]["message"]["content"]
    assert text
    assert message["content"][0]["text"] == text
    assert response["output"][0]["content"][0]["text"] == text
    prompt = chat["usage"]["prompt_tokens"]
    cached = message["usage"]["cache_read_input_tokens"]
    assert prompt - 16 <= cached < prompt
    assert cached + message["usage"]["input_tokens"] == prompt
    assert response["usage"]["input_tokens"] == prompt
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == cached


def test_streamed_or_not_every_protocol_says_the_same(
    claude: anthropic.Anthropic, gpt: openai.OpenAI
):
    said: Any = [{"role": "user", "content": "How do I list the models?"}]
    asked: Any = {"model": MODEL, "temperature": 0}
    limited: Any = {"model": MODEL, "max_tokens": 30, "messages": said}
    greedy: Any = {"extra_body": {"temperature": 0}}
    texts = [
        gpt.chat.completions.create(**asked, messages=said, max_tokens=30).choices[0].message.content,
        "".join(
            chunk.choices[0].delta.content or ""
            for chunk in gpt.chat.completions.create(**asked, messages=said, max_tokens=30, stream=True)
        ),
        claude.messages.create(**limited, **greedy).content[0].text,
        gpt.responses.create(**asked, input=said, max_output_tokens=30).output_text,
    ]  # fmt: skip
    with claude.messages.stream(**limited, **greedy) as message:
        texts.append("".join(message.text_stream))
        assert message.get_final_message().usage.cache_read_input_tokens
    with gpt.responses.stream(**asked, input=said, max_output_tokens=30) as response:
        final: Any = response.until_done().get_final_response()
        texts.append(final.output_text)
        assert final.usage.input_tokens_details.cached_tokens
    assert texts[0]
    assert len(set(texts)) == 1, texts


def test_a_stream_that_is_left_is_cancelled_and_was_well_formed(
    server: LiveServer, claude: anthropic.Anthropic, gpt: openai.OpenAI
):
    endless: Any = {"ignore_eos": True, "temperature": 0}
    said: Any = [{"role": "user", "content": QUESTION}]
    with claude.messages.create(
        model=MODEL, max_tokens=8000, messages=said, stream=True, extra_body={"temperature": 0}
    ) as events:
        first = [
            strictly(RawMessageStreamEvent, next(events).to_dict(warnings=False)) for _ in range(3)
        ]
    assert [event.type for event in first] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
    ]
    with gpt.responses.create(model=MODEL, input=QUESTION, stream=True, temperature=0) as stream:
        begun = [
            strictly(ResponseStreamEvent, next(stream).to_dict(warnings=False)) for _ in range(5)
        ]
    assert [event.sequence_number for event in begun] == [0, 1, 2, 3, 4]
    with gpt.chat.completions.create(
        model=MODEL, messages=said, stream=True, extra_body=endless
    ) as chunks:
        next(chunks)
    with httpx.Client(base_url=server.url, timeout=60) as http:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            engine = http.get("/debug/memory").json()["engines"][MODEL]
            if not engine["running"] + engine["prefilling"] + engine["waiting"]:
                return
    raise AssertionError(engine)


SHOP: list[Any] = [
    {"role": "user", "content": "How do I stop the server?"},
    {"role": "assistant", "content": "Press Ctrl-C."},
    {"role": "user", "content": "And how do I start it?"},
]
CONVERSATION = {"model": MODEL, "temperature": 0, "instructions": "You help. " * 20}


def summary_of(item: Any) -> str:
    opened = Compacted.open(item.encrypted_content)
    assert opened is not None
    return opened.summary


def test_a_compacted_conversation_is_gone_on_from(gpt: openai.OpenAI):
    gpt.responses.create(input=SHOP, **CONVERSATION)
    compacted = gpt.responses.compact(
        model=MODEL, input=SHOP, instructions=CONVERSATION["instructions"]
    )
    *kept, summary = compacted.output
    assert compacted.object == "response.compaction"
    assert [item.to_dict(warnings=False)["content"][0]["text"] for item in kept] == [  # type: ignore[index]
        SHOP[0]["content"],
        SHOP[2]["content"],
    ]
    assert summary.type == "compaction"
    assert summary_of(summary)
    assert compacted.usage.input_tokens_details.cached_tokens > 50
    assert compacted.usage.output_tokens > 0
    window = [item.to_dict(warnings=False) for item in compacted.output]
    onward = {"role": "user", "content": "How do I stop the server?"}
    answer = gpt.responses.create(input=[*window, onward], **CONVERSATION)  # type: ignore[arg-type]
    assert answer.output_text


def test_what_a_summary_stands_for_is_not_read_again(gpt: openai.OpenAI):
    compacted = gpt.responses.compact(model=MODEL, input=SHOP)
    summary: Any = compacted.output[-1].to_dict(warnings=False)
    call: Any = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result: Any = {"type": "function_call_output", "call_id": "c", "output": "long " * 500}
    count = gpt.responses.input_tokens.count
    plain = count(model=MODEL, input=[SHOP[0], SHOP[2], summary]).input_tokens
    for before in ([*SHOP], [SHOP[0], call, result, SHOP[2]], [summary, *SHOP]):
        assert count(model=MODEL, input=[*before, summary]).input_tokens == plain
    assert count(model=MODEL, input=[summary, result | {"output": "1"}]).input_tokens < plain + 50


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_trigger_is_answered_by_a_summary_alone(gpt: openai.OpenAI, stream: bool):
    trigger: Any = {"type": "compaction_trigger"}
    asked: Any = CONVERSATION | {"input": [*SHOP, trigger], "tools": [OPENAI_TOOL]}
    if stream:
        events = list(gpt.responses.create(stream=True, **asked))
        kinds = [event.type for event in events]
        assert kinds[:3] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
        ]
        assert kinds[-2:] == ["response.output_item.done", "response.completed"]
        response = events[-1].response  # type: ignore[union-attr]
    else:
        response = gpt.responses.create(**asked)
    (item,) = response.output
    assert response.status == "completed"
    assert summary_of(item)
    going_on = gpt.responses.create(
        previous_response_id=response.id,
        input="And?",
        **CONVERSATION,  # type: ignore[arg-type]
    )
    assert going_on.usage
    assert response.usage
    assert going_on.usage.input_tokens < response.usage.input_tokens


def test_a_trigger_that_is_not_last_is_refused(gpt: openai.OpenAI):
    trigger: Any = {"type": "compaction_trigger"}
    with pytest.raises(openai.BadRequestError, match="must be last") as caught:
        gpt.responses.create(input=[trigger, *SHOP], **CONVERSATION)  # type: ignore[arg-type]
    assert caught.value.param == "input[0]"


def test_a_conversation_beyond_the_threshold_is_summed_up_before_its_answer(gpt: openai.OpenAI):
    for threshold, kinds in ((100000, ["message"]), (50, ["compaction", "message"])):
        management: Any = [{"type": "compaction", "compact_threshold": threshold}]
        response = gpt.responses.create(
            input=SHOP,
            context_management=management,
            **CONVERSATION,  # type: ignore[arg-type]
        )
        assert [item.type for item in response.output] == kinds
    going_on = gpt.responses.create(
        previous_response_id=response.id,
        input="And?",
        **CONVERSATION,  # type: ignore[arg-type]
    )
    assert going_on.output_text


@pytest.mark.parametrize(
    "long",
    [
        SHOP * 300,
        [{"role": "user", "content": "word " * 40000}],
        [
            SHOP[0],
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "word " * 40000},
        ],
    ],
    ids=["many", "one", "result"],
)
def test_a_conversation_that_is_too_long_is_summed_up_all_the_same(gpt: openai.OpenAI, long: Any):
    with pytest.raises(openai.BadRequestError) as caught:
        gpt.responses.create(model=MODEL, input=long)
    assert caught.value.code == "context_length_exceeded"
    compacted = gpt.responses.compact(model=MODEL, input=long)
    assert summary_of(compacted.output[-1])
    assert compacted.usage.input_tokens < 8192
    triggered = gpt.responses.create(model=MODEL, input=[*long, {"type": "compaction_trigger"}])
    assert [item.type for item in triggered.output] == ["compaction"]
