"""What a model writes in any format is read as it was meant, whole and token by token."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from engine.outputs import parse
from engine.test_forced_calls import CASES, Case, output_of
from engine.written_calls import write_calls
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import ALL

from mlx_manager.mlx_server.core import Tool
from mlx_manager.mlx_server.formats import Braces, CallShape, OneByOne, OutputFormat

NAMES = ("city", "note-id", "a.b", "path/to", "mcp:x", "größe", "x1", "in", "a_b")
INNER = ("city", "note-id", "a.b", "größe", "x1")
FUNCTIONS = ("write_file", "mcp-files.write/now", "ns:get", "note")
TEXTS = (
    *(
        "Paris",
        "zebra",
        " ",
        "\n",
        "\r\n",
        "\t",
        "é🎉",
        '"',
        "'",
        "\\",
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
    ),
    *(
        "=",
        "<",
        ">",
        "</",
        "<b>",
        "</b>",
        "<p class='x'>",
        "3",
        "true",
        "null",
        "None",
        "[1]",
        "/*",
    ),
    *(
        "</function>",
        "</parameter",
        "<parameter=other>",
        "<tool_call>",
        "</tool_call>",
        "</invoke>",
    ),
    *(
        "<function=other>",
        "<|tool_call>",
        "<tool_call|>",
        "city:",
        ", days:",
        "\\n",
        "\\u00e9",
        "&",
    ),
    *(
        "</arg_value",
        "<arg_key>",
        "<|close|>",
        "]]>",
        "```",
        "</tool_calls>",
        "<escape",
        "<|",
        "|>",
    ),
)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "string": st.lists(st.sampled_from(TEXTS), max_size=8).map("".join) | st.text(max_size=8),
    "integer": st.integers(-(10**15), 10**15),
    "number": st.floats(allow_nan=False, allow_infinity=False, width=32) | st.integers(-9, 9),
    "boolean": st.booleans(),
    "null": st.none(),
}
_INNER = st.recursive(
    st.one_of(*VALUES.values()),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(INNER), inner, max_size=3)
    ),
    max_leaves=6,
)
VALUES["array"] = st.lists(_INNER, max_size=3)
VALUES["object"] = st.dictionaries(st.sampled_from(INNER), _INNER, max_size=3)


def expressible(shape: CallShape, value: Any, names: tuple[str, ...]) -> bool:
    """Whether a format has a form for a value: raw text can't hold what ends it."""
    match shape.arguments:
        case OneByOne() as form if isinstance(value, str):
            end = form.end.strip()
            heads = [f"{form.begin}{name}" for name in names]
            return not any(text in value for text in (end, *heads))
        case Braces(quote):
            return quote not in json.dumps(value, ensure_ascii=False).replace('\\"', '"')
    return True


@st.composite
def calls(draw: st.DrawFn, shape: CallShape) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
    offered, made = {}, []
    for function in draw(st.lists(st.sampled_from(FUNCTIONS), min_size=1, max_size=2, unique=True)):
        names = draw(st.lists(st.sampled_from(NAMES), max_size=4, unique=True))
        types = {name: draw(st.sampled_from(sorted(VALUES))) for name in names}
        offered[function] = {
            "type": "object",
            "properties": {name: {"type": kind} for name, kind in types.items()},
        }
        given = [name for name in names if draw(st.integers(0, 9))]
        arguments = {name: draw(VALUES[types[name]]) for name in given}
        for name, value in arguments.items():
            if not expressible(shape, value, tuple(names)):
                arguments[name] = "x" if types[name] == "string" else None
        made.append((function, arguments))
    return made, offered


def output_for(case: Case, offered: dict[str, Any]) -> OutputFormat:
    tools = tuple(Tool(name, parameters=schema) for name, schema in offered.items())
    return output_of(case, SimpleNamespace(added_tokens_decoder={}), tools)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@settings(max_examples=150 if ALL else 20)
@given(st.data())
def test_calls_are_read_as_they_were_written(case: Case, data: st.DataObject) -> None:
    shape = case.syntax.form([]).shape
    assert shape is not None
    made, offered = data.draw(calls(shape))
    if not shape.between and not shape.opening and len(made) > 1:
        made = made[:1]
    text = write_calls(shape, made, offered)
    output = output_for(case, offered)
    whole = parse([text], output)
    assert whole.values == made, text
    assert not whole.content.strip()
    assert parse(text, output) == whole
