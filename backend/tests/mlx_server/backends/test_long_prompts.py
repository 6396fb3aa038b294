"""Prompts of which a tokenizer need look at no more than their beginning: they can't fit in the
model's context."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from demo import MODEL, Demo, demo

from mlx_manager.mlx_server.core import GenerationRequest, Text
from mlx_manager.mlx_server.errors import ContextLengthExceeded

__all__ = ["demo"]

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASKED = {"role": "user", "content": "Hello!"}
LONG = "some words " * 400_000


def called(arguments: str) -> list[dict[str, Any]]:
    """A conversation with a call."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    answers = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "done"},
    ]
    return [ASKED, *answers, ASKED]


def offered(**function: Any) -> dict[str, Any]:
    """A conversation with a tool."""
    tools = [{"type": "function", "function": {"name": "f"} | function}]
    return {"text": [ASKED], "tools": tools}


def wide(properties: int) -> dict[str, Any]:
    named = {f"property_{i}": {"type": "string", "enum": ["a", "b"]} for i in range(properties)}
    return {"type": "object", "properties": named}


@pytest.mark.parametrize(
    "asked",
    [
        {"text": LONG},
        {"text": called(json.dumps({"a": LONG}))},
        offered(description=LONG),
        offered(parameters=wide(100_000)),
    ],
    ids=["content", "arguments", "description", "schema"],
)
async def test_of_a_prompt_that_is_far_too_long_no_more_is_read_than_its_beginning(
    demo: Demo, asked: dict[str, Any]
):
    with pytest.raises(
        ContextLengthExceeded, match=r"length is 8192 tokens\. .* more than \d{5} were counted"
    ) as refused:
        await demo.chat(**asked)
    assert refused.value.param == "messages"


async def test_what_the_template_leaves_out_is_not_counted(demo: Demo):
    answer = {"role": "assistant", "content": "Hi.", "reasoning_content": LONG}
    body = await demo.chat([ASKED, answer, ASKED], max_tokens=1)
    assert body["usage"]["prompt_tokens"] < 100


async def test_an_answer_has_room_up_to_the_contexts_last_token(demo: Demo):
    asked = GenerationRequest(MODEL, Text("some words " * 2500))
    async with demo.pool.lease(MODEL, "text") as lease:
        model = lease.backend
        prompt = await model.tokenize(asked.prompt)
        room = prompt.context_length - len(prompt.ids)
        assert 0 < room < prompt.context_length // 2
        assert await model.leaves_room(replace(asked, max_tokens=room))
        assert not await model.leaves_room(replace(asked, max_tokens=room + 1))
        assert not await model.leaves_room(replace(asked, prompt=Text(LONG)))


async def test_an_answer_half_the_context_long_is_room_enough(demo: Demo):
    asked = GenerationRequest(MODEL, Text("some words " * 1000), max_tokens=8192)
    async with demo.pool.lease(MODEL, "text") as lease:
        assert await lease.backend.leaves_room(asked)
