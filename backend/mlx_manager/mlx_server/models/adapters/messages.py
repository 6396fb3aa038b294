"""A `Conversation` in the form that chat templates read, adapted to one template's traits."""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Iterable, Mapping
from typing import Any

from mlx_manager.mlx_server.core import Message, Parts, Tool, ToolCall
from mlx_manager.mlx_server.models.adapters.template import TemplateTraits, text_parts
from mlx_manager.mlx_server.text.tool_calls.writer import call_object

_BASE62 = string.digits + string.ascii_letters


def template_tools(tools: Iterable[Tool]) -> list[dict[str, Any]]:
    """Return tools as templates read them.

    A missing description becomes "", since templates add it to text. Missing parameters become an
    object without properties.
    """
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


def template_messages(
    messages: Iterable[Message], traits: TemplateTraits, picture: str = ""
) -> list[dict[str, Any]]:
    """Return messages as dicts. Each must have a place in the template; see `turns`.

    picture: the word that stands for a picture where the template takes only texts.
    """
    known = list(messages)
    names = {call.id: call.name for message in known for call in message.tool_calls}
    return [_entry(message, traits, names, picture) for message in known]


def _short_id(call_id: str) -> str:
    """Return 9 letters or digits, the same for the same id: for a call and its result."""
    if re.fullmatch(r"[A-Za-z0-9]{9}", call_id):
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode()).digest())
    return "".join(_BASE62[number // 62**place % 62] for place in range(9))


def _entry(
    message: Message, traits: TemplateTraits, names: dict[str, str], picture: str
) -> dict[str, Any]:
    """Return a message as a dict, without keys that have no value: templates test for keys."""
    content = message.content
    if message.role == "assistant" and not message.tool_calls:
        content = content or traits.filler
    shown = _content(content, traits, picture)
    entry: dict[str, Any] = {"role": message.role, "content": shown}
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
            # Cohere's templates read thinking under this name.
            entry["tool_plan"] = message.reasoning
    if message.tool_calls:
        entry["tool_calls"] = [_call(call, traits) for call in message.tool_calls]
    return entry


def _content(content: Parts, traits: TemplateTraits, picture: str) -> Any:
    """Return a content as the template reads it."""
    if isinstance(content, str):
        return text_parts(content) if traits.content == "parts" else content
    if traits.content == "text":
        return "".join(part if isinstance(part, str) else picture for part in content)
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
        for part in content
    ]


def _call(call: ToolCall, traits: TemplateTraits) -> dict[str, Any]:
    function = {"name": call.name, "arguments": _arguments(call.arguments, traits)}
    return {"id": _call_id(call.id, traits), "type": "function", "function": function}


def _arguments(text: str, traits: TemplateTraits) -> Any:
    """Return arguments as the template reads them. Broken ones, such as the token limit cuts off,
    are passed on whole."""
    found = call_object(text)
    if not traits.object_arguments:
        return text if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
    if isinstance(found, Mapping):
        return found
    return text if traits.text_arguments else {"arguments": text}


def _call_id(call_id: str, traits: TemplateTraits) -> str:
    return _short_id(call_id) if traits.call_ids == "short" else call_id
