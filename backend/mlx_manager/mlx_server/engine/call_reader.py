"""Reads tool calls character by character, and hands their arguments on as they are written.

What turns out to be no call is given back as the text it is: nothing is lost and nothing raises.
Once a call has been announced, whatever the model writes as its arguments is passed on as it is.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field

import regex

from mlx_manager.mlx_server.core import ToolCallDelta, ToolCallStarted
from mlx_manager.mlx_server.engine.argument import ANYTHING, TEXT, Value, quoted
from mlx_manager.mlx_server.engine.schemas import Kind, kinds_by_name
from mlx_manager.mlx_server.formats import CallBlock, CallFormat, OutputFormat, Parameters
from mlx_manager.mlx_server.utils.text import encodable

CallEvent = ToolCallStarted | ToolCallDelta

_ARGUMENT_KEYS = ("arguments", "parameters")
_CALL_KEYS = frozenset({"name", "type", "id", *_ARGUMENT_KEYS})
_CLOSER = {"{": "}", "[": "]"}
_BETWEEN_STRINGS = frozenset(string.whitespace + string.ascii_letters + string.digits + ",:+-.")
_SEPARATORS = string.whitespace + ",;[]"
_BRACKETS = str.maketrans("", "", "]}")
_CONTROL = regex.compile(r"[\x00-\x1f]")
_LITERAL = regex.compile(r'"(?:[^"\\]|\\.)*"', regex.DOTALL)
_LONGEST_ITEM = 512
"""Characters between calls after which no call follows; bounds what a run of blanks costs."""

Steps = Generator[None, str, None]
Reading = Generator[None, str, str]


class _NotACallError(Exception):
    """The last character can't be part of a call."""


class CallLog:
    """Numbers an answer's calls and names them.

    started, finished: how many have begun, and how many are complete.
    """

    def __init__(self, new_id: Callable[[], str], parallel: bool) -> None:
        self._new_id = new_id
        self._parallel = parallel
        self.started = 0
        self.finished = 0

    @property
    def full(self) -> bool:
        """The only call allowed has been made."""
        return self.finished > 0 and not self._parallel

    def start(self, name: str, call_id: str | None) -> ToolCallStarted:
        event = ToolCallStarted(self.started, call_id or self._new_id(), name)
        self.started += 1
        return event


@dataclass(slots=True)
class Progress:
    """What came of some text: events, then text that was taken for a call and is none.

    `rest` is the text after the calls' end, None while more of them may follow.
    """

    events: list[CallEvent] = field(default_factory=list)
    text: str = ""
    rest: str | None = None


class CallReader:
    """One run of calls, from what opened it to what ends it.

    `opener` is the text already read, given back if no call follows. `name` is the call's name
    where a header has given it.
    """

    def __init__(
        self, output: OutputFormat, form: CallFormat, log: CallLog, opener: str, name: str = ""
    ) -> None:
        self._offered = output.offered
        self._item_pattern = regex.compile(form.item)
        self._parameters = form.parameters
        self._block = form.block
        self._name_key = form.name_key
        self._bare = form.bare and not opener
        self._log = log
        self._name = name
        self._events: list[CallEvent] = []
        self._undecided = [opener]
        self._arguments: list[str] = []
        self._passing = False
        self._missing = ""
        self._unread_block: list[str] | None = None
        self._tail = False
        # A header has named a function, and nothing has followed: it is called with no arguments.
        self._named_only = bool(name)
        begun = bool(opener and self._item_pattern.fullmatch(opener, partial=True))
        self._steps = self._section(opener if begun else "")
        next(self._steps)

    def feed(self, text: str) -> Progress:
        for position, char in enumerate(text):
            if self._log.full:
                self._undecided.clear()
                return self._end("")
            self._keep(char)
            try:
                self._steps.send(char)
            except StopIteration:
                return self._end(text[position + 1 :])
            except _NotACallError:
                self._unkeep()
                self._drop_brackets()
                return self._end(text[position:])
        self._flush_arguments()
        events, self._events = self._events, []
        return Progress(events)

    def finish(self, cut: bool) -> Progress:
        """The end of the output; `cut` if it was cut off rather than ended by the model."""
        if self._missing and not cut:
            ended = self.feed(self._missing)
            return ended if ended.rest is not None else self._with_end(ended)
        if self._unread_block is not None and self._block is not None and not cut:
            try:
                self._emit_block(self._block, "".join(self._unread_block))
            except _NotACallError:
                return self._end("")
            self._undecided.clear()
        if self._named_only and not cut:
            self._emit(self._name, "{}")
            self._undecided.clear()
        if self._tail and not "".join(self._undecided).strip(_SEPARATORS + "}"):
            self._undecided.clear()
        self._drop_brackets()
        return self._end("")

    # -- What is kept in case it is no call ----------------------------------------------------

    def _keep(self, char: str) -> None:
        (self._arguments if self._passing else self._undecided).append(char)

    def _unkeep(self) -> None:
        (self._arguments if self._passing else self._undecided).pop()

    def _drop_brackets(self) -> None:
        """Brackets after a call end the list of calls, or are more than were opened."""
        text = "".join(self._undecided)
        if self._tail:
            said = text.lstrip(string.whitespace + "]}")
            before = text.removesuffix(said) if said else text
            self._undecided[:] = [before.translate(_BRACKETS), said]

    def _end(self, rest: str) -> Progress:
        self._flush_arguments()
        return Progress(self._events, "".join(self._undecided), rest)

    def _with_end(self, progress: Progress) -> Progress:
        """The end of the output after `progress`, whose calls are complete but for their end."""
        self._events = progress.events
        self._undecided.clear()
        return self._end("")

    # -- The grammar: each generator is sent one character after the other ---------------------

    def _section(self, ahead: str) -> Steps:
        """Calls until their end. `ahead`: an opener that is the beginning of the first itself."""
        while True:
            match = yield from self._item(self._item_pattern, ahead)
            groups = match.groupdict()
            if groups.get("close") is not None:
                if self._named_only:
                    self._emit(self._name, "{}")
                elif not self._tail:
                    raise _NotACallError
                self._undecided.clear()
                return
            self._named_only = False
            if self._block and groups.get("block") is not None:
                yield from self._read_block(self._block, groups["block"])
                if not self._block.several:
                    return
                ahead = ""
            elif self._parameters and groups.get("params") is not None:
                closed = yield from self._read_parameters(
                    self._parameters, groups["name"], groups["params"]
                )
                if closed:
                    return
                ahead = ""
            elif groups.get("args") is not None:
                name = groups.get("name") or self._name
                ahead = yield from self._stream(name, groups.get("id"))
            else:
                ahead = yield from self._object()
            self._undecided[:] = [ahead]
            self._tail = True

    def _item(
        self, pattern: regex.Pattern[str], text: str
    ) -> Generator[None, str, regex.Match[str]]:
        while True:
            if text:
                match = pattern.fullmatch(text, partial=True)
                if match is None or len(text) > _LONGEST_ITEM:
                    raise _NotACallError
                if not match.partial:
                    return match
            text += yield

    def _object(self) -> Reading:
        """`{"name": ..., "arguments": {...}}` after its brace, the keys in any order, or all of it
        as another object's `function`.

        Returns a character that was read too far, if any: models forget the last brace.
        """
        fields: dict[str, str] = {}
        streamed = False
        char = yield from self._nonblank()
        while char != "}":
            key = yield from self._key(char)
            char = yield from self._nonblank()
            if key in _ARGUMENT_KEYS and char == "{" and "name" in fields and not streamed:
                ahead = yield from self._stream(self._offered_name(fields["name"]), None)
                if ahead:
                    return ahead
                self._tail = streamed = True
                char = yield from self._nonblank()
            elif key == "function" and char == "{" and not streamed:
                ahead = yield from self._object()
                self._undecided[:] = [ahead]
                self._tail = streamed = True
                if ahead:
                    return ahead
                char = yield from self._nonblank()
            else:
                fields[key], char = yield from self._value(char)
                if key == "name":
                    self._offered_name(fields["name"])
            if char == ",":
                char = yield from self._nonblank()
            elif char != "}":
                if streamed:
                    return char
                raise _NotACallError
        if not streamed:
            self._emit_object(fields)
        return ""

    def _key(self, char: str) -> Reading:
        key = _loads_string((yield from self._string(char)))
        if key == self._name_key:
            key = "name"
        if self._bare and key not in _CALL_KEYS:
            raise _NotACallError
        if (yield from self._nonblank()) != ":":
            raise _NotACallError
        return key

    def _stream(self, name: str, call_id: str | None) -> Reading:
        """The arguments whose brace has just been read, announced once they look like JSON.

        Returns the character with which they stopped being JSON, if they did.
        """
        if name not in self._offered:
            raise _NotACallError
        blanks = ""
        while (char := (yield)).isspace():
            blanks += char
        if char not in '"}':
            raise _NotACallError
        self._events.append(self._log.start(name, call_id))
        self._undecided.clear()
        self._arguments += ["{", blanks, char]
        self._passing = True
        ahead = ""
        try:
            yield from self._balanced("{", char)
        except _NotACallError:
            ahead = self._arguments.pop()
            self._undecided.append(ahead)
        self._end_call()
        return ahead

    def _end_call(self) -> None:
        self._flush_arguments()
        self._passing = False
        self._log.finished += 1

    def _flush_arguments(self) -> None:
        if self._arguments:
            text = "".join(self._arguments)
            self._arguments.clear()
            if text:
                self._events.append(ToolCallDelta(self._log.started - 1, text))

    # -- Arguments that are written one by one -------------------------------------------------

    def _read_parameters(
        self, form: Parameters, name: str, ahead: str
    ) -> Generator[None, str, bool]:
        """A call's arguments after its name; `ahead` has been read already.

        Returns whether this was the end of all calls.
        """
        if name not in self._offered:
            raise _NotACallError
        pattern = regex.compile(form.item)
        kinds = kinds_by_name(self._offered[name])
        before = ""
        while True:
            try:
                match = yield from self._item(pattern, ahead)
            except _NotACallError:
                if before:
                    self._close_arguments(before)
                raise
            groups = match.groupdict()
            if before == "{}" and groups.get("end") is None:
                self._close_arguments(before)
                raise _NotACallError
            if not before:
                self._events.append(self._log.start(name, None))
            self._undecided.clear()
            ahead, self._missing = "", form.call_end
            if groups.get("value") is not None:
                self._arguments.append(f"{before or '{'}{quoted(match['key'].strip())}: ")
                yield from self._read_value(form, _kinds_of(match, kinds))
                before = ", "
            elif groups.get("object") is not None:
                yield from self._read_object(form, match["object"])
                self._missing, before = form.call_end, "{}"
            else:
                self._close_arguments(before)
                return groups.get("close") is not None

    def _read_value(self, form: Parameters, kinds: frozenset[Kind]) -> Steps:
        ends = (f"\n{form.end}", form.end) if form.line else (form.end,)
        wrap = form.wrap and (form.wrap[0], [form.wrap[1] + form.end])
        value = Value(kinds, ends, line=form.line, wrap=wrap)
        self._missing = form.end + form.call_end
        ended = False
        while not ended:
            char = yield
            known, ended = value.add(char)
            self._undecided.clear()
            self._arguments.append(known)
        self._missing = form.call_end

    def _read_object(self, form: Parameters, beginning: str) -> Steps:
        value = Value(frozenset({"object"}), (form.object_end,))
        ended = False
        for char in beginning:
            value.add(char)
        self._missing = form.object_end + form.call_end
        while not ended:
            char = yield
            known, ended = value.add(char)
            self._undecided.clear()
            self._arguments.append(known)

    def _close_arguments(self, before: str) -> None:
        """`before` is what would stand before another argument, "{}" if none can follow."""
        self._missing = ""
        if before != "{}":
            self._arguments.append("}" if before else "{}")
        self._tail = True
        self._end_call()

    # -- Calls that are emitted when they are complete -----------------------------------------

    def _emit_object(self, fields: dict[str, str]) -> None:
        given = [fields[key] for key in _ARGUMENT_KEYS if key in fields]
        if "name" not in fields or (self._bare and not given):
            raise _NotACallError
        arguments = given[0] if given and given[0] not in ("null", '""') else "{}"
        if arguments.startswith('"'):
            arguments = _with_escapes(_loads_string(arguments))
        if not arguments.lstrip().startswith("{"):
            raise _NotACallError
        self._emit(self._offered_name(fields["name"]), arguments)

    def _offered_name(self, literal: str) -> str:
        name = _loads_string(literal)
        if name not in self._offered:
            raise _NotACallError
        return name

    def _emit_block(self, block: CallBlock, text: str) -> None:
        try:
            calls = block.parse(text)
        except ValueError as error:
            raise _NotACallError from error
        if not calls or any(name not in self._offered for name, _ in calls):
            raise _NotACallError
        for name, arguments in calls:
            if not self._log.full:
                self._emit(name, arguments)

    def _emit(self, name: str, arguments: str) -> None:
        started = self._log.start(name, None)
        self._events += [started, ToolCallDelta(started.index, encodable(arguments))]
        self._log.finished += 1

    def _read_block(self, block: CallBlock, beginning: str) -> Steps:
        ending = _BlockEnding(block)
        text = self._unread_block = list(beginning)
        for char in beginning:
            ending.reached(char)
        while True:
            char = yield
            text.append(char)
            if ending.reached(char):
                break
        self._unread_block = None
        self._emit_block(block, "".join(text).removesuffix(block.end or ""))
        self._undecided.clear()

    # -- JSON's parts --------------------------------------------------------------------------

    def _nonblank(self) -> Reading:
        while (char := (yield)).isspace():
            pass
        return char

    def _string(self, char: str) -> Reading:
        """A string literal from its quote on."""
        if char != '"':
            raise _NotACallError
        text = char
        while (char := (yield)) != '"':
            if char < " ":
                char = _escaped(char)
                if self._passing:
                    self._arguments[-1] = char
            text += char
            if char == "\\":
                text += yield
        return text + char

    def _balanced(self, opener: str, char: str = "") -> Reading:
        """What follows `opener`, up to the bracket that closes it; `char` is its first character.

        Strings are skipped, brackets are counted, and the rest is not looked at closely.
        """
        text = ""
        closers = [_CLOSER[opener]]
        while closers:
            char = char or (yield)
            if char == '"':
                char = yield from self._string(char)
            elif char in _CLOSER:
                closers.append(_CLOSER[char])
            elif char == closers[-1]:
                closers.pop()
            elif char not in _BETWEEN_STRINGS:
                raise _NotACallError
            text += char
            char = ""
        return text

    def _value(self, char: str) -> Generator[None, str, tuple[str, str]]:
        """A value from its first character on, as text, and the first character after it."""
        if char == '"':
            text = yield from self._string(char)
        elif char in _CLOSER:
            text = char + (yield from self._balanced(char))
        else:
            text = ""
            while char in _BETWEEN_STRINGS and char != "," and not char.isspace():
                text += char
                char = yield
            if not text:
                raise _NotACallError
            if not char.isspace():
                return text, char
        return text, (yield from self._nonblank())


class _BlockEnding:
    """Finds a block's end, character by character, outside of what is quoted in it."""

    def __init__(self, block: CallBlock) -> None:
        self._end = block.end
        self._quotes = block.quotes
        self._closing: str | None = None
        self._escaped = False
        self._depth = 0
        self._recent = ""
        texts = [text for quote in block.quotes for text in quote]
        self._longest = max(len(text) for text in [*texts, block.end or "]"])

    def reached(self, char: str) -> bool:
        self._recent = (self._recent + char)[-self._longest :]
        if self._closing is not None:
            self._quoted(char, self._closing)
            return False
        for opening, closing in self._quotes:
            if self._recent.endswith(opening):
                self._closing, self._recent = closing, ""
                return False
        if self._end is not None:
            return self._recent.endswith(self._end)
        self._depth += (char in "([{") - (char in ")]}")
        return self._depth <= 0

    def _quoted(self, char: str, closing: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\" and len(closing) == 1:
            self._escaped = True
        elif self._recent.endswith(closing):
            self._closing, self._recent = None, ""


def _escaped(char: str) -> str:
    return json.dumps(char)[1:-1]


def _with_escapes(text: str) -> str:
    """JSON as clients can read it, from JSON whose texts hold line feeds or tabs as they are."""

    def escaped(literal: regex.Match[str]) -> str:
        return str(_CONTROL.sub(lambda char: _escaped(char[0]), literal[0]))

    return str(_LITERAL.sub(escaped, text))


def _loads_string(literal: str) -> str:
    """The text of a JSON string literal, which may hold raw control characters."""
    try:
        text = json.loads(literal, strict=False)
    except ValueError as error:
        raise _NotACallError from error
    if not isinstance(text, str):
        raise _NotACallError
    return text


def _kinds_of(match: regex.Match[str], named: Mapping[str, frozenset[Kind]]) -> frozenset[Kind]:
    """The types that an argument may have: what its call says, else what its schema says."""
    groups = match.groupdict()
    if groups.get("text") is not None:
        return TEXT
    kinds = named.get(match["key"].strip(), ANYTHING)
    return (kinds - TEXT or ANYTHING) if groups.get("json") is not None else kinds
