"""Tools come with whatever their authors took for a JSON Schema."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mlx_lm.utils import load_tokenizer

import mlx_manager.demo_model
from mlx_manager.mlx_server.core import JsonObject, JsonSchema, Tool
from mlx_manager.mlx_server.errors import InvalidParameter
from mlx_manager.mlx_server.text.grammar.matchers import Grammars
from mlx_manager.mlx_server.text.tool_calls.formats import FORMATS
from mlx_manager.mlx_server.text.tool_calls.schemas import (
    MalformedError,
    OversizedError,
    parameters_schema,
    typed_parameters,
)

KEYWORDS = (
    *("type", "properties", "required", "anyOf", "oneOf", "allOf", "enum", "const", "$ref"),
    *("$defs", "additionalProperties", "items", "not", "format", "pattern", "x-guidance"),
)
VALUES = st.recursive(
    st.sampled_from([None, True, 5, "x", "string", "object", "#", "#/$defs/x"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from([*KEYWORDS, "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)
SCHEMAS = st.dictionaries(st.sampled_from(KEYWORDS), VALUES, max_size=4)


@given(SCHEMAS)
def test_whatever_a_tool_brings_its_calls_can_be_read(parameters: dict[str, Any]):
    assert all(typed.kinds for typed in typed_parameters(parameters).names.values())


@given(SCHEMAS)
@example({"x": {"allOf": None}})
@example({"properties": {}, "allOf": [{"x": {"properties": None, "anyOf": []}}]})
@example({"properties": {}, "$ref": "#/x", "x": {"properties": None, "anyOf": 5}})
def test_a_tools_parameters_are_an_object_or_said_to_be_no_schema(parameters: dict[str, Any]):
    with suppress(MalformedError):
        assert parameters_schema(Tool("f", parameters=parameters))["type"] == "object"


def chain(length: int) -> dict[str, Any]:
    """Objects of which each refers to the next."""
    links = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(length)}
    return {"$defs": links, "$ref": "#/$defs/d0"}


def test_references_may_be_a_chain_that_is_not_too_long():
    found = parameters_schema(Tool("f", parameters=chain(60)))
    assert found["$defs"]["d59"]["additionalProperties"] is False
    with pytest.raises(OversizedError, match=r"401 schemas .* at most 128"):
        parameters_schema(Tool("f", parameters=chain(200)))


@pytest.mark.parametrize(
    ("leaf", "kind"),
    [(False, "any"), ({"type": "string"}, "string"), ({"properties": {"a": {}}}, "object")],
)
def test_alternatives_of_alternatives_do_not_take_time_with_their_number(leaf: Any, kind: str):
    ways = [{"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 10} for i in range(15)]
    links = {f"d{i}": schema for i, schema in enumerate([*ways, leaf])}
    value = {"$ref": "#/$defs/d0"}
    typed = typed_parameters({"$defs": links, "properties": {"a": value}})
    assert typed.names["a"].kinds == {kind}
    whole = {"$defs": links, "allOf": [value, {"properties": {"b": {}}}]}
    assert parameters_schema(Tool("f", parameters=whole))["type"] == "object"


@pytest.mark.parametrize("name", ["llama", "hermes", "qwen3-coder", "kimi-k3"])
@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": None},
        {"type": "object", "required": None},
        {"type": "object", "required": [5]},
        {"type": "object", "properties": {"a": 5}},
        {"type": "object", "properties": {"a": {"type": {"a": 5}}}},
        {"type": "object", "properties": {"a": {"enum": None}}},
        {"type": "object", "properties": {"a": {"anyOf": {"type": "string"}}}},
        {"$ref": None},
        {"x-guidance": 5},
    ],
)
def test_what_is_no_schema_is_refused_by_its_place(name: str, parameters: dict[str, Any]):
    grammars = Grammars(load_tokenizer(Path(mlx_manager.demo_model.__file__).parent), (2553,))
    form, tools = FORMATS[name], [Tool("f", parameters=parameters)]
    for made in (
        lambda: grammars.calls(form, tools, parallel=True),
        lambda: grammars.free_calls(form, tools, [], param="tools"),
        lambda: grammars.answer_or_calls(JsonObject(), form, tools, parallel=True),
    ):
        with pytest.raises(InvalidParameter, match=r"no JSON schema.*must be") as caught:
            made()
        assert caught.value.param == "tools.parameters"


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(load_tokenizer(Path(mlx_manager.demo_model.__file__).parent), (2553,))


@given(SCHEMAS, st.sampled_from(sorted(FORMATS)))
@example({"properties": {"a": True}}, "llama")
@example({"properties": {"a": False}, "required": ["a"]}, "llama")
def test_calls_of_whatever_a_tool_brings_have_a_grammar_or_are_refused(
    grammars: Grammars, parameters: dict[str, Any], name: str
):
    form, tools = FORMATS[name], [Tool("f", parameters=parameters)]
    with suppress(InvalidParameter):
        grammars.calls(form, tools, parallel=True)
    with suppress(InvalidParameter):
        grammars.free_calls(form, tools, [], param="tools")


def test_what_is_no_schema_of_an_answer_is_refused():
    grammars = Grammars(load_tokenizer(Path(mlx_manager.demo_model.__file__).parent), (2553,))
    with pytest.raises(InvalidParameter, match="response_format"):
        grammars.answer(JsonSchema('{"x-guidance": 5}'))
