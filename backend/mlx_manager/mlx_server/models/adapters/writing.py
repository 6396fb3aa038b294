"""Past calls as text, in the form that a model writes them, for templates that leave calls out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mlx_manager.mlx_server.core import ToolCall
from mlx_manager.mlx_server.formats import (
    AsObject,
    Braces,
    CallShape,
    Keywords,
    OneByOne,
    Pattern,
    Piece,
)
from mlx_manager.mlx_server.models.adapters.messages import call_object

_TYPES: Mapping[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


def written(shape: CallShape, calls: Sequence[ToolCall]) -> str:
    """Return calls in this shape, without the pieces that may be left out."""
    texts = [
        f"{_pieces(shape.head, call, number)}{_name(shape, call)}"
        f"{_pieces(shape.middle, call, number)}{_arguments(shape, call)}"
        f"{_pieces(shape.tail, call, number)}"
        for number, call in enumerate(calls)
    ]
    first = calls[0]
    between = _pieces(shape.between, first, 0)
    return _pieces(shape.opening, first, 0) + between.join(texts) + _pieces(shape.closing, first, 0)


def _pieces(pieces: Iterable[Piece], call: ToolCall, number: int) -> str:
    return "".join(_piece(piece, call, number) for piece in pieces)


def _piece(piece: Piece, call: ToolCall, number: int) -> str:
    match piece:
        case str():
            return piece
        case Pattern(regex):
            # The pattern stands for the call's id, its number, or a line feed.
            choices = (call.id, str(number), "\n")
            return next((text for text in choices if re.fullmatch(regex, text)), "")
    return ""


def _name(shape: CallShape, call: ToolCall) -> str:
    return _json(call.name)[1:-1] if '"' in "".join(_texts(shape.head)) else call.name


def _texts(pieces: Iterable[Piece]) -> Iterator[str]:
    return (piece for piece in pieces if isinstance(piece, str))


def _arguments(shape: CallShape, call: ToolCall) -> str:
    """Return the arguments as text; broken JSON is written as it is, or as one argument."""
    found = call_object(call.arguments)
    given = found if isinstance(found, Mapping) else {"arguments": call.arguments}
    match shape.arguments:
        case AsObject():
            return _json(found) if found is given else call.arguments
        case Keywords():
            return ", ".join(f"{name}={_json(value)}" for name, value in given.items())
        case Braces(quote):
            return _braces(given, quote)
        case OneByOne() as form:
            return "".join(_one(form, name, value) for name, value in given.items())


def _one(form: OneByOne, name: str, value: Any) -> str:
    if isinstance(value, str):
        before, text = form.text, value
        if form.wrap and "<" in value:
            text = value.join(form.wrap)
    else:
        before, text = form.other.format(type=_TYPES[type(value)]), _json(value)
    return f"{form.begin}{name}{form.middle}{before}{text}{form.end}{form.tail}"


def _braces(value: Any, quote: str) -> str:
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case Mapping():
            inner = ",".join(f"{name}:{_braces(each, quote)}" for name, each in value.items())
            return f"{{{inner}}}"
        case list():
            return f"[{','.join(_braces(each, quote) for each in value)}]"
    return _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
