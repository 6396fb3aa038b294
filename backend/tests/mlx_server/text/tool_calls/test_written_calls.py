"""Text that a model writes in any format is read as it was meant, whole and token by token."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text.outputs import Answer, parse
from text.tool_calls.test_forced_calls import CASES, Case, output_of, tokenizer_of
from text.tool_calls.written_calls import write_calls
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


def shape_of(case: Case) -> CallShape:
    shape = case.syntax.form([]).shape
    assert shape is not None
    return shape


def expressible(shape: CallShape, value: Any, names: tuple[str, ...]) -> bool:
    """Return whether a format has a form for a value: raw text can't hold what ends that text."""
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
    shape = shape_of(case)
    made, offered = data.draw(calls(shape))
    if not shape.between and not shape.opening and len(made) > 1:
        made = made[:1]
    text = write_calls(shape, made, offered)
    output = output_for(case, offered)
    whole = parse([text], output)
    assert whole.values == made, text
    assert not whole.content.strip()
    assert parse(text, output) == whole


ONE_BY_ONE = tuple(case for case in CASES if isinstance(shape_of(case).arguments, OneByOne))
WRITE = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "content": {"type": "string"},
        "count": {"type": "integer"},
        "edits": {"type": "array"},
    },
}
OFFERED = {"write": WRITE, "now": {"type": "object", "properties": {}}}
WRITTEN = [("write", {"path": "a.py", "content": "x = 1", "count": 3})]


def read(case: Case, text: str) -> Answer:
    """Return what is read of a text, which is the same whole and token by token."""
    output = output_for(case, OFFERED)
    whole = parse([text], output)
    assert parse(text, output) == whole
    return whole


def misspelt(end: str) -> list[str]:
    """An end as models misspell it."""
    if end.endswith("<|sep|>"):
        return [end.replace("<|sep|>", f"{tail}<|sep|>") for tail in ("s", "1", " ")]
    name = end.strip("</>")
    return [
        *(f"</{name}{tail}>" for tail in ("1", "s", " ")),
        *(f"</{name[:-1]}>", f"</ {name}>", f"</{name.upper()}>", f"<\\/{name}>", f"</{name}\n"),
    ]


@pytest.mark.parametrize("case", ONE_BY_ONE, ids=lambda case: case.name)
def test_an_end_that_is_missing_or_misspelt_ends_its_value_all_the_same(case: Case) -> None:
    shape = shape_of(case)
    form = shape.arguments
    assert isinstance(form, OneByOne)
    end, text = form.end.strip(), write_calls(shape, WRITTEN, OFFERED)
    damaged = [text.replace(end, wrong, 1) for wrong in ("", *misspelt(end))]
    damaged += [text.replace(end, wrong) for wrong in ("", *misspelt(end))]
    last = text.rfind(end)
    damaged += [text[:last] + text[last + len(end) :], text[:last], text[: last + len(end)]]
    for each in damaged:
        answer = read(case, each)
        assert answer.values == WRITTEN, each
        assert not answer.content.strip()


@pytest.mark.parametrize("case", ONE_BY_ONE, ids=lambda case: case.name)
def test_an_end_of_a_call_that_is_missing_or_misspelt_ends_it_all_the_same(case: Case) -> None:
    shape = shape_of(case)
    form = output_for(case, OFFERED).calls
    assert form is not None
    assert form.parameters is not None
    many = bool(shape.between or shape.opening)
    calls = [*WRITTEN, ("now", {}), *WRITTEN] if many else WRITTEN
    text = write_calls(shape, calls, OFFERED)
    for end in filter(None, (form.parameters.call_end, form.close)):
        last = text.rfind(end)
        wrong = ["", *(misspelt(end) if end.startswith("</") else ())]
        damaged = [text[:last] + each + text[last + len(end) :] for each in wrong]
        if many and (end == form.parameters.call_end or not form.parameters.call_end):
            first = text.find(end)
            damaged += [text[:first] + text[first + len(end) :]]
        for each in damaged:
            answer = read(case, each)
            assert answer.values == calls, each
            assert not answer.content.strip()


@pytest.mark.parametrize("case", ONE_BY_ONE, ids=lambda case: case.name)
def test_markup_in_a_text_is_text_where_the_texts_own_end_follows(case: Case) -> None:
    shape = shape_of(case)
    form, parameters = shape.arguments, output_for(case, OFFERED).calls.parameters
    assert isinstance(form, OneByOne)
    head, end = f"{form.begin}{{}}{form.middle}{form.text}", form.end.strip()
    call = write_calls(
        shape, [("other", {"a": "1"})], {"other": {"properties": {"a": {"type": "string"}}}}
    )
    inner = [
        parameters.call_end or shape.tail[-1],
        *(shape.closing or shape.tail)[-1:],
        head.format("other"),
        head.format("path"),
        f"{head.format('other')}y{end}",
        f"{head.format('count')}y{end}",
        end,
        *misspelt(end),
        f"{end}\n{end}",
        call,
        f"So:\n{call}\nand so on",
    ]
    if form.wrap:
        inner = [text for text in inner if form.wrap[0] not in text]
    for text in inner:
        for value in (f"x\n{text}\nz", f"x {text} z"):
            written = [("write", {"path": "a.py", "content": value, "count": 3})]
            answer = read(case, write_calls(shape, written, OFFERED))
            assert answer.values == written, value


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@settings(max_examples=60 if ALL else 8)
@given(st.data())
def test_what_masks_let_through_is_read_as_it_was_written(case: Case, data: st.DataObject) -> None:
    shape = shape_of(case)
    form = shape.arguments
    begin = [form.begin, form.end] if isinstance(form, OneByOne) else []
    texts = st.lists(st.sampled_from([*TEXTS, *begin, "path", "write", *shape.tail]), max_size=6)
    arguments = {"content": "".join(map(str, data.draw(texts)))}
    text = write_calls(shape, [("write", arguments)], OFFERED)
    _, grammars = tokenizer_of(case.name, tokens=False)
    tools = tuple(Tool(name, parameters=schema) for name, schema in OFFERED.items())
    matcher = grammars.calls(shape, tools, parallel=False)
    tokens = grammars.texts.tokenize_str(text)
    if matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting():
        assert read(case, text).values == [("write", arguments)]
