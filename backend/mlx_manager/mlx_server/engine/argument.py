"""One argument of a call, as it is written where text has no quotes, to JSON."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from mlx_manager.mlx_server.engine.schemas import Kind, kind_of
from mlx_manager.mlx_server.engine.text_scanner import TextScanner
from mlx_manager.mlx_server.utils.text import encodable

TEXT: frozenset[Kind] = frozenset({"string"})
ANYTHING: frozenset[Kind] = frozenset({"any"})

_LITERAL_ERRORS = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)


def as_json(text: str, kinds: AbstractSet[Kind]) -> str:
    """JSON for an argument written as `text` whose parameter takes `kinds`.

    What is neither JSON of a type that fits nor, where no text does, a literal in Python, is text.
    """
    trimmed = text.strip()
    textual = bool(kinds & {"string", "any"})
    try:
        value = json.loads(trimmed, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return quoted(text) if textual else _literal(trimmed)
    if not textual:
        return trimmed
    kind = kind_of(value)
    fits = kind != "string" and ("any" in kinds or kind in kinds)
    return trimmed if fits or (kind == "integer" and "number" in kinds) else quoted(text)


def _literal(text: str) -> str:
    try:
        value = ast.literal_eval(text)
        return encodable(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except _LITERAL_ERRORS:
        return quoted(text)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


class Value:
    """One argument as it is read, character by character.

    Args:
        kinds: the types that its parameter takes.
        ends: texts one of which ends it; of two that do, the longer.
        line: a line feed at its beginning is not part of it.
        wrap: texts around a value that looks like markup, and the ends that then hold.
    """

    def __init__(
        self,
        kinds: AbstractSet[Kind],
        ends: Sequence[str],
        *,
        line: bool = False,
        wrap: tuple[str, Sequence[str]] | None = None,
    ) -> None:
        self._kinds = kinds
        self._scanner = TextScanner(ends)
        self._ends = ends
        self._line = line
        self._wrap = wrap
        self._begun = ""
        self._text: list[str] = []
        self._streams = kinds == TEXT
        self._opened = False
        self._json = None if "string" in kinds else _JsonText("{[" if "any" in kinds else '{["')

    def add(self, char: str) -> tuple[str, bool]:
        """What of the argument's JSON is now known, and whether that is its end."""
        if self._line:
            self._line = False
            if char == "\n":
                return "", False
        if self._wrap is not None:
            self._begun += char
            opening, ends = self._wrap
            if self._begun == opening:
                self._scanner, self._ends = TextScanner(ends), ends
            elif opening.startswith(self._begun):
                return "", False
            char = "" if self._begun == opening else self._begun
            self._wrap = None
        found, number, _ = self._scanner.feed(char)
        ended = number is not None
        if number is not None and self._json is not None and self._json.within(found):
            found, ended = found + self._ends[number], False
        elif self._json is not None:
            self._json.take(found)
        return self._known(found, ended), ended

    def _known(self, found: str, ended: bool) -> str:
        if not self._streams:
            self._text.append(found)
            return as_json("".join(self._text), self._kinds) if ended else ""
        opening = "" if self._opened or not (found or ended) else '"'
        self._opened = self._opened or bool(found or ended)
        return opening + quoted(found)[1:-1] + ('"' if ended else "")


class _JsonText:
    """Whether JSON is within a text of its own, where nothing ends it.

    Args:
        beginnings: the characters with which JSON begins, as opposed to text.
    """

    def __init__(self, beginnings: str) -> None:
        self._beginnings = beginnings
        self._begun = self._is_json = False
        self._quoted = self._escaped = False

    def take(self, text: str) -> None:
        for char in text:
            if not self._begun and not char.isspace():
                self._begun, self._is_json = True, char in self._beginnings
            if self._escaped:
                self._escaped = False
            elif self._quoted and char == "\\":
                self._escaped = True
            elif char == '"':
                self._quoted = not self._quoted

    def within(self, text: str) -> bool:
        self.take(text)
        return self._is_json and self._quoted
