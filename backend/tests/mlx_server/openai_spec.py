"""OpenAI's own description of its API, to validate against. Skips where it is not at hand."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

SPEC = Path(__file__).parents[4] / "shared" / "data" / "openai_openapi.json"


def check(component: str, value: object) -> None:
    """Validate `value` against the component schema of that name."""
    if not SPEC.exists():
        pytest.skip(f"OpenAI's API description is not at {SPEC}")
    error = next(iter(validator(component).iter_errors(value)), None)
    assert error is None, f"{component}: {error}\n{json.dumps(value)}"


@cache
def validator(component: str) -> Draft202012Validator:
    reference = {"$ref": f"#/components/schemas/{component}"}
    return Draft202012Validator(reference | {"components": components()})


@cache
def components() -> dict[str, Any]:
    described = json.loads(SPEC.read_text())["components"]
    # The description forbids what the API itself sends in every chunk but the last.
    completion = described["schemas"]["CreateCompletionResponse"]["properties"]["choices"]
    completion["items"]["properties"]["finish_reason"]["nullable"] = True
    translated = translate(described)
    assert isinstance(translated, dict)
    return translated


def translate(schema: Any) -> Any:
    """From OpenAPI 3.0's `nullable` to JSON Schema's null type."""
    if isinstance(schema, list):
        return [translate(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    translated = {key: translate(value) for key, value in schema.items() if key != "nullable"}
    if schema.get("nullable") is True:
        return {"anyOf": [translated, {"type": "null"}]}
    return translated
