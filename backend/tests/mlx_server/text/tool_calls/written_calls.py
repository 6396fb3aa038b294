"""Calls written as a model writes them in each format, after the format's own description."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

from mlx_manager.mlx_server.formats import (
    Aside,
    AsObject,
    Braces,
    CallShape,
    Keywords,
    Maybe,
    OneByOne,
    Pattern,
    Piece,
)

_CHOSEN = {
    "[A-Za-z0-9]{9}": "abcdefgh{}",
    "[0-9]{1,3}": "{}",
    r" |\n    ": " ",
    r"to=[\w.\-]+": "to=functions",
}
"""Choices of a model where a format lets the model choose, by the format's expression."""


def write_calls(
    shape: CallShape, calls: Sequence[tuple[str, Mapping[str, Any]]], tools: Mapping[str, Any]
) -> str:
    """An answer of these calls. `tools`: the schemas of parameters, by the function's name."""
    numbers = count()
    written = [
        _pieces(shape.head, numbers)
        + name
        + _pieces(shape.middle, numbers)
        + _arguments(shape, arguments, tools[name])
        + _pieces(shape.tail, numbers)
        for name, arguments in calls
    ]
    opening, closing = _pieces(shape.opening, numbers), _pieces(shape.closing, numbers)
    return opening + _pieces(shape.between, numbers).join(written) + closing


def _pieces(pieces: Iterable[Piece], numbers: Iterable[int]) -> str:
    found = ""
    for piece in pieces:
        match piece:
            case str():
                found += piece
            case Pattern(expression):
                found += _CHOSEN[expression].format(next(iter(numbers)))
            case Maybe(inner):
                found += _pieces(inner, numbers)
            case Aside():
                pass
    return found


def _arguments(shape: CallShape, arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    match shape.arguments:
        case AsObject():
            return json.dumps(arguments, ensure_ascii=False)
        case Keywords():
            return ", ".join(f"{name}={json.dumps(value)}" for name, value in arguments.items())
        case Braces(quote):
            return _braces(arguments, quote)
        case OneByOne() as form:
            types = schema["properties"]
            return "".join(
                _one(form, name, value, types[name]["type"]) for name, value in arguments.items()
            )


def _one(form: OneByOne, name: str, value: Any, kind: str) -> str:
    if kind != "string":
        said = form.other.replace("{type}", kind) + json.dumps(value, ensure_ascii=False)
    elif form.wrap and ("<" in value or "&" in value):
        said = form.text + form.wrap[0] + value + form.wrap[1]
    else:
        said = form.text + value
    return f"{form.begin}{name}{form.middle}{said}{form.end}{form.tail}"


def _braces(value: Any, quote: str) -> str:
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case Mapping():
            inner = (f"{name}:{_braces(each, quote)}" for name, each in value.items())
            return "{" + ",".join(inner) + "}"
        case list():
            return "[" + ",".join(_braces(each, quote) for each in value) + "]"
        case _:
            return json.dumps(value)
