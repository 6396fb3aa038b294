"""Constraints on the content of an answer, in the ways that clients state them."""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import from_json

from mlx_manager.mlx_server.core import (
    Choice,
    Constraint,
    Grammar,
    JsonObject,
    JsonSchema,
    Regex,
)
from mlx_manager.mlx_server.errors import InvalidParameter, UnsupportedParameter
from mlx_manager.mlx_server.schemas.openai import (
    GenerationParameters,
    ResponseFormat,
    StructuredOutputs,
)
from mlx_manager.mlx_server.schemas.surrogates import mended


def constraint(body: GenerationParameters) -> Constraint | None:
    """
    Raises:
        InvalidParameter: there is more than one, or a schema that is no JSON.
        UnsupportedParameter: a part of `structured_outputs` that can't be honoured.
    """
    found: list[Constraint] = []
    if body.response_format is not None:
        found += _response_format(body.response_format)
    if body.structured_outputs is not None:
        found += _structured(body.structured_outputs)
    if body.guided_json is not None:
        found.append(_schema(body.guided_json, "guided_json"))
    if body.guided_regex is not None:
        found.append(Regex(body.guided_regex, "guided_regex"))
    if body.guided_choice is not None:
        found.append(Choice(tuple(body.guided_choice), "guided_choice"))
    if body.json_schema is not None:
        found.append(_schema(body.json_schema, "json_schema"))
    if body.regex:
        found.append(Regex(body.regex, "regex"))
    for name in ("guided_grammar", "grammar", "ebnf"):
        if text := getattr(body, name):
            found.append(Grammar(text, name))
    if len(found) > 1:
        names = " and ".join(f"`{each.param}`" for each in found)
        raise InvalidParameter(f"{names} exclude each other.", param=found[1].param)
    return found[0] if found else None


def _response_format(asked: ResponseFormat) -> list[Constraint]:
    given, schema = asked.json_schema, asked.schema_
    if given is not None and asked.type != "json_schema":
        raise InvalidParameter(
            "`response_format.json_schema` goes with type 'json_schema', and only with it.",
            param="response_format.json_schema",
        )
    if schema is not None and (asked.type == "text" or given is not None):
        raise InvalidParameter(
            "`response_format.schema` goes with type 'json_object' or 'json_schema', and not "
            "beside `response_format.json_schema`.",
            param="response_format.schema",
        )
    match asked.type:
        case "text":
            return []
        case "json_object":
            return [JsonObject() if schema is None else _schema(schema)]
        case "json_schema":
            if schema is not None:
                return [_schema(schema)]
            if given is None:
                raise InvalidParameter(
                    "`response_format.json_schema` is missing.", param="response_format.json_schema"
                )
            wanted = True if given.schema_ is None else given.schema_
            return [_schema(wanted, strict=given.strict or False)]


def _structured(asked: StructuredOutputs) -> list[Constraint]:
    _refuse_layout(asked)
    found: list[Constraint] = []
    if asked.json_ is not None:
        found.append(_schema(asked.json_, "structured_outputs.json"))
    if asked.json_object:
        found.append(JsonObject("structured_outputs.json_object"))
    if asked.regex is not None:
        found.append(Regex(asked.regex, "structured_outputs.regex"))
    if asked.choice is not None:
        found.append(Choice(tuple(asked.choice), "structured_outputs.choice"))
    if asked.grammar is not None:
        found.append(Grammar(asked.grammar, "structured_outputs.grammar"))
    return found


def _refuse_layout(asked: StructuredOutputs) -> None:
    for name in (
        "structural_tag",
        "whitespace_pattern",
        "disable_any_whitespace",
        "disable_additional_properties",
    ):
        if getattr(asked, name):
            raise UnsupportedParameter(
                f"`structured_outputs.{name}` is not supported by this server.",
                param=f"structured_outputs.{name}",
            )


def _schema(
    given: dict[str, Any] | str | bool, param: str = "response_format", *, strict: bool = False
) -> JsonSchema:
    if not isinstance(given, str):
        return JsonSchema(json.dumps(given), strict, param)
    try:
        # As deep as a body may be nested, so that a text is no way around that.
        from_json(given)
    except ValueError:
        given = mended(given.encode()).decode()
        try:
            from_json(given)
        except ValueError as error:
            raise InvalidParameter(f"`{param}` is not valid JSON: {error}.", param=param) from error
    return JsonSchema(given, strict, param)
