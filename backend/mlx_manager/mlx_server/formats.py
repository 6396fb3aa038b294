"""What a model's output looks like: how it marks thinking and tool calls, as data.

The model's adapter (`models/adapters`) writes an `OutputFormat` for each request, the engine's
`OutputParser` reads it. Neither imports the other; this leaf is what they share.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

_ALPHANUMERIC = string.ascii_letters + string.digits

Region = Literal["content", "reasoning", "header", "calls"]
"""What a piece of an answer is.

content: what the caller reads. reasoning: thinking. header: text before a message that says what
the message is; nobody sees it. calls: tool calls, written as `OutputFormat.calls` says.
"""


def openai_call_id() -> str:
    """`call_` and 24 letters or digits."""
    return "call_" + "".join(random.choices(_ALPHANUMERIC, k=24))  # nosec B311  # no secret


def short_call_id() -> str:
    """9 letters or digits: what Mistral's templates insist on."""
    return "".join(random.choices(_ALPHANUMERIC, k=9))  # nosec B311  # no secret


@dataclass(frozen=True, slots=True)
class CallBlock:
    """Calls that can be read only once their whole block is there.

    parse: the block's text, without `end`, to (name, JSON arguments) pairs. Raises ValueError if
    the text is no call. None if calls are written as in Python. end: the text that ends the block;
    None ends it where its brackets balance. quotes: pairs of texts between which `end` and brackets
    are nothing but text. several: whether other blocks may follow, until the calls' `close`.
    """

    parse: Callable[[str], list[tuple[str, str]]] | None
    end: str | None
    quotes: tuple[tuple[str, str], ...] = ()
    several: bool = False


@dataclass(frozen=True, slots=True)
class Parameters:
    """Arguments that stand one after the other, each after its name.

    They can be read while they are written: text as it is, anything else as JSON. What ends them is
    found where a model leaves it out or misspells it, too.

    call: a regular expression (of the `regex` package) for the beginning of a call, with all that
    may stand before it where no other call precedes it; group `name` is the call's.
    head: one for what stands before a value. Group `key` is its name; where the format says what it
    is, group `text` takes part if it is text, and group `json` if it is JSON. What group `ahead`
    matches is part of the value.
    whole: one for what stands before all the arguments as one JSON object, "" if nothing does.
    end: the text that ends a value. also: names that models give it by mistake. wrong: a regular
    expression for what may be a misspelt end; what group `ahead` matches follows it.
    whole_end: the text that ends a JSON object. call_end: the text that ends a call, "" if `close`
    does. close: the text that ends all calls.
    line: a line feed at either end of a value belongs to the markup. wrap: texts around values that
    look like markup.
    """

    call: str
    head: str
    end: str
    call_end: str
    close: str
    whole: str = ""
    whole_end: str = ""
    also: tuple[str, ...] = ()
    wrong: str = r"<\s*[/\\]?[^<>\n]{0,40}(?:>|(?P<ahead>[<\n]))"
    line: bool = False
    wrap: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Pattern:
    """Text that the model chooses, in a `CallShape`: what a regular expression matches."""

    regex: str


@dataclass(frozen=True, slots=True)
class Aside:
    """Text that the model may write or leave out, in a `CallShape`: anything between two texts."""

    begin: str
    end: str


@dataclass(frozen=True, slots=True)
class Maybe:
    """Pieces that the model may leave out, in a `CallShape`."""

    pieces: tuple[str | Pattern, ...]


Piece = str | Pattern | Aside | Maybe


@dataclass(frozen=True, slots=True)
class AsObject:
    """Arguments as a JSON object. key: what it is called where the call is a JSON object too."""

    key: str = "arguments"


@dataclass(frozen=True, slots=True)
class OneByOne:
    """Arguments as `begin`, name, `middle`, value, `end`: text as it is, anything else as JSON.

    text, other: what stands after `middle`, before text and before anything else (`{type}` is its
    type in JSON Schema). wrap: as in `Parameters`.
    """

    begin: str
    middle: str
    end: str
    tail: str = ""
    text: str = ""
    other: str = ""
    wrap: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Keywords:
    """Arguments as in Python: `name=value, ...`, the values in JSON."""


@dataclass(frozen=True, slots=True)
class Braces:
    """Arguments as an object whose names have no quotes, and whose texts are between `quote`s."""

    quote: str


ArgumentShape = AsObject | OneByOne | Keywords | Braces


@dataclass(frozen=True, slots=True)
class CallShape:
    """How calls are written when they must be made: opening, calls with `between`s, closing.

    Each call is its head, the name, the middle, the arguments, the tail. name: a regular expression
    for the names that can be written. bare: calls begin with a JSON object's brace, as an answer in
    JSON does. whole: the shape covers the answer from its first token, and not from the end of the
    thinking on. other: another head and middle that mean the same. message, joint: where answers
    are messages with headers, the header of one that is no call, and what stands between two.
    """

    head: tuple[Piece, ...]
    middle: tuple[Piece, ...]
    tail: tuple[Piece, ...] = ()
    opening: tuple[Piece, ...] = ()
    between: tuple[Piece, ...] = ()
    closing: tuple[Piece, ...] = ()
    arguments: ArgumentShape = AsObject()
    name: str = r"[^\s\"<>\\]+"
    bare: bool = False
    whole: bool = False
    other: tuple[tuple[Piece, ...], tuple[Piece, ...]] | None = None
    message: tuple[Piece, ...] = ()
    joint: tuple[Piece, ...] = ()


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How tool calls are written once a marker, or the answer's first character, opened them.

    item: a regular expression (of the `regex` package) for what may stand before each call and
    after the last. It ends in one of these groups:
        object  a `{`: the call is a JSON object that holds its name and its arguments
        args    a `{`: the arguments, as JSON; group `name` is the call's and group `id` may be
        braces  a `{`: the arguments, as `quotes` says; group `name` is the call's
        none    anything, or nothing: the call has no arguments; group `name` is its name
        params  the beginning of what `parameters` reads; group `name` is the call's
        block   the beginning of what `block` reads
        close   the end of the calls
    What group `ahead` matches is not part of it. end: what ends a call, where the output may end
    before it. close: what ends all calls.
    named_by_id: calls have no name but that in their id, which others may have rewritten.
    quotes: the quotes of texts in arguments that are objects without quotes else.
    bare: calls may also begin an answer with no marker before them; such an object must hold
    arguments, so that an answer in JSON is not taken for a call. shape: how the model is made to
    write calls; None if it can't be. name_key: what the name is called in a call that is a JSON
    object. held: calls are held to their tools' schemas even where these are not strict, since the
    model has not been trained to write them.
    """

    item: str
    parameters: Parameters | None = None
    block: CallBlock | None = None
    bare: bool = False
    shape: CallShape | None = None
    name_key: str = "name"
    held: bool = False
    end: str = ""
    close: str = ""
    named_by_id: bool = False
    quotes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """What the parser looks for in one answer, and what the answer begins with.

    edges: for each region, the markers that end it and the region that follows; markers are never
    shown. initial: "reasoning" when the prompt itself opened the thinking. header: a regular
    expression (of the `regex` package) for the whole of a header; group `channel` names what
    follows, as `channels` says (otherwise content), group `name` the function it calls.
    offered: the tools that may be called, each with its parameters' schema; a call of any other is
    text. parallel: whether more than one call may be made. keep: ids of special tokens whose text
    matters because it is (part of) a marker; other special tokens have no text. continues: the
    output goes on in the prompt's own text, so that a space at its beginning counts. thinking_end:
    what ends the thinking and begins the content, "" for a model that does not think.
    """

    edges: Mapping[Region, tuple[tuple[str, Region], ...]] = field(default_factory=dict)
    initial: Region = "content"
    header: str | None = None
    channels: Mapping[str, Region] = field(default_factory=dict)
    calls: CallFormat | None = None
    offered: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    parallel: bool = True
    keep: frozenset[int] = frozenset()
    continues: bool = False
    thinking_end: str = ""
    new_call_id: Callable[[], str] = openai_call_id


PLAIN = OutputFormat(continues=True)
"""Nothing is marked, as in completions: all of it is text."""
