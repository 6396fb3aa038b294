"""JSON and notations like it, as models write them, to JSON.

What is JSON comes out as it stands. All else is read leniently and written strictly: line feeds in
texts, quotes that are not escaped, Python's literals, names and words without quotes, commas too
many or too few, brackets and quotes that are not closed.
"""

from __future__ import annotations

import ast
import json
import string
from collections.abc import Callable, Generator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Literal

import regex

from mlx_manager.mlx_server.text.source import Reading, Source, Steps
from mlx_manager.mlx_server.text.tool_calls.schemas import ANYTHING, TEXT, Kind, Typed, kind_of
from mlx_manager.mlx_server.utils.text import encodable

Place = Literal["name", "member", "element"]
Write = Callable[[str], None]
Ahead = Callable[[int], Reading[bool]]

_ANY = Typed({}, {})
_CLOSER = {"{": "}", "[": "]"}
_BLANKS = " \t\r\n"
_ESCAPES = frozenset('"\\/bfnrt')
_SPECIAL = frozenset(string.whitespace + "\\}]")
"""In quotes, what may be the beginning of something else than text; and what `_unquoted` reads."""
_SPECIAL_RAW = frozenset(string.whitespace + "}],\"'<|")
_BARE_NAME = regex.compile(r"[^\s,:=(){}\[\]\"'<>]")
_ENDS_WORD = ",}]\"'{[<>"
_ENDS_BARE = ",}]<"
"""Besides blanks, what may end a word without quotes, in JSON and in notations with quotes of their
own."""
_IN_QUOTES = "<|\"'>"
_LONGEST_QUOTE = 7
_TAG = regex.compile(r"<[/\\]?\w{3,7}>")
_LONGEST_NAME = 128

_LITERALS = {"True": "true", "TRUE": "true", "False": "false", "FALSE": "false", "None": "null"}
_NUMBER = regex.compile(r"(?P<sign>[+-]?)(?P<whole>\d*)(?:\.(?P<part>\d*))?")
_LITERAL_ERRORS = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)
_LARGEST_EXACT = 2**53


class NotJsonError(Exception):
    """The next character can't be part of a value."""


class _CutError(Exception):
    """The output was cut off here."""


@dataclass(slots=True)
class _Frame:
    """An object or a list that is open.

    names: the types of what an object's schema names. given: the names of its members so far.
    """

    bracket: str
    typed: Typed
    names: Mapping[str, Typed]
    given: set[str] = field(default_factory=set)
    filled: bool = False


class JsonReader:
    """Reads one value from a source.

    Args:
        write: takes JSON as it becomes known.
        typed: the value's schema, where the notation leaves types open.
        quotes: the texts around texts in a notation that is no JSON: names and words in it have no
            quotes at all, or any.
        ends: what stands after the value, and never in it outside of quotes.
        again: whether another value follows at a place after one of `ends`.
    """

    def __init__(
        self,
        source: Source,
        write: Write,
        *,
        typed: Typed = _ANY,
        quotes: tuple[str, ...] = (),
        ends: tuple[str, ...] = (),
        again: Ahead | None = None,
    ) -> None:
        self._source = source
        self._write = write
        self._typed = typed
        self._quotes = quotes
        self._ends = ends
        self._special = _SPECIAL | {end[0] for end in ends}
        self._again = again
        self._frames: list[_Frame] = []
        self._gap = ""
        # Where JSON is written as it stands: from where on nothing has been written.
        self._written = source.at
        self.complete = False
        """The value's end has been read or taken for granted, and it was not cut off."""

    def begins(self) -> Reading[bool]:
        """Return whether an object begins here: after its brace comes its end or a name."""
        place = yield from self._source.blanks(1)
        if (yield from self._source.char(place)) == "}" or (yield from self._at_end(place)):
            return True
        return (yield from self._name_ahead(place)) > 0

    def read(self) -> Steps:
        """Read the value, to its end.

        What is open at the end of the output is closed, and so is what is open where something
        follows that can't be part of the value. Nothing is closed where the output was cut off.

        Raises:
            NotJsonError: no value begins here.
        """
        try:
            yield from self._value(self._typed, "element")
            while self._frames:
                yield from self._next_in(self._frames[-1])
        except (_CutError, NotJsonError):
            if not self._frames and not self._source.cut:
                raise
            if self._source.cut:
                self._write_rest()
                return
            self._close_all()
        self.complete = True

    def _write_rest(self) -> None:
        """Write what has been read of JSON that was cut off."""
        if not self._quotes:
            self._write(self._source.seen(self._written - self._source.at, 0))
            self._write(self._source.rest)

    # -- Brackets and what is between values ---------------------------------------------------

    def _next_in(self, frame: _Frame) -> Steps:
        """Read on in an object or a list: its end, or one more value."""
        comma = yield from self._between()
        char = yield from self._source.char()
        if char == "":
            self._end_of_all()
            self._close_all()
        elif char in "}]":
            self._close(char)
        else:
            yield from self._one_more(frame, char, comma)

    def _one_more(self, frame: _Frame, char: str, comma: bool) -> Steps:
        if (yield from self._at_end(0)):
            raise NotJsonError
        named = frame.bracket == "{"
        quoted = char in "\"'" or (yield from self._quote()) != ""
        length = (yield from self._name_ahead()) if named else 0
        if named:
            if not length and not (quoted and (comma or not frame.filled)):
                raise NotJsonError
        elif (char in "<>" and not quoted) or (
            frame.filled and not comma and not (quoted or char in "{[")
        ):
            raise NotJsonError
        self._separate(frame, comma)
        frame.filled = True
        if named:
            typed = yield from self._named(frame, char if quoted else "", length)
            yield from self._value(typed, "member")
        else:
            yield from self._value(frame.typed.element, "element")

    def _between(self) -> Reading[bool]:
        """Read blanks and commas; return whether there is a comma."""
        comma = False
        while (char := (yield from self._source.char())) and (char.isspace() or char == ","):
            self._source.take(1)
            if char == "," and not comma:
                self._gap += char
            elif char != ",":
                self._gap += _plain(char)
            comma = comma or char == ","
        return comma

    def _separate(self, frame: _Frame, comma: bool) -> None:
        """Write what is between the last value and the next."""
        gap, self._gap = self._gap, ""
        if not frame.filled:
            gap = gap.replace(",", "")
        elif not comma:
            gap = "," + (gap or " ")
        if self._quotes:
            gap = ", " if frame.filled else ""
        self._put(gap)

    def _open(self, bracket: str, typed: Typed) -> None:
        self._source.take(1)
        self._put(bracket)
        self._frames.append(_Frame(bracket, typed, typed.names if self._quotes else {}))

    def _close(self, char: str) -> None:
        """Close what `char` closes, and all that is open in it."""
        opener = "{" if char == "}" else "["
        if all(frame.bracket != opener for frame in self._frames):
            raise NotJsonError
        self._source.take(1)
        gap, self._gap = self._gap.replace(",", ""), ""
        self._put("" if self._quotes else gap)
        while (frame := self._frames.pop()).bracket != opener:
            self._put(_CLOSER[frame.bracket])
        self._put(char)

    def _close_all(self) -> None:
        self._gap = ""
        while self._frames:
            self._put(_CLOSER[self._frames.pop().bracket])

    def _end_of_all(self) -> None:
        """Raise `_CutError` at the end of output that was cut off, which is not completed."""
        if self._source.cut:
            raise _CutError

    # -- Names ---------------------------------------------------------------------------------

    def _named(self, frame: _Frame, quote: str, length: int) -> Reading[Typed]:
        """Read a member's name and its colon; return the type of its value."""
        if quote:
            parts: list[str] = []

            def put(part: str) -> None:
                parts.append(part)
                self._put(part)

            yield from self._text("name", put)
            name = str(json.loads("".join(parts)))
        else:
            name = self._source.take(length).strip()
            self._put(quoted(name))
        frame.given.add(name)
        gap = self._source.take((yield from self._source.blanks()))
        colon = yield from self._source.char()
        if colon == "":
            self._end_of_all()
        elif colon in ":=":
            self._source.take(1)
        self._put(": " if self._quotes else f"{_plain(gap)}:")
        return frame.typed.member(name) if self._quotes else _ANY

    def _name_ahead(self, ahead: int = 0) -> Reading[int]:
        """Return the length of the name that stands there with a colon after it; 0 if none does."""
        source = self._source
        char = yield from source.char(ahead)
        quote = char if char in ('"', "'") else (yield from self._quote(ahead))
        if not quote:
            return (yield from self._bare_name_ahead(ahead))
        place = ahead + len(quote)
        while place - ahead < _LONGEST_NAME:
            char = yield from source.char(place)
            if char in ("", "\n"):
                break
            if (yield from source.says(quote, place)):
                place += len(quote)
                colon = yield from source.blanks(place)
                return place - ahead if (yield from source.char(colon)) == ":" else 0
            place += 2 if char == "\\" else 1
        return 0

    def _bare_name_ahead(self, ahead: int) -> Reading[int]:
        """Return the length of a name without quotes; 0 if there is none. It may have colons and
        blanks itself if the schema names one that has."""
        known = self._frames[-1].names if self._frames else self._typed.names
        found, place = 0, ahead
        while place - ahead < _LONGEST_NAME:
            char = yield from self._source.char(place)
            if char == ":" or char.isspace():
                colon = yield from self._source.blanks(place)
                name = self._source.seen(ahead, place)
                if name and (yield from self._source.char(colon)) == ":":
                    found = place - ahead if name in known or not found else found
                begun = self._source.seen(ahead, colon + (char == ":"))
                more = any(each.startswith(begun) for each in known)
                if not more and (name in known or not (yield from self._goes_on(colon))):
                    break
                place = colon
            elif not _BARE_NAME.fullmatch(char):
                break
            place += 1
        return found

    def _goes_on(self, colon: int) -> Reading[bool]:
        """Return whether a name that no schema knows goes on after this colon: up to another one,
        which quotes or a bracket follow."""
        place = colon + 1
        while place - colon < _LONGEST_NAME:
            char = yield from self._source.char(place)
            if not _BARE_NAME.fullmatch(char):
                break
            place += 1
        if place == colon + 1 or (yield from self._source.char(place)) != ":":
            return False
        char = yield from self._source.char(place + 1)
        return char in ("{", "[", '"', "'") or (yield from self._quote(place + 1)) != ""

    # -- Values --------------------------------------------------------------------------------

    def _value(self, typed: Typed, place: Place) -> Steps:
        gap = self._source.take((yield from self._source.blanks()))
        char = yield from self._source.char()
        if char == "":
            self._end_of_all()
        self._put("" if self._quotes else _plain(gap))
        kinds = typed.kinds if self._quotes else ANYTHING
        quoted = char in ('"', "'") or (yield from self._quote()) != ""
        if char in ("{", "[") and kinds != TEXT:
            self._open(char, typed)
        elif quoted and kinds & {"string", "any"}:
            yield from self._text(place, self._put)
        elif quoted:
            parts: list[str] = []
            yield from self._text(place, parts.append)
            self._put(as_json(json.loads("".join(parts)), kinds))
        elif char in ("", ",", "}", "]"):
            if not self._frames:
                raise NotJsonError
            self._put('""' if kinds == TEXT else "null")
        else:
            yield from self._word(place, kinds)

    def _word(self, place: Place, kinds: AbstractSet[Kind]) -> Steps:
        length = yield from self._word_length(place, kinds)
        word = self._source.seen(0, length).rstrip()
        if not word:
            if place == "member":
                self._put("null")
            raise NotJsonError
        if (yield from self._source.char(length)) == "":
            self._end_of_all()
        self._source.take(len(word))
        self._put(bare(word, kinds))

    def _word_length(self, place: Place, kinds: AbstractSet[Kind]) -> Reading[int]:
        """Return how far a word reaches, or a text without quotes."""
        source, length, depth = self._source, 0, 0
        special = _ENDS_BARE if self._quotes else _ENDS_WORD
        while char := (yield from source.char(length)):
            within = depth > 0
            if kinds == TEXT and (char in "{[" or (within and char in "}]")):
                depth += 1 if char in "{[" else -1
            elif within or not (char in special or char.isspace()):
                pass
            elif (yield from self._ends_word(char, place, length)):
                break
            length += 1
        return length

    def _ends_word(self, char: str, place: Place, ahead: int) -> Reading[bool]:
        """Return whether a word ends before a character."""
        if char in "}]" or not self._quotes:
            return char not in (" ", "\t")
        if char == ",":
            # In a text without quotes, a comma is one unless a member follows.
            return place == "element" or (yield from self._member_or_end(ahead + 1))
        after = yield from self._source.blanks(ahead)
        if (yield from self._source.char(after)) == "" or (yield from self._at_end(after)):
            return True
        if after == ahead:
            return (yield from self._quote(after)) != ""
        # Another member follows without a comma.
        return (yield from self._new_name_ahead(after))

    def _member_or_end(self, ahead: int) -> Reading[bool]:
        """Return whether a comma before this place is one between members."""
        place = yield from self._source.blanks(ahead)
        char = yield from self._source.char(place)
        if char in ("", "}", "]", ",") or (char == '"' and not self._quotes):
            return True
        return (yield from self._at_end(place)) or (yield from self._name_ahead(place)) > 0

    def _new_name_ahead(self, place: int) -> Reading[bool]:
        """Return whether a member follows that the schema names and that is not there yet."""
        length = yield from self._name_ahead(place)
        name = self._source.seen(place, place + length)
        for quote in ("'", '"', *self._quotes):
            name = name.removeprefix(quote).removesuffix(quote)
        frame = self._frames[-1]
        return length > 0 and name not in frame.given and (name in frame.names or not frame.names)

    # -- Texts ---------------------------------------------------------------------------------

    def _quote(self, ahead: int = 0) -> Reading[str]:
        """Return the quote of this notation's own that stands there."""
        for quote in self._quotes:
            if (yield from self._source.says(quote, ahead)):
                return quote
        return ""

    def _text(self, place: Place, put: Write) -> Steps:
        """Read a text in quotes of some kind, as JSON."""
        if quote := (yield from self._quote()):
            self._source.take(len(quote))
            put('"')
            yield from self._raw(quote, put)
        else:
            quote = self._source.take(1)
            put('"')
            yield from self._escaped(quote, place, put)
        put('"')

    def _escaped(self, quote: str, place: Place, put: Write) -> Steps:
        """Read the rest of a text with escapes, and its quote."""
        source, special = self._source, self._special | {quote}
        while True:
            if run := source.run(special):
                put(quoted(run)[1:-1])
            char = yield from source.char()
            if char == "":
                self._end_of_all()
                return
            if char == quote:
                if (yield from self._closes(place)):
                    source.take(1)
                    return
                source.take(1)
                put('\\"' if char == '"' else char)
            elif char == "\\":
                put((yield from self._escape()))
            elif char in special:
                length = yield from self._unquoted()
                if not length:
                    return
                put(quoted(source.take(length))[1:-1])

    def _escape(self) -> Reading[str]:
        """Read an escape; return it as in JSON, or the text meant by an invalid one."""
        source = self._source
        char = yield from source.char(1)
        if char == "":
            self._end_of_all()
        if char in _ESCAPES:
            return source.take(2)
        if char == "'":
            return source.take(2)[1]
        unit = (yield from self._unit(0)) if char == "u" else None
        if unit is None:
            source.take(1)
            return "\\\\"
        if not 0xD800 <= unit < 0xE000:
            return source.take(6)
        other = None
        if (yield from source.char(6)) in ("", "\\") and (yield from source.char(7)) == "":
            self._end_of_all()
        if unit < 0xDC00 and (yield from source.says("\\u", 6)):
            other = yield from self._unit(6)
        if other is not None and 0xDC00 <= other < 0xE000:
            return source.take(12)
        source.take(6)
        return "\ufffd"

    def _unit(self, ahead: int) -> Reading[int | None]:
        r"""Read the code unit of an escape such as `\u00e9`."""
        for place in range(ahead + 2, ahead + 6):
            char = yield from self._source.char(place)
            if char == "":
                self._end_of_all()
            if char == "" or char not in string.hexdigits:
                return None
        return int(self._source.seen(ahead + 2, ahead + 6), 16)

    def _closes(self, place: Place) -> Reading[bool]:
        """Return whether a quote ends its text, and is not one in it that lacks its backslash."""
        if place == "name":
            return True
        after = yield from self._source.blanks(1)
        char = yield from self._source.char(after)
        if char in ("", "}", "]"):
            return True
        if char == ",":
            return place == "element" or (yield from self._member_or_end(after + 1))
        if (yield from self._at_end(after)):
            return True
        return char == '"' if place == "element" else (yield from self._name_ahead(after)) > 0

    def _unquoted(self) -> Reading[int]:
        """Return the length of blanks and brackets in a text, or of one other character; 0 if the
        text ends before them without its quote, since the end of all follows."""
        length = yield from self._blanks_and_brackets()
        if (yield from self._source.char(length)) == "":
            self._end_of_all()
            closing = any(bracket in "}]" for bracket in self._source.seen(0, length))
            return 0 if closing else length
        return 0 if (yield from self._ends_all(length)) else (length or 1)

    def _raw(self, quote: str, put: Write) -> Steps:
        """Read the rest of a text without escapes, and its quote."""
        source = self._source
        while True:
            if run := source.run(_SPECIAL_RAW):
                put(quoted(run)[1:-1])
            if (yield from source.char()) == "":
                self._end_of_all()
                return
            if (yield from source.says(quote)):
                source.take(len(quote))
                return
            if source.ended and quote.startswith(source.rest):
                self._end_of_all()
                source.take(len(source.rest))
                return
            wrong = yield from self._wrong_quote()
            length = yield from self._blanks_and_brackets()
            if wrong is not None:
                right = yield from self._right_quote(quote)
                if right is None:
                    self._end_of_all()
                    source.take(wrong)
                    return
                length = right
            put(quoted(source.take(length or 1))[1:-1])

    def _wrong_quote(self) -> Reading[int | None]:
        """Return the length of what may stand in the place of the quote that ends a text: another
        quote, or nothing before what can follow; None if no such thing stands here."""
        source, length = self._source, 0
        while (char := (yield from source.char(length))) in _IN_QUOTES and char:
            length += 1
            if length > _LONGEST_QUOTE:
                return None
        said = source.seen(0, length)
        if '"' not in said and "'" not in said:
            found = yield from source.match(_TAG)
            length = len(found[0]) if found else 0
        return length if (yield from self._ends_value(length)) else None

    def _ends_value(self, ahead: int) -> Reading[bool]:
        """Return whether what stands there can only follow a value."""
        source = self._source
        place = yield from source.blanks(ahead)
        char = yield from source.char(place)
        if char == ",":
            after = yield from source.blanks(place + 1)
            return (yield from self._new_name_ahead(after))
        place += yield from self._blanks_and_brackets(place)
        return (yield from source.char(place)) == "" or (yield from self._at_end(place))

    def _blanks_and_brackets(self, ahead: int = 0) -> Reading[int]:
        """Return how many blanks and closing brackets stand there."""
        place = ahead
        while (char := (yield from self._source.char(place))) and (char in "}]" or char.isspace()):
            place += 1
        return place - ahead

    def _right_quote(self, quote: str) -> Reading[int | None]:
        """Return where the quote is that ends the text; None if the next one begins another."""
        source, place = self._source, 0
        while (yield from source.char(place)):
            if (yield from source.says(quote, place)):
                after = yield from source.blanks(place + len(quote))
                char = yield from source.char(after)
                if char in ("", ",", "}", "]") or (yield from self._at_end(after)):
                    return place
                return place if (yield from self._name_ahead(after)) else None
            place += 1
        return None

    # -- The end of all ------------------------------------------------------------------------

    def _at_end(self, ahead: int) -> Reading[bool]:
        """Return whether what ends the value stands there, outside of quotes."""
        for end in self._ends:
            if (yield from self._source.says(end, ahead)):
                return True
        return False

    def _ends_all(self, ahead: int) -> Reading[bool]:
        """Return whether the value's end stands there and is not meant as text: the output ends
        after it, or goes on with another value."""
        for end in self._ends:
            if (yield from self._source.says(end, ahead)):
                after = yield from self._source.blanks(ahead + len(end))
                if (yield from self._source.char(after)) == "":
                    self._end_of_all()
                    return True
                if self._again is not None and (yield from self._again(after)):
                    return True
        return False

    def _put(self, text: str) -> None:
        if text:
            self._write(text)
        self._written = self._source.at


# ---------------------------------------------------------------------------------------------
# Texts that are complete
# ---------------------------------------------------------------------------------------------


def mended(text: str) -> str | None:
    """Return JSON for a text that is one value; None if it is none."""
    source = Source(text)
    source.at = 0
    source.end(cut=False)
    parts: list[str] = []
    try:
        run(JsonReader(source, parts.append).read())
    except NotJsonError:
        return None
    return None if source.rest.strip() else "".join(parts)


def run(steps: Generator[None, None, Any]) -> None:
    """Read a source that has ended."""
    for _ in steps:
        raise AssertionError("waits for more than there is")


def as_json(text: str, kinds: AbstractSet[Kind]) -> str:
    """Return JSON for an argument written as `text` whose parameter takes `kinds`.

    What is neither JSON of a type that fits nor, where no text does, like JSON or a literal in
    Python, is text.
    """
    trimmed = text.strip()
    if not trimmed and not kinds & {"string", "any"}:
        return "null"
    try:
        value = json.loads(trimmed, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError):
        brackets = "string" not in kinds and trimmed.startswith(("{", "["))
        if kinds & {"string", "any"} and not brackets:
            return quoted(text)
        return _like_json(trimmed, kinds, text)
    kind = kind_of(value)
    if kinds & {"string", "any"}:
        fits = kind != "string" and ("any" in kinds or kind in kinds)
        fits = fits or (kind == "integer" and "number" in kinds)
        return _strict(trimmed) if fits else quoted(text)
    if isinstance(value, str) and value.strip() != trimmed:
        # Quotes too many, around what is of a type that fits.
        inner = as_json(value, kinds)
        return inner if _is_of(inner, kinds) else quoted(value)
    return _of_kinds(value, kinds) or _strict(trimmed)


def _like_json(trimmed: str, kinds: AbstractSet[Kind], text: str) -> str:
    if "boolean" in kinds and trimmed.lower() in ("true", "false"):
        return trimmed.lower()
    try:
        value = ast.literal_eval(trimmed)
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        return _of_kinds(value, kinds) or encodable(written)
    except _LITERAL_ERRORS:
        return quoted(text) if "any" in kinds else _strict(trimmed, quoted(trimmed))


def _strict(text: str, otherwise: str = "") -> str:
    """Return JSON for an object, a list or a text. `otherwise`: the result for anything else;
    "" if that is JSON already."""
    if text.startswith(("{", "[", '"')):
        return mended(text) or quoted(text)
    return otherwise or text


def _of_kinds(value: Any, kinds: AbstractSet[Kind]) -> str | None:
    """Return JSON for a number with a point or an exponent where only whole numbers are taken."""
    whole = isinstance(value, float) and value.is_integer() and abs(value) <= _LARGEST_EXACT
    return str(int(value)) if whole and "integer" in kinds and "number" not in kinds else None


def _is_of(text: str, kinds: AbstractSet[Kind]) -> bool:
    try:
        kind = kind_of(json.loads(text))
    except (ValueError, RecursionError):
        return False
    return kind in kinds or (kind == "integer" and "number" in kinds)


def bare(word: str, kinds: AbstractSet[Kind]) -> str:
    """Return JSON for a word without quotes."""
    if kinds == TEXT:
        return quoted(word)
    number = _NUMBER.fullmatch(word)
    if number and (number["whole"] or number["part"]) and not number["whole"].startswith("0"):
        sign = number["sign"].replace("+", "")
        point = "" if number["part"] is None else f".{number['part'] or 0}"
        word = f"{sign}{number['whole'] or 0}{point}"
    return as_json(_LITERALS.get(word, word), kinds)


def quoted(text: str) -> str:
    """Return a text as JSON."""
    return json.dumps(encodable(text), ensure_ascii=False)


def _plain(blanks: str) -> str:
    """Return blanks as JSON has them."""
    return "".join(char if char in _BLANKS else " " for char in blanks)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
