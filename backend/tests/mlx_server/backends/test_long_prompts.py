"""Prompts that no tokenizer need look at: they can't fit in the model's context."""

from __future__ import annotations

import json
from typing import Any

import pytest
from demo import Demo, demo

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
async def test_a_prompt_of_far_too_many_characters_is_refused_by_their_number(
    demo: Demo, asked: dict[str, Any]
):
    with pytest.raises(
        ContextLengthExceeded, match=r"\d{7} characters, which can't fit .* 8192 tokens"
    ) as refused:
        await demo.chat(**asked)
    assert refused.value.param == "messages"


async def test_what_the_template_leaves_out_is_not_counted(demo: Demo):
    answer = {"role": "assistant", "content": "Hi.", "reasoning_content": LONG}
    body = await demo.chat([ASKED, answer, ASKED], max_tokens=1)
    assert body["usage"]["prompt_tokens"] < 100
