from __future__ import annotations

import json
from typing import Any

import openai.types.chat
import pytest
from pydantic import BaseModel, ValidationError

from mlx_manager.mlx_server.protocols.parameters import UNSUPPORTED
from mlx_manager.mlx_server.schemas.openai import (
    NO_EFFECT,
    ChatCompletionRequest,
    CompletionRequest,
)

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate_json(json.dumps({"messages": MESSAGES} | fields))


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate_json(json.dumps({"prompt": "once"} | fields))


OUT_OF_RANGE = [
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("top_p", -0.1),
    ("top_p", 1.01),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5),
    ("repetition_penalty", 0),
    ("seed", 2**63),
    ("n", 0),
    ("n", 129),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["x"] * 17),
    ("stop", ["a", "x" * 1025]),
    ("stop", 7),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["x"]),
    ("min_tokens", -1),
    ("logit_bias", {"17": 101}),
    ("logit_bias", {"cat": 1}),
    ("stream", "perhaps"),
]


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
@pytest.mark.parametrize("request_of", [chat, completion])
def test_a_value_out_of_range_is_refused_by_its_name(request_of, name: str, value: object):
    with pytest.raises(ValidationError) as caught:
        request_of(**{name: value})
    assert caught.value.errors()[0]["loc"][0] == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0),
        ("temperature", 2),
        ("top_p", 1),
        ("top_k", -1),
        ("min_p", 0),
        ("n", 128),
        ("stop", ["x" * 1024] * 16),
        ("seed", -(2**63)),
        ("logit_bias", {"17": -100}),
    ],
)
@pytest.mark.parametrize("request_of", [chat, completion])
def test_the_ends_of_a_range_are_accepted(request_of, name: str, value: object):
    request_of(**{name: value})


@pytest.mark.parametrize("kind", [ChatCompletionRequest, CompletionRequest])
def test_null_means_the_default_for_every_parameter(kind: type[BaseModel]):
    required = {"messages": MESSAGES, "prompt": "once"}
    nulls = {name: None for name in kind.model_fields if name not in required}
    kind.model_validate_json(json.dumps(required | nulls))


def test_unknown_fields_are_kept_and_named_wherever_they_stand():
    message = {"role": "user", "content": [{"type": "text", "text": "hi", "detail": 1}], "mood": 1}
    body = chat(messages=[message, message], stream_options={"x": 1}, top_a=0.5)
    assert body.unknown_fields() == [
        "top_a",
        "stream_options.x",
        "messages.mood",
        "messages.content.detail",
    ]


def test_a_message_as_the_sdk_keeps_it_has_no_unknown_fields():
    answer = openai.types.chat.ChatCompletionMessage(role="assistant", content="Hello")
    assert chat(messages=[answer.model_dump()]).unknown_fields() == []


def test_a_request_without_unknown_fields_names_none():
    assert chat(temperature=1, user="me", tools=[]).unknown_fields() == []


def test_a_null_in_a_call_means_what_is_left_out():
    call = {"id": None, "type": None, "function": {"name": "f", "arguments": None}}
    body = chat(messages=[{"role": "assistant", "tool_calls": [call]}])
    assert body.messages[0].tool_calls[0].function.name == "f"


def test_a_null_asks_for_nothing_that_could_be_unknown():
    said = {"role": "user", "content": "hi", "mood": None}
    assert chat(messages=[said], top_a=None, thread=None).unknown_fields() == []


def test_every_field_without_effect_is_one_that_is_declared_and_not_refused():
    declared = set(ChatCompletionRequest.model_fields) | set(CompletionRequest.model_fields)
    assert declared >= NO_EFFECT
    assert declared >= UNSUPPORTED.keys()
    assert not NO_EFFECT & UNSUPPORTED.keys()


@pytest.mark.parametrize("kind", [ChatCompletionRequest, CompletionRequest])
def test_every_parameter_is_described(kind: type[BaseModel]):
    undescribed = [name for name, field in kind.model_fields.items() if not field.description]
    assert undescribed in ([], ["messages"])


@pytest.mark.parametrize(
    "prompt", ["once", ["a", "b"], [1, 2, 3], [[1, 2], [3]], ["a", [1, 2]], [0]]
)
def test_prompts_are_text_or_token_ids_or_lists_of_either(prompt: object):
    assert completion(prompt=prompt).prompt == prompt


@pytest.mark.parametrize(
    "prompt", ["", [], [""], [[]], ["a", ""], ["a", []], [1, "a"], [-1], [1.5], [True], 5, {}, None]
)
def test_an_empty_or_mixed_prompt_is_refused(prompt: object):
    with pytest.raises(ValidationError) as caught:
        completion(prompt=prompt)
    assert caught.value.errors()[0]["loc"][0] == "prompt"


@pytest.mark.parametrize("role", ["function", "bot", "", None, 5])
def test_an_unknown_role_is_refused(role: object):
    with pytest.raises(ValidationError):
        chat(messages=[{"role": role, "content": "hi"}])
