"""Calls that a model writes not quite as its format says: what is left of them is JSON, of the types
that the schema says, and complete."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text.outputs import HERMES, LLAMA, WEATHER, Call, of_format, of_mlx, parse

from mlx_manager.mlx_server.formats import OutputFormat
from mlx_manager.mlx_server.text.tool_calls import formats
from mlx_manager.mlx_server.text.tool_calls.lenient_json import mended
from mlx_manager.mlx_server.utils.text import encodable

CODER, GLM, MINIMAX, GEMMA, KIMI, KIMI_3, LFM_2 = map(
    of_mlx,
    ("qwen3_coder", "glm47", "minimax_m2", "gemma4", "kimi_k2", "kimi_k3", "pythonic"),
)
DEEPSEEK_32, OLMO_3 = map(of_format, (formats.DEEPSEEK_32, formats.OLMO_3))
CALL = '{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}'

# ---------------------------------------------------------------------------------------------
# Arguments are JSON
# ---------------------------------------------------------------------------------------------

EDITS = {"name": {}, "edits": {"type": "array"}, "n": {"type": "integer"}}
DSML = "｜DSML｜"


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (CODER, "<tool_call>\n<function=note>\n<parameter=edits>\n{}\n</parameter>\n</function>"),
        (GLM, "<tool_call>note\n<arg_key>edits</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"),
        (
            MINIMAX,
            '<minimax:tool_call>\n<invoke name="note">\n<parameter name="edits">{}</parameter>\n'
            "</invoke>\n</minimax:tool_call>",
        ),
        (
            DEEPSEEK_32,
            f'<{DSML}function_calls>\n<{DSML}invoke name="note">\n'
            f'<{DSML}parameter name="edits" string="false">{{}}</{DSML}parameter>\n'
            f"</{DSML}invoke>\n</{DSML}function_calls>",
        ),
        (
            KIMI_3,
            '<|open|>tools<|sep|><|open|>call tool="note" index="1"<|sep|><|open|>json<|sep|>'
            '{{"edits": {}}}<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
        ),
        (HERMES, '<tool_call>{{"name": "note", "arguments": {{"edits": {}}}}}</tool_call>'),
        (HERMES, '<tool_call>{{"arguments": {{"edits": {}}}, "name": "note"}}</tool_call>'),
        (LLAMA, "[note(edits={})]"),
        (GEMMA, "<|tool_call>call:note{{edits:{}}}<tool_call|>"),
    ],
    ids=[
        *("qwen coder", "glm", "minimax", "deepseek", "kimi k3", "hermes", "hermes, name last"),
        *("pythonic", "gemma 4"),
    ],
)
@pytest.mark.parametrize(
    ("written", "value"),
    [
        ('[{"old": "a\n\tb"}]', [{"old": "a\n\tb"}]),
        ('[{"old": "a\r\nb"},]', [{"old": "a\r\nb"}]),
        ('[True, None, "x"]', [True, None, "x"]),
        ("['a', {'b': False}]", ["a", {"b": False}]),
        (r'["\ud83c\udf89", "\ud83c"]', ["🎉", "\ufffd"]),
    ],
)
def test_what_is_read_leniently_is_written_strictly(
    output: OutputFormat, text: str, written: str, value: object
) -> None:
    output = replace(output, offered={"note": {"type": "object", "properties": EDITS}})
    text = text.format(written)
    for pieces in ([text], text):
        answer = parse(pieces, output)
        assert answer.values == [("note", {"edits": value})]
        assert answer.calls[0].arguments.encode()
        assert answer.content == ""


@pytest.mark.parametrize(
    ("written", "value"),
    [
        (r'{"path": "C:\dir\new"}', {"path": "C:\\dir\new"}),
        (r'{"re": "\d+\."}', {"re": r"\d+\."}),
        ('{"say": "He said "hi" to me", "n": 1}', {"say": 'He said "hi" to me', "n": 1}),
        ('{"a": 1 "b": 2}', {"a": 1, "b": 2}),
        ('{"a": [1, 2}', {"a": [1, 2]}),
        ('{"a": {"b": [1]', {"a": {"b": [1]}}),
        ('{"a": "Paris}}</tool_call>', {"a": "Paris"}),
        ('{"a": "Paris\n</tool_call>\n', {"a": "Paris"}),
        ('{"a": "x", "b":', {"a": "x", "b": None}),
        ('{"a": one two, "b": .5}', {"a": "one two", "b": 0.5}),
    ],
)
def test_arguments_that_are_not_quite_json_are_mended(written: str, value: object) -> None:
    text = f'<tool_call>{{"name": "now", "arguments": {written}'
    for pieces in ([text], text):
        answer = parse(pieces, HERMES)
        assert (answer.values, answer.content) == ([("now", value)], "")


def test_an_end_that_stands_in_a_text_does_not_end_it() -> None:
    value = {"text": "</tool_call>\n<tool_call> and }}</tool_call>"}
    text = f'<tool_call>{{"name": "note", "arguments": {json.dumps(value)}}}</tool_call>'
    for pieces in ([text], text):
        assert parse(pieces, HERMES).values == [("note", value)]


def test_a_call_whose_end_or_quote_is_missing_does_not_hide_the_next() -> None:
    text = f"<tool_call>\n{CALL}\n<tool_call>\n{CALL}\n</tool_call>"
    for pieces in ([text], text):
        assert parse(pieces, HERMES).values == [WEATHER, WEATHER]
    text = text.replace('"days": 2}}', '"day": "x}}\n</tool_call>', 1)
    for pieces in ([text], text):
        assert parse(pieces, HERMES).values == [
            ("get_weather", {"city": "Paris", "day": "x"}),
            WEATHER,
        ]


# ---------------------------------------------------------------------------------------------
# Types
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, "1e3", 1000),
        ({"type": "number"}, "5.0", 5.0),
        ({"type": "integer"}, '"5"', 5),
        ({"type": "array"}, '"[1, 2]"', [1, 2]),
        ({"type": "boolean"}, "TRUE", True),
        ({"type": "integer"}, "", None),
        ({"type": "string"}, "", ""),
        ({"type": "string", "nullable": True}, "null", None),
        ({"type": "string", "nullable": True}, "3", "3"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": "true"}, "true", "true"),
        ({"$ref": "#/$defs/text"}, "3", "3"),
        ({"$ref": "#/$defs/list"}, "[3]", [3]),
        ({"allOf": [{"$ref": "#/$defs/text"}, {"minLength": 1}]}, "null", "null"),
        ({"anyOf": [{"$ref": "#/$defs/text"}, {"type": "null"}]}, "3", "3"),
        ({"oneOf": [{"type": "integer"}, {"type": "boolean"}]}, "true", True),
        ({"type": "STRING"}, "3", "3"),
        ({"type": "str"}, "3", "3"),
        ({"type": "list"}, "[3]", [3]),
        ({}, "['a', {'b': None}]", ["a", {"b": None}]),
        ({}, "[see above]", "[see above]"),
        ({}, "True", "True"),
        ({"type": "date"}, "2024-02-28", "2024-02-28"),
        ({"$ref": "#/$defs/loop"}, "[3]", [3]),
    ],
)
def test_a_value_is_of_the_type_that_its_schema_says(
    schema: object, written: str, value: object
) -> None:
    definitions = {
        "text": {"type": "string"},
        "list": {"type": "array"},
        "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/loop"}]},
    }
    parameters = {"type": "object", "properties": {"a": schema}, "$defs": definitions}
    output = replace(CODER, offered={"now": parameters})
    text = f"<tool_call>\n<function=now>\n<parameter=a>\n{written}\n</parameter>\n</function>"
    ((_, arguments),) = parse(text, output).values
    assert repr(arguments) == repr({"a": value})


@pytest.mark.parametrize(
    ("said", "schema", "written", "value"),
    [
        ("true", {"type": "string"}, "3", "3"),
        ("false", {"type": "string"}, "3", "3"),
        ("true", {"type": "integer"}, "3", 3),
        ("false", {"type": "integer"}, "3", 3),
        ("true", {}, "3", "3"),
        ("false", {}, "3", 3),
        ("true", {"type": ["string", "integer"]}, "3", "3"),
        ("false", {"type": ["string", "integer"]}, "3", 3),
    ],
)
def test_the_schema_overrules_what_a_call_says_of_a_type(
    said: str, schema: object, written: str, value: object
) -> None:
    parameters = {"type": "object", "properties": {"a": schema}}
    text = (
        f'<{DSML}function_calls>\n<{DSML}invoke name="now">\n<{DSML}parameter name="a" '
        f'string="{said}">{written}</{DSML}parameter>\n</{DSML}invoke>\n</{DSML}function_calls>'
    )
    answer = parse(text, replace(DEEPSEEK_32, offered={"now": parameters}))
    assert answer.values == [("now", {"a": value})]


# ---------------------------------------------------------------------------------------------
# Gemma's notation, and Python's
# ---------------------------------------------------------------------------------------------

Q = '<|"|>'
TYPES = {
    "text": {"type": "string"},
    "days": {"type": "integer"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "note-id": {"type": "string"},
    "mcp:x": {"type": "string"},
    "at": {"type": "object", "properties": {"zip.code": {"type": "string"}}},
    "flag": {"type": "boolean"},
}


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ("tags:['a','b']", {"tags": ["a", "b"]}),
        ('tags:["x,y:z"]', {"tags": ["x,y:z"]}),
        (f"tags:[{Q}a{Q} {Q}b{Q},]", {"tags": ["a", "b"]}),
        ("tags:[a b, c]", {"tags": ["a b", "c"]}),
        (f"text:{Q}x{Q}, days:3", {"text": "x", "days": 3}),
        (f"text:{Q}x{Q}days:3", {"text": "x", "days": 3}),
        (f"\n  text:{Q}x{Q},\n  days:3,\n", {"text": "x", "days": 3}),
        (f"note-id:{Q}x{Q}", {"note-id": "x"}),
        (f"mcp:x:{Q}x{Q}", {"mcp:x": "x"}),
        (
            "at:{zip.code:02134,a-b:{c:[1,null]}}",
            {"at": {"zip.code": "02134", "a-b": {"c": [1, None]}}},
        ),
        ("text:3,flag:True", {"text": "3", "flag": True}),
        ("text:true,days:None", {"text": "true", "days": None}),
        (f"days:{Q}3{Q}", {"days": 3}),
        ("text:Hello, world,days:3", {"text": "Hello, world", "days": 3}),
        ("text:see /tmp/a.txt days:3", {"text": "see /tmp/a.txt", "days": 3}),
        (f"text:{Q}'a' \"b\" {{c}}, days:{Q}", {"text": "'a' \"b\" {c}, days:"}),
        ("text:'it's'", {"text": "it's"}),
        (f'"text":"x",{Q}days{Q}:3', {"text": "x", "days": 3}),
        (f"text:{Q}Paris,days:3", {"text": "Paris", "days": 3}),
        (f'text:{Q}Paris",days:3', {"text": "Paris", "days": 3}),
        (f"text:{Q}Paris", {"text": "Paris"}),
        ("text:,days:3", {"text": "", "days": 3}),
        (f"at:{{zip.code:{Q}x{Q}", {"at": {"zip.code": "x"}}),
        ("", {}),
    ],
)
@pytest.mark.parametrize("end", ["}<tool_call|>", "}", "<tool_call|>"])
def test_gemmas_notation_is_read_however_it_is_written(body: str, value: object, end: str) -> None:
    output = replace(GEMMA, offered={"ns.note-1": {"properties": TYPES}})
    text = f"<|tool_call>call:ns.note-1{{{body}{end}"
    for pieces in ([text], text):
        answer = parse(pieces, output)
        assert (answer.values, answer.content) == ([("ns.note-1", value)], "")


def test_gemmas_texts_stream_as_they_are_written() -> None:
    parts = ["<|tool_call>call:note{text:", '<|"|>A ', '"b" }', "]", '<|"', "|>}<tool_call|>"]
    answers = [parse(parts[: n + 1], GEMMA, reason="length") for n in range(len(parts))]
    assert [answer.calls[0].arguments for answer in answers] == [
        '{"text": ',
        '{"text": "A',
        r'{"text": "A \"b',
        r'{"text": "A \"b',
        r'{"text": "A \"b\" }]',
        r'{"text": "A \"b\" }]"}',
    ]


@pytest.mark.parametrize(
    ("output", "around"),
    [
        (LLAMA, "[{}]"),
        (LFM_2, "<|tool_call_start|>[{}]<|tool_call_end|>"),
        (OLMO_3, "<function_calls>{}</function_calls>"),
    ],
    ids=["llama", "lfm2", "olmo 3"],
)
@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("note-id='x', a.b=1", {"note-id": "x", "a.b": 1}),
        ("text='''a\n\"b\"'''", {"text": 'a\n"b"'}),
        ('text="one\ntwo"', {"text": "one\ntwo"}),
        ("text=3, days='3'", {"text": "3", "days": 3}),
        ("flag=true, tags=['a', None]", {"flag": True, "tags": ["a", None]}),
        ("text=Paris", {"text": "Paris"}),
        ("text='it\\'s', from=\"a/b\"", {"text": "it's", "from": "a/b"}),
        (r'text="a\/b \ud83c\udf89"', {"text": "a/b 🎉"}),
        ("at={'a-b': (1, 2)}", {"at": {"a-b": [1, 2]}}),
        ("", {}),
    ],
)
def test_calls_as_in_python_have_names_of_any_kind(
    output: OutputFormat, around: str, written: str, value: object
) -> None:
    text = around.format(f"mcp-x.note({written})")
    for pieces in ([text], text):
        answer = parse(pieces, replace(output, offered={"mcp-x.note": {"properties": TYPES}}))
        assert (answer.values, answer.content) == ([("mcp-x.note", value)], "")


# ---------------------------------------------------------------------------------------------
# Kimi's ids
# ---------------------------------------------------------------------------------------------

SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")


def kimi(*ids: str, section: tuple[str, str] = SECTION) -> str:
    calls = (
        f'<|tool_call_begin|>{id}<|tool_call_argument_begin|>{{"text": "x"}}<|tool_call_end|>'
        for id in ids
    )
    return section[0] + "".join(calls) + section[1]


@pytest.mark.parametrize(
    ("written", "id"),
    [
        ("functions.note:3", "functions.note:3"),
        ("functions_note_3", "functions.note:3"),
        ("functions-note-3", "functions.note:3"),
        ("functionsnote3", "functions.note:3"),
        ("note:3", "functions.note:3"),
        ("note_3", "functions.note:3"),
        ("functions.note", "id-1"),
        ("functions_note", "id-1"),
        ("note", "id-1"),
    ],
)
def test_an_id_that_others_rewrote_still_names_its_function(written: str, id: str) -> None:
    text = kimi(written)
    for pieces in ([text], text):
        assert parse(pieces, KIMI).calls == [Call("note", '{"text": "x"}', id)]


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("functions.mcp.note-2.add:0", "mcp.note-2.add"),
        ("functions_mcp_note_2_add_0", "mcp.note-2.add"),
        ("functionsmcpnote2add0", "mcp.note-2.add"),
        ("functions_note2_0", "note2"),
        ("functionsnote20", "note2"),
        ("functions_note_20", "note"),
        ("functions.functions:1", "functions"),
    ],
)
def test_of_what_an_id_may_mean_it_means_a_function_that_is_offered(
    written: str, name: str
) -> None:
    names = ("note", "note2", "mcp.note-2.add", "functions")
    answer = parse(kimi(written), replace(KIMI, offered={each: {} for each in names}))
    assert [call.name for call in answer.calls] == [name]


def test_an_id_that_names_nothing_offered_is_text() -> None:
    for id in ("functions.other:0", "call_a1b2", "functions.", "0"):
        answer = parse(kimi(id), KIMI)
        assert (answer.content, answer.calls) == (kimi(id), [])


def test_two_calls_of_an_answer_never_share_an_id() -> None:
    calls = parse(kimi("functions.note:0", "functions_note_0", "note"), KIMI).calls
    assert [call.id for call in calls] == ["functions.note:0", "id-1", "id-2"]


@pytest.mark.parametrize(
    "section",
    [("", ""), ("", SECTION[1]), ("<|tool_call_section_begin|>", "<|tool_call_section_end|>")],
    ids=["none", "no beginning", "singular"],
)
def test_kimis_calls_are_read_whatever_is_around_them(section: tuple[str, str]) -> None:
    text = f"Well.{kimi('functions.note:0', 'functions.note:1', section=section)}"
    for pieces in ([text], text):
        answer = parse(pieces, KIMI)
        assert (answer.content, answer.values) == ("Well.", [("note", {"text": "x"})] * 2)


@pytest.mark.parametrize("end", ["<|tool_call_end|><|tool_calls_section_end|>", ""])
@pytest.mark.parametrize("blank", ["", "\n"])
def test_kimis_empty_arguments_are_none(blank: str, end: str) -> None:
    begin = f"<|tool_call_argument_begin|>{blank}"
    text = f"{SECTION[0]}<|tool_call_begin|>functions.now:0{begin}{end}"
    for pieces in ([text], text):
        answer = parse(pieces, KIMI)
        assert (answer.content, answer.values) == ("", [("now", {})])


# ---------------------------------------------------------------------------------------------
# Sizes
# ---------------------------------------------------------------------------------------------


def test_a_parameter_that_is_given_twice_is_the_last_one() -> None:
    twice = "".join(f"<parameter=text>\n{text}\n</parameter>\n" for text in "ab")
    text = f"<tool_call>\n<function=note>\n{twice}</function>\n</tool_call>"
    assert parse(text, CODER).values == [("note", {"text": "b"})]


def test_long_values_are_read_whole_whatever_they_look_like() -> None:
    lines = "<p>{'a': [\"b\", 1]}</p>\n</function>\n" * 1_000
    for output, text in (
        (
            CODER,
            f"<tool_call>\n<function=note>\n<parameter=text>\n{lines}\n</parameter>\n</function>",
        ),
        (GEMMA, f"<|tool_call>call:note{{text:{Q}{lines}{Q}}}<tool_call|>"),
        (HERMES, f'<tool_call>{{"name": "note", "arguments": {json.dumps({"text": lines})}}}'),
    ):
        for pieces in ([text], text):
            assert parse(pieces, output).values == [("note", {"text": lines})]


# ---------------------------------------------------------------------------------------------
# Anything at all
# ---------------------------------------------------------------------------------------------

_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
_SCRAPS = (
    '"',
    "'",
    "\\",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    " ",
    "\n",
    "\u00a0",
    "True",
    "x",
    "1",
    "</b>",
)


@given(st.dictionaries(st.text(max_size=4), _JSON, max_size=4), st.sampled_from([None, 1]))
def test_what_is_json_comes_out_as_it_stands(value: object, indent: int | None) -> None:
    for text in (json.dumps(value, indent=indent), json.dumps(value, ensure_ascii=False)):
        assert mended(text) == encodable(text)
        answer = parse(f'<tool_call>{{"name": "now", "arguments": {text}}}</tool_call>', HERMES)
        assert answer.calls == [Call("now", encodable(text), "id-1")]


@settings(max_examples=300)
@given(st.data())
def test_whatever_is_written_as_arguments_they_are_a_json_object(data: st.DataObject) -> None:
    text = json.dumps(data.draw(st.dictionaries(st.sampled_from(["a", "text", ""]), _JSON)))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(text)))
        length = data.draw(st.integers(0, 3))
        text = text[:place] + data.draw(st.sampled_from(["", *_SCRAPS])) + text[place + length :]
    output, around = data.draw(
        st.sampled_from(
            [
                (HERMES, '<tool_call>{{"name": "note", "arguments": {}}}</tool_call>'),
                (HERMES, '<tool_call>{{"arguments": {}, "name": "note"}}</tool_call>'),
                (KIMI, "<|tool_call_begin|>functions.note:0<|tool_call_argument_begin|>{}"),
                (GEMMA, "<|tool_call>call:note{}<tool_call|>"),
                (CODER, "<function=note>\n<parameter=a>\n{}\n</parameter>\n</function>"),
                (CODER, "<function=note>\n<parameter=text>\n{}"),
                (LFM_2, "<|tool_call_start|>[note(a={})]<|tool_call_end|>"),
            ]
        )
    )
    text = around.format(text)
    whole = parse([text], output)
    assert parse(text, output) == whole
    assert all(isinstance(arguments, dict) for _, arguments in whole.values)
    assert whole.calls or whole.content == text
