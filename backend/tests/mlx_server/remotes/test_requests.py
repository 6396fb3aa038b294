"""No demand of a request is lost on its way to another machine."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from mlx_manager.mlx_server.core import (
    Conversation,
    EmbeddingRequest,
    GenerationRequest,
    JsonSchema,
    Message,
    NamedTool,
    RerankRequest,
    Sampling,
    StopRules,
    Text,
    Tool,
    ToolCall,
)
from mlx_manager.mlx_server.errors import UnsupportedParameter
from mlx_manager.mlx_server.remotes import requests
from mlx_manager.mlx_server.remotes.dialects import OURS
from mlx_manager.mlx_server.remotes.facts import Facts

THERE = Facts("there", OURS)
TOOL = Tool("f", "what it does", {"type": "object"})
TALK = Conversation((Message("user", "Hello!"),), tools=(TOOL,))
ASKED = GenerationRequest("here", TALK, Sampling(silent=frozenset({"top_k"})))
VECTORS = EmbeddingRequest("here", ("a",))
SCORES = RerankRequest("here", "a", ("b",))
OF_THE_CALL = {"model", "request_id", "caller"}
"""Fields that say who asks, or name the model; there they are others."""

OTHERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "request": (
        ASKED,
        {
            "prompt": Conversation((Message("user", "Bye!"),)),
            "sampling": Sampling(seed=1),
            "stop": StopRules(("a",)),
            "max_tokens": 7,
            "logprobs": 2,
            "constraint": JsonSchema("{}"),
            "thinking_budget": 3,
            "priority": 2,
            "return_ids": True,
            "context_length": 9,
            "prediction": "Hello!",
            "speculation": "off",
            "cache_salt": "mine",
        },
    ),
    "completion": (
        replace(ASKED, prompt=Text("a")),
        {"echo": True, "logprobs": 0, "max_tokens": 7, "prediction": "b"},
    ),
    "sampling": (
        Sampling(),
        {
            "temperature": 0.5,
            "top_p": 0.5,
            "top_k": 5,
            "min_p": 0.1,
            "seed": 2**64 - 1,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
            "repetition_penalty": 1.5,
            "logit_bias": ((3, 1.0),),
            "silent": frozenset({"temperature"}),
        },
    ),
    "stop": (
        StopRules(),
        {"strings": ("a",), "token_ids": (3,), "ignore_eos": True, "min_tokens": 2},
    ),
    "prompt": (
        TALK,
        {
            "messages": (Message("user", "Bye!"),),
            "tools": (),
            "tool_choice": NamedTool("f"),
            "parallel_tool_calls": False,
            "add_generation_prompt": False,
            "continue_final_message": True,
            "template_args": {"style": "short"},
        },
    ),
    "messages": (
        TALK.messages[0],
        {
            "role": "system",
            "content": "Bye!",
            "name": "Ann",
            "reasoning": "Hm.",
            "tool_calls": (ToolCall("a", "f", "{}"),),
            "tool_call_id": "a",
        },
    ),
    "tools": (
        TOOL,
        {
            "name": "g",
            "description": "other",
            "parameters": {},
            "strict": True,
            "text_grammar": "start: /a/",
        },
    ),
    "embedding": (
        VECTORS,
        {"inputs": ("b", (1,)), "dimensions": 3, "truncate": 4, "prompt": "query"},
    ),
    "rerank": (
        SCORES,
        {
            "query": "b",
            "documents": ("c",),
            "truncate": 4,
            "activate": False,
            "instruction": "Judge.",
        },
    ),
}
NOT_SENT = {
    "request": OF_THE_CALL | {"echo", "inputs"},
    "completion": {field.name for field in fields(ASKED)},
    "tools": {"param", "schema_field"},
    "prompt": {"param"},
    "embedding": OF_THE_CALL | {"priority"},
    "rerank": OF_THE_CALL | {"priority"},
}
"""Fields that are no demands; `echo` is one of completions, and an encoder there has no order."""


def written(part: str, value: Any) -> Any:
    """Return what a value, as that part of a request, is sent as."""
    match part:
        case "embedding":
            return requests.embedding(value, THERE, "http://there")
        case "rerank":
            return requests.ranking(value, THERE, "http://there")
        case "request" | "completion":
            asked = value
        case "prompt" | "sampling" | "stop":
            asked = replace(ASKED, **{part: value})
        case _:
            asked = replace(ASKED, prompt=replace(TALK, **{part: (value,)}))
    return requests.generation(asked, THERE, "http://there")


@pytest.mark.parametrize("part", OTHERS)
def test_each_field_of_a_request_is_sent_or_refused(part: str) -> None:
    plain, others = OTHERS[part]
    known = others.keys() | NOT_SENT.get(part, set())
    assert {field.name for field in fields(plain)} == known
    for name, value in others.items():
        other = replace(plain, **{name: value})
        try:
            sent = written(part, other)
        except UnsupportedParameter:
            continue
        assert sent != written(part, plain), name


@pytest.mark.parametrize("seed", [0, 5, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_seed_means_the_same_draws_there(seed: int) -> None:
    _, body = requests.generation(replace(ASKED, sampling=Sampling(seed=seed)), THERE, "")
    assert -(2**63) <= body["seed"] < 2**63
    assert body["seed"] % 2**64 == seed


def test_what_a_request_leaves_open_is_left_open_there() -> None:
    _, body = requests.generation(ASKED, THERE, "")
    assert "top_k" not in body
    assert "max_tokens" not in body
