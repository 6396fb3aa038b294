"""Ollama's bodies as requests, and an answer's events as its lines."""

from __future__ import annotations

import json
import math

import pytest
from timelines import heard, timeline

from mlx_manager.mlx_server.core import (
    Conversation,
    Finished,
    JsonSchema,
    ReasoningDelta,
    Started,
    Text,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)
from mlx_manager.mlx_server.errors import InvalidParameter, UnsupportedParameter
from mlx_manager.mlx_server.protocols import ollama
from mlx_manager.mlx_server.protocols.ollama import OllamaAnswer, OllamaHead, OllamaStream
from mlx_manager.mlx_server.schemas.ollama import OllamaChatRequest, OllamaGenerateRequest

HEAD = OllamaHead(model="m", shown="m:latest")
USAGE = Usage(7, 3, cached_tokens=2)


def chat(**fields: object) -> object:
    body = OllamaChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "Hi"}], **fields}
    )
    return ollama.chat_request(body, HEAD)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("5m", 300),
        ("1h30m", 5400),
        ("250ms", 0.25),
        ("0", 0),
        (0, 0),
        (12.5, 12.5),
        ("90", 90),
        (-1, math.inf),
        ("-1", math.inf),
        ("-1m", math.inf),
        (None, None),
    ],
)
def test_a_time_to_keep_a_model_is_read_as_go_reads_it(
    given: str | float | None, seconds: float | None
):
    assert ollama.keep_alive(given) == seconds


@pytest.mark.parametrize("given", ["soon", "5 minutes", "", "5x", "nan"])
def test_another_time_is_refused_by_name(given: str):
    with pytest.raises(InvalidParameter) as refused:
        ollama.keep_alive(given)
    assert refused.value.param == "keep_alive"


def test_options_are_the_sampling():
    options = {
        "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 7, "stop": "x",
        "num_predict": 12, "repeat_penalty": 1.2, "presence_penalty": 0.1, "num_ctx": 4096,
    }  # fmt: skip
    request = chat(options=options)
    drawn = request.sampling
    assert (drawn.temperature, drawn.top_k, drawn.top_p, drawn.min_p) == (0.5, 3, 0.9, 0.1)
    assert (drawn.seed, drawn.repetition_penalty, drawn.presence_penalty) == (7, 1.2, 0.1)
    assert request.stop.strings == ("x",)
    assert request.max_tokens == 12
    assert drawn.silent == {"frequency_penalty"}


def test_a_penalty_over_no_tokens_is_none():
    assert (
        chat(options={"repeat_penalty": 1.2, "repeat_last_n": 0}).sampling.repetition_penalty == 1
    )


@pytest.mark.parametrize("number", [-1, -2, None])
def test_an_answer_may_fill_the_context(number: int | None):
    assert chat(options={"num_predict": number}).max_tokens is None


@pytest.mark.parametrize(
    ("option", "value"), [("mirostat", 1), ("tfs_z", 0.5), ("typical_p", 0.5), ("num_predict", 0)]
)
def test_an_option_that_can_not_be_honoured_is_refused_by_name(option: str, value: float):
    with pytest.raises((UnsupportedParameter, InvalidParameter)) as refused:
        chat(options={option: value})
    assert refused.value.param == f"options.{option}"


def test_options_of_the_runner_are_no_unknown_fields():
    body = OllamaChatRequest.model_validate({"options": {"num_ctx": 1, "num_gpu": 9, "odd": 1}})
    assert body.unknown_fields() == ["options.odd"]


@pytest.mark.parametrize(
    ("think", "arguments"),
    [
        (None, {}),
        (True, {"enable_thinking": True}),
        (False, {"enable_thinking": False}),
        ("high", {"enable_thinking": True, "reasoning_effort": "high"}),
    ],
)
def test_thinking_is_the_templates(think: object, arguments: dict[str, object]):
    assert dict(chat(think=think).prompt.template_args) == arguments


def test_a_schema_is_what_the_answer_fits():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked = chat(format=schema).constraint
    assert isinstance(asked, JsonSchema)
    assert (json.loads(asked.schema), asked.param) == (schema, "format")


def test_results_are_joined_to_calls_by_name_and_order():
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    other = {"function": {"name": "sub", "arguments": {}}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": [call, other, call]},
        {"role": "tool", "tool_name": "sub", "content": "two"},
        {"role": "tool", "tool_name": "add", "content": "one"},
        {"role": "tool", "content": "three"},
    ]
    _, asked, *results = chat(messages=messages).prompt.messages
    first, second, third = asked.tool_calls
    assert first.arguments == '{"a": 1}'
    assert [result.tool_call_id for result in results] == [second.id, first.id, third.id]
    assert [result.name for result in results] == ["sub", "add", "add"]


def test_a_prompt_is_a_turn_unless_it_is_raw():
    templated = OllamaGenerateRequest(prompt="Hi", system="Be brief.")
    prompt = ollama.generate_request(templated, HEAD).prompt
    assert isinstance(prompt, Conversation)
    assert [message.role for message in prompt.messages] == ["system", "user"]
    raw = ollama.generate_request(OllamaGenerateRequest(prompt="Hi", raw=True), HEAD)
    assert raw.prompt == Text("Hi")
    filling = ollama.generate_request(OllamaGenerateRequest(prompt="a", suffix="b"), HEAD)
    assert filling.prompt == Text("a", "b")


@pytest.mark.parametrize(("field", "value"), [("context", [1]), ("template", "{{ .Prompt }}")])
def test_what_has_no_meaning_here_is_refused(field: str, value: object):
    body = OllamaGenerateRequest.model_validate({"prompt": "x", field: value})
    with pytest.raises(UnsupportedParameter) as refused:
        ollama.generate_request(body, HEAD)
    assert refused.value.param == field


EVENTS = [
    Started(7, 2, queued=0.1, prefill=0.2),
    ReasoningDelta("Hm."),
    TextDelta("Look: "),
    ToolCallStarted(0, "c1", "add"),
    ToolCallDelta(0, '{"a":'),
    ToolCallDelta(0, "1}"),
    ToolCallStarted(1, "c2", "add"),
    ToolCallDelta(1, '{"a":2}'),
    Finished("tool_calls", USAGE),
]


def lines(stream: OllamaStream, events: list[object]) -> list[dict[str, object]]:
    written = b"".join(stream.write([(0, [event])]) for event in events) + stream.end()
    return [json.loads(line) for line in written.splitlines()]


def test_a_stream_is_lines_that_add_up_to_the_whole():
    call = heard(EVENTS)
    streamed = lines(OllamaStream(HEAD, call, chat=True), EVENTS)
    answer = OllamaAnswer(HEAD, call, chat=True)
    answer.add([(0, EVENTS)])
    whole = json.loads("".join(answer.body()))
    assert [line["done"] for line in streamed] == [False] * (len(streamed) - 1) + [True]
    assert {line["model"] for line in streamed} == {"m:latest"}
    messages = [line["message"] for line in streamed]
    assert "".join(m["content"] for m in messages) == whole["message"]["content"] == "Look: "
    assert "".join(m.get("thinking", "") for m in messages) == whole["message"]["thinking"]
    calls = [call for m in messages for call in m.get("tool_calls", [])]
    assert calls == whole["message"]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == [{"a": 1}, {"a": 2}]
    for counted in (streamed[-1], whole):
        assert (counted["prompt_eval_count"], counted["eval_count"]) == (7, 3)
        assert counted["done_reason"] == "stop"
        assert counted["prompt_eval_duration"] == 200_000_000


def test_a_call_that_was_cut_off_is_text():
    events = [*EVENTS[:1], *EVENTS[3:5], Finished("length", USAGE)]
    *_, shown, last = lines(OllamaStream(HEAD, heard(events), chat=True), events)
    assert shown["message"]["content"] == '{"a":'
    assert last["done_reason"] == "length"


def test_a_sign_of_life_is_an_empty_line_of_the_answer():
    sign = json.loads(OllamaStream(HEAD, timeline(), chat=False).keep_alive)
    assert (sign["response"], sign["done"]) == ("", False)
