"""The format of a model's output, as data: its marks of thinking and tool calls.

The model's adapter (`models/adapters`) makes an `OutputFormat` for each request, and the engine's
`OutputParser` reads it. Neither imports the other; both import this module.
"""

from __future__ import annotations

import random
import re
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


# ---------------------------------------------------------------------------------------------
# Tool calls
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Name:
    """Place of the function's name in a `CallForm`."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """Text that the model chooses: any match of a regular expression.

    written: the choice where the server writes; `{number}` stands for the number of the call.
    """

    regex: str
    written: str = ""


@dataclass(frozen=True, slots=True)
class CallId(Pattern):
    """Place of the call's id."""


@dataclass(frozen=True, slots=True)
class Aside:
    """Text that the model may write or leave out: anything between two texts."""

    begin: str
    end: str


@dataclass(frozen=True, slots=True)
class Maybe:
    """Pieces that the model may leave out."""

    pieces: tuple[str | Pattern, ...]


Piece = str | Pattern | Aside | Maybe
Pieces = tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Json:
    """Arguments as a JSON object."""


@dataclass(frozen=True, slots=True)
class Tagged:
    """Arguments one after the other, each between tags: texts as they are, anything else as JSON.

    An argument is `begin`, its name, `middle`, its value, `end`. after: the text behind `end`.
    kind: the attribute of a value's type, its value for texts and for all else; `{type}` stands for
    the type in JSON Schema. wrap: the texts around texts that look like markup. whole: the
    beginning and the end of all arguments as one JSON object, which models write, too. also: names
    that models give `end` by mistake.
    """

    begin: str
    middle: str
    end: str
    after: str = ""
    kind: tuple[str, str, str] | None = None
    wrap: tuple[str, str] | None = None
    whole: tuple[str, str] | None = None
    also: tuple[str, ...] = ()

    def before(self, kind: str) -> str:
        """Return the text between the name and a value of a type of JSON Schema."""
        if self.kind is None:
            return self.middle
        attribute, text, other = self.kind
        said = text if kind == "string" else other.format(type=kind)
        return f'" {attribute}="{said}{self.middle}'


@dataclass(frozen=True, slots=True)
class Keywords:
    """Arguments as in Python: `name=value, ...`, the values in JSON."""


@dataclass(frozen=True, slots=True)
class Unquoted:
    """Arguments as an object whose names have no quotes, and whose texts are between `quote`s."""

    quote: str


Arguments = Json | Tagged | Keywords | Unquoted

NAME, JSON, KEYWORDS = Name(), Json(), Keywords()

WORD = r"[^\s\"'<>\[\]{}\\]{1,128}"
"""Regular expression for names. Characters that could end a name are excluded."""

PYTHON_NAME = r"[A-Za-z_][^\s()\[\]{}<>\"'\\,=]{0,127}"
"""Regular expression for names in calls as in Python; a tool's name need not be valid there."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """One call: its head, the function's name, the middle, the arguments, the tail."""

    head: Pieces
    middle: Pieces
    arguments: Arguments
    tail: Pieces

    @classmethod
    def of(cls, *parts: Piece | Name | Arguments) -> CallForm:
        """Return the call that is written as `parts` say, with `NAME` and arguments in places."""
        named = parts.index(NAME) if NAME in parts else -1
        given = next(i for i, part in enumerate(parts) if isinstance(part, Arguments))

        def pieces(start: int, stop: int) -> Pieces:
            return tuple(part for part in parts[start:stop] if isinstance(part, Piece))

        arguments = parts[given]
        assert isinstance(arguments, Arguments)
        head, middle = pieces(0, max(named, 0)), pieces(named + 1, given)
        return cls(head, middle, arguments, pieces(given + 1, len(parts)))

    @property
    def keys(self) -> tuple[str, str] | None:
        """Return the keys of the name and of the arguments; None if the call is no JSON object."""
        name = re.search(r'"([^"\\]+)"\s*:\s*"$', last_text(self.head))
        arguments = re.search(r'"([^"\\]+)"\s*:\s*$', last_text(self.middle))
        return (name[1], arguments[1]) if name and arguments else None

    @property
    def quotes_name(self) -> bool:
        """Return whether the name is a JSON string."""
        return self.arguments == JSON and last_text(self.head).endswith('"')

    @property
    def names(self) -> str:
        """Return a regular expression for the names that can be written."""
        if self.quotes_name:
            return r"[^\s\"<>\\]+"
        return PYTHON_NAME if self.arguments == KEYWORDS else WORD


def texts_of(pieces: Pieces) -> list[str]:
    """Return the fixed texts in `pieces`, those of `Maybe` included."""
    found: list[str] = []
    for piece in pieces:
        if isinstance(piece, str):
            found.append(piece)
        elif isinstance(piece, Maybe):
            found += texts_of(piece.pieces)
    return found


def last_text(pieces: Pieces) -> str:
    """Return the text that `pieces` end with, "" if they end with no fixed text."""
    return pieces[-1] if pieces and isinstance(pieces[-1], str) else ""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Form of one kind of model's tool calls: `opening`, calls with `between`s, `closing`.

    The reader of calls, the grammar of forced calls and the writer of past calls are derived from
    it (`text/tool_calls`).

    openers: the texts that begin calls in an answer, by default the first tag in what is written.
    closers: the texts that end them, by default the last marker of `closing`, or of a call.
    also: other forms of a call that are read. other: another form that the model may write.
    skipped: texts between calls that mean nothing.
    parsers: the modules of mlx-lm's parsers that stand for this format, in mlx_lm.tool_parsers.
    template: the texts in a chat template that tell this format, by default the first opener.
    bare: calls may also begin an answer with no opener before them; such an object must hold
    arguments, so that an answer in JSON is not taken for a call.
    held: calls are constrained to their tools' schemas even where these are not strict, since the
    model has not been trained to write them.
    named_by_id: a call's name is only in its id, which others may have rewritten. The id is between
    the first piece of the head and the last of the middle.
    whole: the format covers the answer from its first token, and not from the end of the thinking
    on. message, joint: where answers are messages and their headers have the calls' names, the
    header of a message that is no call, and the text between two messages.
    """

    name: str
    call: CallForm
    openers: tuple[str, ...] = ()
    opening: Pieces = ()
    between: Pieces = ()
    closing: Pieces = ()
    closers: tuple[str, ...] = ()
    also: tuple[CallForm, ...] = ()
    other: CallForm | None = None
    skipped: tuple[str, ...] = ()
    parsers: tuple[str, ...] = ()
    template: tuple[str, ...] = ()
    bare: bool = False
    held: bool = False
    named_by_id: bool = False
    whole: bool = False
    message: Pieces = ()
    joint: Pieces = ()

    def __post_init__(self) -> None:
        tag = re.search(r"<[^<>]*>", "".join(texts_of(self.opening or self.call.head)))
        if tag and not self.openers:
            object.__setattr__(self, "openers", (tag[0],))
        if not self.template:
            object.__setattr__(self, "template", self.openers[:1])

    @property
    def texts(self) -> list[str]:
        """Return the texts among which are all marks of this format."""
        found = [*self.openers, *self.closers, *self.skipped]
        found += texts_of((*self.opening, *self.between, *self.closing))
        for call in (self.call, *self.also, *filter(None, [self.other])):
            found += texts_of((*call.head, *call.middle, *call.tail))
            match call.arguments:
                case Tagged() as form:
                    found += [form.begin, form.middle, form.end, *(form.whole or ())]
                case Unquoted(quote):
                    found.append(quote)
        return found


# ---------------------------------------------------------------------------------------------
# Answers
# ---------------------------------------------------------------------------------------------


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
    calls: ToolFormat | None = None
    offered: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    parallel: bool = True
    keep: frozenset[int] = frozenset()
    continues: bool = False
    thinking_end: str = ""
    new_call_id: Callable[[], str] = openai_call_id


PLAIN = OutputFormat(continues=True)
"""Format of output without marks, as of completions: all of it is text."""
