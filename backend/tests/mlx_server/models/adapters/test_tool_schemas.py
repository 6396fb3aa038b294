"""Tools' parameters for templates that print types, and for those that dump the schema."""

from __future__ import annotations

import json
from typing import Any

import pytest
from models.adapters.published import NAMES, REDUCED_NAMES, loaded

from mlx_manager.mlx_server.core import Conversation, Message, Tool
from mlx_manager.mlx_server.models.adapters import get_adapter

HERMES, GEMMA, OSS, QWEN3 = NAMES[2], NAMES[7], NAMES[13], NAMES[5]

EVERYTHING: dict[str, Any] = {
    "type": "object",
    "properties": {
        "when": {"$ref": "#/$defs/When", "description": "word1"},
        "maybe": {"type": ["string", "null"], "description": "word2"},
        "either": {
            "anyOf": [
                {"type": "string", "description": "word3"},
                {"type": "array", "items": {"type": "integer"}, "description": "word4"},
            ]
        },
        "both": {"allOf": [{"$ref": "#/$defs/Node"}, {"description": "word5"}]},
        "one": {"oneOf": [{"const": "word6"}, {"type": "null"}]},
        "list": {"type": "array", "items": {"$ref": "#/$defs/Node"}},
        "many": {"type": ["string", "integer"], "enum": ["word7", 3]},
        "type": {"type": "string", "description": "word8"},
        "items": {
            "type": "object",
            "additionalProperties": {"type": "string", "description": "word9"},
        },
        "first": {"type": "array", "prefixItems": [{"type": "string", "description": "word10"}]},
        "any": True,
        "nothing": {"type": "null", "description": "word16"},
    },
    "required": ["when"],
    "$defs": {
        "When": {
            "type": "object",
            "description": "word11",
            "properties": {
                "at": {"type": "string", "format": "date", "description": "word12"},
                "kind": {"$ref": "#/$defs/Kind"},
            },
        },
        "Kind": {"type": "string", "enum": ["word13", "word14"]},
        "Node": {
            "type": "object",
            "properties": {
                "value": {"type": "string", "description": "word15"},
                "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]},
            },
        },
    },
}


@pytest.fixture(params=[*NAMES, *REDUCED_NAMES])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def told(name: str, parameters: dict[str, Any]) -> str:
    config, tokenizer = loaded(name)
    adapter = get_adapter(config, name, tokenizer)
    tool = Tool("find", "Find things", parameters)
    return adapter.render_text(Conversation((Message("user", "Hi"),), (tool,)), tokenizer)


def test_all_that_is_said_of_parameters_reaches_the_model(name: str) -> None:
    text = told(name, EVERYTHING)
    assert [n for n in range(1, 17) if f"word{n}" not in text] == []
    assert [each for each in EVERYTHING["properties"] if each not in text] == []


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        (
            {
                "allOf": [
                    {"type": "object", "properties": {"aa": {"type": "string"}}},
                    {"properties": {"bb": {"type": "integer", "description": "word1"}}},
                ]
            },
            ("aa", "bb", "word1"),
        ),
        (
            {
                "$ref": "#/definitions/Root",
                "definitions": {
                    "Root": {
                        "type": "object",
                        "properties": {"aa": {"type": "string", "description": "word1"}},
                    }
                },
            },
            ("aa", "word1"),
        ),
        (
            {
                "anyOf": [
                    {"type": "object", "properties": {"aa": {"type": "string"}}},
                    {"type": "object", "properties": {"bb": {"description": "word1"}}},
                ]
            },
            ("aa", "bb", "word1"),
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"$ref": "#/$defs/x~1y%20z"}},
                "$defs": {"x/y z": {"type": "string", "description": "word1"}},
            },
            ("word1",),
        ),
    ],
    ids=["allOf", "$ref", "anyOf", "escapes"],
)
def test_what_the_whole_is_made_of_reaches_the_model(
    name: str, parameters: dict[str, Any], words: tuple[str, ...]
) -> None:
    text = told(name, parameters)
    assert [word for word in words if word not in text] == []


def test_a_template_that_dumps_the_schema_gets_it_as_it_came() -> None:
    for name in (QWEN3, GEMMA):
        assert json.dumps(EVERYTHING) in told(name, EVERYTHING)


def test_references_are_printed_as_what_they_name() -> None:
    text = told(OSS, EVERYTHING)
    assert "maybe?: string | null" in text
    assert '"word13" | "word14"' in text
    assert "Node, as above" in text
    text = told(HERMES, {"type": "object", **EVERYTHING})
    assert "when: dict" in text
    assert "maybe: str" in text


def test_null_alone_is_no_reason_to_fail() -> None:
    """Hermes's macro goes through the letters of a type that it does not know, without an end."""
    for parameter in ({"type": ["string", "null"]}, {"type": "null"}, {"type": ["null"]}):
        text = told(HERMES, {"type": "object", "properties": {"city": parameter}})
        assert "city" in text


def bomb(levels: int, width: int) -> dict[str, Any]:
    definitions = {
        f"a{n}": {
            "type": "object",
            "properties": {f"k{w}": {"$ref": f"#/$defs/a{n + 1}"} for w in range(width)},
        }
        for n in range(levels)
    }
    return {
        "type": "object",
        "properties": {"p": {"$ref": "#/$defs/a0"}},
        "$defs": {**definitions, f"a{levels}": {"type": "string", "description": "the end"}},
    }


@pytest.mark.parametrize(
    "parameters",
    [
        bomb(30, 10),
        bomb(1000, 1),
        {
            "type": "object",
            "properties": {f"p{n}": {"$ref": "#/$defs/a"} for n in range(500)},
            "$defs": {"a": {"type": "string", "description": "the end" * 500}},
        },
    ],
    ids=["wide", "deep", "long"],
)
def test_inlining_never_makes_much_of_little(name: str, parameters: dict[str, Any]) -> None:
    text = told(name, parameters)
    assert "the end" in text
    assert len(text) < 6 * len(json.dumps(parameters)) + 50_000


def test_a_schema_too_deep_to_be_gone_through_is_described() -> None:
    schema: dict[str, Any] = {"type": "string", "description": "the end"}
    for _ in range(200):
        schema = {"type": "object", "properties": {"deeper": schema}}
    for name in (OSS, HERMES, GEMMA):
        assert "the end" in told(name, {"type": "object", "properties": {"top": schema}})


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": None},
        {"type": "object", "properties": {"a": None, "b": 5, "c": [], "d": "text"}},
        {"properties": {"a": {"type": 5}, "b": {"type": []}, "c": {"items": [{"type": "string"}]}}},
        {"properties": {"a": {"anyOf": {}}, "b": {"allOf": 5}, "c": {"$ref": 5}, "d": {"enum": 5}}},
        {"properties": {"a": {"$ref": "https://example.com/a"}, "b": {"$ref": "#/nowhere"}}},
        {"properties": {"a": {"$ref": "#"}, "b": {"$ref": "#/properties/b"}}, "required": None},
    ],
)
def test_schemas_that_make_no_sense_do_no_harm(name: str, parameters: dict[str, Any]) -> None:
    assert "Find things" in told(name, parameters)
