from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from mlx_manager.mlx_server.core import Choice, Grammar, JsonObject, JsonSchema, Regex
from mlx_manager.mlx_server.errors import InvalidParameter, UnsupportedParameter
from mlx_manager.mlx_server.protocols.constraints import constraint
from mlx_manager.mlx_server.schemas.openai import ChatCompletionRequest, CompletionRequest

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
TEXT = json.dumps(SCHEMA)


def found(**fields: Any) -> object:
    messages = [{"role": "user", "content": "hi"}]
    return constraint(ChatCompletionRequest.model_validate({"messages": messages} | fields))


@pytest.mark.parametrize(
    ("fields", "expected", "param"),
    [
        ({"response_format": {"type": "json_object"}}, JsonObject(), "response_format"),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            JsonSchema(TEXT),
            "response_format",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            JsonSchema(TEXT, strict=True),
            "response_format",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            JsonSchema("true"),
            "response_format",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": None}}},
            JsonSchema("true"),
            "response_format",
        ),
        (
            {"response_format": {"type": "json_schema", "schema": SCHEMA}},
            JsonSchema(TEXT),
            "response_format",
        ),
        ({"guided_json": SCHEMA}, JsonSchema(TEXT), "guided_json"),
        ({"guided_json": TEXT}, JsonSchema(TEXT), "guided_json"),
        ({"guided_regex": "a+"}, Regex("a+"), "guided_regex"),
        ({"guided_choice": ["a", "b"]}, Choice(("a", "b")), "guided_choice"),
        ({"guided_grammar": "start: A"}, Grammar("start: A"), "guided_grammar"),
        ({"structured_outputs": {"json": SCHEMA}}, JsonSchema(TEXT), "structured_outputs.json"),
        ({"structured_outputs": {"json_object": True}}, JsonObject(), None),
        ({"structured_outputs": {"regex": "a"}}, Regex("a"), "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a"]}}, Choice(("a",)), "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "x"}}, Grammar("x"), "structured_outputs.grammar"),
    ],
)
def test_each_way_to_ask_for_a_form_is_understood(
    fields: dict[str, Any], expected: Any, param: str | None
):
    asked = found(**fields)
    assert asked == expected
    assert param is None or asked.param == param


@pytest.mark.parametrize(
    "fields",
    [{}, {"response_format": {"type": "text"}}, {"guided_json": None, "structured_outputs": None}],
)
def test_no_form_is_asked_for(fields: dict[str, Any]):
    assert found(**fields) is None


def test_the_order_of_properties_is_kept():
    asked = found(guided_json=SCHEMA)
    assert isinstance(asked, JsonSchema)
    assert list(json.loads(asked.schema)["properties"]) == ["b", "a"]


def test_completions_take_them_too():
    body = CompletionRequest(prompt="x", response_format={"type": "json_object"})
    assert constraint(body) == JsonObject()


def test_two_forms_exclude_each_other():
    with pytest.raises(InvalidParameter, match=r"guided_regex.*guided_choice"):
        found(guided_regex="a", guided_choice=["a"])
    with pytest.raises(InvalidParameter, match=r"structured_outputs\.json"):
        found(structured_outputs={"json": SCHEMA, "regex": "a"})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"type": "json_object", "json_schema": {"schema": SCHEMA}}, "json_schema"),
        ({"type": "text", "json_schema": {"schema": SCHEMA}}, "json_schema"),
        ({"type": "text", "schema": SCHEMA}, "schema"),
        ({"type": "json_schema", "schema": SCHEMA, "json_schema": {"strict": True}}, "schema"),
    ],
)
def test_a_schema_that_would_not_be_held_to_is_refused(fields: dict[str, Any], param: str):
    with pytest.raises(InvalidParameter, match=f"`response_format.{param}` goes with") as caught:
        found(response_format=fields)
    assert caught.value.param == f"response_format.{param}"


def test_what_is_wrong_is_named():
    with pytest.raises(InvalidParameter, match=r"response_format\.json_schema"):
        found(response_format={"type": "json_schema"})
    with pytest.raises(InvalidParameter, match="guided_json"):
        found(guided_json="{")
    with pytest.raises(ValidationError, match="guided_choice"):
        found(guided_choice=[])
    with pytest.raises(ValidationError, match="response_format"):
        found(response_format={"type": "xml"})
    with pytest.raises(UnsupportedParameter, match="whitespace_pattern"):
        found(structured_outputs={"json": SCHEMA, "whitespace_pattern": " "})
