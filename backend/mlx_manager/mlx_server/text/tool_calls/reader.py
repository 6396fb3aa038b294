"""Reads tool calls character by character, and hands their arguments on as they are written.

What turns out to be no call is given back as the text it is: nothing is lost and nothing raises.
Once a call has been announced, what the model writes as its arguments is passed on as JSON,
whatever it is.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field

import regex

from mlx_manager.mlx_server.core import ToolCallDelta, ToolCallStarted
from mlx_manager.mlx_server.formats import OutputFormat, ToolFormat, Unquoted
from mlx_manager.mlx_server.text.source import Reading, Source, Steps
from mlx_manager.mlx_server.text.tool_calls.argument import (
    ArgumentReader,
    NotACallError,
    resembling,
)
from mlx_manager.mlx_server.text.tool_calls.lenient_json import JsonReader, NotJsonError, mended
from mlx_manager.mlx_server.text.tool_calls.patterns import TagPatterns, patterns_of
from mlx_manager.mlx_server.text.tool_calls.python_calls import python_calls
from mlx_manager.mlx_server.text.tool_calls.schemas import typed_parameters
from mlx_manager.mlx_server.utils.text import encodable

CallEvent = ToolCallStarted | ToolCallDelta

_OTHER_KEYS = frozenset({"type", "id"})
_NO_ARGUMENTS = frozenset({"null", '""', "[]"})
_SEPARATORS = string.whitespace + ",;[]"
_BRACKETS = str.maketrans("", "", "]}")
_PREFIX = regex.compile(r"functions?[._:\-]?")
_TAG = regex.compile(r"<[/\\|]?[^<>\n]{0,40}(?:>|(?P<ahead>[<\n]))")
_NO_NAME = regex.compile(r"[^A-Za-z0-9]+")


class CallLog:
    """Numbers an answer's calls and names them.

    started, finished: how many have begun, and how many are complete.
    """

    def __init__(self, new_id: Callable[[], str], parallel: bool) -> None:
        self._new_id = new_id
        self._parallel = parallel
        self._ids: set[str] = set()
        self.started = 0
        self.finished = 0

    @property
    def full(self) -> bool:
        """Return whether the only call allowed has been made."""
        return self.finished > 0 and not self._parallel

    def start(self, name: str, call_id: str | None) -> ToolCallStarted:
        if call_id is None or call_id in self._ids:
            call_id = self._new_id()
        self._ids.add(call_id)
        event = ToolCallStarted(self.started, call_id, name)
        self.started += 1
        return event


@dataclass(slots=True)
class Progress:
    """The outcome of some text: events, then text that was taken for a call and is none.

    `rest` is the text after the calls' end, None while more of them may follow.
    """

    events: list[CallEvent] = field(default_factory=list)
    text: str = ""
    rest: str | None = None


class _CompleteError(Exception):
    """The only call allowed has been made."""


class CallReader:
    """One run of calls, from what opened it to what ends it.

    `opener` is the text already read, given back if no call follows. `name` is the call's name
    where a header has given it.
    """

    def __init__(
        self, output: OutputFormat, form: ToolFormat, log: CallLog, opener: str, name: str = ""
    ) -> None:
        self._offered = output.offered
        self._form = form
        self._patterns = patterns_of(form)
        self._item_pattern = self._patterns.item
        self._bare = form.bare and not opener
        self._log = log
        self._name = name
        self._opener = opener
        self._events: list[CallEvent] = []
        self._source = Source(opener)
        self._arguments: list[str] = []
        self._tail = False
        # The arguments of a call have been passed on, and the object around them has not ended.
        self._within = False
        # A header has named a function, and nothing has followed: it is called with no arguments.
        self._named_only = bool(name)
        if opener and self._item_pattern.fullmatch(opener, partial=True):
            # The beginning of the first call itself.
            self._source.at = 0
        self._steps = self._section()
        next(self._steps)

    def feed(self, text: str) -> Progress:
        self._source.add(text)
        return self._advance()

    def finish(self, cut: bool) -> Progress:
        """Read the end of the output. `cut`: the output was cut off rather than ended by the
        model."""
        self._source.end(cut)
        return self._advance()

    def _advance(self) -> Progress:
        source = self._source
        if self._log.full:
            return Progress(rest="")
        try:
            next(self._steps)
        except _CompleteError:
            return self._progress("", "")
        except (StopIteration, NotACallError):
            # What opened calls is text if none follows; it is not looked at again.
            source.at = max(source.at, len(self._opener))
            if not source.ended:
                return self._progress(self._shown(source.undecided), source.rest)
            source.take(len(source.rest))
            if self._log.finished < self._log.started or self._within:
                # The output ended within a call: what has not been passed on is its markup.
                source.decide()
            return self._progress(self._shown(source.undecided), "")
        return self._progress("", None)

    def _progress(self, text: str, rest: str | None) -> Progress:
        self._flush_arguments()
        events, self._events = self._events, []
        return Progress(events, text, rest)

    def _shown(self, text: str) -> str:
        """Return text between calls without the brackets that end a list of calls, or that are more
        than were opened."""
        if not self._tail:
            return text
        if self._source.ended and not text.strip(_SEPARATORS + "}"):
            return ""
        said = text.lstrip(string.whitespace + "]}")
        before = text.removesuffix(said) if said else text
        return before.translate(_BRACKETS) + said

    # -- The grammar ---------------------------------------------------------------------------

    def _section(self) -> Steps:
        """Read calls until their end."""
        while True:
            match = yield from self._item()
            groups = match.groupdict()
            if groups.get("close") is not None:
                if self._named_only:
                    self._emit(self._name, "{}")
                elif not self._tail:
                    raise NotACallError
                self._source.decide()
                return
            self._named_only = False
            if (yield from self._call(groups)):
                return
            self._tail = True

    def _call(self, groups: dict[str, str | None]) -> Reading[bool]:
        """Read a call from its item on; return whether all calls end with it."""
        arguments, tags = self._form.call.arguments, self._patterns.tags
        if groups.get("block") is not None:
            yield from self._read_block(groups["block"] or "")
            return self._patterns.block_end is not None or self._form.bare
        if tags and groups.get("params") is not None:
            return (yield from self._read_tagged(tags, groups["name"] or ""))
        if groups.get("object") is not None:
            yield from self._object()
            self._within = False
            return False
        name, call_id = self._called(groups)
        if groups.get("none") is not None:
            self._emit(name, "{}", call_id)
            self._source.decide()
        elif isinstance(arguments, Unquoted) and groups.get("braces") is not None:
            yield from self._stream_unquoted(name, arguments.quote)
        else:
            yield from self._stream(name, call_id)
        return False

    def _called(self, groups: dict[str, str | None]) -> tuple[str, str | None]:
        """Return the name and the id that an item gives a call.

        Raises:
            NotACallError: no such function is offered.
        """
        name, call_id = groups.get("name") or self._name, groups.get("id")
        if self._form.named_by_id:
            name, call_id = called_by_id(call_id or "", self._offered)
        if name not in self._offered:
            raise NotACallError
        return name, call_id

    def _item(self) -> Reading[regex.Match[str]]:
        source = self._source
        match = yield from source.match(self._item_pattern)
        if match is not None:
            source.take(len(match[0]) - len(match.groupdict().get("ahead") or ""))
            return match
        blanks = yield from source.blanks()
        if source.ended and not source.cut and (yield from source.char(blanks)) == "":
            if self._named_only:
                self._emit(self._name, "{}")
                source.decide()
        elif source.ended and not source.cut and self._patterns.end:
            match = self._item_pattern.fullmatch(source.rest + self._patterns.end)
            groups = match.groupdict() if match else {}
            named = self._form.named_by_id or groups.get("name") in self._offered
            if match and named and groups.get("none") is not None:
                source.take(len(source.rest))
                return match
        if not self._tail:
            source.take(source.begun(self._item_pattern))
            raise NotACallError
        length = yield from self._after_calls()
        for end in (self._patterns.end, self._patterns.close):
            if wrong := (yield from self._wrong_end(length, end)):
                source.take(wrong)
                source.decide()
                if end == self._patterns.close:
                    raise NotACallError
                return (yield from self._item())
        source.take(length)
        raise NotACallError

    def _after_calls(self) -> Reading[int]:
        """Return the length of separators and brackets after a call. The call's own end is
        dropped, and so is the beginning of an end where the output ends."""
        source, length = self._source, 0
        markup = [*filter(None, [self._patterns.end]), *(["```"] if self._patterns.fenced else [])]
        while char := (yield from source.char(length)):
            for text in markup:
                if (yield from source.says(text, length)):
                    source.take(length + len(text))
                    source.decide()
                    length = 0
                    break
            else:
                if char not in _SEPARATORS + "}":
                    break
                length += 1
        said = source.rest[length:]
        ends = (*markup, self._patterns.close)
        if source.ended and any(end.startswith(said) for end in ends if said):
            source.take(len(source.rest))
            source.decide()
            return 0
        return length

    def _wrong_end(self, place: int, end: str) -> Reading[int]:
        """Return the place behind a tag that resembles an end; 0 if there is none."""
        if self._opener and (yield from self._source.says(self._opener, place)):
            return 0
        length = yield from resembling(self._source, _TAG, place, end)
        return place + length if length else 0

    def _object(self) -> Steps:
        """Read `{"name": ..., "arguments": {...}}` after its brace, the keys in any order, or all
        of it as another object's `function`. Models forget the last brace."""
        source, fields, streamed = self._source, dict[str, str](), False
        while True:
            source.take((yield from source.blanks()))
            char = yield from source.char()
            if char == "}":
                source.take(1)
                break
            if char != '"' and streamed:
                return
            key = yield from self._key()
            source.take((yield from source.blanks()))
            char = yield from source.char()
            in_braces, name = char == "{" and not streamed, self._name_in(fields)
            if key in self._patterns.argument_keys and in_braces and name is not None:
                source.take(1)
                yield from self._stream(self._offered_name(name), None)
                self._tail = self._within = streamed = True
            elif key == "function" and in_braces:
                source.take(1)
                yield from self._object()
                self._tail = self._within = streamed = True
            else:
                fields[key] = yield from self._field(key in self._patterns.name_keys)
            place = yield from source.blanks()
            char = yield from source.char(place)
            if char == "}":
                continue
            if char != ",":
                if streamed:
                    return
                source.take(place)
                raise NotACallError
            source.take(place + 1)
        if not streamed:
            self._emit_object(fields)
        source.decide()

    def _key(self) -> Reading[str]:
        key = _loads_string((yield from self._string()))
        known = {*self._patterns.name_keys, *self._patterns.argument_keys, *_OTHER_KEYS}
        if self._bare and key not in known:
            raise NotACallError
        self._source.take((yield from self._source.blanks()))
        if (yield from self._source.char()) != ":":
            raise NotACallError
        self._source.take(1)
        return key

    def _string(self) -> Reading[str]:
        """Read a string literal."""
        source = self._source
        if (yield from source.char()) != '"':
            raise NotACallError
        text = source.take(1)
        while (char := (yield from source.next())) != '"':
            if char == "":
                raise NotACallError
            text += char
            if char == "\\":
                text += yield from source.next()
        return text + '"'

    def _field(self, name: bool) -> Reading[str]:
        """Read any value of an object, and return it as JSON."""
        if name:
            text = yield from self._string()
            self._offered_name(text)
            return text
        parts: list[str] = []
        reader = JsonReader(self._source, parts.append)
        try:
            yield from reader.read()
        except NotJsonError as error:
            raise NotACallError from error
        if not reader.complete or (self._source.ended and not self._source.rest):
            raise NotACallError
        return "".join(parts)

    def _stream(self, name: str, call_id: str | None) -> Steps:
        """Read the arguments whose brace has just been read, announced once they look like JSON."""
        source = self._source
        if name not in self._offered:
            raise NotACallError
        blanks = yield from source.blanks()
        char = yield from source.char(blanks)
        if char not in ('"', "}"):
            source.take(blanks)
            raise NotACallError
        self._events.append(self._log.start(name, call_id))
        source.at -= 1
        ends = tuple(filter(None, (self._patterns.end, self._patterns.close)))
        again = self._another if self._opener else None
        yield from self._pass_on(JsonReader(source, self._write, ends=ends, again=again))

    def _stream_unquoted(self, name: str, quote: str) -> Steps:
        """Read the arguments whose brace comes next, in a notation with quotes of its own."""
        reader = JsonReader(
            self._source,
            self._write,
            typed=typed_parameters(self._offered[name]),
            quotes=(quote,),
            ends=(self._patterns.close,),
            again=self._another,
        )
        if not (yield from reader.begins()):
            raise NotACallError
        self._events.append(self._log.start(name, None))
        yield from self._pass_on(reader)

    def _pass_on(self, reader: JsonReader) -> Steps:
        """Read a call's arguments, as they are written."""
        self._source.decide()
        yield from reader.read()
        if reader.complete:
            self._source.decide()
            self._end_call()

    def _another(self, place: int) -> Reading[bool]:
        """Return whether another call of a function that is offered begins there."""
        source = self._source
        if not (yield from source.says(self._opener, place)):
            return False
        match = yield from source.match(self._item_pattern, place + len(self._opener))
        if match is None or match.groupdict().get("object") is None:
            return match is not None and (match.groupdict().get("name") or "") in self._offered
        named = self._patterns.named
        found = yield from source.match(named, place + len(self._opener) + len(match[0]))
        return found is not None and found["name"] in self._offered

    def _write(self, text: str) -> None:
        self._arguments.append(text)
        self._source.decide()

    def _end_call(self) -> None:
        self._flush_arguments()
        self._log.finished += 1
        if self._log.full:
            raise _CompleteError

    def _flush_arguments(self) -> None:
        if text := "".join(self._arguments):
            self._events.append(ToolCallDelta(self._log.started - 1, text))
        self._arguments.clear()

    # -- Arguments between tags ----------------------------------------------------------------

    def _read_tagged(self, form: TagPatterns, name: str) -> Reading[bool]:
        """Read a call's arguments after its name; return whether this was the end of all calls."""
        if name not in self._offered:
            raise NotACallError
        typed = typed_parameters(self._offered[name])

        def start() -> None:
            self._events.append(self._log.start(name, None))

        reader = ArgumentReader(
            self._source, form, typed, self._offered, start=start, write=self._write
        )
        closed = None
        with suppress(NotACallError):
            closed = yield from reader.read()
        if reader.complete:
            self._tail = True
            self._end_call()
        if closed is None:
            raise NotACallError
        return closed

    # -- Calls that are emitted when they are complete -----------------------------------------

    def _emit_object(self, fields: dict[str, str]) -> None:
        name = self._name_in(fields)
        given = [fields[key] for key in self._patterns.argument_keys if key in fields]
        if name is None or (self._bare and not given):
            raise NotACallError
        arguments = given[0] if given and given[0] not in _NO_ARGUMENTS else "{}"
        if arguments.startswith('"'):
            arguments = mended(_loads_string(arguments).strip()) or ""
        if not arguments.startswith("{"):
            raise NotACallError
        self._emit(self._offered_name(name), arguments)

    def _name_in(self, fields: dict[str, str]) -> str | None:
        return next((fields[key] for key in self._patterns.name_keys if key in fields), None)

    def _offered_name(self, literal: str) -> str:
        name = _loads_string(literal)
        if name not in self._offered:
            raise NotACallError
        return name

    def _emit_block(self, text: str) -> None:
        try:
            calls = python_calls(text, self._offered)
        except ValueError as error:
            raise NotACallError from error
        if not calls or any(name not in self._offered for name, _ in calls):
            raise NotACallError
        for name, arguments in calls:
            self._emit(name, arguments)

    def _emit(self, name: str, arguments: str, call_id: str | None = None) -> None:
        self._events.append(self._log.start(name, call_id))
        self._arguments.append(encodable(arguments))
        self._end_call()

    def _read_block(self, beginning: str) -> Steps:
        end = self._patterns.block_end
        ending = _BlockEnding(end)
        source, text = self._source, list(beginning)
        for char in beginning:
            ending.reached(char)
        while char := (yield from source.next()):
            text.append(char)
            if ending.reached(char):
                break
        else:
            if source.cut:
                raise NotACallError
            text = list(_without_beginning("".join(text), end or ""))
        self._emit_block("".join(text).removesuffix(end or ""))
        source.decide()


class _BlockEnding:
    """Finds a block's end, character by character, outside of texts in quotes.

    end: the text that ends the block; None if its brackets do.
    """

    def __init__(self, end: str | None) -> None:
        self._end = end
        self._quote = ""
        self._escaped = False
        self._depth = 0
        self._recent = ""

    def reached(self, char: str) -> bool:
        if self._quote:
            if self._escaped or char == "\\":
                self._escaped = not self._escaped
            elif char == self._quote:
                self._quote = ""
        elif char in "\"'":
            self._quote, self._recent = char, ""
        elif self._end is not None:
            self._recent = (self._recent + char)[-len(self._end) :]
            return self._recent == self._end
        else:
            self._depth += (char in "([{") - (char in ")]}")
            return self._depth <= 0
        return False


def _loads_string(literal: str) -> str:
    """Return the text of a JSON string literal, which may hold raw control characters."""
    try:
        text = json.loads(literal, strict=False)
    except ValueError as error:
        raise NotACallError from error
    if not isinstance(text, str):
        raise NotACallError
    return text


def _without_beginning(text: str, end: str) -> str:
    """Return `text` without the beginning of an end at its own."""
    lengths = (length for length in range(len(end), 0, -1) if text.endswith(end[:length]))
    return text[: len(text) - next(lengths, 0)]


def called_by_id(call_id: str, offered: Collection[str]) -> tuple[str, str | None]:
    """Return the function that an id such as `functions.note:1` names, and the id as it should be;
    no function if none that is offered has such a name, and no id if it would not tell calls apart.

    Clients and proxies rewrite ids, and models repeat what they find: `functions_note_1`,
    `functionsnote1`, `functions.note`, `note`.
    """
    prefix = _PREFIX.match(call_id)
    bodies = [call_id, call_id[prefix.end() :] if prefix else call_id]
    split = [(body[:place], body[place:]) for body in bodies for place in _numbers(body)]
    for name, number in split:
        for known in (name, name[:-1] if name[-1:] in "._:-" and number else name):
            if known in offered:
                return known, f"functions.{known}:{number}" if number else None
    plain = {_plain(name): name for name in sorted(offered, reverse=True)}
    for name, number in split:
        if known := plain.get(_plain(name), ""):
            return known, f"functions.{known}:{number}" if number else None
    return "", None


def _numbers(text: str) -> range:
    """Return the places where a number at the end of a text may begin, the last first."""
    return range(len(text), len(text.rstrip(string.digits)) - 1, -1)


def _plain(name: str) -> str:
    return str(_NO_NAME.sub("", name)).lower()
