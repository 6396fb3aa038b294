"""Calls as text, in the form that a model writes them, for templates that leave past calls out."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_manager.mlx_server.core import ToolCall
from mlx_manager.mlx_server.formats import (
    CallForm,
    Json,
    Keywords,
    Pattern,
    Pieces,
    Tagged,
    ToolFormat,
    Unquoted,
)

_TYPES: Mapping[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


def write_calls(form: ToolFormat, calls: Sequence[ToolCall]) -> str:
    """Return calls in a format, without the pieces that may be left out."""
    written = (_call(form.call, call, number) for number, call in enumerate(calls))
    text = _pieces(form.between).join(written)
    return _pieces(form.opening) + text + _pieces(form.closing)


def call_object(text: str) -> Any:
    """Return arguments as the object that most templates want, or unchanged if they are no JSON.

    JSON that Python would change (repeated names, numbers too large) stays text, too.
    """
    if text.strip() in ("", "null"):
        return {}
    try:
        return json.loads(
            text, object_pairs_hook=_object, parse_float=_float, parse_constant=_refused
        )
    except (ValueError, RecursionError):
        return text


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name twice")
    return found


def _float(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refused(text)


def _refused(text: str) -> Any:
    raise ValueError(f"{text} is no number")


def _call(form: CallForm, call: ToolCall, number: int) -> str:
    name = _json(call.name)[1:-1] if form.quotes_name else call.name
    head, middle, tail = (_pieces(p, number) for p in (form.head, form.middle, form.tail))
    return f"{head}{name}{middle}{_arguments(form, call)}{tail}"


def _pieces(pieces: Pieces, number: int = 0) -> str:
    found = ""
    for piece in pieces:
        match piece:
            case str():
                found += piece
            case Pattern():
                found += piece.written.format(number=number)
    return found


def _arguments(form: CallForm, call: ToolCall) -> str:
    """Return the arguments as text; broken JSON is written as it is, or as one argument."""
    found = call_object(call.arguments)
    given = found if isinstance(found, Mapping) else {"arguments": call.arguments}
    match form.arguments:
        case Json():
            return _json(found) if found is given else call.arguments
        case Keywords():
            return ", ".join(f"{name}={_json(value)}" for name, value in given.items())
        case Unquoted(quote):
            return _unquoted(given, quote)
        case Tagged() as tagged:
            return "".join(_tagged(tagged, name, value) for name, value in given.items())


def _tagged(form: Tagged, name: str, value: Any) -> str:
    kind, text = "string", value
    if not isinstance(value, str):
        kind, text = _TYPES[type(value)], _json(value)
    elif form.wrap and re.search(r"[<&\n]", value):
        text = value.join(form.wrap)
    return f"{form.begin}{name}{form.before(kind)}{text}{form.end}{form.after}"


def _unquoted(value: Any, quote: str) -> str:
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case Mapping():
            inner = ",".join(f"{name}:{_unquoted(each, quote)}" for name, each in value.items())
            return f"{{{inner}}}"
        case list():
            return f"[{','.join(_unquoted(each, quote) for each in value)}]"
    return _json(value)


def _json(value: Any) -> str:
    # llguidance's JSON has no U+007F that is not escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
