"""Text that a model writes in any format is read as it was meant, whole and token by token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text import outputs
from text.outputs import WEATHER, Answer, output_of, parse
from text.tool_calls.golden import GOLDEN
from text.tool_calls.test_forced_calls import every_format, tokenizer_of
from thorough import ALL

from mlx_manager.mlx_server.core import Tool, ToolCall
from mlx_manager.mlx_server.formats import (
    JSON,
    NAME,
    CallForm,
    Tagged,
    ToolFormat,
    Unquoted,
    texts_of,
)
from mlx_manager.mlx_server.text.tool_calls.formats import FORMATS
from mlx_manager.mlx_server.text.tool_calls.patterns import patterns_of
from mlx_manager.mlx_server.text.tool_calls.writer import write_calls

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


def expressible(form: ToolFormat, value: Any, names: tuple[str, ...]) -> bool:
    """Return whether a format has a form for a value: raw text can't hold what ends that text."""
    match form.call.arguments:
        case Tagged() as tagged if isinstance(value, str):
            heads = [f"{tagged.begin}{name}" for name in names]
            return not any(text in value for text in (tagged.end.strip(), *heads))
        case Unquoted(quote):
            return quote not in json.dumps(value, ensure_ascii=False).replace('\\"', '"')
    return True


@st.composite
def calls(draw: st.DrawFn, form: ToolFormat) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
    """Return calls, and the schemas of the functions' parameters."""
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
            if not expressible(form, value, tuple(names)):
                arguments[name] = "x" if types[name] == "string" else None
        made.append((function, arguments))
    return made, offered


def write(form: ToolFormat, made: Sequence[tuple[str, Any]]) -> str:
    """Return calls as the history has them."""
    return write_calls(form, [ToolCall("id", name, json.dumps(given)) for name, given in made])


@every_format
@settings(max_examples=150 if ALL else 20)
@given(st.data())
def test_calls_are_read_as_they_were_written(form: ToolFormat, data: st.DataObject) -> None:
    made, offered = data.draw(calls(form))
    text, output = write(form, made), output_of(form, offered)
    whole = parse([text], output)
    assert whole.values == made, text
    assert not whole.content.strip()
    assert parse(text, output) == whole
    place = data.draw(st.integers(0, len(text)))
    assert parse([text[:place], text[place:]], output) == whole


def takes(form: ToolFormat, text: str, offered: dict[str, Any]) -> bool:
    """Return whether the grammar of forced calls allows a text."""
    _, grammars = tokenizer_of(form, tokens=False)
    tools = tuple(Tool(name, parameters=schema) for name, schema in offered.items())
    matcher = grammars.calls(form, tools, parallel=True)
    tokens = grammars.texts.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def is_plain(form: ToolFormat, value: Any) -> bool:
    """Return whether a grammar has a form for a value of any schema of its type."""
    match form.call.arguments:
        case Tagged():
            return not (isinstance(value, str) and "<" in value)
        case Unquoted():
            inner = value.values() if isinstance(value, dict) else value
            scalars = isinstance(value, str | int | float | None) or not any(
                isinstance(each, dict | list) for each in inner
            )
            return scalars and not (isinstance(value, dict) and {"note-id", "a.b"} & value.keys())
    return True


@every_format
@settings(max_examples=60 if ALL else 10)
@given(st.data())
def test_calls_in_the_history_are_such_as_can_be_forced(
    form: ToolFormat, data: st.DataObject
) -> None:
    made, offered = data.draw(calls(form))
    kinds = {name: schema["properties"] for name, schema in offered.items()}
    for name, arguments in made:
        for key, value in list(arguments.items()):
            kind = kinds[name][key]["type"]
            if (value is None and kind != "null") or not is_plain(form, value):
                del arguments[key]
            elif kind == "number":
                # Without its schema a whole number is an integer, where types are written.
                arguments[key] = float(value)
    text = write(form, made)
    assert takes(form, text, offered), text


TAGGED = [form for form in FORMATS.values() if isinstance(form.call.arguments, Tagged)]
every_tagged = pytest.mark.parametrize("form", TAGGED, ids=lambda form: form.name)
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


def read(form: ToolFormat, text: str) -> Answer:
    """Return what is read of a text, which is the same whole and token by token."""
    output = output_of(form, OFFERED)
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


@every_tagged
def test_an_end_that_is_missing_or_misspelt_ends_its_value_all_the_same(form: ToolFormat) -> None:
    tagged = form.call.arguments
    assert isinstance(tagged, Tagged)
    end, text = tagged.end.strip(), write(form, WRITTEN)
    damaged = [text.replace(end, wrong, 1) for wrong in ("", *misspelt(end))]
    damaged += [text.replace(end, wrong) for wrong in ("", *misspelt(end))]
    last = text.rfind(end)
    damaged += [text[:last] + text[last + len(end) :], text[:last], text[: last + len(end)]]
    for each in damaged:
        answer = read(form, each)
        assert answer.values == WRITTEN, each
        assert not answer.content.strip()


@every_tagged
def test_an_end_of_a_call_that_is_missing_or_misspelt_ends_it_all_the_same(
    form: ToolFormat,
) -> None:
    tags = patterns_of(form).tags
    assert tags is not None
    many = bool(form.between or form.opening)
    calls = [*WRITTEN, ("now", {}), *WRITTEN] if many else WRITTEN
    text = write(form, calls)
    for end in filter(None, (tags.call_end, tags.close)):
        last = text.rfind(end)
        wrong = ["", *(misspelt(end) if end.startswith("</") else ())]
        damaged = [text[:last] + each + text[last + len(end) :] for each in wrong]
        if many and (end == tags.call_end or not tags.call_end):
            first = text.find(end)
            damaged += [text[:first] + text[first + len(end) :]]
        for each in damaged:
            answer = read(form, each)
            assert answer.values == calls, each
            assert not answer.content.strip()


@every_tagged
def test_markup_in_a_text_is_text_where_the_texts_own_end_follows(form: ToolFormat) -> None:
    tagged, tags = form.call.arguments, patterns_of(form).tags
    assert isinstance(tagged, Tagged)
    assert tags is not None
    head, end = f"{tagged.begin}{{}}{tagged.before('string')}", tagged.end.strip()
    call = write(form, [("other", {"a": "1"})])
    inner = [
        tags.call_end or str(form.call.tail[-1]),
        *map(str, (form.closing or form.call.tail)[-1:]),
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
    if tagged.wrap:
        inner = [text for text in inner if tagged.wrap[0] not in text]
    for text in inner:
        for value in (f"x\n{text}\nz", f"x {text} z"):
            written = [("write", {"path": "a.py", "content": value, "count": 3})]
            answer = read(form, write(form, written))
            assert answer.values == written, value


@every_format
@settings(max_examples=60 if ALL else 8)
@given(st.data())
def test_what_masks_let_through_is_read_as_it_was_written(
    form: ToolFormat, data: st.DataObject
) -> None:
    tagged = form.call.arguments
    begin = [tagged.begin, tagged.end] if isinstance(tagged, Tagged) else []
    texts = [*TEXTS, *begin, "path", "write", *filter(None, texts_of(form.call.tail))]
    drawn = data.draw(st.lists(st.sampled_from(texts), max_size=6))
    made = [("write", {"content": "".join(drawn)})]
    text = write(form, made)
    if takes(form, text, OFFERED):
        assert read(form, text).values == made


@pytest.mark.parametrize("arguments", ['{"city": "Par', "[1]", "Paris"])
@every_format
def test_broken_arguments_are_written_as_they_are(form: ToolFormat, arguments: str) -> None:
    text = write_calls(form, [ToolCall("c", "get_weather", arguments)])
    assert arguments in text or json.dumps(arguments) in text


# ---------------------------------------------------------------------------------------------
# One golden text a format
# ---------------------------------------------------------------------------------------------

MADE = [WEATHER, ("now", {})]


def test_each_format_has_a_golden_text() -> None:
    assert GOLDEN.keys() == FORMATS.keys()


@every_format
def test_a_format_is_written_forced_and_read_as_its_golden_text_says(form: ToolFormat) -> None:
    text = GOLDEN[form.name]
    assert write(form, MADE) == text
    assert takes(form, text, outputs.OFFERED)
    output = output_of(form, outputs.OFFERED)
    assert parse([text], output).values == parse(text, output).values == MADE


MADE_UP = [
    ToolFormat(
        "nova",
        CallForm.of('<|call|>{"tool": "', NAME, '", "input": ', JSON, "}<|/call|>"),
        between=("\n",),
    ),
    ToolFormat(
        "compact",
        CallForm.of('{"function":"', NAME, '","function-args":', JSON, "}"),
        opening=("<calls>[",),
        between=(",",),
        closing=("]</calls>",),
    ),
    ToolFormat(
        "bare",
        CallForm.of('{"action": "', NAME, '", "action_input": ', JSON, "}"),
        openers=("<|run|>",),
        between=("\n",),
        bare=True,
    ),
]
"""Formats that no model has, whose keys are those of no other."""


@pytest.mark.parametrize("form", MADE_UP, ids=[form.name for form in MADE_UP])
def test_the_keys_of_a_call_are_those_that_its_format_declares(form: ToolFormat) -> None:
    text = write(form, MADE)
    output = output_of(form, outputs.OFFERED)
    assert parse([text], output).values == parse(text, output).values == MADE
    assert parse(text, output).content == ""
    assert takes(form, text, outputs.OFFERED)


def test_a_bare_object_with_another_formats_keys_is_text() -> None:
    form = MADE_UP[-1]
    text = '{"action": "now", "input": {}}'
    assert parse([text], output_of(form, outputs.OFFERED)).values == []


def test_a_call_between_free_text_has_the_keys_of_its_format() -> None:
    form = MADE_UP[-1]
    _, grammars = tokenizer_of(form, tokens=False)
    tools = (Tool("now"),)
    taken = {}
    for name, arguments in [("action", "action_input"), ("name", "parameters")]:
        matcher = grammars.free_calls(form, tools, form.openers, param="tools")
        tokens = grammars.texts.tokenize_str(json.dumps({name: "now", arguments: {}}))
        taken[name] = matcher.try_consume_tokens(tokens) == len(tokens)
    assert taken == {"action": True, "name": False}
