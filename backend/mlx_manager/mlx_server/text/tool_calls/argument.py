"""Arguments that are written one by one, where text has no quotes, to JSON.

A value ends at its end. Models leave ends out and misspell them, and write texts that look like
markup. So an end counts if what follows it can follow it; what only looks like an end is text if
a right one comes later, and is taken for it otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import regex

from mlx_manager.mlx_server.text.source import Reading, Source, Steps
from mlx_manager.mlx_server.text.tool_calls.lenient_json import (
    JsonReader,
    Write,
    as_json,
    quoted,
)
from mlx_manager.mlx_server.text.tool_calls.patterns import TagPatterns
from mlx_manager.mlx_server.text.tool_calls.schemas import ANYTHING, TEXT, Kind, Typed

_NO_LETTERS = regex.compile(r"<\|(?:close|sep)\|>|[^a-z]+")
_SHORTEST_NAME = 3


class NotACallError(Exception):
    """The next character can't be part of a call."""


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a value: how many of the next characters are still text, and how many markup."""

    text: int
    markup: int


class ArgumentReader:
    """Reads the arguments of one call, from its name on.

    Args:
        typed: the schema of its parameters.
        offered: the names of the functions that may be called.
        start: announces the call.
        write: takes the arguments' JSON as it becomes known.
    """

    def __init__(
        self,
        source: Source,
        form: TagPatterns,
        typed: Typed,
        offered: Collection[str],
        *,
        start: Callable[[], None],
        write: Write,
    ) -> None:
        self._source = source
        self._form = form
        self._typed = typed
        self._names = typed.names
        self._offered = offered
        self._start = start
        self._write = write
        self._given: set[str] = set()
        self._started = self._whole = False
        self._break = "\n"

    def read(self) -> Reading[bool]:
        """Read the arguments to the end of the call; return whether all calls end there.

        Nothing is closed where the output was cut off.

        Raises:
            NotACallError: no call has been announced, or it is complete and something else follows.
        """
        while True:
            match = yield from self._source.match(self._form.item)
            if match is None or not self._fits(match):
                over = yield from self._without_end(match)
                if over is None:
                    continue
                return over
            groups = match.groupdict()
            self._source.take(len(match[0]) - len(groups.get("ahead") or ""))
            if groups.get("object") is not None:
                yield from self._read_whole()
                continue
            self._begin()
            if groups.get("value") is None:
                self._close()
                return groups.get("close") is not None
            yield from self._read_argument(match)

    def _fits(self, match: regex.Match[str]) -> bool:
        """Return whether this can follow what there is so far."""
        groups = match.groupdict()
        if groups.get("value") is not None or groups.get("object") is not None:
            return not self._whole and not (groups.get("object") is not None and self._given)
        # Without the end of a call, it is one if there is nothing else that it could lack.
        left_out = groups.get("end") is None and self._form.call_end
        return self._started or not left_out or not self._names

    def _without_end(self, match: regex.Match[str] | None) -> Reading[bool | None]:
        """Read on where the end of a call is missing or misspelt.

        Returns whether all calls end there; None if it was one end of a value too many.
        """
        source = self._source
        blanks = yield from source.blanks()
        if not self._started:
            source.take(source.begun(self._form.item))
            raise NotACallError
        if (yield from source.char(blanks)) == "":
            if not source.cut:
                self._close()
            return True
        another = yield from self._call_ahead(0)
        wrong = yield from self._wrong_end(blanks, self._form.call_end or self._form.close, ())
        if another or (wrong and (yield from self._calls_over(wrong))):
            source.take(0 if another else wrong)
            self._close()
            return not self._form.call_end
        if source.ended and self._form.item.fullmatch(source.rest, partial=True):
            source.take(len(source.rest))
            if not source.cut:
                self._close()
            return True
        if match is None and (yield from source.says(self._form.end, blanks)):
            source.take(blanks + len(self._form.end))
            return None
        if not source.cut:
            self._close()
        raise NotACallError

    # -- What is written -----------------------------------------------------------------------

    def _begin(self) -> None:
        if not self._started:
            self._started = True
            self._start()
        self._source.decide()

    def _close(self) -> None:
        if not self._whole:
            self._write("}" if self._given else "{}")
        self._source.decide()

    @property
    def complete(self) -> bool:
        """Return whether the call has ended."""
        return self._started and not self._source.cut

    def _read_whole(self) -> Steps:
        """Read all arguments as one JSON object."""
        source = self._source
        source.take((yield from source.blanks()))
        if (yield from source.char()) != "{":
            raise NotACallError
        self._begin()
        self._whole = True
        ends = (self._form.whole_end, self._form.call_end)
        yield from JsonReader(source, self._write, ends=ends).read()
        blanks = yield from source.blanks()
        if (yield from source.says(self._form.whole_end, blanks)):
            source.take(blanks + len(self._form.whole_end))
        source.decide()

    def _read_argument(self, match: regex.Match[str]) -> Steps:
        key = self._key(match["key"])
        self._write(f"{', ' if self._given else '{'}{quoted(key)}: ")
        self._given.add(key)
        value = _Value(self._kinds(match, key), self._write)
        yield from self._read_value(value, key)
        if not (self._source.cut and self._source.rest == ""):
            self._source.decide()

    def _key(self, written: str) -> str:
        key = written.strip()
        unquoted = key.strip("\"'")
        return unquoted if key not in self._names and unquoted in self._names else key

    def _kinds(self, match: regex.Match[str], key: str) -> AbstractSet[Kind]:
        """Return the types that an argument may have: what its schema says, else what its call
        says."""
        kinds, groups = self._typed.member(key).kinds, match.groupdict()
        if groups.get("text") is not None:
            return TEXT if kinds & {"string", "any"} else kinds
        if groups.get("json") is None:
            return kinds
        return (kinds - TEXT) or kinds

    # -- A value and its end -------------------------------------------------------------------

    def _read_value(self, value: _Value, key: str) -> Steps:
        source, form = self._source, self._form
        if form.line:
            yield from self._line_break()
        end = form.end
        if form.wrap and (yield from source.says(form.wrap[0])):
            source.take(len(form.wrap[0]))
            end = form.wrap[1] + form.end
        special = {end[0], "<"} if end is not form.end else {"<", "\n", "\r"}
        first = True
        while True:
            if text := source.run(special):
                value.put(text)
                first = False
            if (yield from source.char()) == "":
                break
            if end is form.end:
                found = yield from self._end_here(value, key, first)
            else:
                found = yield from self._wrapped_end(end)
            first = False
            if found is not None:
                value.put(source.take(found.text))
                source.take(found.markup)
                value.finish()
                return
            if source.ended and self._begins_markup(end):
                source.take(len(source.rest))
            else:
                value.put(source.take(1))
        if not source.cut:
            value.finish()

    def _line_break(self) -> Steps:
        self._break = "\n"
        if (yield from self._source.says("\r\n")):
            self._break = "\r\n"
        if (yield from self._source.says(self._break)):
            self._source.take(len(self._break))

    def _begins_markup(self, end: str) -> bool:
        """Return whether all that is left of the output may be the beginning of markup."""
        rest = self._source.rest
        text = rest.lstrip("\r\n \t")
        if end.startswith(rest) or (self._form.line and end.startswith(text)):
            return True
        return self._source.cut and (
            end.startswith(text)
            or self._form.item.fullmatch(rest, partial=True) is not None
            or self._form.begun.fullmatch(rest, partial=True) is not None
            or self._form.wrong.fullmatch(text, partial=True) is not None
        )

    def _end_here(self, value: _Value, key: str, first: bool) -> Reading[_End | None]:
        """Return the end of a value that stands here, if one does."""
        source, form = self._source, self._form
        place = yield from self._layout()
        if place is None:
            return None
        if (yield from source.char(place)) == "":
            return None if source.cut else _End(0, place)
        own_line = form.line and source.seen(0, place) == self._break
        length = None
        if place == 0 or own_line:
            length = yield from self._value_end(place, key)
        right_one = length is not None and (yield from source.says(form.end, place))
        if length is None:
            over = yield from self._other_end(place, first or place > 0, value)
            if over is None:
                return None
            sure, found = over, _End(0, place)
        else:
            lax = right_one and not value.nested
            sure = yield from (self._can_follow(length) if lax else self._must_follow(length))
            found = _End(0, length)
        if sure and not value.within_quotes:
            return found if right_one or not source.cut else None
        right = yield from self._right_end(value)
        if right is None:
            return found if right_one or not source.cut else None
        before = self._break if form.line else ""
        blank = len(before) if right and source.seen(right - len(before), right) == before else 0
        return _End(right - blank, blank + len(form.end))

    def _layout(self) -> Reading[int | None]:
        """Return the length of line breaks and blanks before a `<` or the end of the output; None
        if there is no such thing.

        A value without its end has one line break after it, or two where it is on its own lines.
        """
        source, place = self._source, 0
        for _ in range(2 if self._form.line else 1):
            carried = (yield from source.char(place)) == "\r"
            if (yield from source.char(place + carried)) == "\n":
                place += 1 + carried
        while place and (char := (yield from source.char(place))) and char in " \t":
            place += 1
        char = yield from source.char(place)
        return place if char == "<" or (char == "" and self._form.line) else None

    def _value_end(self, place: int, key: str) -> Reading[int | None]:
        """Return the place behind an end of a value: the right one, or a misspelt one if only the
        end of a value can stand there."""
        if (yield from self._source.says(self._form.end, place)):
            return place + len(self._form.end)
        wrong = yield from self._wrong_end(place, self._form.end, (*self._form.also, key))
        return wrong if wrong and (yield from self._can_follow(wrong)) else None

    def _wrong_end(self, place: int, end: str, also: Sequence[str]) -> Reading[int]:
        """Return the place behind a tag that resembles an end; 0 if there is none."""
        length = yield from resembling(self._source, self._form.wrong, place, end, also)
        return place + length if length else 0

    def _other_end(
        self, place: int, line_start: bool, value: _Value | None = None
    ) -> Reading[bool | None]:
        """Look for another argument or the end of the call, behind a value whose end is missing.

        Returns True if it surely is one, False if it may be text, None if there is none.
        """
        source = self._source
        match = yield from source.match(self._form.head, place)
        if match is not None and (line_start or not self._form.line):
            if self._is_missing(self._key(match["key"])):
                return (yield from self._is_argument(place + len(match[0])))
            if value is not None:
                value.nested = True
            return None
        match = yield from source.match(self._form.closing, place)
        if match is not None:
            return (yield from self._calls_over(place + len(match[0])))
        match = yield from source.match(self._form.begun, place)
        if match is None:
            return None
        if value is not None:
            value.nested = True
        return True if match["name"] in self._offered else None

    def _is_missing(self, key: str) -> bool:
        """Return whether an argument of this name may follow. Markup in a text names other ones."""
        return key not in self._given and (key in self._names or not self._names)

    def _is_argument(self, place: int) -> Reading[bool]:
        """Return whether the value there ends like one of this call, not like markup in a text."""
        source = self._source
        while char := (yield from source.char(place)):
            if char == "<":
                if (yield from source.says(self._form.end, place)):
                    return (yield from self._can_follow(place + len(self._form.end)))
                match = yield from source.match(self._form.begun, place)
                if match is not None and match["name"] in self._offered:
                    return True
            place += 1
        return True

    def _can_follow(self, place: int) -> Reading[bool]:
        """Return whether what stands there can follow the end of a value."""
        if (yield from self._source.match(self._form.item, place)) is not None:
            return True
        return (yield from self._must_follow(place))

    def _must_follow(self, place: int) -> Reading[bool]:
        """Return whether what stands there can only follow the end of a value."""
        source = self._source
        blanks = yield from source.blanks(place)
        if (yield from source.char(blanks)) == "" or (yield from self._call_ahead(place)):
            return True
        if (yield from self._other_end(blanks, True)):
            return True
        wrong = yield from self._wrong_end(blanks, self._form.call_end or self._form.close, ())
        return wrong > 0 and (yield from self._calls_over(wrong))

    def _calls_over(self, place: int) -> Reading[bool]:
        """Return whether only the end of a call can stand before this place: the end of the output
        follows, with or without that of all calls, or another call."""
        source = self._source
        for _ in range(2):
            place = yield from source.blanks(place)
            if (yield from source.char(place)) == "" or (yield from self._call_ahead(place)):
                return True
            match = yield from source.match(self._form.closing, place)
            wrong = yield from self._wrong_end(place, self._form.close, ())
            if match is not None and match.groupdict().get("close") is not None:
                place += len(match[0])
            elif wrong:
                place = wrong
            else:
                return False
        return False

    def _call_ahead(self, place: int) -> Reading[bool]:
        match = yield from self._source.match(self._form.call, place)
        return match is not None and match["name"] in self._offered

    def _right_end(self, value: _Value) -> Reading[int | None]:
        """Return the place of the next end after which the value can't go on; None if another call
        begins before it."""
        source, quotes, place = self._source, value.quotes, 0
        while char := (yield from source.char(place)):
            if char == "<" and place and not (quotes and quotes.within):
                if (yield from source.says(self._form.end, place)):
                    after = place + len(self._form.end)
                    follows = self._must_follow if value.nested else self._can_follow
                    if (yield from follows(after)):
                        return place
                else:
                    match = yield from source.match(self._form.begun, place)
                    if match is not None and match["name"] in self._offered:
                        return None
            quotes = quotes and quotes.after(char)
            place += 1
        return None

    def _wrapped_end(self, end: str) -> Reading[_End | None]:
        """Return the end of a value between texts that say that all of it is text."""
        source, form = self._source, self._form
        if (yield from source.says(end)):
            return _End(0, len(end))
        assert form.wrap is not None
        for part in (form.wrap[1], form.end):
            if (yield from source.says(part)) and (yield from self._can_follow(len(part))):
                place = len(part)
                while (yield from source.char(place)):
                    if (yield from source.says(end, place)):
                        return _End(place, len(end))
                    place += 1
                return None if source.cut else _End(0, len(part))
        return None


def resembling(
    source: Source, pattern: regex.Pattern[str], place: int, end: str, also: Sequence[str] = ()
) -> Reading[int]:
    """Return the length of what stands there and was meant to be an end; 0 if nothing was.

    Args:
        pattern: what it may look like; what group `ahead` matches follows it.
        also: names that models give it by mistake.
    """
    match = yield from source.match(pattern, place)
    if match is None and source.ended:
        # A tag that lacks its end, at the end of all.
        match = pattern.fullmatch(source.rest[place:] + "\n")
    if match is None or not end:
        return 0
    length = len(match[0]) - len(match.groupdict().get("ahead") or "")
    return length if _resembles(match[0][:length], end, also) else 0


def _resembles(tag: str, end: str, also: Sequence[str]) -> bool:
    name, right = _letters(tag), _letters(end)
    if "/" in end and not ("/" in tag or "\\" in tag):
        return name == right
    if name == right or name in map(_letters, also):
        return bool(name)
    if len(name) < _SHORTEST_NAME:
        return False
    if right.startswith(name) or name.startswith(right):
        return True
    return regex.fullmatch(f"(?:{right}){{e<={2 if len(right) > 5 else 1}}}", name) is not None


def _letters(tag: str) -> str:
    return str(_NO_LETTERS.sub("", tag.lower()))


class _Value:
    """An argument's text as it is read, and its JSON."""

    def __init__(self, kinds: AbstractSet[Kind], write: Write) -> None:
        self._kinds = kinds
        self._write = write
        self._streams = kinds == TEXT
        self._opened = False
        self._parts: list[str] = []
        # Whether there is markup like that of arguments or calls in it.
        self.nested = False
        self.quotes = None if "string" in kinds else _Quotes.of(kinds)

    @property
    def within_quotes(self) -> bool:
        """Return whether the value is JSON and is within a text in it, where nothing ends it."""
        return self.quotes is not None and self.quotes.within

    def put(self, text: str) -> None:
        if not text:
            return
        if not self._streams:
            self._parts.append(text)
            for char in text if self.quotes else "":
                self.quotes = self.quotes and self.quotes.after(char)
            return
        self._write(("" if self._opened else '"') + quoted(text)[1:-1])
        self._opened = True

    def finish(self) -> None:
        if self._streams:
            self._write('"' if self._opened else '""')
        else:
            self._write(as_json("".join(self._parts), self._kinds))


@dataclass(frozen=True, slots=True)
class _Quotes:
    """Return whether JSON is within a text of its own.

    beginnings: the characters with which JSON begins, as opposed to text. is_json: whether it does,
    None while nothing but blanks has been read.
    """

    beginnings: str
    is_json: bool | None = None
    quoted: bool = False
    escaped: bool = False

    @classmethod
    def of(cls, kinds: AbstractSet[Kind]) -> _Quotes:
        return cls("{[" if kinds & ANYTHING else '{["')

    @property
    def within(self) -> bool:
        return bool(self.is_json) and self.quoted

    def after(self, char: str) -> _Quotes:
        is_json = self.is_json
        if is_json is None and not char.isspace():
            is_json = char in self.beginnings
        if self.escaped:
            return _Quotes(self.beginnings, is_json, self.quoted, False)
        if self.quoted and char == "\\":
            return _Quotes(self.beginnings, is_json, True, True)
        return _Quotes(self.beginnings, is_json, self.quoted != (char == '"'), False)
