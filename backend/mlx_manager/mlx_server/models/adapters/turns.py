"""Changes to a conversation's turns after which a chat template shows them.

Each change keeps every text. `fitting` finds the changes that a conversation needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mlx_manager.mlx_server.core import Message, Part, Role, ToolCall
from mlx_manager.mlx_server.models.adapters.generic_tools import result_parts
from mlx_manager.mlx_server.models.adapters.parts import in_one, paragraphs
from mlx_manager.mlx_server.models.adapters.template import SystemPlace, TemplateTraits

WriteCalls = Callable[[Sequence[ToolCall]], str]
"""Function that writes calls as the model would, for a template that leaves them out."""

Change = Literal[
    "apart", "alternating", "gathered", "completed", "the user's", "as text", "pictures"
]
"""Changes to a conversation that a template refuses, or shows in part.

apart: text beside calls becomes a message of its own, before them. alternating: neighbours of one
role are joined, and empty messages keep user and assistant in turn. gathered: results follow their
calls; results without a call become the user's text. completed: calls without a result get an empty
one. the user's: system messages become the user's text. as text: results become the user's text,
and calls the assistant's. pictures: those of results, and of the system's and the assistant's
messages, become the user's, after them.
"""

Changes = frozenset[Change]


def turns(
    messages: Sequence[Message], traits: TemplateTraits, changes: Changes, write: WriteCalls
) -> list[Message]:
    """Return the messages, each in a place that the template has for it, with `changes` made."""
    system: SystemPlace = "nowhere" if "the user's" in changes else traits.system
    placed = _place_system(messages, system, joined=traits.tools == "in system")
    calls, results = traits.calls, traits.results
    if "as text" in changes:
        calls, results = "none", False
    if "gathered" in changes:
        placed = _gathered(placed)
    if any(message.tool_calls for message in placed):
        placed = list(_in_order(placed, traits, completed="completed" in changes))
    if "apart" in changes:
        placed = list(_apart(placed))
    if calls == "none":
        placed = [_with_calls_written(message, write) for message in placed]
    if not results:
        placed = _results_as_text(placed)
    if "pictures" in changes:
        placed = _pictures_apart(placed)
    return _alternating(placed) if "alternating" in changes else placed


# ---------------------------------------------------------------------------------------------
# System messages
# ---------------------------------------------------------------------------------------------


def with_system(messages: Sequence[Message], told: str) -> list[Message]:
    """Return the messages with a system message at the beginning, to which `told` is added."""
    if messages and messages[0].role == "system":
        first = messages[0]
        return [replace(first, content=paragraphs([first.content, told])), *messages[1:]]
    return [Message("system", told), *messages]


def _place_system(messages: Sequence[Message], place: SystemPlace, joined: bool) -> list[Message]:
    """Return the messages with system messages only in the template's place for them.

    joined: system messages at the beginning become one, in which the template lists tools.
    """
    if place == "anywhere" and not joined:
        return list(messages)
    leading = next((i for i, m in enumerate(messages) if m.role != "system"), len(messages))
    rest = list(messages[leading:])
    if place != "anywhere":
        rest = _as_the_users(rest)
    if not leading:
        return rest
    system = paragraphs(message.content for message in messages[:leading])
    host = _host(rest, place)
    if host is None:
        return [Message("user" if place == "nowhere" else "system", system), *rest]
    said = replace(rest[host], content=paragraphs([system, rest[host].content]))
    return [*rest[:host], said, *rest[host + 1 :]]


def _host(rest: Sequence[Message], place: SystemPlace) -> int | None:
    """Return the index of the user's message that the system's text is added to; None if it stays
    a message of its own."""
    if place == "nowhere":
        return 0 if rest and rest[0].role == "user" else None
    if place != "before last" or (rest and rest[-1].role == "user"):
        return None
    return next((i for i in reversed(range(len(rest))) if rest[i].role == "user"), None)


def _as_the_users(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with system messages as the user's, joined to the user's neighbours.

    Agents such as Claude Code have system messages anywhere. Templates without a place for them
    want turns that alternate.
    """
    placed: list[Message] = []
    lent = False
    for message in messages:
        system = message.role == "system"
        said = Message("user", message.content) if system else message
        if (system or lent) and placed and placed[-1].role == said.role == "user":
            placed[-1] = _joined(placed[-1], said)
            lent = True
        else:
            placed.append(said)
            lent = system
    return placed


def _pictures_apart(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with all pictures in the user's: in the next one, or in one of their own
    before the assistant goes on."""
    placed: list[Message] = []
    owed: tuple[Part, ...] = ()
    for message in messages:
        said = message
        if message.role == "user" and owed:
            said = replace(message, content=paragraphs([owed, message.content]))
            owed = ()
        elif message.role == "assistant" and owed:
            placed.append(Message("user", owed))
            owed = ()
        if message.role != "user" and message.images:
            owed += message.images
            said = replace(message, content=message.text)
        placed.append(said)
    return [*placed, Message("user", owed)] if owed else placed


# ---------------------------------------------------------------------------------------------
# Neighbours
# ---------------------------------------------------------------------------------------------


def _joined(first: Message, second: Message) -> Message:
    reasoning = "\n\n".join(filter(None, [first.reasoning, second.reasoning]))
    return replace(
        second,
        content=paragraphs([first.content, second.content]),
        name=first.name if first.name == second.name else None,
        reasoning=reasoning or second.reasoning,
    )


def _alternating(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with user and assistant in turn, the user first. Calls and results are
    not counted."""
    placed: list[Message] = []
    due: Role = "user"
    for message in messages:
        plain = message.role in ("user", "assistant") and not message.tool_calls
        began = any(each.role != "system" for each in placed)
        if plain and began and _is_plain(placed[-1]) and placed[-1].role == message.role:
            placed[-1] = _joined(placed[-1], message)
            continue
        if message.role != "system" and (message.role != due if plain else not began):
            placed.append(Message(due))
            due = _other(due)
        placed.append(message)
        if plain:
            due = _other(message.role)
    if all(message.role == "system" for message in placed):
        placed.append(Message("user"))
    return placed


def _is_plain(message: Message) -> bool:
    return message.role in ("user", "assistant") and not message.tool_calls


def _other(role: Role) -> Role:
    return "assistant" if role == "user" else "user"


# ---------------------------------------------------------------------------------------------
# Calls and results
# ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class CallTurn:
    """A message with calls, and the results that follow it."""

    message: Message
    results: list[Message]

    def matched(self) -> tuple[list[list[Message]], list[Message]]:
        """Return the results of each call, and the results of no call.

        Calls that share an id, as some clients' do, have one result each, and the last one all
        further results. A result without an id goes to the first call without a result.
        """
        calls = self.message.tool_calls
        found: list[list[Message]] = [[] for _ in calls]
        left: list[Message] = []
        for result in self.results:
            own = [n for n, call in enumerate(calls) if call.id == result.tool_call_id]
            if result.tool_call_id is None:
                own = [n for n in range(len(calls)) if not found[n]]
            free = [n for n in own if not found[n]] or own[-1:]
            (found[free[0]] if free else left).append(result)
        return found, left


def by_turn(messages: Sequence[Message]) -> Iterator[Message | CallTurn]:
    """Yield the messages, those with calls together with the results that follow them."""
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        if not message.tool_calls:
            yield message
            continue
        end = position
        while end < len(messages) and messages[end].role == "tool":
            end += 1
        yield CallTurn(message, list(messages[position:end]))
        position = end


def _in_order(
    messages: Sequence[Message], traits: TemplateTraits, *, completed: bool
) -> Iterator[Message]:
    """Yield the messages with their calls and results as the template needs them.

    Results are in their calls' order where nothing else tells them apart. Each call is a message of
    its own, followed by its result, where the template shows only one call a message.
    """
    numbers = 0
    for given in by_turn(messages):
        if isinstance(given, Message):
            yield given
            continue
        turn = given
        if traits.call_ids in ("numbered", "numbered anew"):
            turn = _numbered(given, 0 if traits.call_ids == "numbered anew" else numbers)
            numbers += len(turn.message.tool_calls)
        found, left = turn.matched()
        calls = turn.message.tool_calls
        if completed:
            found = [
                own or [Message("tool", name=call.name, tool_call_id=call.id)]
                for call, own in zip(calls, found, strict=True)
            ]
        if traits.calls == "one":
            said = turn.message
            for call, own in zip(calls, found, strict=True):
                yield replace(said, tool_calls=(call,))
                yield from own
                said = Message("assistant")
            yield from left
        else:
            yield turn.message
            ordered = completed or not traits.told_apart
            yield from [*(r for own in found for r in own), *left] if ordered else turn.results


def _numbered(turn: CallTurn, first: int) -> CallTurn:
    """Return the turn with ids as Kimi K2 writes them: a model that reads other ids writes them,
    too."""
    found, left = turn.matched()
    calls = tuple(
        replace(call, id=f"functions.{call.name}:{number}")
        for number, call in enumerate(turn.message.tool_calls, first)
    )
    results = [
        replace(result, tool_call_id=call.id)
        for call, own in zip(calls, found, strict=True)
        for result in own
    ]
    return CallTurn(replace(turn.message, tool_calls=calls), results + left)


def _gathered(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with results right after their calls, wherever they came.

    A result without a call becomes the user's text. A result that follows calls and has an unknown
    id goes to the first call without a result: ids get rewritten on the way.
    """
    placed: list[Message | CallTurn] = []
    by_call: dict[str, CallTurn] = {}
    for turn in by_turn(messages):
        if isinstance(turn, CallTurn):
            found, left = turn.matched()
            open_ids = [
                call.id for call, own in zip(turn.message.tool_calls, found, strict=True) if not own
            ]
            turn.results = [result for own in found for result in own]
            placed.append(turn)
            by_call |= {call.id: turn for call in turn.message.tool_calls}
            for result in left:
                if open_ids and result.tool_call_id not in by_call:
                    turn.results.append(replace(result, tool_call_id=open_ids.pop(0)))
                else:
                    _gather(result, placed, by_call)
        elif turn.role == "tool":
            _gather(turn, placed, by_call)
        else:
            placed.append(turn)
    return [
        message
        for turn in placed
        for message in ([turn] if isinstance(turn, Message) else [turn.message, *turn.results])
    ]


def _gather(
    result: Message, placed: list[Message | CallTurn], by_call: dict[str, CallTurn]
) -> None:
    turn = by_call.get(result.tool_call_id or "")
    if turn is not None:
        turn.results.append(result)
    else:
        placed.append(Message("user", result_parts(result.content)))


def _apart(messages: Sequence[Message]) -> Iterator[Message]:
    for message in messages:
        if message.tool_calls and message.text.strip():
            yield replace(message, tool_calls=())
            yield replace(message, content="", reasoning=None)
        else:
            yield message


def _with_calls_written(message: Message, write: WriteCalls) -> Message:
    if not message.tool_calls:
        return message
    content = in_one(message.content, write(message.tool_calls))
    if isinstance(content, str):
        content = content.lstrip("\n")
    return replace(message, content=content, tool_calls=())


def _results_as_text(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with results as the user's text, those of one turn in one message."""
    placed: list[Message] = []
    before: Role | None = None
    for message in messages:
        said = message
        if message.role == "tool":
            said = Message("user", result_parts(message.content))
            if before == "tool":
                said = replace(said, content=in_one(placed.pop().content, "\n", said.content))
        placed.append(said)
        before = message.role
    return placed
