"""The format of a model's output, as data: its marks of thinking and tool calls.

The model's adapter (`models/adapters`) makes an `OutputFormat` for each request, and the engine's
`OutputParser` reads it. Neither imports the other; both import this module.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

_ALPHANUMERIC = string.ascii_letters + string.digits

Region = Literal["content", "reasoning", "header", "calls"]
"""Kind of a piece of an answer.

content: text for the caller. reasoning: thinking. header: text before a message that gives the kind
of the message; it is never shown. calls: tool calls in the format `OutputFormat.calls`.
"""


def openai_call_id() -> str:
    """Return a new id: `call_` and 24 letters or digits."""
    return "call_" + "".join(random.choices(_ALPHANUMERIC, k=24))  # nosec B311  # no secret


def short_call_id() -> str:
    """Return a new id of 9 letters or digits, which Mistral's templates require."""
    return "".join(random.choices(_ALPHANUMERIC, k=9))  # nosec B311  # no secret


@dataclass(frozen=True, slots=True)
class CallBlock:
    """Calls that can be read only once their whole block is there.

    parse: turns the block's text, without `end`, into (name, JSON arguments) pairs, and raises
    ValueError if the text is no call; None if calls are written as in Python. end: the text that
    ends the block; None: the block ends where its brackets balance. quotes: pairs of texts between
    which `end` and brackets are ordinary text. several: other blocks may follow, until the calls'
    `close`.
    """

    parse: Callable[[str], list[tuple[str, str]]] | None
    end: str | None
    quotes: tuple[tuple[str, str], ...] = ()
    several: bool = False


@dataclass(frozen=True, slots=True)
class Parameters:
    """Arguments that stand one after the other, each after its name.

    Arguments can be read while they are written: text as it is, anything else as JSON. Their end is
    also found where a model leaves out or misspells the text that marks it.

    call: a regular expression (of the `regex` package) for the beginning of a call, with all text
    that may precede a first call; group `name` is the call's name.
    head: a regular expression for the text before a value. Group `key` is the value's name. If the
    format gives the kind of the value, group `text` matches for text, and group `json` for JSON.
    The match of group `ahead` is part of the value.
    whole: a regular expression for the text before all arguments as one JSON object, "" if the
    format has none.
    end: the text that ends a value. also: names in `end` that models use by mistake. wrong: a
    regular expression for possible misspellings of `end`; the match of group `ahead` comes after.
    whole_end: the text that ends a JSON object. call_end: the text that ends a call, "" if `close`
    does. close: a regular expression for the text that ends all calls.
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
    """Text that the model chooses, in a `CallShape`: any match of a regular expression."""

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
    """Arguments as a JSON object. key: its name where the call is a JSON object, too."""

    key: str = "arguments"


@dataclass(frozen=True, slots=True)
class OneByOne:
    """Arguments as `begin`, name, `middle`, value, `end`: text as it is, anything else as JSON.

    text, other: marks after `middle`, before a text and before any other value (`{type}` is the
    value's type in JSON Schema). tail: follows `end`. wrap: as in `Parameters`.
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
    """Form in which the model is made to write calls: opening, calls with `between`s, closing.

    Each call is its head, the name, the middle, the arguments, the tail. name: a regular expression
    for the names that can be written. bare: calls begin with a JSON object's brace, as an answer in
    JSON does. whole: the shape covers the answer from its first token, and not from the end of the
    thinking on. other: another head and middle with the same meaning. message, joint: where answers
    are messages with headers, the header of a message that is no call, and the text between two
    messages.
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
    """Format of tool calls after a marker, or the answer's first character, has opened them.

    item: a regular expression (of the `regex` package) for the text before each call and after the
    last. The expression ends in one of these groups:
        object  a `{`: the call is a JSON object that holds its name and its arguments
        args    a `{`: the arguments, as JSON; group `name` is the call's and group `id` may be
        braces  a `{`: the arguments, as `quotes` says; group `name` is the call's
        none    anything, or nothing: the call has no arguments; group `name` is its name
        params  the beginning of arguments for `parameters`; group `name` is the call's
        block   the beginning of a block for `block`
        close   the end of the calls
    The match of group `ahead` is not part of the item. end: the text that ends a call; the output
    may end before it. close: the text that ends all calls.
    named_by_id: a call's name is only in its id, which others may have rewritten.
    quotes: the quotes of texts in arguments that are objects without other quotes.
    bare: calls may also begin an answer with no marker before them; such an object must hold
    arguments, so that an answer in JSON is not taken for a call. shape: the form in which the model
    is made to write calls; None if it can't be made to. name_key: the key of the name in a call
    that is a JSON object. held: calls are constrained to their tools' schemas even where these are
    not strict, since the model has not been trained to write them.
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
    """Marks that the parser looks for in one answer, and the answer's first region.

    edges: for each region, the markers that end it and the region that follows; markers are never
    shown. initial: "reasoning" when the prompt itself opened the thinking. header: a regular
    expression (of the `regex` package) for a whole header. Its group `channel` gives the region
    that follows, by `channels` (otherwise content), and group `name` the function that is called.
    offered: the tools that may be called, each with its parameters' schema; a call of any other is
    text. parallel: more than one call may be made. keep: ids of special tokens whose text matters
    because it is (part of) a marker; other special tokens have no text. continues: the output
    continues the prompt's own text, so that a space at its beginning counts. thinking_end: the text
    that ends the thinking and begins the content, "" for a model that does not think.
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
"""Format of output without marks, as of completions: all of it is text."""
