"""Search for the fewest changes with which a template shows all of a conversation.

A template may leave a message out silently. So an outline of the conversation is rendered first,
with a unique word in place of each text. A missing word means a text that the model would never
see. Most conversations need no change.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import combinations, count, pairwise
from typing import Any

from mlx_manager.mlx_server.core import Conversation, Image, Message, Parts, Tool, ToolCall
from mlx_manager.mlx_server.models.adapters.template import RENDER_ERRORS
from mlx_manager.mlx_server.models.adapters.turns import Change, Changes, by_turn
from mlx_manager.mlx_server.text.tool_calls.writer import call_object

Rendered = Callable[[Conversation, Changes], str]
Placed = Callable[[Conversation, Changes], Sequence[Message]]

NOTHING: Changes = frozenset()
_CHANGES: Sequence[Change] = (
    *("apart", "alternating", "gathered", "completed", "pictures", "the user's"),
)
ALL: Changes = frozenset(_CHANGES)
_TOGETHER = 2
"""Most changes that are tried together, before all are."""
_AS_TEXT: Sequence[Changes] = (
    frozenset({"as text"}),
    frozenset({"as text", "alternating"}),
    frozenset({"as text", "alternating", "the user's"}),
    frozenset({"as text", "alternating", "the user's", "pictures"}),
)
LAST_RESORT = _AS_TEXT[-1]
"""Changes that leave only texts of the user and the assistant in turn."""

_LONG = 128
"""Messages of an outline beyond which few combinations are tried."""
_KNOWN = 256
"""Outlines that are remembered, if they have `_BRIEF` messages at most."""
_BRIEF = 32
"""Most messages of a conversation whose outline leaves none out."""
_FIRST, _LAST = 4, 8
"""Turns at either end that are always in the outline."""


@dataclass(frozen=True, slots=True)
class Outline:
    """A conversation with words in place of its texts. words: the words that must be rendered.
    pictures: the number of pictures that must be."""

    messages: tuple[Message, ...]
    offers: bool
    add_generation_prompt: bool
    continue_final_message: bool
    template_args: tuple[tuple[str, Any], ...]
    words: tuple[str, ...] = field(compare=False)
    pictures: int = 0

    @property
    def conversation(self) -> Conversation:
        return Conversation(
            self.messages,
            (_TOOL,) if self.offers else (),
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            template_args=dict(self.template_args),
        )


_TOOL = Tool(
    "qofferedq",
    "qtellsq",
    {"type": "object", "properties": {"qwordq": {"type": "string", "description": "d"}}},
)
_PICTURE = Image(b"", "", 1, 1)


class Fitting:
    """Search for the changes that one model's template needs. Safe to use from several threads.

    render: returns a conversation's text once these changes are made. place: returns its messages
    then. placeholder: the text of a picture.
    """

    def __init__(self, render: Rendered, place: Placed, placeholder: str = "") -> None:
        self._render = render
        self._place = place
        self._placeholder = placeholder
        self._remembered = lru_cache(_KNOWN)(self._found)

    def changes(self, conversation: Conversation) -> Changes | None:
        """Return the fewest changes with which the template shows all of the conversation; None if
        it never does."""
        outline = outline_of(conversation)
        brief = len(outline.messages) <= _BRIEF
        return self._remembered(outline) if brief else self._found(outline)

    def shows(self, conversation: Conversation, changes: Changes) -> bool:
        """True if the template shows all of the conversation once these changes are made."""
        return self._shows(outline_of(conversation), changes)

    def _found(self, outline: Outline) -> Changes | None:
        tried: set[tuple[Message, ...]] = set()
        for changes in _candidates(len(outline.messages)):
            placed = tuple(self._place(outline.conversation, changes))
            if placed not in tried and self._shows(outline, changes):
                return changes
            tried.add(placed)
        return None

    def _shows(self, outline: Outline, changes: Changes) -> bool:
        try:
            text = self._render(outline.conversation, changes)
        except RENDER_ERRORS:
            return False
        if self._placeholder and text.count(self._placeholder) != outline.pictures:
            return False
        return all(word in text for word in outline.words)


def _candidates(messages: int) -> Iterator[Changes]:
    """Yield sets of changes in the order in which they are tried."""
    yield NOTHING
    if messages <= _LONG:
        for size in range(1, _TOGETHER + 1):
            yield from map(frozenset, combinations(_CHANGES, size))
    yield ALL - {"the user's"}
    yield ALL
    yield from _AS_TEXT


# ---------------------------------------------------------------------------------------------
# Outlines
# ---------------------------------------------------------------------------------------------


def outline_of(conversation: Conversation) -> Outline:
    """Return the outline of a conversation; alike conversations have the same outline.

    Turns of a long conversation are left out, see `_essential`. Thinking has words that need not be
    rendered: templates leave it out on purpose.
    """
    numbers = count()
    words: list[str] = []
    ids: dict[str, str] = {}

    def word() -> str:
        words.append(f"qx{next(numbers)}xq")
        return words[-1]

    def alias(call_id: str | None) -> str | None:
        return ids.setdefault(call_id, f"call_{len(ids)}") if call_id else call_id

    def call(made: ToolCall) -> ToolCall:
        return ToolCall(alias(made.id) or "", word(), _arguments(made.arguments, word))

    def content(said: Parts) -> Parts:
        if isinstance(said, str):
            return word() if said.strip() else ""
        return tuple(_PICTURE if isinstance(part, Image) else word() for part in said)

    def message(said: Message) -> Message:
        return replace(
            said,
            content=content(said.content),
            name=said.name and "qnameq",
            reasoning=said.reasoning and "qthoughtq",
            tool_calls=tuple(map(call, said.tool_calls)),
            tool_call_id=alias(said.tool_call_id),
        )

    messages = tuple(map(message, _essential(conversation.messages)))
    offers = conversation.offers_tools
    return Outline(
        messages,
        offers,
        conversation.add_generation_prompt,
        conversation.continue_final_message,
        tuple(sorted(_small(conversation.template_args))),
        (*words, *((_TOOL.name, _TOOL.description or "") if offers else ())),
        sum(len(message.images) for message in messages),
    )


def _essential(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages; of a long conversation only both ends, and each pair of neighbouring
    turns that is the first of its kinds. Some templates take quadratic time: minutes for many."""
    if len(messages) <= _BRIEF:
        return messages
    units = [
        [turn] if isinstance(turn, Message) else [turn.message, *turn.results]
        for turn in by_turn(messages)
    ]
    kinds = [tuple(map(_kind, unit)) for unit in units]
    kept = {*range(_FIRST), *range(len(units) - _LAST, len(units))}
    seen: set[Hashable] = set()
    for place, pair in enumerate(pairwise(kinds)):
        if pair not in seen:
            seen.add(pair)
            kept |= {place, place + 1}
    return [message for place in sorted(kept & {*range(len(units))}) for message in units[place]]


def _kind(message: Message) -> Hashable:
    """Return the properties of a message that a template may treat differently."""
    calls = tuple(_arguments(call.arguments, str) for call in message.tool_calls)
    said = bool(message.text.strip()), bool(message.reasoning), message.tool_call_id is None
    return message.role, said, bool(message.images), calls


def _arguments(text: str, word: Callable[[], str]) -> str:
    found = call_object(text)
    if not isinstance(found, Mapping):
        return f"{{{word()}"
    # Some templates leave out nulls.
    kinds = {value is None for value in found.values()}
    return json.dumps({word(): None if null else word() for null in sorted(kinds)})


def _small(variables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the template's variables that an outline may depend on: short plain values."""
    for name, value in variables.items():
        if isinstance(value, bool | int | float | str) and len(str(value)) <= 64:
            yield name, value
