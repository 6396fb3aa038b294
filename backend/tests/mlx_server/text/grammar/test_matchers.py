from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher
from mlx_lm.utils import load_tokenizer
from tokenizers.pre_tokenizers import PreTokenizer

import mlx_manager.demo_model
from mlx_manager.mlx_server.core import (
    Choice,
    Constraint,
    Grammar,
    JsonObject,
    JsonSchema,
    Regex,
    Tool,
)
from mlx_manager.mlx_server.errors import InvalidParameter, UnsupportedParameter
from mlx_manager.mlx_server.formats import Aside
from mlx_manager.mlx_server.text.grammar import matchers as grammar
from mlx_manager.mlx_server.text.grammar.matchers import (
    Grammars,
    allows_more_than,
    fill_masks,
    only,
    unheld,
    with_tokens,
)
from mlx_manager.mlx_server.text.tool_calls.formats import FORMATS

SCHEMAS = Path(__file__).parents[6] / "shared/data/json_schemas.jsonl"
END = (2553, 2556, 2557)
WEATHER = Tool(
    "weather.now",
    parameters={
        "type": "dict",
        "properties": {"city": {"type": "string"}, "days": {"type": "float"}},
        "required": ["city"],
    },
)
CLOCK = Tool("clock")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(Path(mlx_manager.demo_model.__file__).parent)


def noting(function: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    def noted(*arguments: Any, **more: Any) -> Any:
        names.append(function.__name__)
        return function(*arguments, **more)

    return noted


class Whole:
    """A part of a tokenizer that is made in Python, and has no form in JSON."""

    def pre_tokenize(self, text: Any) -> None:
        text.split(lambda _, part: [part])


def without_decoder(tokenizer: Any) -> str:
    tokenizer.backend_tokenizer.decoder = None
    return "can't determine decoder type"


def with_a_part_in_python(tokenizer: Any) -> str:
    tokenizer.backend_tokenizer.pre_tokenizer = PreTokenizer.custom(Whole())
    return "Custom PreTokenizer cannot be serialized"


@pytest.mark.parametrize("spoil", [without_decoder, with_a_part_in_python])
def test_a_tokenizer_that_llguidance_can_t_use_is_told(
    spoil: Callable[[Any], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = load_tokenizer(Path(mlx_manager.demo_model.__file__).parent)
    reason = spoil(own._tokenizer)
    grammars = Grammars(own, END)
    tried: list[str] = []
    monkeypatch.setattr(grammar, "vocabulary", noting(grammar.vocabulary, tried))
    for _ in range(2):
        with pytest.raises(UnsupportedParameter, match=reason) as caught:
            grammars.answer(JsonObject())
        assert caught.value.param == JsonObject().param
    assert tried == ["vocabulary"]


@pytest.fixture(scope="module")
def grammars(tokenizer: Any) -> Grammars:
    return Grammars(tokenizer, END)


def allowed(grammars: Grammars, matcher: LLMatcher) -> set[int]:
    mask = fill_masks(None, [matcher], grammars.words)[0]
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def test_a_tokenizer_that_cuts_and_pads_texts_has_the_same_vocabulary(grammars: Grammars) -> None:
    own = load_tokenizer(Path(mlx_manager.demo_model.__file__).parent)
    own._tokenizer.backend_tokenizer.enable_truncation(2)
    own._tokenizer.backend_tokenizer.enable_padding(length=40)
    cutting, text = Grammars(own, END), 'How are "you"?'
    masks = [allowed(each, each.answer(JsonObject())) for each in (grammars, cutting)]
    assert masks[0] == masks[1]
    assert cutting.texts.tokenize_str(text) == grammars.texts.tokenize_str(text)
    # It still does so itself.
    assert len(own._tokenizer.backend_tokenizer.encode(text).ids) == 40


def takes(grammars: Grammars, matcher: LLMatcher, text: str) -> bool:
    """Whether the masks let the whole of `text` be written, and then let it end."""
    for token in grammars.texts.tokenize_str(text):
        if token not in allowed(grammars, matcher):
            return False
        assert matcher.consume_token(token)
    return matcher.is_accepting() and set(END) <= allowed(grammars, matcher)


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        (JsonObject(), ['{"a": 1}', "{}", '{"a": {"b": [null]}}'], ["[1]", "1", '{"a"}']),
        (
            JsonSchema('{"type": "object", "properties": {"a": {"type": "integer"}}}'),
            ['{"a": 1}', '{\n  "a": 1\n}'],
            ['{"a": "x"}', '{"a": 1}\n'],
        ),
        (JsonSchema('{"type": "string", "format": "shoe-size"}'), ['"x"'], ["7"]),
        (JsonSchema('{"type": "string", "format": "date"}'), ['"2024-02-29"'], ['"today"']),
        (JsonSchema("true"), ["7", "[]"], ["seven"]),
        (Regex("^[a-c]{2}/?$"), ["ab", "cc/"], ["a", "abc"]),
        (Choice(("yes", 'no "really"')), ["yes", 'no "really"'], ["ye", "maybe"]),
        (Choice(("a\x7fb", "\x80\u2028")), ["a\x7fb", "\x80\u2028"], ["ab", "a\\u007fb"]),
        (Grammar('start: "a" ("b" | "c")+'), ["abc"], ["a", "d"]),
        (Grammar('root ::= "a" | "b" root'), ["bba"], ["bb"]),
    ],
)
def test_a_constraint_takes_what_fits_and_nothing_else(
    grammars: Grammars, constraint: Constraint, good: list[str], bad: list[str]
):
    for text in good:
        assert takes(grammars, grammars.answer(constraint), text), text
    for text in bad:
        assert not takes(grammars, grammars.answer(constraint), text), text


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (JsonSchema('{"type": "dict"}'), "Invalid type"),
        (JsonSchema('{"not": {}}', strict=True), "not"),
        (JsonSchema("false"), "Unsatisfiable"),
        (JsonSchema("3"), "Unsatisfiable"),
        (
            JsonSchema('{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}'),
            "nothing fits",
        ),
        (JsonSchema('{"$ref": "http://example.org/x.json"}', strict=True), "retriev"),
        (JsonSchema('{"type": "string", "format": "shoe-size"}', strict=True), "shoe-size"),
        (Regex("("), "regex"),
        (Regex("a(?=b)"), "look-around"),
        (Grammar("start: missing"), "missing"),
        (Grammar("root ::= ["), "GBNF"),
    ],
)
def test_what_can_not_be_honoured_is_refused_with_the_reason(
    grammars: Grammars, constraint: Constraint, reason: str
):
    with pytest.raises(InvalidParameter, match=reason) as caught:
        grammars.answer(constraint)
    assert caught.value.param == constraint.param
    assert "<state>" not in caught.value.message


def test_endless_blanks_are_not_json_here(grammars: Grammars):
    assert not takes(grammars, grammars.answer(JsonObject()), "{" + " " * 50 + "}")


def test_copies_of_a_kept_grammar_are_independent(grammars: Grammars):
    first, second = (grammars.answer(Regex("ab")) for _ in range(2))
    assert takes(grammars, first, "ab")
    assert takes(grammars, second, "ab")


@pytest.mark.parametrize(("strict", "share"), [(True, 0.65), (False, 1)])
def test_real_schemas_are_held_to_or_refused(grammars: Grammars, strict: bool, share: float):
    if not SCHEMAS.exists():
        pytest.skip(f"{SCHEMAS} is not here")
    held = refused = 0
    for line in SCHEMAS.read_text().splitlines():
        schema = json.dumps(json.loads(line)["schema"])
        try:
            matcher = grammars.answer(JsonSchema(schema, strict=strict))
        except InvalidParameter:
            refused += 1
        else:
            held += 1
            assert not (strict and unheld(matcher))
    assert held >= share * (held + refused)


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        ({"type": "string"}, ()),
        ({"not": {"type": "string"}, "uniqueItems": True}, ("not", "uniqueItems")),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ("oneOf",)),
        ({"type": "string", "format": "shoe-size"}, ("format shoe-size",)),
        ({"items": {"if": {}, "then": {}}, "contains": {}}, ("contains", "if", "then")),
        ({"type": "string", "pattern": "^(?!a)b"}, ("pattern",)),
        ({"items": {"pattern": "(a)\\1"}, "enum": [["a"]]}, ("pattern",)),
        ({"type": "object", "patternProperties": {"(?=a)": {}}}, ("patternProperties",)),
        ({"properties": {"a": {"$ref": "http://example.org/x.json"}}}, ("$ref",)),
    ],
)
def test_what_of_a_schema_is_not_held_is_named_and_refused_if_it_is_strict(
    grammars: Grammars, schema: dict[str, Any], names: tuple[str, ...]
):
    text = json.dumps(schema)
    assert sorted(unheld(grammars.answer(JsonSchema(text)))) == sorted(names)
    if names:
        with pytest.raises(InvalidParameter):
            grammars.answer(JsonSchema(text, strict=True))


# Forced calls

WRITTEN = {
    "llama": '{"name": "weather.now", "parameters": {"city": "Ulm", "days": 1.5}}',
    "hermes": '<tool_call>\n{"name": "weather.now", "arguments": {"city": "Ulm"}}\n</tool_call>',
    "granite": '<|tool_call|>[{"name": "weather.now", "arguments": {"city": "Ulm"}}]',
    "mistral": '[TOOL_CALLS][{"name": "weather.now", "arguments": {"city": "Ulm"}}]',
    "mistral-args": '[TOOL_CALLS]weather.now[ARGS]{"city": "Ulm"}',
    "kimi-k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather.now:0"
    '<|tool_call_argument_begin|>{"city": "Ulm"}<|tool_call_end|><|tool_calls_section_end|>',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather.now\n"
    '```json\n{"city": "Ulm"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek-3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather.now<｜tool▁sep｜>"
    '{"city": "Ulm"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "harmony": " to=functions.weather.now<|channel|>commentary <|constrain|>json<|message|>"
    '{"city": "Ulm"}',
}


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_are_forced_in_the_models_own_format(grammars: Grammars, name: str):
    def calls(parallel: bool = True) -> LLMatcher:
        return grammars.calls(FORMATS[name], [WEATHER, CLOCK], parallel=parallel)

    assert takes(grammars, calls(), WRITTEN[name])
    assert takes(grammars, calls(False), WRITTEN[name])
    assert not takes(grammars, calls(), WRITTEN[name].replace("weather.now", "calendar"))
    assert not takes(grammars, calls(), WRITTEN[name].replace('"Ulm"', "7"))
    assert not takes(grammars, calls(), WRITTEN[name].replace('"city"', '"town"'))
    assert not takes(grammars, calls(), "Sorry.")


def test_one_call_or_several(grammars: Grammars):
    one = WRITTEN["llama"]
    form = FORMATS["llama"]
    tools = [WEATHER, CLOCK]
    assert takes(grammars, grammars.calls(form, tools, parallel=True), f"{one}\n{one}")
    assert not takes(grammars, grammars.calls(form, tools, parallel=False), f"{one}\n{one}")


def test_thinking_may_stand_before_forced_calls_that_cover_the_whole_answer(grammars: Grammars):
    aside = Aside("<|start_header_id|>", "<|eom_id|>")
    form = replace(FORMATS["llama"], opening=(aside,), whole=True)
    matcher = grammars.calls(form, [CLOCK], parallel=False)
    begin, end = (
        grammars.texts.tokenize_str(t, parse_special=True) for t in (aside.begin, aside.end)
    )
    for token in [*begin, *grammars.texts.tokenize_str("Let me think. {"), *end]:
        assert token in allowed(grammars, matcher)
        assert matcher.consume_token(token)
    assert takes(grammars, matcher, '{"name": "clock", "parameters": {}}')


@pytest.mark.parametrize("name", [name for name in WRITTEN if name != "harmony"])
@pytest.mark.parametrize(
    ("constraint", "answer"),
    [
        (JsonObject(), '{"city": "Ulm"}'),
        (JsonSchema('{"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}'), "7"),
        (Choice(("yes", "no")), "no"),
    ],
)
def test_an_answer_may_be_in_its_form_or_a_call(
    grammars: Grammars, name: str, constraint: Constraint, answer: str
):
    def either() -> LLMatcher:
        return grammars.answer_or_calls(constraint, FORMATS[name], [WEATHER, CLOCK], parallel=True)

    assert takes(grammars, either(), answer)
    assert takes(grammars, either(), WRITTEN[name])
    assert not takes(grammars, either(), "Sorry.")


POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


@pytest.mark.parametrize(
    ("parameters", "good", "bad"),
    [
        # As zod-to-json-schema writes what it has written before.
        (
            {"properties": {"a": POINT, "b": {"$ref": "#/properties/a"}}, "required": ["b"]},
            {"b": {"x": 1}},
            {"b": {"x": "one"}},
        ),
        (
            {"properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
            {"next": {"next": None}},
            {"next": {"name": "f", "parameters": {}}},
        ),
        (
            {
                "$id": "https://example.org/p",
                "$ref": "#/$defs/p",
                "$defs": {"p": POINT},
            },
            {"x": 1},
            {"x": None},
        ),
        ({"properties": {"$ref": {"const": "#"}}, "required": ["$ref"]}, {"$ref": "#"}, {}),
    ],
)
def test_references_within_parameters_hold_wherever_a_call_may_stand(
    grammars: Grammars, parameters: dict[str, Any], good: dict[str, Any], bad: dict[str, Any]
):
    form, tools = FORMATS["llama"], [Tool("f", parameters=parameters)]
    ways = [
        grammars.calls(form, tools, parallel=False),
        grammars.free_calls(form, tools, [], param="tools"),
        grammars.answer_or_calls(JsonSchema('{"type": "integer"}'), form, tools, parallel=False),
    ]
    for matcher in ways:
        for arguments, fits in ((good, True), (bad, False)):
            text = json.dumps({"name": "f", "parameters": arguments})
            assert takes(grammars, matcher.deep_copy(), text) is fits, text


def test_the_tool_at_fault_is_named(grammars: Grammars):
    parameters = {"type": "object", "not": {}}
    bad = Tool("bad", parameters=parameters, strict=True, param="tools[1].function")
    with pytest.raises(InvalidParameter, match="not") as caught:
        grammars.calls(FORMATS["llama"], [CLOCK, bad], parallel=True)
    assert caught.value.param == "tools[1].function.parameters"
    assert "\n" not in caught.value.message
    for constraint in (JsonObject(), Choice(("yes", "no"))):
        with pytest.raises(InvalidParameter, match="not") as caught:
            grammars.answer_or_calls(constraint, FORMATS["llama"], [CLOCK, bad], parallel=True)
        assert caught.value.param == "tools[1].function.parameters"
        assert "\n" not in caught.value.message


@pytest.mark.parametrize("name", WRITTEN)
def test_a_name_that_json_would_write_otherwise_is_refused(grammars: Grammars, name: str):
    tool = Tool("App\\Tools", param="tools[0]")
    with pytest.raises(InvalidParameter, match="no form for") as caught:
        grammars.calls(FORMATS[name], [tool], parallel=True)
    assert caught.value.param == "tools[0].name"


@pytest.mark.parametrize("name", ["llama", "kimi-k2"])
@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "array", "items": {"type": "integer"}},
        {"$ref": "#/$defs/name", "$defs": {"name": {"type": "string"}}},
    ],
)
def test_parameters_that_are_no_object_are_refused(
    grammars: Grammars, name: str, parameters: dict[str, Any]
):
    with pytest.raises(InvalidParameter) as caught:
        grammars.calls(FORMATS[name], [Tool("f", parameters=parameters)], parallel=True)
    assert caught.value.param == "tools.parameters"


A, B = (
    {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}
    for name in "ab"
)


@pytest.mark.parametrize(
    "parameters",
    [
        {"allOf": [A, B]},
        {"type": "object", "$defs": {"A": A}, "allOf": [{"$ref": "#/$defs/A"}, B]},
        {"$defs": {"A": A}, "$ref": "#/$defs/A", **B},
        {"$defs": {"A": A, "C": {"$ref": "#/$defs/A"}}, "$ref": "#/$defs/C", **B},
        {**A, "anyOf": [B, {**B, "properties": {**B["properties"], "c": {"type": "null"}}}]},
    ],
)
@pytest.mark.parametrize("inner", [False, True])
def test_parameters_may_be_named_in_several_places(
    grammars: Grammars, parameters: dict[str, Any], inner: bool
):
    if inner:
        definitions = parameters.pop("$defs", {})
        parameters = {"properties": {"x": parameters}, "required": ["x"], "$defs": definitions}
    matcher = grammars.calls(FORMATS["llama"], [Tool("f", parameters=parameters)], parallel=True)
    for given, fits in (
        ('{"a": 1, "b": 2}', True),
        ('{"a": 1}', False),
        ('{"a": 1, "b": 2, "z": 3}', False),
    ):
        text = f'{{"x": {given}}}' if inner else given
        text = f'{{"name": "f", "parameters": {text}}}'
        assert takes(grammars, matcher.deep_copy(), text) is fits, text


def test_pythons_names_of_types_are_understood_among_others(grammars: Grammars):
    parameters = {"properties": {"x": {"type": ["float", "null"]}}, "required": ["x"]}
    matcher = grammars.calls(FORMATS["llama"], [Tool("f", parameters=parameters)], parallel=True)
    for value, fits in (("1.5", True), ("null", True), ('"a"', False)):
        text = f'{{"name": "f", "parameters": {{"x": {value}}}}}'
        assert takes(grammars, matcher.deep_copy(), text) is fits, text


def test_parameters_that_may_be_an_object_are_one(grammars: Grammars):
    parameters = {"anyOf": [{"type": "string"}, {"type": "object", "properties": {}}]}
    for schema in (parameters, {"type": ["object", "null"], "properties": {}}):
        matcher = grammars.calls(FORMATS["llama"], [Tool("f", parameters=schema)], parallel=True)
        assert takes(grammars, matcher.deep_copy(), '{"name": "f", "parameters": {}}')
        for other in ('"x"', "null"):
            text = f'{{"name": "f", "parameters": {other}}}'
            assert not takes(grammars, matcher.deep_copy(), text)


def test_a_mask_is_asked_what_it_allows_besides() -> None:
    mask = with_tokens(only(40, 2), [3])
    assert allows_more_than(mask, [])
    assert allows_more_than(mask, [3])
    assert not allows_more_than(mask, [3, 40])
    assert not allows_more_than(mask, [-1, 3, 40, 64, 10**9])
    assert not allows_more_than(only(63, 2), [63])
