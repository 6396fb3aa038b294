from __future__ import annotations

from typing import Any

import pytest

from mlx_manager.mlx_server.core import Sampling, StopRules
from mlx_manager.mlx_server.errors import InvalidParameter, UnsupportedParameter
from mlx_manager.mlx_server.protocols.parameters import (
    UNSUPPORTED,
    UNSUPPORTED_IN_CHAT,
    includes_usage,
    refuse_unsupported,
    sampling,
    stop_rules,
)
from mlx_manager.mlx_server.schemas.openai import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationParameters,
)


def chat(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest(messages=[{"role": "user", "content": "hi"}], **fields)


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest(prompt="once", **fields)


ASKS_FOR_SOMETHING = [
    (chat, "audio", {"voice": "alloy"}),
    (chat, "best_of", 2),
    (chat, "echo", True),
    (chat, "function_call", {"name": "f"}),
    (chat, "functions", [{"name": "f"}]),
    (chat, "modalities", ["text", "audio"]),
    (chat, "skip_special_tokens", False),
]


@pytest.mark.parametrize(("request_of", "name", "value"), ASKS_FOR_SOMETHING)
def test_what_is_not_supported_is_refused_by_name(request_of, name: str, value: object):
    with pytest.raises(UnsupportedParameter, match=f"`{name}`") as caught:
        refuse_unsupported(request_of(**{name: value}), UNSUPPORTED_IN_CHAT)
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("request_of", "name", "value"),
    [
        (request_of, name, value)
        for name, refusal in UNSUPPORTED.items()
        for request_of, kind in ((chat, ChatCompletionRequest), (completion, CompletionRequest))
        if name in kind.model_fields
        for value in (None, *refusal.harmless)
    ],
)
def test_a_value_that_asks_for_nothing_is_accepted(request_of, name: str, value: object):
    refuse_unsupported(request_of(**{name: value}))


def test_an_empty_request_samples_with_the_defaults():
    assert sampling(chat()) == Sampling()
    assert stop_rules(chat(), None) == StopRules()


def test_parameters_reach_sampling_unchanged():
    body = chat(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.1,
        logit_bias={7: 5, 9: -100},
    )
    assert sampling(body) == Sampling(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.1,
        logit_bias=((7, 5), (9, -100)),
    )


def test_zero_is_a_temperature_and_minus_one_switches_top_k_off():
    assert sampling(chat(temperature=0, top_k=-1)) == Sampling(temperature=0, top_k=0)


def test_each_of_n_answers_has_its_own_seed_and_the_first_the_given_one():
    body = chat(seed=5, n=3)
    assert [sampling(body, draw).seed for draw in range(3)] == [5, 6, 7]
    assert sampling(chat(seed=-1)).seed == 2**64 - 1
    assert sampling(chat()).seed is None


def test_stop_is_a_string_or_several():
    assert stop_rules(chat(stop="END"), None).strings == ("END",)
    assert stop_rules(chat(stop=["a", "b"]), None).strings == ("a", "b")
    body = chat(stop_token_ids=[3], ignore_eos=True, min_tokens=4)
    assert stop_rules(body, 4) == StopRules((), (3,), True, 4)


def test_more_tokens_demanded_than_allowed_is_refused():
    with pytest.raises(InvalidParameter, match="min_tokens"):
        stop_rules(chat(min_tokens=5), 4)


def test_stream_options_need_a_stream():
    options = {"include_usage": True}
    assert includes_usage(chat(stream=True, stream_options=options))
    assert not includes_usage(chat(stream=True))
    with pytest.raises(InvalidParameter, match="stream_options"):
        includes_usage(chat(stream_options=options))


def test_refusals_name_fields_that_some_request_has():
    fields = set(ChatCompletionRequest.model_fields) | set(CompletionRequest.model_fields)
    assert fields >= UNSUPPORTED.keys()
    assert set(GenerationParameters.model_fields) < fields
