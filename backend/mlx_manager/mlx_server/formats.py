"""What a model's output looks like: how it marks thinking and tool calls, as data.

The model's adapter (`models/adapters`) writes an `OutputFormat` for each request, the engine's
`OutputParser` reads it. Neither imports the other; this leaf is what they share.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

_ALPHANUMERIC = string.ascii_letters + string.digits

Region = Literal["content", "reasoning", "header", "message", "calls"]
"""What the text being generated is.

content: what the caller reads. reasoning: thinking. header: text before a message that says what
the message is (harmony's channel and recipient). message: the header is complete and
`OutputFormat.read_header` says what follows. calls: tool calls, as `OutputFormat.calls` says.
"""


def openai_call_id() -> str:
    """`call_` and 24 letters or digits."""
    return "call_" + "".join(random.choices(_ALPHANUMERIC, k=24))


def short_call_id() -> str:
    """9 letters or digits: what Mistral's templates insist on."""
    return "".join(random.choices(_ALPHANUMERIC, k=9))


@dataclass(frozen=True, slots=True)
class CallBlock:
    """Calls that are read once the whole block is there.

    end: the text that ends the block; None ends it where its brackets balance.
    quotes: pairs of texts between which `end` and brackets are only text.
    parse: the block's text, without `end`, to (name, JSON arguments) pairs. Raises ValueError if
    the text is no call.
    """

    parse: Callable[[str], list[tuple[str, str]]]
    end: str | None
    quotes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How tool calls are written once a marker, or the answer's first character, opened them.

    item: a regular expression (of the `regex` package) for the text before a call. It must end in
    one of these groups:
        object  a `{`: the call is a JSON object with its name and its arguments
        args    a `{`: the arguments as JSON; group `name` is the call's, group `id` may be
        block   the beginning of a block that `block` reads
        close   the end of the calls
    bare: calls may also stand at the beginning of the answer with no marker before them.
    """

    item: str
    block: CallBlock | None = None
    bare: bool = False


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """What the parser looks for in one answer, and in which state the answer begins.

    edges: for each region, the markers that end it and the region that follows; the markers are
    never shown. initial: where the answer begins; "reasoning" when the prompt opened the thinking.
    offered: the names of the tools that may be called; a call of any other is text. parallel:
    whether more than one call may be made. keep: ids of special tokens whose text matters because
    it is a marker or part of one; other special tokens have no text. continues: the output goes on
    in the prompt's text, so that a space at its beginning stays. read_header: see `Region`; a
    call's name instead of a region means that its arguments follow.
    """

    edges: Mapping[Region, tuple[tuple[str, Region], ...]] = field(default_factory=dict)
    initial: Region = "content"
    calls: CallFormat | None = None
    offered: frozenset[str] = frozenset()
    parallel: bool = True
    keep: frozenset[int] = frozenset()
    continues: bool = False
    read_header: Callable[[str], Header] | None = None
    new_call_id: Callable[[], str] = openai_call_id


@dataclass(frozen=True, slots=True)
class Header:
    """What a message's header says: the region of its body, and whom it calls, if anyone."""

    region: Region
    name: str | None = None


PLAIN = OutputFormat(continues=True)
"""Nothing is marked, as in completions: all of it is text."""
