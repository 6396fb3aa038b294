"""A `Conversation` in the form that chat templates read, bent to what the template can express."""

from __future__ import annotations

import hashlib
import json
import math
import re
import string
from collections.abc import Iterable, Mapping
from typing import Any

from mlx_manager.mlx_server.core import Message, Tool, ToolCall
from mlx_manager.mlx_server.models.adapters.template import TemplateTraits

_BASE62 = string.digits + string.ascii_letters


def template_tools(tools: Iterable[Tool]) -> list[dict[str, Any]]:
    """Tools as templates read them. No description is an empty one: templates add it to text."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": dict(tool.parameters) or {"type": "object", "properties": {}},
            },
        }
        for tool in tools
    ]


def template_messages(messages: Iterable[Message], traits: TemplateTraits) -> list[dict[str, Any]]:
    """Messages as dicts. Each has a place in the template; see `turns`."""
    known = list(messages)
    names = {call.id: call.name for message in known for call in message.tool_calls}
    return [_entry(message, traits, names) for message in known]


def call_object(text: str) -> Any:
    """Arguments as the object that most templates want, or as they are if they are no JSON.

    JSON that Python would change (names twice, numbers too large) stays text as well.
    """
    if text.strip() in ("", "null"):
        return {}
    try:
        return json.loads(
            text, object_pairs_hook=_object, parse_float=_float, parse_constant=_refused
        )
    except (ValueError, RecursionError):
        return text


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name twice")
    return found


def _float(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refused(text)


def _refused(text: str) -> Any:
    raise ValueError(f"{text} is no number")


def _short_id(call_id: str) -> str:
    """The same 9 letters or digits for the same id, in a call and in its result."""
    if re.fullmatch(r"[A-Za-z0-9]{9}", call_id):
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode()).digest())
    return "".join(_BASE62[number // 62**place % 62] for place in range(9))


def _entry(message: Message, traits: TemplateTraits, names: dict[str, str]) -> dict[str, Any]:
    """Keys without a value are left out: templates ask whether a key is there."""
    content = message.content
    if message.role == "assistant" and not message.tool_calls:
        content = content or traits.filler
    entry: dict[str, Any] = {"role": message.role, "content": content}
    name = message.name
    call_id = message.tool_call_id
    if message.role == "tool" and traits.call_ids == "short":
        call_id = call_id or ""
    if call_id is not None:
        name = name or names.get(call_id)
        entry["tool_call_id"] = _call_id(call_id, traits)
    if name is not None:
        entry["name"] = name
    if message.reasoning is not None:
        entry["reasoning_content"] = message.reasoning
        if message.tool_calls:
            # What Cohere's templates call it.
            entry["tool_plan"] = message.reasoning
    if message.tool_calls:
        entry["tool_calls"] = [_call(call, traits) for call in message.tool_calls]
    return entry


def _call(call: ToolCall, traits: TemplateTraits) -> dict[str, Any]:
    function = {"name": call.name, "arguments": _arguments(call.arguments, traits)}
    return {"id": _call_id(call.id, traits), "type": "function", "function": function}


def _arguments(text: str, traits: TemplateTraits) -> Any:
    """Arguments as the template reads them; nothing of broken ones, as those that the token limit
    cut off, is left out."""
    found = call_object(text)
    if not traits.object_arguments:
        return text if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
    if isinstance(found, Mapping):
        return found
    return text if traits.text_arguments else {"arguments": text}


def _call_id(call_id: str, traits: TemplateTraits) -> str:
    return _short_id(call_id) if traits.call_ids == "short" else call_id
