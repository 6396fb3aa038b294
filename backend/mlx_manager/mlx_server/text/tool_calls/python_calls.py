"""Calls as in Python, `name(argument=value, ...)`, to names and JSON.

Names need not be Python's. Values are Python's literals or JSON's.
"""

from __future__ import annotations

import ast
import json
import math
import sys
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import regex

from mlx_manager.mlx_server.text.tool_calls.lenient_json import as_json, bare, mended, quoted
from mlx_manager.mlx_server.text.tool_calls.schemas import TEXT, Kind, typed_parameters

_NAME = regex.compile(r"\s*(?P<name>[^\s()\[\]{}\"'\\,=]+)\s*\(\s*")
_KEY = regex.compile(r"\s*(?P<key>[^\s()\[\]{}\"'\\,=]+)\s*=\s*")
_BETWEEN = regex.compile(r"[\s,;]*")
_QUOTES = ('"""', "'''", '"', "'")
_CLOSER = {"(": ")", "[": "]", "{": "}"}
_WORD = regex.compile(r"[^\s()\[\]{}\"'\\,=<>]+(?: [^\s()\[\]{}\"'\\,=<>]+)*")
_JSON_LITERALS = {"true": True, "false": False, "null": None}
_LITERAL_ERRORS = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)


def python_calls(text: str, offered: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return (name, JSON arguments) of the calls that a text consists of, with brackets around them
    or without; brackets that are missing at its end are not missed.

    Raises:
        ValueError: it is something else, an argument has no name, or a function is not offered.
    """
    text = text.strip()
    listed = text.startswith("[")
    place = int(listed)
    found = []
    while place < len(text):
        match = _NAME.match(text, place)
        if match is None or match["name"] not in offered:
            raise ValueError("no call of a function that is offered")
        arguments, place = _arguments(text, match.end(), offered[match["name"]])
        found.append((match["name"], arguments))
        between = _BETWEEN.match(text, place)
        place = between.end() if between else place
        if listed and text[place:].strip() == "]":
            break
    return found


def _arguments(text: str, place: int, parameters: Mapping[str, Any]) -> tuple[str, int]:
    """Return the arguments from behind the opening bracket on, and the place behind the closing
    one."""
    typed = typed_parameters(parameters)
    found: list[str] = []
    while place < len(text) and text[place] not in ")]":
        match = _KEY.match(text, place)
        if match is None:
            raise ValueError("an argument without a name")
        end = _end_of_value(text, match.end())
        value = _value(text[match.end() : end].strip(), typed.member(match["key"]).kinds)
        found.append(f"{quoted(match['key'])}: {value}")
        comma = _BETWEEN.match(text, end)
        place = comma.end() if comma else end
    return "{" + ", ".join(found) + "}", place + text.startswith(")", place)


def _end_of_value(text: str, place: int) -> int:
    """Return the place of the comma or the bracket that ends a value; the end of all if a text in
    it does not end."""
    closers: list[str] = []
    while place < len(text):
        char = text[place]
        if quote := next((quote for quote in _QUOTES if text.startswith(quote, place)), ""):
            place = _end_of_text(text, place + len(quote), quote)
            continue
        if char in _CLOSER:
            closers.append(_CLOSER[char])
        elif closers and char == closers[-1]:
            closers.pop()
        elif not closers and char in ",)]":
            break
        place += 1
    return place


def _end_of_text(text: str, place: int, quote: str) -> int:
    while place < len(text):
        if text.startswith(quote, place):
            return place + len(quote)
        place += 2 if text[place] == "\\" else 1
    return len(text)


def _value(text: str, kinds: AbstractSet[Kind]) -> str:
    """Return JSON for a value.

    Raises:
        ValueError: it is none.
    """
    for read in (json.loads, _literal, _without_escapes, _without_quote):
        try:
            return _of_value(read(text), text, kinds)
        except _LITERAL_ERRORS:
            continue
    if text.startswith(("{", "[")) and (found := mended(text)):
        return found
    if _WORD.fullmatch(text):
        return bare(text, kinds)
    raise ValueError(f"{text[:40]} is no value")


def _literal(text: str) -> Any:
    return ast.literal_eval(_WithLiterals().visit(ast.parse(text, mode="eval").body))


def _of_value(value: Any, text: str, kinds: AbstractSet[Kind]) -> str:
    if isinstance(value, str):
        return quoted(value) if kinds & {"string", "any"} else as_json(value, kinds)
    if kinds == TEXT and value is not None:
        return quoted(text)
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)


def _without_escapes(text: str) -> Any:
    """Return a literal whose line feeds the model forgot to escape."""
    return _literal(text.replace("\r", "\\r").replace("\n", "\\n"))


def _without_quote(text: str) -> Any:
    """Return a text whose closing quote is missing, at the end of all."""
    quote = next((quote for quote in _QUOTES if text.startswith(quote)), "")
    return _without_escapes(text.rstrip(")] \r\n") + quote)


class _WithLiterals(ast.NodeTransformer):
    """JSON's names of values among Python's, as templates write them."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in _JSON_LITERALS:
            return node
        return ast.copy_location(ast.Constant(_JSON_LITERALS[node.id]), node)


def _finite(value: Any) -> Any:
    """Return `value` with the largest number there is in place of those that JSON has but floats
    don't."""
    match value:
        case float() if math.isinf(value):
            return math.copysign(sys.float_info.max, value)
        case Mapping():
            return {key: _finite(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_finite(inner) for inner in value]
        case _:
            return value
