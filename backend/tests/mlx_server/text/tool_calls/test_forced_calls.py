"""Calls that must be made, in every format: whatever the masks let through is read as a call of an
offered function whose arguments fit."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher
from mlx_lm.tokenizer_utils import TokenizerWrapper, load
from models.adapters.published import Published, write_tokenizer
from text.outputs import Answer, parse
from thorough import ALL

from mlx_manager.mlx_server.core import Tool
from mlx_manager.mlx_server.errors import InvalidParameter
from mlx_manager.mlx_server.formats import Aside, OutputFormat, Region
from mlx_manager.mlx_server.models.adapters import tool_syntax
from mlx_manager.mlx_server.models.adapters.answer import kept_tokens
from mlx_manager.mlx_server.models.adapters.messages import template_tools
from mlx_manager.mlx_server.models.families.gpt_oss import HARMONY
from mlx_manager.mlx_server.text.detokenizer import TokenTexts
from mlx_manager.mlx_server.text.grammar.matchers import Grammars, fill_masks
from mlx_manager.mlx_server.text.output_parser import OutputParser

MARKERS = (
    r"<\|[\w/]+\|?>|<\w+\|>|<｜[^｜]+｜>|｜DSML｜|\[[A-Z_]+\]|</?(?:longcat_)?(?:tool_call|arg_\w+)>"
    r"|</?(?:minimax|seed):tool_call>|</?(?:start|end)_function_call>|<escape>"
)

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


@dataclass(frozen=True)
class Case:
    """A format, and how an answer in it begins."""

    name: str
    syntax: tool_syntax.ToolSyntax
    initial: Region = "content"


def of_module(module: str, start: str, end: str) -> tool_syntax.ToolSyntax:
    parser = import_module(f"mlx_lm.tool_parsers.{module}").parse_tool_call
    return tool_syntax.of_mlx_parser(module, start, end, parser)


CASES = (
    *(
        Case(name.lower(), getattr(tool_syntax, name))
        for name in (
            *("HERMES", "GRANITE", "MISTRAL", "MISTRAL_ARGS", "KIMI_K2", "DEEPSEEK", "DEEPSEEK_31"),
            *("LLAMA", "QWEN_CODER", "GLM", "GLM_47", "LONGCAT", "MINIMAX", "DEEPSEEK_32"),
            *("DEEPSEEK_4", "MINICPM", "KIMI_K3", "SEED", "COMMAND"),
            *("NEMOTRON", "PHI_4", "HUNYUAN", "TOOL_CALLS", "OLMO_3", "APERTUS", "INTERNLM"),
        )
    ),
    Case("muse_spark", tool_syntax.MUSE_SPARK, "header"),
    Case("harmony", tool_syntax.HARMONY, "header"),
    Case("gemma4", of_module("gemma4", "<|tool_call>", "<tool_call|>")),
    Case(
        "function_gemma",
        of_module("function_gemma", "<start_function_call>", "<end_function_call>"),
    ),
    Case("pythonic", of_module("pythonic", "<|tool_call_start|>", "<|tool_call_end|>")),
)


def output_of(case: Case, tokenizer: Any, tools: tuple[Tool, ...]) -> OutputFormat:
    form = case.syntax.form(template_tools(tools))
    edges: dict[Region, tuple[tuple[str, Region], ...]] = {
        "content": tuple((opener, "calls") for opener in case.syntax.openers)
    }
    if case.name == "muse_spark":
        edges = {
            "header": (("<atem:function_calls>", "calls"), ("to=self<|message|>", "reasoning")),
            "reasoning": (("<|eom|>", "header"),),
        }
    harmony = case.name == "harmony"
    if harmony:
        edges = HARMONY.edges
    return OutputFormat(
        edges=edges,
        initial=case.initial,
        header=HARMONY.header if harmony else None,
        channels={"analysis": "reasoning"} if harmony else {},
        calls=form,
        offered={tool.name: tool.parameters for tool in tools},
        keep=kept_tokens(tokenizer, edges, form, HARMONY.header if harmony else ""),
    )


@cache
def tokenizer_of(name: str, *, tokens: bool) -> tuple[TokenizerWrapper, Grammars]:
    """One token a byte and, if `tokens`, one for each of the format's markers."""
    case = next(case for case in CASES if case.name == name)
    form = case.syntax.form([])
    said = " ".join([repr(form.shape), form.item, repr(form.parameters), *case.syntax.openers])
    markers = re.findall(MARKERS, said.replace("\\\\", "").replace("\\", "")) if tokens else []
    with TemporaryDirectory() as folder:
        made = Published("x", "llama", None, "<|eos|>", tuple(dict.fromkeys(markers)))
        write_tokenizer(Path(folder), made, None)
        tokenizer = load(Path(folder))
    return tokenizer, Grammars(tokenizer, [tokenizer.eos_token_id])


class Walk:
    """Draws tokens at random from what a matcher allows, and closes what is open now and then."""

    def __init__(self, case: Case, seed: int, *, tokens: bool) -> None:
        self.case = case
        self.tokenizer, self.grammars = tokenizer_of(case.name, tokens=tokens)
        self.random = random.Random(seed)
        form = case.syntax.form([])
        assert form.shape is not None
        shape = form.shape
        ways = shape.arguments
        asides = [piece.end for piece in shape.opening if isinstance(piece, Aside)]
        pieces = [*asides, getattr(ways, "end", ""), getattr(ways, "quote", ""), '"', "}", "]", ")"]
        pieces += [*shape.closing, *shape.tail, ", ", ",", *shape.middle, *shape.head]
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
        output = replace(output_of(self.case, self.tokenizer, tools), parallel=parallel)
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


@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_whatever_a_forced_answer_is_it_calls_what_is_offered_and_fits(
    case: Case, tokens: bool
) -> None:
    if case.name in ("harmony", "muse_spark") and not tokens:
        pytest.skip("its markers are always tokens")
    tools = TOOLS
    shape = case.syntax.form([]).shape
    assert shape is not None
    for seed in range(6 if ALL else 2):
        walk = Walk(case, seed, tokens=tokens)
        matcher = walk.grammars.calls(shape, tools, parallel=bool(seed % 2))
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


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_text_that_is_held_to_a_grammar_is_derived_from_it(case: Case) -> None:
    shape = case.syntax.form([]).shape
    assert shape is not None
    for seed in range(3):
        walk = Walk(case, seed, tokens=True)
        matcher = walk.grammars.calls(shape, (TEXT,), parallel=False)
        drawn = walk.draw(matcher)
        answer = walk.read(drawn, (TEXT,))
        ((name, arguments),) = answer.values
        assert name == "write"
        assert re.fullmatch(r'begin\n([+"][ab"\\\t ]{0,6}\n){1,3}end', arguments["input"]), (
            arguments
        )


@pytest.mark.parametrize("name", ["weather/now", "mcp:weather@2", "größe+1", "a.b-c"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_function_of_any_name_can_be_demanded_and_is_read(case: Case, name: str) -> None:
    tools = (replace(CLOCK, name=name),)
    shape = case.syntax.form([]).shape
    assert shape is not None
    walk = Walk(case, 1, tokens=True)
    drawn = walk.draw(walk.grammars.calls(shape, tools, parallel=False))
    answer = walk.read(drawn, tools)
    assert answer.values == [(name, {})], walk.tokenizer.decode(drawn)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_between_free_text_calls_fit(case: Case) -> None:
    if case.name == "muse_spark":
        pytest.skip("its headers are its own choice")
    tools = TOOLS
    shape = case.syntax.form([]).shape
    assert shape is not None
    called = 0
    for seed in range(8 if ALL else 3):
        walk = Walk(case, seed, tokens=True)
        openers = case.syntax.openers
        walk.closers += [walk.tokenizer.encode(o, add_special_tokens=False) for o in openers] * 8
        matcher = walk.grammars.free_calls(shape, tools, openers, param="tools")
        answer = walk.read(walk.draw(matcher), tools)
        called += len(answer.calls)
        check(answer, tools, free=True)
    assert called


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_text_is_free(case: Case) -> None:
    if case.name == "muse_spark":
        pytest.skip("its headers are its own choice")
    shape = case.syntax.form([]).shape
    assert shape is not None
    walk = Walk(case, 0, tokens=True)
    text = 'No call: {"name": "Ada", "of": [1]} <b>é</b> [x]'
    if case.name == "harmony":
        text = f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>{text}"
    tokens = walk.tokenizer.encode(text, add_special_tokens=False)
    matcher = walk.grammars.free_calls(shape, TOOLS[1:], case.syntax.openers, param="tools")
    assert matcher.consume_tokens(tokens)
    assert matcher.is_accepting()


def written(walk: Walk, drawn: list[int], output: OutputFormat) -> list[str]:
    """The text of each token."""
    texts = TokenTexts(walk.tokenizer).stream(output)
    return [*(texts.add(token) for token in drawn), texts.finish()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_generated_outputs_mean_the_same_however_they_are_cut(case: Case) -> None:
    tools = TOOLS
    shape = case.syntax.form([]).shape
    assert shape is not None
    for seed in range(2 if ALL else 1):
        walk = Walk(case, seed, tokens=True)
        output = output_of(case, walk.tokenizer, tools)
        pieces = written(walk, walk.draw(walk.grammars.calls(shape, tools, parallel=True)), output)
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
    ("syntax", "tool", "param", "reason"),
    [
        (tool_syntax.QWEN_CODER, Tool("a<b"), "tools.name", "a<b"),
        (tool_syntax.MISTRAL_ARGS, Tool("a[b"), "tools.name", "a[b"),
        (tool_syntax.GLM, Tool("a{b"), "tools.name", "a{b"),
        (tool_syntax.DEEPSEEK, Tool("a" * 129), "tools.name", "a" * 129),
        (of_module("gemma4", "", ""), Tool("a{b"), "tools.name", "a{b"),
        (of_module("pythonic", "", ""), Tool("a(b"), "tools.name", "a(b"),
        (
            of_module("pythonic", "", ""),
            Tool("f", parameters=OBJECT | {"properties": {"a=b": {}}}),
            "tools.parameters",
            "a=b",
        ),
        (
            tool_syntax.GLM,
            Tool("f", parameters={"anyOf": [OBJECT, OBJECT]}),
            "tools.parameters",
            "anyOf",
        ),
        (
            tool_syntax.GLM,
            Tool("f", parameters=OBJECT | {"properties": {"a": {"type": "string", "not": {}}}}),
            "tools.parameters",
            "not",
        ),
        (
            tool_syntax.MINIMAX,
            Tool("f", parameters=OBJECT | {"properties": {"a": {"$ref": "#/nowhere"}}}),
            "tools.parameters",
            "nowhere",
        ),
        (
            of_module("gemma4", "", ""),
            Tool("f", parameters=OBJECT | {"properties": {"a b": {"type": "string"}}}),
            "tools.parameters",
            "a b",
        ),
        (
            tool_syntax.DEEPSEEK_32,
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
    syntax: tool_syntax.ToolSyntax, tool: Tool, param: str, reason: str
) -> None:
    shape = syntax.form([]).shape
    assert shape is not None
    _, grammars = tokenizer_of("hermes", tokens=False)
    with pytest.raises(InvalidParameter, match=re.escape(reason)) as refusal:
        grammars.calls(shape, [tool], parallel=False)
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
    _, grammars = tokenizer_of("qwen_coder", tokens=False)
    shape = tool_syntax.QWEN_CODER.form([]).shape
    assert shape is not None
    tool = Tool("f", parameters=OBJECT | {"properties": {"a": schema}, "required": ["a"]})

    def takes(value: str) -> bool:
        text = f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
        matcher = grammars.calls(shape, [tool], parallel=False)
        tokens = grammars.texts.tokenize_str(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    assert all(map(takes, good)), [value for value in good if not takes(value)]
    assert not any(map(takes, bad)), [value for value in bad if takes(value)]
