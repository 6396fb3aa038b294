"""JSON Schemas by the hundred, drawn by hypothesis: every keyword, some that contradict others."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

Schema = Any
Keywords = dict[str, st.SearchStrategy[Any]]

NAMES = st.sampled_from(["a", "b", "id", "name", 'quo"te', "größe"])
NUMBERS = st.integers(-50, 300)
COUNTS = st.integers(0, 4)
SCALARS = st.none() | st.booleans() | NUMBERS | st.text('ab é\n"', max_size=5)
PATTERNS = st.sampled_from([r"^[a-f]{2,4}$", r"^\d+-\d+$", "^(yes|no)$", "x", r"^\w*$"])
FORMATS = st.sampled_from(["date", "time", "uuid", "ipv4", "email", "date-time", "shoe-size"])
INVALID = st.sampled_from(
    [
        {"type": "thing"},
        {"type": "string", "minLength": "two"},
        {"type": "string", "pattern": "("},
        {"type": "integer", "maximum": "ten"},
        {"type": "array", "items": 3},
        {"type": "object", "properties": ["a"]},
        {"enum": "yes"},
        {"anyOf": {}},
        {"$ref": "#/nowhere"},
        3,
    ]
)


def of_type(name: str, **keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[Schema]:
    """Schemas of one type with any of the keywords."""
    return st.fixed_dictionaries({"type": st.just(name)}, optional=keywords)


SIMPLE = st.one_of(
    of_type("string", minLength=COUNTS, maxLength=st.integers(2, 9)),
    of_type("string", pattern=PATTERNS),
    of_type("string", format=FORMATS, maxLength=st.just(40)),
    of_type("integer", minimum=NUMBERS, maximum=NUMBERS),
    of_type("integer", exclusiveMinimum=NUMBERS, multipleOf=st.integers(1, 7)),
    of_type("number", minimum=NUMBERS, exclusiveMaximum=NUMBERS),
    of_type("boolean"),
    of_type("null"),
    st.fixed_dictionaries({"enum": st.lists(SCALARS, min_size=1, max_size=4, unique_by=json.dumps)}),
    st.fixed_dictionaries({"const": SCALARS}),
    st.fixed_dictionaries({"type": st.just(["integer", "null"])}),
    st.booleans(),
)  # fmt: skip


def nested(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    several = st.lists(inner, min_size=1, max_size=3)
    objects: Keywords = {
        "properties": st.dictionaries(NAMES, inner, max_size=3),
        "required": st.lists(NAMES, max_size=3, unique=True),
        "additionalProperties": st.booleans() | inner,
    }
    return st.one_of(
        of_type("object", **objects),
        of_type("object", minProperties=COUNTS, maxProperties=COUNTS, **objects),
        of_type("object", patternProperties=st.dictionaries(PATTERNS, inner, max_size=2)),
        of_type("array", items=inner, minItems=COUNTS, maxItems=COUNTS),
        of_type("array", prefixItems=several, items=inner, minItems=COUNTS),
        st.fixed_dictionaries({"anyOf": several}),
        st.fixed_dictionaries({"oneOf": several}),
        st.fixed_dictionaries({"allOf": several}),
    )


def odd(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    """Schemas that grammars can't hold, or that are none, around and inside of others."""
    return st.one_of(
        of_type("array", items=inner, uniqueItems=st.just(True), maxItems=COUNTS),
        of_type("array", contains=inner),
        st.fixed_dictionaries({"not": inner}),
        st.fixed_dictionaries({"if": inner, "then": inner}, optional={"else": inner}),
        st.builds(lambda a, b: {"allOf": [a, b]}, inner, INVALID),
        st.builds(lambda a, b: {"type": "array", "items": [a, b]}, inner, INVALID),
        INVALID.filter(lambda schema: schema != 3),
    )


def with_definition(schema: Schema) -> Schema:
    return {
        "$defs": {"x": schema},
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/x"}},
        "required": ["a"],
        "additionalProperties": False,
    }


FORMS = nested(st.recursive(SIMPLE, nested, max_leaves=6))
SCHEMAS = FORMS | FORMS | FORMS.map(with_definition) | odd(FORMS)


def generated_schemas(number: int) -> list[Schema]:
    """`number` different schemas, the same in every run."""
    found: dict[str, Schema] = {}

    @settings(
        max_examples=2 * number,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(SCHEMAS)
    def collect(schema: Schema) -> None:
        found[json.dumps(schema)] = schema

    collect()
    return list(found.values())[-number:]
