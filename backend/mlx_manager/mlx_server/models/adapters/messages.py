"""A `Conversation` in the form that chat templates read, bent to what the template can express."""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from mlx_manager.mlx_server.core import Conversation, Message, Tool, ToolCall
from mlx_manager.mlx_server.errors import InvalidRequest
from mlx_manager.mlx_server.models.adapters.template import TemplateTraits

WriteCalls = Callable[[Sequence[ToolCall]], str]
"""Calls as the model itself would write them, for a template that leaves them out."""

CallId = Callable[[str, int], str]
"""The id of a call, by its name and its number in the conversation."""

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


def template_messages(
    conversation: Conversation, traits: TemplateTraits, write_calls: WriteCalls | None
) -> list[dict[str, Any]]:
    """The conversation's messages as dicts.

    Raises:
        InvalidRequest: the template would leave some of them out.
    """
    param = conversation.param
    messages = _place_system(conversation.messages, traits)
    if traits.tools == "in system" and conversation.tools and messages[0].role != "system":
        messages = [Message("system"), *messages]
    if any(message.role == "tool" for message in messages) and not traits.results:
        raise _refused("messages of role 'tool'", param)
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    if names:
        messages = _place_calls(messages, traits, write_calls, param)
    if traits.answered:
        messages = _with_answers(messages)
    return [_entry(message, traits, names) for message in messages]


def _refused(what: str, param: str) -> InvalidRequest:
    return InvalidRequest(f"This model's chat template has no place for {what}.", param=param)


# ---------------------------------------------------------------------------------------------
# System messages
# ---------------------------------------------------------------------------------------------


def _place_system(messages: Sequence[Message], traits: TemplateTraits) -> list[Message]:
    if traits.system == "anywhere" and traits.tools != "in system":
        return list(messages)
    leading = next((i for i, m in enumerate(messages) if m.role != "system"), len(messages))
    rest = list(messages[leading:])
    if traits.system != "anywhere":
        rest = _as_the_users(rest)
    if not leading:
        return rest
    system = "\n\n".join(message.content for message in messages[:leading])
    if traits.system != "nowhere":
        return [Message("system", system), *rest]
    if rest and rest[0].role == "user":
        return [replace(rest[0], content=f"{system}\n\n{rest[0].content}"), *rest[1:]]
    return [Message("user", system), *rest]


def _as_the_users(messages: Sequence[Message]) -> list[Message]:
    """System messages as the user's, part of what the user says beside them: agents such as Claude
    Code have them anywhere, and templates without a place for them want turns that alternate."""
    placed: list[Message] = []
    lent = False
    for message in messages:
        system = message.role == "system"
        said = Message("user", message.content) if system else message
        if (system or lent) and placed and placed[-1].role == said.role == "user":
            placed[-1] = replace(placed[-1], content=f"{placed[-1].content}\n\n{said.content}")
            lent = True
        else:
            placed.append(said)
            lent = system
    return placed


# ---------------------------------------------------------------------------------------------
# Tool calls
# ---------------------------------------------------------------------------------------------


def _place_calls(
    messages: list[Message], traits: TemplateTraits, write_calls: WriteCalls | None, param: str
) -> list[Message]:
    if traits.calls == "many":
        return messages
    if traits.calls == "one":
        return _one_call_each(messages)
    if write_calls is None:
        raise _refused("tool calls", param)
    return [_with_calls_written(message, write_calls) for message in messages]


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Several calls of a message as several messages, each followed by its own result."""
    placed: list[Message] = []
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        if len(message.tool_calls) < 2:
            placed.append(message)
            continue
        results: list[Message] = []
        while position < len(messages) and messages[position].role == "tool":
            results.append(messages[position])
            position += 1
        placed += _calls_and_results(message, results)
    return placed


def _calls_and_results(message: Message, results: list[Message]) -> list[Message]:
    """Calls that share an id, as some clients' do, have one result each, the last what is left."""
    placed: list[Message] = []
    left = Counter(call.id for call in message.tool_calls)
    by_call: defaultdict[str | None, deque[Message]] = defaultdict(deque)
    for result in results:
        by_call[result.tool_call_id].append(result)
    for number, call in enumerate(message.tool_calls):
        said = message if number == 0 else Message("assistant")
        placed.append(replace(said, tool_calls=(call,)))
        left[call.id] -= 1
        own = by_call[call.id]
        placed += [own.popleft() for _ in range(min(len(own), 1) if left[call.id] else len(own))]
    return placed + [result for result in results if result.tool_call_id not in left]


def _with_answers(messages: Sequence[Message]) -> list[Message]:
    """An empty answer between results and what the user says next, as agents' users do."""
    placed: list[Message] = []
    for message in messages:
        if message.role == "user" and placed and placed[-1].role == "tool":
            placed.append(Message("assistant"))
        placed.append(message)
    return placed


def _with_calls_written(message: Message, write_calls: WriteCalls) -> Message:
    if not message.tool_calls:
        return message
    written = message.content + write_calls(message.tool_calls)
    return replace(message, content=written, tool_calls=())


def call_object(text: str) -> Any:
    """Arguments as the object that most templates want, or as they are if they are no JSON."""
    if text.strip() in ("", "null"):
        return {}
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _short_id(call_id: str) -> str:
    """The same 9 letters or digits for the same id, in a call and in its result."""
    if re.fullmatch(r"[A-Za-z0-9]{9}", call_id):
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode()).digest())
    return "".join(_BASE62[number // 62**place % 62] for place in range(9))


def with_call_ids(messages: Iterable[Message], call_id: CallId) -> tuple[Message, ...]:
    """`messages` with ids of calls, and of their results, as the model itself gives them.

    Ids that are as they should be stay, and the others get the numbers that are left.
    """
    messages = tuple(messages)
    calls = [call for message in messages for call in message.tool_calls]
    own = {call.id for call in calls if _numbered(call, call_id) is not None}
    taken = {_numbered(call, call_id) for call in calls}
    free = (number for number in count() if number not in taken)
    renamed: dict[str, str] = {}
    placed: list[Message] = []
    for message in messages:
        calls = []
        for call in message.tool_calls:
            renamed[call.id] = call.id if call.id in own else call_id(call.name, next(free))
            calls.append(replace(call, id=renamed[call.id]))
        answered = renamed.get(message.tool_call_id or "", message.tool_call_id)
        placed.append(replace(message, tool_calls=tuple(calls), tool_call_id=answered))
    return tuple(placed)


def _numbered(call: ToolCall, call_id: CallId) -> int | None:
    """The number in a call's id, if it is as it should be."""
    number = re.search(r"[0-9]{1,9}$", call.id)
    return int(number[0]) if number and call.id == call_id(call.name, int(number[0])) else None


# ---------------------------------------------------------------------------------------------
# One message
# ---------------------------------------------------------------------------------------------


def _entry(message: Message, traits: TemplateTraits, names: dict[str, str]) -> dict[str, Any]:
    """Keys without a value are left out: templates ask whether a key is there."""
    entry: dict[str, Any] = {"role": message.role, "content": message.content}
    name = message.name
    if message.tool_call_id is not None:
        name = name or names.get(message.tool_call_id)
        entry["tool_call_id"] = _call_id(message.tool_call_id, traits)
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
    arguments = call_object(call.arguments)
    if not (traits.object_arguments or isinstance(arguments, str)):
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return {"id": _call_id(call.id, traits), "type": "function", "function": function}


def _call_id(call_id: str, traits: TemplateTraits) -> str:
    return _short_id(call_id) if traits.short_ids else call_id
