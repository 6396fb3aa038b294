"""Calls that must be made, in every format: whatever the masks let through is read as a call of an
offered function whose arguments fit."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher
from mlx_lm.tokenizer_utils import TokenizerWrapper, load
from models.adapters.published import Published, write_tokenizer
from text.outputs import Answer, output_of, parse
from thorough import ALL, one_in_turn

from mlx_manager.mlx_server.core import Tool
from mlx_manager.mlx_server.errors import InvalidParameter
from mlx_manager.mlx_server.formats import Aside, OutputFormat, ToolFormat
from mlx_manager.mlx_server.text.detokenizer import TokenTexts
from mlx_manager.mlx_server.text.grammar.matchers import Grammars, fill_masks
from mlx_manager.mlx_server.text.output_parser import OutputParser
from mlx_manager.mlx_server.text.tool_calls import formats
from mlx_manager.mlx_server.text.tool_calls.formats import FORMATS

MARKERS = (
    r"<\|[\w/]+\|?>|<\w+\|>|<｜[^｜]+｜>|｜DSML｜|\[[A-Z_]+\]|</?(?:longcat_)?(?:tool_call|arg_\w+)>"
    r"|</?(?:minimax|seed):tool_call>|</?(?:start|end)_function_call>|<escape>"
)
"""Expression for what models have as tokens of their own."""
MARKED_BY_TEXT = {"olmo-3", "nemotron", "minicpm"}
"""Formats whose models have no such tokens."""

PLACE = {
    "type": "object",
    "properties": {
        "x": {"type": "number"},
        "label": {"type": "string", "maxLength": 6},
        "inner": {"$ref": "#/$defs/leaf"},
    },
    "required": ["x"],
    "additionalProperties": False,
}
EVERYTHING = Tool(
    "every-thing",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Paris", "New York", 'the "Big" one']},
            "note": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "ratio": {"type": "number"},
            "flag": {"type": "boolean"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "count": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
            "place": PLACE,
            "leaf": {"allOf": [{"$ref": "#/$defs/leaf"}], "description": "What else"},
            "mixed": {"type": ["string", "integer"]},
            "free": {},
            "day": {"type": "string", "format": "date"},
            "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]+/?$"},
            "kind": {"const": "a b"},
            "short": {"type": "string", "minLength": 2, "maxLength": 3},
            "level": {"enum": [1, 2, "top", None]},
        },
        "required": ["city", "days", "place", "mixed", "short", "level"],
        "$defs": {
            "leaf": {
                "type": "object",
                "properties": {"v": {"type": "boolean"}},
                "required": ["v"],
                "additionalProperties": False,
            }
        },
    },
)
CLOCK = Tool("clock")
TOOLS = (EVERYTHING, CLOCK)


every_format = pytest.mark.parametrize("form", FORMATS.values(), ids=list(FORMATS))


def markers_of(form: ToolFormat) -> list[str]:
    return re.findall(MARKERS, " ".join([*form.texts, repr(form)]))


def test_it_is_known_which_markers_of_a_format_are_tokens() -> None:
    assert {name for name, form in FORMATS.items() if not markers_of(form)} == MARKED_BY_TEXT


@cache
def tokenizer_of(form: ToolFormat, *, tokens: bool) -> tuple[TokenizerWrapper, Grammars]:
    """One token a byte and, if `tokens`, one for each of the format's markers."""
    markers = markers_of(form) if tokens else []
    with TemporaryDirectory() as folder:
        made = Published("x", "llama", None, "<|eos|>", tuple(dict.fromkeys(markers)))
        write_tokenizer(Path(folder), made, None)
        tokenizer = load(Path(folder))
    return tokenizer, Grammars(tokenizer, [tokenizer.eos_token_id])


def offered(tools: tuple[Tool, ...]) -> dict[str, Any]:
    return {tool.name: tool.parameters for tool in tools}


class Walk:
    """Draws tokens at random from what a matcher allows, and closes what is open now and then."""

    def __init__(self, form: ToolFormat, seed: int, *, tokens: bool) -> None:
        self.form = form
        self.tokenizer, self.grammars = tokenizer_of(form, tokens=tokens)
        self.random = random.Random(seed)
        call, ways = form.call, form.call.arguments
        asides = [piece.end for piece in form.opening if isinstance(piece, Aside)]
        pieces = [*asides, getattr(ways, "end", ""), getattr(ways, "quote", ""), '"', "}", "]", ")"]
        pieces += [*form.closing, *call.tail, ", ", ",", *call.middle, *call.head]
        self.closers = [
            self.tokenizer.encode(piece, add_special_tokens=False)
            for piece in pieces
            if isinstance(piece, str) and piece
        ]

    def draw(self, matcher: LLMatcher, most: int = 2000) -> list[int]:
        drawn: list[int] = []
        while not matcher.is_stopped() and len(drawn) < most:
            chosen: list[int] = []
            late = len(drawn) > 400
            if late and matcher.is_accepting():
                break
            if late or self.random.random() < 0.5:
                closers = self.closers if late else [self.random.choice(self.closers)]
                fits = (c for c in closers if matcher.validate_tokens(c) == len(c))
                chosen = next(fits, [])
            if not chosen:
                mask = fill_masks(None, [matcher], self.grammars.words)[0].view(np.uint8)
                allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
                assert len(allowed), "nothing can follow"
                ends = self.tokenizer.eos_token_id in allowed
                if ends and self.random.random() < 0.5:
                    return drawn
                chosen = [int(self.random.choice(allowed))]
                if chosen[0] == self.tokenizer.eos_token_id:
                    return drawn
            assert matcher.consume_tokens(chosen)
            drawn += chosen
        assert matcher.is_stopped() or matcher.is_accepting(), "the walk never ended" + repr(
            self.tokenizer.decode(drawn)[-300:]
        )
        return drawn

    def read(self, drawn: list[int], tools: tuple[Tool, ...], parallel: bool = True) -> Answer:
        output = replace(output_of(self.form, offered(tools), self.tokenizer), parallel=parallel)
        parser = OutputParser(TokenTexts(self.tokenizer).stream(output), output)
        answer = Answer()
        for token in drawn:
            for event in parser.push(token):
                answer.add(event)
        for event in parser.finish("stop"):
            answer.add(event)
        return answer


def check(answer: Answer, tools: tuple[Tool, ...], *, free: bool = False) -> None:
    schemas = {tool.name: dict(tool.parameters) for tool in tools}
    assert free or answer.content.strip() == ""
    for name, arguments in answer.values:
        jsonschema.validate(arguments, schemas[name])


WHOLE = [name for name, form in FORMATS.items() if form.whole]
"""Formats whose markers are always tokens."""


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        *one_in_turn([name for name in FORMATS if name not in WHOLE], [True, False]),
        *((name, True) for name in WHOLE),
    ],
)
def test_whatever_a_forced_answer_is_it_calls_what_is_offered_and_fits(
    name: str, tokens: bool
) -> None:
    form = FORMATS[name]
    tools = TOOLS
    for seed in range(6 if ALL else 2):
        walk = Walk(form, seed, tokens=tokens)
        matcher = walk.grammars.calls(form, tools, parallel=bool(seed % 2))
        drawn = walk.draw(matcher)
        answer = walk.read(drawn, tools)
        assert answer.calls, walk.tokenizer.decode(drawn)
        assert seed % 2 or len(answer.calls) == 1
        check(answer, tools)


LINES = r"""start: "begin" LF (("+" | "\"") /[ab"\\\t ]{0,6}/ LF){1,3} "end"
%import common.LF
"""
TEXT = Tool(
    "write",
    parameters={
        "type": "object",
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
        "additionalProperties": False,
    },
    strict=True,
    text_grammar=LINES,
)


@every_format
def test_a_text_that_is_held_to_a_grammar_is_derived_from_it(form: ToolFormat) -> None:
    for seed in range(3):
        walk = Walk(form, seed, tokens=True)
        matcher = walk.grammars.calls(form, (TEXT,), parallel=False)
        drawn = walk.draw(matcher)
        answer = walk.read(drawn, (TEXT,))
        ((name, arguments),) = answer.values
        assert name == "write"
        assert re.fullmatch(r'begin\n([+"][ab"\\\t ]{0,6}\n){1,3}end', arguments["input"]), (
            arguments
        )


@pytest.mark.parametrize("name", ["weather/now", "mcp:weather@2", "größe+1", "a.b-c"])
@every_format
def test_a_function_of_any_name_can_be_demanded_and_is_read(form: ToolFormat, name: str) -> None:
    tools = (replace(CLOCK, name=name),)
    walk = Walk(form, 1, tokens=True)
    drawn = walk.draw(walk.grammars.calls(form, tools, parallel=False))
    answer = walk.read(drawn, tools)
    assert answer.values == [(name, {})], walk.tokenizer.decode(drawn)


@every_format
def test_between_free_text_calls_fit(form: ToolFormat) -> None:
    if form.name == "muse-spark":
        pytest.skip("its headers are its own choice")
    tools = TOOLS
    called = 0
    for seed in range(8 if ALL else 3):
        walk = Walk(form, seed, tokens=True)
        openers = form.openers
        walk.closers += [walk.tokenizer.encode(o, add_special_tokens=False) for o in openers] * 8
        matcher = walk.grammars.free_calls(form, tools, openers, param="tools")
        answer = walk.read(walk.draw(matcher), tools)
        called += len(answer.calls)
        check(answer, tools, free=True)
    assert called


@every_format
def test_text_is_free(form: ToolFormat) -> None:
    if form.name == "muse-spark":
        pytest.skip("its headers are its own choice")
    walk = Walk(form, 0, tokens=True)
    text = 'No call: {"name": "Ada", "of": [1]} <b>é</b> [x]'
    if form.name == "harmony":
        text = f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>{text}"
    tokens = walk.tokenizer.encode(text, add_special_tokens=False)
    matcher = walk.grammars.free_calls(form, TOOLS[1:], form.openers, param="tools")
    assert matcher.consume_tokens(tokens)
    assert matcher.is_accepting()


def written(walk: Walk, drawn: list[int], output: OutputFormat) -> list[str]:
    """The text of each token."""
    texts = TokenTexts(walk.tokenizer).stream(output)
    return [*(texts.add(token) for token in drawn), texts.finish()]


@every_format
def test_generated_outputs_mean_the_same_however_they_are_cut(form: ToolFormat) -> None:
    tools = TOOLS
    for seed in range(2 if ALL else 1):
        walk = Walk(form, seed, tokens=True)
        output = output_of(form, offered(tools), walk.tokenizer)
        pieces = written(walk, walk.draw(walk.grammars.calls(form, tools, parallel=True)), output)
        text = "".join(pieces)
        whole = parse([text], output)
        assert parse(pieces, output) == whole
        assert parse(text, output) == whole
        for place in range(0, len(text), 1 + len(text) // 20):
            assert parse([text[:place], text[place:]], output) == whole
            cut = parse(text[:place], output, reason="length")
            assert len(cut.calls) <= len(whole.calls)
            for call, full in zip(cut.calls, whole.calls, strict=False):
                assert (call.name, full.arguments[: len(call.arguments)]) == (
                    full.name,
                    call.arguments,
                )


OBJECT = {"type": "object"}


@pytest.mark.parametrize(
    ("form", "tool", "param", "reason"),
    [
        (formats.QWEN_CODER, Tool("a<b"), "tools.name", "a<b"),
        (formats.MISTRAL_ARGS, Tool("a[b"), "tools.name", "a[b"),
        (formats.GLM, Tool("a{b"), "tools.name", "a{b"),
        (formats.DEEPSEEK, Tool("a" * 129), "tools.name", "a" * 129),
        (formats.GEMMA_4, Tool("a{b"), "tools.name", "a{b"),
        (formats.LFM_2, Tool("a(b"), "tools.name", "a(b"),
        (
            formats.LFM_2,
            Tool("f", parameters=OBJECT | {"properties": {"a=b": {}}}),
            "tools.parameters",
            "a=b",
        ),
        (
            formats.GLM,
            Tool("f", parameters={"anyOf": [OBJECT, OBJECT]}),
            "tools.parameters",
            "anyOf",
        ),
        (
            formats.GLM,
            Tool("f", parameters=OBJECT | {"properties": {"a": {"type": "string", "not": {}}}}),
            "tools.parameters",
            "not",
        ),
        (
            formats.MINIMAX,
            Tool("f", parameters=OBJECT | {"properties": {"a": {"$ref": "#/nowhere"}}}),
            "tools.parameters",
            "nowhere",
        ),
        (
            formats.GEMMA_4,
            Tool("f", parameters=OBJECT | {"properties": {"a b": {"type": "string"}}}),
            "tools.parameters",
            "a b",
        ),
        (
            formats.DEEPSEEK_32,
            Tool(
                "f",
                parameters=OBJECT | {"properties": {"a": {"type": "string", "pattern": "a(?=b)"}}},
            ),
            "tools.parameters",
            "look-around",
        ),
    ],
)
def test_what_a_format_has_no_form_for_is_refused_by_name(
    form: ToolFormat, tool: Tool, param: str, reason: str
) -> None:
    _, grammars = tokenizer_of(FORMATS["hermes"], tokens=False)
    with pytest.raises(InvalidParameter, match=re.escape(reason)) as refusal:
        grammars.calls(form, [tool], parallel=False)
    assert refusal.value.param == param


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string"}, ["", "a\n", "</b>", '"'], ["a</parameter>"]),
        ({"type": "string", "maxLength": 2}, ["ab"], ["abc"]),
        ({"type": "string", "pattern": "b"}, ["abc", "b"], ["a"]),
        ({"type": "string", "pattern": "^b+/$"}, ["bb/"], ["abb/"]),
        ({"type": "string", "pattern": r"^\d+$"}, ["12"], ["２", "٣", "a"]),
        (
            {"type": "string", "pattern": r"^[\w.-]+\W[^\d]\D\\d$"},
            ["a_.-éxé\\d"],
            ["é-xx\\d", "a-1x\\d"],
        ),
        ({"type": "string", "format": "ipv4"}, ["127.0.0.1"], ["127.0.0.256", "x"]),
        ({"type": "string", "format": "email"}, ["a.b@c-d.org"], ["a@b", "a"]),
        ({"type": "string", "format": "date-time"}, ["2024-02-28T01:02:03Z"], ["2024-02-28"]),
        ({"enum": ["a", "b"]}, ["a"], ["c", '"a"']),
        ({"type": "integer"}, ["5", "-999999999999999999"], ["5.0", "five", "9" * 19]),
        ({"type": "array", "items": {"type": "boolean"}}, ["[true, false]"], ["[1]", "true"]),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ["null", "a"], []),
        ({"type": ["string", "integer"]}, ["5", "a"], ["5a"]),
        (True, ["anything", "5"], []),
    ],
)
def test_values_are_written_as_their_schema_says(
    schema: Any, good: list[str], bad: list[str]
) -> None:
    _, grammars = tokenizer_of(FORMATS["qwen3-coder"], tokens=False)
    tool = Tool("f", parameters=OBJECT | {"properties": {"a": schema}, "required": ["a"]})

    def takes(value: str) -> bool:
        text = f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
        matcher = grammars.calls(formats.QWEN_CODER, [tool], parallel=False)
        tokens = grammars.texts.tokenize_str(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    assert all(map(takes, good)), [value for value in good if not takes(value)]
    assert not any(map(takes, bad)), [value for value in bad if takes(value)]
