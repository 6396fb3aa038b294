"""Reasons why a prompt was not found among those kept: its first part that differs from them.

A prompt is compared with the latest ones of its model, part by part: tools, then messages, long
texts in pieces. Of each part only a hash is kept, for the life of the process.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mlx_manager.mlx_server.core import Conversation, Image, Prompt, Text, Tokens

PIECE = 256
"""Characters or tokens that are compared at once."""
MOST_PIECES = 64
"""Pieces of one text: a longer text has longer pieces."""
MOST_PARTS = 4096
MOST_PROMPTS = 48
MOST_MODELS = 8
SHOWN = 12
"""Digits of a picture's digest that name it."""
ONE_PAGE = 32
"""Tokens by which a prompt that goes on from another may miss: the page that was not full, and the
tokens of the template that open an answer."""


class PromptPart(NamedTuple):
    """A part of a prompt. place: its name, as in a request. offset: where a piece begins in its
    text. digest: of its content; whole: of the prompt up to its end. Both are only comparable in
    this process."""

    place: str
    offset: int
    digest: int
    whole: int

    @property
    def shown(self) -> str:
        return f"{self.place} from {self.offset:,} on" if self.offset else self.place


@dataclass(frozen=True, slots=True)
class KeptPrompt:
    """A prompt that has been processed. since: when, in seconds since 1970. tokens: its length."""

    parts: tuple[PromptPart, ...]
    since: float
    tokens: int


def parts_of(prompt: Prompt, salt: str = "") -> tuple[PromptPart, ...]:
    """Return the parts of a prompt in the order in which templates write them, its salt first; at
    most `MOST_PARTS`."""
    found: list[PromptPart] = []
    whole = 0
    for place, offset, digest in _parts(prompt, salt):
        whole = hash((whole, place, offset, digest))
        found.append(PromptPart(place, offset, digest, whole))
        if len(found) == MOST_PARTS:
            break
    return tuple(found)


def _parts(prompt: Prompt, salt: str) -> Iterator[tuple[str, int, int]]:
    """Yield each part's place, its offset there, and the digest of its content."""
    if salt:
        yield "cache_salt", 0, hash(salt)
    match prompt:
        case Conversation(messages, tools):
            for name, value in sorted(prompt.template_args.items()):
                yield f"template argument {name}", 0, hash(repr(value))
            for number, tool in enumerate(tools):
                yield f"tools[{number}] ({tool.name})", 0, hash(repr(tool))
            for number, message in enumerate(messages):
                place = f"messages[{number}]"
                named = f"{place} ({message.role})"
                for part in message.parts or ("",):
                    if isinstance(part, Image):
                        shown = f"{named}, image {part.digest[:SHOWN]}"
                        yield shown, 0, hash(part.digest)
                    else:
                        yield from _pieces(named, part)
                for made, call in enumerate(message.tool_calls):
                    content = hash((call.name, call.arguments))
                    yield f"{place}.tool_calls[{made}] ({call.name})", 0, content
        case Text(text):
            yield from _pieces("the text", text)
        case Tokens(ids):
            yield from _pieces("the tokens", tuple(ids))


def _pieces(place: str, content: str | tuple[int, ...]) -> Iterator[tuple[str, int, int]]:
    size = max(PIECE, -(-len(content) // MOST_PIECES))
    for offset in range(0, max(1, len(content)), size):
        yield place, offset, hash(content[offset : offset + size])


class KeptPrompts:
    """The latest prompts of each model. Belongs to the event loop."""

    def __init__(self) -> None:
        self._models: OrderedDict[str, deque[KeptPrompt]] = OrderedDict()

    def keep(self, model: str, prompt: KeptPrompt) -> None:
        kept = self._models.setdefault(model, deque(maxlen=MOST_PROMPTS))
        # What it has in common with the nearest one is in memory once.
        parts, same = prompt.parts, 0
        if kept and (same := common((alike := nearest(kept, parts)).parts, parts)):
            prompt = replace(prompt, parts=(*alike.parts[:same], *parts[same:]))
        kept.append(prompt)
        self._models.move_to_end(model)
        while len(self._models) > MOST_MODELS:
            self._models.popitem(last=False)

    def reason(
        self, model: str, parts: Sequence[PromptPart], tokens: int, cached: int, admitted: float
    ) -> str:
        """Return why only `cached` of a prompt's `tokens` were found; "" if no more could be.

        admitted: when its processing began, in seconds since 1970; later prompts do not count.
        """
        before = [kept for kept in self._models.get(model, ()) if kept.since <= admitted]
        if tokens - cached <= ONE_PAGE:
            return ""
        alike = nearest(before, parts) if before else None
        same = 0 if alike is None else common(alike.parts, parts)
        if alike is None or not same:
            return _unlike(alike, parts)
        if same == len(alike.parts):
            # It goes on from the other one, all of which could have been found.
            given_up = cached < min(alike.tokens, tokens) - ONE_PAGE
            return "its beginning was kept, and has been given up since" if given_up else ""
        return _differs(alike.parts[same:], parts[same:])


def common(one: Sequence[PromptPart], other: Sequence[PromptPart]) -> int:
    """Return the number of parts with which both begin."""
    most = min(len(one), len(other))
    return bisect_left(range(most), True, key=lambda at: one[at].whole != other[at].whole)


def nearest(kept: Iterable[KeptPrompt], parts: Sequence[PromptPart]) -> KeptPrompt:
    """Return the prompt, of at least one, that begins like `parts` for longest; of equal ones, the
    latest."""
    return max(kept, key=lambda each: (common(each.parts, parts), each.since))


def _unlike(alike: KeptPrompt | None, parts: Sequence[PromptPart]) -> str:
    if alike is None:
        return "no prompt was kept before it"
    if alike.parts and parts and alike.parts[0].place == parts[0].place:
        return f"{parts[0].shown} is another than in every prompt that was kept"
    return "no prompt that was kept begins like it"


def _differs(kept: Sequence[PromptPart], parts: Sequence[PromptPart]) -> str:
    """Return in words how two prompts go on that were alike so far. kept: is not empty."""
    if not parts:
        return f"it ends before {kept[0].shown} of the nearest one"
    old, new = kept[0], parts[0]
    if len(kept) > 1 and kept[1].digest == new.digest:
        return f"{old.shown} of the nearest one is gone"
    if len(parts) > 1 and parts[1].digest == old.digest:
        return f"{new.shown} is new"
    if old.place.partition("[")[0] != new.place.partition("[")[0]:
        return f"{new.shown} stands where the nearest one has {old.shown}"
    return f"{new.shown} has changed"
