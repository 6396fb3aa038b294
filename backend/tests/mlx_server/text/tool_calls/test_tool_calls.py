"""Tool calls and thinking, in every format, however the output is cut into tokens."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from pkgutil import iter_modules

import mlx_lm.tool_parsers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text.outputs import (
    HARMONY,
    HERMES,
    LLAMA,
    NASTY,
    PARIS,
    SAMPLES,
    THINKING,
    THINKING_HERMES,
    TOOLS,
    WEATHER,
    Call,
    Sample,
    of_format,
    of_mlx,
    parse,
)
from text.tool_calls.golden import GOLDEN

from mlx_manager.mlx_server.formats import OutputFormat, openai_call_id, short_call_id
from mlx_manager.mlx_server.text.tool_calls import formats

GLM = of_mlx("glm47")
CODER = of_mlx("qwen3_coder")
GEMMA = of_mlx("gemma4")
MISTRAL = of_mlx("mistral")
DEEPSEEK = of_format(formats.DEEPSEEK)
SEED, COMMAND, NEMOTRON, PHI_4, HUNYUAN, OLMO_3, APERTUS, INTERNLM = map(
    of_format,
    (
        *(formats.SEED, formats.COMMAND, formats.NEMOTRON, formats.PHI_4),
        *(formats.HUNYUAN, formats.OLMO_3, formats.APERTUS, formats.INTERNLM),
    ),
)
CALL = '{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}'


def cut(text: str, places: set[int]) -> list[str]:
    borders = [0, *sorted(place for place in places if 0 < place < len(text)), len(text)]
    return [text[a:b] for a, b in pairwise(borders)]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.title)
@pytest.mark.parametrize("pieces", [lambda text: [text], list], ids=["at once", "by character"])
def test_an_output_means_what_its_format_says(sample: Sample, pieces) -> None:
    answer = parse(pieces(sample.text), sample.output)
    assert answer.content == sample.content
    assert answer.reasoning == sample.reasoning
    assert tuple(answer.values) == sample.calls


@settings(max_examples=400)
@given(st.data())
def test_cuts_make_no_difference_and_neither_does_an_early_end(data: st.DataObject) -> None:
    sample = data.draw(st.sampled_from(SAMPLES))
    text = sample.text[: data.draw(st.integers(0, len(sample.text)))]
    reason = data.draw(st.sampled_from(["stop", "length"]))
    stop = data.draw(
        st.lists(st.sampled_from(["is", "Paris", ".\n", " <", "I'll look"]), max_size=2)
    )
    output = replace(sample.output, parallel=data.draw(st.booleans()))
    pieces = cut(text, data.draw(st.sets(st.integers(1, max(len(text), 1)))))
    assert parse(pieces, output, stop, reason) == parse([text], output, stop, reason)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.title)
def test_an_output_cut_off_anywhere_is_the_beginning_of_the_whole(sample: Sample) -> None:
    whole = parse([sample.text], sample.output)
    for length in range(len(sample.text)):
        answer = parse([sample.text[:length]], sample.output, reason="length")
        for call, full in zip(answer.calls, whole.calls, strict=False):
            assert call.name == full.name
            assert full.arguments.startswith(call.arguments)
        assert len(answer.calls) <= len(whole.calls)
        # What was held back as the beginning of a marker is text after all, and ends the answer.
        begun = answer.reasoning.partition("<")[0]
        assert whole.reasoning.startswith(begun)


PROSE = (
    "Paris",
    "zebra",
    "\n",
    " ",
    "é🎉",
    "ok ",
    '"',
    "\\",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    ";",
    "<",
)
MARKERS = {
    "hermes": (HERMES, ("<tool_call>", "</tool_call>", CALL, '{"name": "now"')),
    "thinking": (THINKING, ("<think>", "</think>")),
    "both": (THINKING_HERMES, ("<think>", "</think>", "<tool_call>", "</tool_call>", CALL)),
    "llama": (LLAMA, ("<|python_tag|>", CALL, "[now(", ")]", '"parameters"', '{"name": "now", ')),
    "mistral": (MISTRAL, ("[TOOL_CALLS]", "[ARGS]", "now", "[CALL_ID]", "{}", CALL)),
    "deepseek": (
        DEEPSEEK,
        (
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "now",
            "<｜tool▁sep｜>",
            "{}",
            "```json\n",
        ),
    ),
    "glm": (
        GLM,
        ("<tool_call>", "</tool_call>", "now", "<arg_key>", "</arg_value>", "<arg_value>"),
    ),
    "coder": (
        CODER,
        ("<tool_call>", "</tool_call>", "<function=now>", "</function>", "<parameter="),
    ),
    "dsml": (
        of_format(formats.DEEPSEEK_32),
        (
            *("<｜DSML｜function_calls>", '<｜DSML｜invoke name="now">', "</｜DSML｜invoke>"),
            *('<｜DSML｜parameter name="a" string="', 'true">', 'false">', "</｜DSML｜parameter>"),
            "</｜DSML｜function_calls>",
        ),
    ),
    "minimax": (
        of_mlx("minimax_m2"),
        (
            *("<minimax:tool_call>", '<invoke name="now">', "</invoke>", "</minimax:tool_call>"),
            *('<parameter name="a">', "</parameter>"),
        ),
    ),
    "longcat": (
        of_mlx("longcat"),
        (
            *("<longcat_tool_call>", "</longcat_tool_call>", "now", "<longcat_arg_key>a"),
            *("</longcat_arg_key>", "<longcat_arg_value>", "</longcat_arg_value>"),
        ),
    ),
    "minicpm": (
        of_mlx("minicpm5"),
        (
            *("<function name=", '"now">', "</function>", '<param name="a">', "</param>"),
            *("<![CDATA[", "]]>"),
        ),
    ),
    "muse": (
        of_mlx("muse_spark"),
        (
            *("<atem:function_calls>", '<atem:invoke name="now">', "</atem:invoke>"),
            *('<atem:parameter name="a">', "</atem:parameter>", "</atem:function_calls>"),
        ),
    ),
    "kimi k3": (
        of_mlx("kimi_k3"),
        (
            *("<|open|>tools<|sep|>", '<|open|>call tool="now"', "<|sep|>", "<|open|>json"),
            *('<|open|>argument key="a" type="string"', "<|close|>argument<|sep|>"),
            *("<|close|>json<|sep|>", "<|close|>call<|sep|>", "<|close|>tools<|sep|>"),
        ),
    ),
    "kimi k2": (
        of_mlx("kimi_k2"),
        (
            *("<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.now:0"),
            *("<|tool_call_argument_begin|>", "{}", "<|tool_call_end|>"),
            "<|tool_calls_section_end|>",
        ),
    ),
    "granite": (of_format(formats.GRANITE), ("<|tool_call|>", "<|/tool_call|>", CALL, "[")),
    "pythonic": (
        of_mlx("pythonic"),
        ("<|tool_call_start|>", "[now(", "a=", ")]", "<|tool_call_end|>", "'"),
    ),
    "function gemma": (
        of_mlx("function_gemma"),
        ("<start_function_call>", "call:now", "{", "}", "<escape>", "<end_function_call>"),
    ),
    "gemma": (GEMMA, ("<|tool_call>", "<tool_call|>", "call:now", "{}", '<|"|>')),
    "harmony": (
        HARMONY,
        (
            *("<|channel|>", "analysis", "final", "commentary to=functions.now", "<|message|>"),
            *("{}", "<|end|>", "<|call|>", "<|start|>assistant", "<|constrain|>json"),
        ),
    ),
}


@settings(max_examples=400)
@given(st.data())
def test_no_soup_of_markers_raises_or_depends_on_the_cuts(data: st.DataObject) -> None:
    output, markers = MARKERS[data.draw(st.sampled_from(sorted(MARKERS)))]
    pieces = data.draw(st.lists(st.sampled_from([*markers, *PROSE]), max_size=14))
    text = "".join(pieces)
    stop = data.draw(st.sampled_from([(), ("zebra",), ("\n", "<")]))
    reason = data.draw(st.sampled_from(["stop", "length"]))
    at_once = parse([text], output, stop, reason)
    assert parse(pieces, output, stop, reason) == at_once
    assert parse(text, output, stop, reason) == at_once
    if not stop and not at_once.calls and output not in (THINKING, THINKING_HERMES, HARMONY):
        assert at_once.content == text, "what is no call comes out as it was written"


MALFORMED = (
    (HERMES, "<tool_call>"),
    (HERMES, "<tool_call></tool_call>"),
    (HERMES, "The marker <tool_call> opens, </tool_call> closes."),
    (HERMES, '<tool_call>{"name": "get_weather"'),
    (HERMES, '<tool_call>{"name": "other", "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "now", "arguments": 5}</tool_call>'),
    (HERMES, '<tool_call>{"name": "now", "arguments": "five"}</tool_call>'),
    (HERMES, '<tool_call>{"arguments": {"city": "Paris"}}</tool_call>'),
    (HERMES, "<tool_call>{'name': 'now', 'arguments': {}}</tool_call>"),
    (HERMES, '<tool_call>{"name": "now", "arguments": {\'a\': 1}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "no\\w", "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "now" "arguments": {}}</tool_call>'),
    (HERMES, "<tool_call>" + " " * 600 + CALL),
    (LLAMA, '{"name": "get_weather", "parameters": '),
    (LLAMA, '{"name": "now", "parameters": [1]} and so on'),
    (LLAMA, "[get_weather(city="),
    (LLAMA, "[other(a=1)]"),
    (LLAMA, "[now(1)] is a call with a position"),
    (LLAMA, '<|python_tag|>print("hi")'),
    (MISTRAL, "[TOOL_CALLS]now(1)"),
    (MISTRAL, "[TOOL_CALLS]other[ARGS]{}"),
    (
        DEEPSEEK,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>other\n```json\n{}\n```",
    ),
    (GLM, "<tool_call>other\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"),
    (GLM, "<tool_call>get_weather\n<arg_key>city</arg_key>\n"),
    (CODER, "<tool_call>\n<function=other>\n<parameter=days>\n2\n</parameter>\n</function>"),
    (CODER, "<tool_call>\n<function=get_weather>\n</tool_call>\nnothing"),
    (COMMAND, '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "other", "parameters": {}}]'),
    (COMMAND, '<|START_ACTION|>[{"name": "now", "parameters": 5}]<|END_ACTION|>'),
    (SEED, "<seed:tool_call>\n<function=other>\n</function>\n</seed:tool_call>"),
    (NEMOTRON, "Between <TOOLCALL> and </TOOLCALL> stand calls."),
    (NEMOTRON, '<TOOLCALL>[{"name": "get_weather"'),
    (PHI_4, '<|tool_call|>[{"type": "function", "function": {"name": "other"}}]<|/tool_call|>'),
    (PHI_4, '<|tool_call|>{"function": {"name": "now"'),
    (HUNYUAN, "<tool_calls><tool_call>other\n```json\n{}\n```</tool_call></tool_calls>"),
    (HUNYUAN, "<tool_calls></tool_calls>"),
    (OLMO_3, "<function_calls>other(a=1)</function_calls>"),
    (OLMO_3, "<function_calls></function_calls>"),
    (OLMO_3, "<function_calls>now(1)</function_calls>"),
    (OLMO_3, '<function_calls>get_weather(city="Par'),
    (APERTUS, '<|tools_prefix|>[{"other": {}}]<|tools_suffix|>'),
    (APERTUS, '<|tools_prefix|>[{"now": 5}]<|tools_suffix|>'),
    (INTERNLM, "<|action_start|><|interpreter|>\nprint(1)<|action_end|>"),
    (GEMMA, "<|tool_call>call:get_weather{cit"),
    (GEMMA, '<|tool_call>call:other{city:<|"|>Paris<|"|>}<tool_call|>'),
    (GEMMA, '<|tool_call>call:note{<|"|>x<|"|>}<tool_call|>'),
    (GEMMA, "<|tool_call>call:note(text=1)<tool_call|>"),
)


@pytest.mark.parametrize(("output", "text"), MALFORMED, ids=lambda value: str(value)[:40])
def test_a_malformed_call_comes_out_as_text(output: OutputFormat, text: str) -> None:
    for pieces in ([text], text):
        answer = parse(pieces, output, reason="length")
        assert (answer.content, answer.calls) == (text, [])


def test_a_call_after_a_malformed_one_is_recognised() -> None:
    answer = parse(f"<tool_call>oops</tool_call> <tool_call>{CALL}</tool_call>", HERMES)
    assert answer.content == "<tool_call>oops</tool_call> "
    assert answer.values == [WEATHER]


def test_arguments_stream_as_they_are_written() -> None:
    parts = ['<tool_call>{"name": "get_weather", "arguments": {', '"city": "Pa', 'ris", ', '"days"']
    answers = [parse(parts[: n + 1], HERMES, reason="length") for n in range(4)]
    assert [answer.calls[0].arguments for answer in answers[1:]] == [
        '{"city": "Pa',
        '{"city": "Paris", ',
        '{"city": "Paris", "days"',
    ]


def test_text_streams_as_it_is_written_where_it_has_no_quotes() -> None:
    parts = [
        "<tool_call>\n<function=note>\n<parameter=text>\nA ",
        '"b"',
        "\n</par",
        "t\n</parameter>",
    ]
    answers = [parse(parts[: n + 1], CODER, reason="length") for n in range(4)]
    assert [answer.calls[0].arguments for answer in answers] == [
        '{"text": "A ',
        r'{"text": "A \"b\"',
        r'{"text": "A \"b\"',
        r'{"text": "A \"b\"\n</part"',
    ]


@pytest.mark.parametrize(
    ("kind", "written", "value"),
    [
        ("string", "5", "5"),
        ("string", "null", "null"),
        ("string", ' "a" \n', ' "a" \n'),
        ("integer", " 5\n", 5),
        ("integer", "two", "two"),
        ("boolean", "True", True),
        ("array", "['a', 1]", ["a", 1]),
        ("object", '{"a": "</parameter>"}', {"a": "</parameter>"}),
        (["string", "null"], "null", None),
        (["string", "null"], "5", "5"),
        (["integer", "null"], "5", 5),
        (["string", "integer"], "5", 5),
        (["string", "number"], "5", 5),
        (["string", "integer"], "5a", "5a"),
        (None, "[1]", [1]),
        (None, "NaN", "NaN"),
    ],
)
def test_an_argument_is_read_as_its_parameter_says(
    kind: object, written: str, value: object
) -> None:
    schema = {"type": "object", "properties": {"a": {} if kind is None else {"type": kind}}}
    output = replace(CODER, offered={"now": schema})
    text = f"<tool_call>\n<function=now>\n<parameter=a>\n{written}\n</parameter>\n</function>\n</tool_call>"
    assert parse(text, output).values == [("now", {"a": value})]


def test_each_parser_of_mlx_lm_has_a_format() -> None:
    known = {parser for form in formats.FORMATS.values() for parser in form.parsers}
    assert {module.name for module in iter_modules(mlx_lm.tool_parsers.__path__)} == known


@pytest.mark.parametrize("module", ["glm47", "qwen3_coder", "minimax_m2", "longcat", "kimi_k3"])
def test_what_mlx_lm_reads_is_read_alike(module: str) -> None:
    parser = import_module(f"mlx_lm.tool_parsers.{module}")
    form = of_mlx(module).calls
    assert form is not None
    text = GOLDEN[form.name]
    first = text[text.index(parser.tool_call_start) + len(parser.tool_call_start) :]
    found = parser.parse_tool_call(first[: first.index(parser.tool_call_end)].strip(), TOOLS)
    call = found[0] if isinstance(found, list) else found
    assert parse(text, of_mlx(module)).values[0] == (call["name"], call["arguments"])


def test_arguments_are_exactly_what_the_model_wrote() -> None:
    written = '{ "city" :\t"\\u0050aris",\n "days": 2.0 , "more": [1, {"a": null}] }'
    answer = parse(
        f'<tool_call>{{"name": "get_weather", "arguments": {written}}}</tool_call>', HERMES
    )
    assert answer.calls == [Call("get_weather", written, "id-1")]


def test_arguments_that_stop_being_json_end_there() -> None:
    answer = parse('<tool_call>{"name": "now", "arguments": {"a": 1 </tool_call>there', HERMES)
    assert answer.calls == [Call("now", '{"a": 1}', "id-1")]
    assert answer.content == "there"


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "note", "arguments": {"text": "one\n\ttwo"}}',
        '{"arguments": {"text": "one\n\ttwo"}, "name": "note"}',
        '{"name": "note", "arguments": "{\\"text\\": \\"one\\n\\ttwo\\"}"}',
    ],
    ids=["streamed", "arguments first", "as text"],
)
def test_line_feeds_that_a_model_forgets_to_escape_are_escaped(call: str) -> None:
    for pieces in ([call], call):
        answer = parse(["<tool_call>", *pieces, "</tool_call>"], HERMES)
        assert answer.values == [("note", {"text": "one\n\ttwo"})]


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (
            HERMES,
            '<tool_call>{"name": "note", "arguments": "{\\"text\\": \\"\\ud83d\\"}"}</tool_call>',
        ),
        (LLAMA, '[note(text="\\ud83d")]'),
        (GEMMA, '<|tool_call>call:note{text:"\\ud83d"}<tool_call|>'),
    ],
    ids=["hermes", "pythonic", "gemma 4"],
)
def test_half_a_character_in_an_argument_can_be_sent(output: OutputFormat, text: str) -> None:
    answer = parse(text, output)
    assert answer.calls[0].arguments.encode()
    assert answer.values == [("note", {"text": "\ufffd"})]


def test_calls_as_in_python_come_out_line_by_line() -> None:
    text = '<function_calls>get_weather(city="Paris", days=2)\nnow()\nnote(text="a'
    for pieces in ([text], text):
        cut = parse(pieces, OLMO_3, reason="length")
        assert (cut.values, cut.content) == ([WEATHER, ("now", {})], '\nnote(text="a')
        assert parse(pieces, replace(OLMO_3, parallel=False)).values == [WEATHER]
    broken = parse("<function_calls>now()\nother()</function_calls>", OLMO_3)
    assert (broken.values, broken.content) == ([("now", {})], "\nother()</function_calls>")


@pytest.mark.parametrize("output", [LLAMA, OLMO_3], ids=["llama", "olmo 3"])
def test_a_character_that_is_escaped_as_in_json_is_read_in_calls_as_in_python(
    output: OutputFormat,
) -> None:
    call = r'note(text="\ud83c\udf89 \u00e9")'
    text = f"[{call}]" if output is LLAMA else f"<function_calls>{call}</function_calls>"
    assert parse(text, output).values == [("note", {"text": "🎉 é"})]


def test_half_a_character_in_a_literal_of_python_can_be_sent() -> None:
    output = replace(CODER, offered={"now": {"properties": {"a": {"type": "array"}}}})
    text = "<tool_call><function=now><parameter=a>['\\ud83d']</parameter></function></tool_call>"
    answer = parse(text, output)
    assert answer.calls[0].arguments.encode()
    assert answer.values == [("now", {"a": ["\ufffd"]})]


@pytest.mark.parametrize(
    ("output", "text", "content"),
    [
        (MISTRAL, f"[TOOL_CALLS][{CALL}] Done", " Done"),
        (of_format(formats.GRANITE), f"<|tool_call|>[{CALL}]\nDone.", "\nDone."),
        (LLAMA, f"[{CALL}] 2 more", " 2 more"),
        (LLAMA, f"{CALL}}}", ""),
        (HERMES, f"<tool_call>\n{CALL}}}\n</tool_call>\nDone.", "\nDone."),
        (HERMES, f"<tool_call>{CALL}}}</tool_call>", ""),
    ],
)
def test_brackets_after_a_call_are_not_content(
    output: OutputFormat, text: str, content: str
) -> None:
    for pieces in ([text], text):
        answer = parse(pieces, output)
        assert (answer.content, answer.values) == (content, [WEATHER])


def test_a_call_with_one_brace_too_many_does_not_hide_the_next() -> None:
    text = f"<tool_call>\n{CALL}}}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>"
    answer = parse(text, HERMES)
    assert (answer.content, answer.values) == ("", [WEATHER, WEATHER])


@pytest.mark.parametrize("end", ["", "<|call|>", "\n<|end|>"])
def test_a_function_that_is_named_and_given_nothing_has_no_arguments(end: str) -> None:
    header = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>"
    answer = parse(header + end, HARMONY)
    assert (answer.content, answer.values) == ("", [("now", {})])


def test_arguments_that_are_an_empty_text_are_none() -> None:
    answer = parse('<tool_call>{"name": "now", "arguments": ""}</tool_call>', HERMES)
    assert (answer.content, answer.values) == ("", [("now", {})])


def test_nothing_of_a_broken_call_is_content_when_no_other_may_follow() -> None:
    text = '<tool_call>{"name": "now", "arguments": {"a": 1<b></tool_call>there'
    for pieces in ([text], text):
        answer = parse(pieces, replace(HERMES, parallel=False))
        assert (answer.content, answer.calls) == ("", [Call("now", '{"a": 1}', "id-1")])


@pytest.mark.parametrize("end", ["", "\n</tool_call>", "\n</tool_call>\nDone."])
def test_a_call_of_qwen_coder_without_its_opening_marker_is_read(end: str) -> None:
    call = "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    call += "<parameter=days>\n2\n</parameter>\n</function>"
    for text in (f"I'll look.\n\n{call}{end}", f"I'll look.\n\n{call}\n{call}{end}"):
        for pieces in ([text], text):
            answer = parse(pieces, CODER)
            assert answer.content.split() == ["I'll", "look.", *end[14:].split()]
            assert answer.values == [WEATHER] * text.count("<function=")


@pytest.mark.parametrize(
    "text",
    ["Write <function=name> so.", "<function=", "<function=other>\n</function>\n</tool_call>"],
)
def test_what_only_looks_like_a_call_of_qwen_coder_is_text(text: str) -> None:
    for pieces in ([text], text):
        answer = parse(pieces, CODER)
        assert (answer.content, answer.calls) == (text, [])


def test_only_one_call_is_made_when_calls_may_not_be_parallel() -> None:
    text = f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call> and text"
    for pieces in ([text], text):
        answer = parse(pieces, replace(HERMES, parallel=False))
        assert (answer.values, answer.content) == ([WEATHER], "")


def test_nothing_is_a_call_when_no_tool_was_offered() -> None:
    text = f"<tool_call>{CALL}</tool_call>"
    assert parse(text, OutputFormat()).content == text


def test_kimi_names_its_calls_itself() -> None:
    ids = [call.id for call in parse(GOLDEN["kimi-k2"], of_mlx("kimi_k2")).calls]
    assert ids == ["functions.get_weather:0", "functions.now:1"]


def test_ids_have_the_length_that_clients_and_templates_expect() -> None:
    assert openai_call_id().startswith("call_")
    assert len(openai_call_id()) == 29
    assert len(short_call_id()) == 9
    assert short_call_id().isalnum()
    assert openai_call_id() != openai_call_id()


def test_blanks_around_calls_are_not_content() -> None:
    answer = parse(f"\n\n<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>\n", HERMES)
    assert (answer.content, len(answer.calls)) == ("", 2)


def test_a_block_without_its_end_is_read_when_the_model_has_ended() -> None:
    text = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    assert parse(text, GLM).values == [("get_weather", {"city": "Paris"})]
    cut = parse(text, GLM, reason="length")
    assert (cut.calls[0].arguments, cut.content) == ('{"city": "Paris"', "")
    assert parse(text[:-15], GLM).values == [("get_weather", {"city": "Par"})]


def test_many_markers_take_linear_time() -> None:
    many = ["<tool_call>", "now\n"] * 20_000
    assert parse(many, HERMES).content == "".join(many)
    assert parse(many, GLM).content == "".join(many)
    assert parse([*many, "</tool_call>"], GLM).calls == []
    assert parse(["<tool_call>", *"\n" * 20_000], HERMES).calls == []
    assert parse("a" * 20_000, HARMONY).content == "a" * 20_000


def test_arguments_of_any_depth_are_passed_on() -> None:
    arguments = '{"a": ' + "[" * 5_000 + "]" * 5_000 + "}"
    answer = parse([f'<tool_call>{{"name": "now", "arguments": {arguments}}}</tool_call>'], HERMES)
    assert answer.calls[0].arguments == arguments


def test_markers_inside_strings_are_arguments() -> None:
    for sample in SAMPLES:
        for name, value in parse([sample.text], sample.output).values:
            if name == "note" and "</tool_call>" in sample.text:
                assert value == {"text": NASTY}
            if name == "get_weather":
                assert value == PARIS
