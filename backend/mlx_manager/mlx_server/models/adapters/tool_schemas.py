"""Parameters of tools for templates that print types themselves instead of the JSON Schema.

Such a template knows some keywords and ignores the others, or fails at them. Probing finds out
which ones are shown. References are inlined, and the rest is written into a description, as JSON:
nothing that a client says of its tools is lost. A template that dumps the schema gets it unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

Schema = Mapping[str, Any]
Told = Callable[[Schema], str]
"""Function that returns the template's text for a tool with these parameters, "" if refused."""

_DEPTH = 32
"""Levels of a schema that is rewritten; a deeper one is only described."""
_GROWTH = 4
_SMALL = 16_384
"""A schema may grow by inlining to `_GROWTH` times its characters, or to `_SMALL`."""

_NONE: Schema = {"type": "object", "properties": {}}
_ROOTS = ("$ref", "allOf", "anyOf", "oneOf")
_WHOLE = (*_ROOTS, "enum", "const", "additionalProperties")
"""Keywords that a template either shows or hides, whatever is in them."""
_OTHERS = {
    *("prefixItems", "patternProperties", "propertyNames", "contains", "not", "if", "then", "else"),
    *("dependentSchemas", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef"),
}

_WORD = "qinnerq"
_INNER = {"type": "string", "description": _WORD}
_SHOWN: Mapping[str, Schema] = {
    "$ref": {"$ref": "#/$defs/Q"},
    "allOf": {"allOf": [{"type": "qtypeq", "description": _WORD}]},
    "anyOf": {"anyOf": [{"type": "qtypeq", "description": _WORD}, {"type": "integer"}]},
    "oneOf": {"oneOf": [{"type": "qtypeq", "description": _WORD}, {"type": "integer"}]},
    "properties": {"type": "object", "properties": {"qtypeq": {"type": "string"}}},
    "description": {"type": "object", "properties": {"qtypeq": _INNER}},
    "items": {"type": "array", "items": {"type": "object", "properties": {"qtypeq": _INNER}}},
    "additionalProperties": {"type": "object", "additionalProperties": _INNER},
    "enum": {"type": "string", "enum": ["qtypeq", _WORD]},
    "const": {"const": _WORD},
    "typed enum": {"type": ["string", "integer"], "enum": ["qtypeq", _WORD]},
    "others": {"type": "array", "prefixItems": [_INNER]},
}
"""Keywords, each with a parameter whose words are in the text of a template that shows it."""

_NAMES = (
    *("name", "type", "description", "properties", "required", "nullable"),
    *("items", "enum", "default", "title", "parameters", "return"),
)
"""Names of parameters that a template may take for keywords."""


@dataclass(frozen=True, slots=True)
class SchemaTraits:
    """Keywords and names in a tool's parameters that a template shows or hides.

    hidden: the hidden keywords. "description" stands for those within a parameter, "items" for
    items with more than a type, "item types" for those with a type only, "types" for lists of
    types, "null" for lists with null, "typed enum" for enums of more than strings, and "others" for
    keywords that few templates know. nullable: OpenAPI's `nullable` is shown. lost: names of
    parameters that are left out. describes: descriptions of parameters are shown. dumps: the whole
    schema is shown beside the types that the template prints.
    """

    hidden: frozenset[str] = frozenset()
    nullable: bool = True
    lost: frozenset[str] = frozenset()
    describes: bool = True
    dumps: bool = False

    @property
    def all(self) -> bool:
        """True if nothing is hidden: the template dumps the schema."""
        return not self.hidden and not self.lost and self.describes


def probe_schemas(told: Told) -> SchemaTraits:
    """Find out a template's traits by rendering small tools."""

    def text(parameter: Schema, name: str = "qparamq") -> str:
        parameters = {"type": "object", "properties": {name: parameter}}
        return told({**parameters, "$defs": {"Q": {**_INNER, "title": "qtypeq"}}}).lower()

    def lists(*types: str) -> str:
        return text({"type": list(types), "description": "d"})

    hidden = {
        keyword
        for keyword, parameter in _SHOWN.items()
        if not all(word in text(parameter) for word in _words(parameter))
    }
    if lists("string", "integer") in ("", lists("string", "boolean")):
        hidden.add("types")
    if lists("string", "null") in ("", text({"type": "string", "description": "d"})):
        hidden.add("null")
    strings, flags = (text({"type": "array", "items": {"type": t}}) for t in ("string", "boolean"))
    if strings == flags:
        hidden.add("item types")
    plain, nullable = (text({"type": "string", **more}) for more in ({}, {"nullable": True}))
    if not hidden - {"null"} and text({"type": "string"}).count("qparamq") > 1:
        # The schema is there, and each parameter once more, with a type made of one keyword.
        return SchemaTraits(frozenset(hidden | {"null", *_ROOTS}), nullable != plain, dumps=True)
    if _WORD not in text(_INNER):
        return SchemaTraits(frozenset(hidden), nullable != plain, describes=False)
    lost = (name for name in _NAMES if _WORD not in text(_INNER, name))
    return SchemaTraits(frozenset(hidden), nullable != plain, frozenset(lost))


def _words(parameter: Schema) -> Sequence[str]:
    said = json.dumps(parameter)
    return [word for word in ("qtypeq", _WORD) if word in said] or [_WORD]


def shown_function(traits: SchemaTraits, function: Schema) -> Schema:
    """Return a tool's function such that the template shows all that is said of it.

    Raises:
        RecursionError: the parameters are nested too deeply for JSON.
    """
    if traits.all:
        return function
    try:
        return _rewritten(function, traits)
    except _TooLarge:
        return described_function(function)


def described_function(function: Schema) -> Schema:
    """Return a tool's function with its parameters in its description alone."""
    if function["parameters"] == _NONE:
        return function
    said = f"Parameters: {_json(function['parameters'])}"
    return {
        **function,
        "description": _joined(function["description"], said),
        "parameters": _NONE,
    }


class _TooLarge(Exception):
    """A schema that inlining makes too large, or that is nested too deeply."""


def _rewritten(function: Schema, traits: SchemaTraits) -> Schema:
    root = function["parameters"]
    if "$ref" in traits.hidden and '"$ref"' in _json(root):
        root = _inlined(root)
    root = _simplified(root, traits)
    description = function["description"]
    more = {key: root[key] for key in _ROOTS if key in root and key in traits.hidden}
    if more:
        description = _joined(description, f"Parameters: {_json(more)}")
    properties: dict[str, Any] = {}
    given = root.get("properties")
    for name, schema in given.items() if isinstance(given, Mapping) else ():
        properties[name] = shown = _parameter(schema, traits)
        said = shown.get("description") and not traits.describes
        if name in traits.lost or said:
            description = _joined(description, f"Parameter {name}: {_json(schema)}")
    parameters = {**root, "properties": properties}
    return {**function, "description": description, "parameters": parameters}


def _parameter(schema: Any, traits: SchemaTraits) -> Schema:
    """Return a parameter as the template can show it, with the rest in its description."""
    if not isinstance(schema, Mapping):
        # A schema may be True, which allows anything.
        return {}
    if traits.dumps or _is_shown(schema, traits):
        return schema
    rest = {key: value for key, value in schema.items() if key != "description"}
    description = _joined(schema.get("description"), f"JSON Schema: {_json(rest)}")
    types = schema.get("type")
    if isinstance(types, list):
        schema = {**schema, "type": next((kind for kind in types if kind != "null"), "string")}
    return {**schema, "description": description}


# ---------------------------------------------------------------------------------------------
# References
# ---------------------------------------------------------------------------------------------


def _inlined(root: Schema) -> Schema:
    """Return `root` with the referenced schemas in place of the references.

    A reference that leads back into itself is replaced by its name in a description.

    Raises:
        _TooLarge: the result would be too large or too deep.
    """
    room = max(_SMALL, _GROWTH * len(_json(root)))

    def take(characters: int) -> None:
        nonlocal room
        room -= characters
        if room < 0:
            raise _TooLarge

    def inline(value: Any, path: tuple[str, ...], depth: int) -> Any:
        take(2)
        if depth > _DEPTH:
            raise _TooLarge
        if isinstance(value, Mapping):
            reference = value.get("$ref")
            if isinstance(reference, str):
                return referred(value, reference, path, depth)
            take(sum(len(str(key)) for key in value))
            return {
                key: inline(inner, path, depth + 1)
                for key, inner in value.items()
                if depth or key not in ("$defs", "definitions")
            }
        if isinstance(value, list):
            return [inline(inner, path, depth + 1) for inner in value]
        take(len(value) if isinstance(value, str) else 4)
        return value

    def referred(value: Schema, reference: str, path: tuple[str, ...], depth: int) -> Any:
        beside = {key: inner for key, inner in value.items() if key != "$ref"}
        target = _target(root, reference)
        if target is None:
            return {"$ref": reference, **inline(beside, path, depth + 1)}
        name = reference.rpartition("/")[2] or reference
        if reference in path:
            known = inline(beside, path, depth + 1)
            return {**known, "description": _joined(known.get("description"), f"{name}, as above")}
        found = inline(target, (*path, reference), depth + 1)
        return _merged([inline(beside, path, depth + 1), found]) if beside else found

    inlined: Schema = inline(root, ("#",), 0)
    return inlined


def _target(root: Schema, reference: str) -> Schema | None:
    """Return the schema that a reference within the schema names, None if there is none."""
    if not reference.startswith("#"):
        return None
    found: Any = root
    for step in filter(None, reference[1:].split("/")):
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found if isinstance(found, Mapping) else None


# ---------------------------------------------------------------------------------------------
# What a template has no words for
# ---------------------------------------------------------------------------------------------


def _simplified(schema: Any, traits: SchemaTraits) -> Any:
    """Return an equal schema without `allOf` and null, where the template hides them and the
    schema can do without."""
    if not isinstance(schema, Mapping):
        return schema
    simple = dict(schema)
    for key in ("items", "additionalProperties"):
        if key in simple:
            simple[key] = _simplified(simple[key], traits)
    inner = simple.get("properties")
    if isinstance(inner, Mapping):
        simple["properties"] = {name: _simplified(each, traits) for name, each in inner.items()}
    parts = simple.get("allOf")
    if "allOf" in traits.hidden and isinstance(parts, list):
        rest = {key: value for key, value in simple.items() if key != "allOf"}
        merged = _merged([rest, *(_simplified(part, traits) for part in parts)])
        simple = simple if "allOf" in merged else merged
    return _without_null(simple, traits)


def _without_null(schema: dict[str, Any], traits: SchemaTraits) -> dict[str, Any]:
    """Return the schema with "one type or null" written in the way that the template shows."""
    for keyword in ("anyOf", "oneOf"):
        options = schema.get(keyword)
        if keyword not in traits.hidden or not isinstance(options, list):
            continue
        others = [each for each in options if not _is_null(each)]
        if len(others) == 1 < len(options) and isinstance(others[0], Mapping):
            rest = {key: value for key, value in schema.items() if key != keyword}
            merged = _merged([rest, _simplified(others[0], traits)])
            return schema if "allOf" in merged else _nullable(merged, traits)
    types = schema.get("type")
    if types == "null":
        types = ["null"]
    if isinstance(types, list) and "null" in types and "null" in traits.hidden:
        others = [kind for kind in types if kind != "null"]
        kept = {key: value for key, value in schema.items() if key != "type"}
        if others:
            kept["type"] = others[0] if len(others) == 1 else others
        return _nullable(kept, traits)
    return schema


def _nullable(schema: dict[str, Any], traits: SchemaTraits) -> dict[str, Any]:
    kind = schema.get("type")
    plain = schema.keys() <= {"type", "description", "default", "title"}
    if isinstance(kind, str) and plain and "null" not in traits.hidden:
        return {**schema, "type": [kind, "null"]}
    if traits.nullable and isinstance(kind, str):
        return {**schema, "nullable": True}
    return {**schema, "description": _joined(schema.get("description"), "May be null.")}


def _is_null(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "null"


def _merged(schemas: Sequence[Any]) -> dict[str, Any]:
    """Return one schema for several that all hold; with `allOf`, if they disagree."""
    merged: dict[str, Any] = {}
    for schema in schemas:
        if not isinstance(schema, Mapping):
            return {"allOf": list(schemas)}
        for key, value in schema.items():
            if key not in merged or merged[key] == value:
                merged[key] = value
            elif key == "description":
                merged[key] = _joined(merged[key], value)
            elif key == "required" and isinstance(value, list):
                merged[key] = list(dict.fromkeys([*merged[key], *value]))
            elif key == "properties" and isinstance(value, Mapping):
                named = merged[key]
                both = {n: _merged([named[n], value[n]]) for n in value if n in named}
                merged[key] = {**named, **value, **both}
            elif key not in ("title", "default"):
                return {"allOf": list(schemas)}
    return merged


def _is_shown(schema: Any, traits: SchemaTraits, within: bool = False) -> bool:
    """Return whether the template shows all of a schema. within: the schema is a part of a
    parameter."""
    if not isinstance(schema, Mapping):
        return True
    if _used(schema, within) & traits.hidden or traits.lost & _names(schema):
        return False
    return all(_is_shown(each, traits, True) for each in _inner(schema))


def _used(schema: Schema, within: bool) -> set[str]:
    """Return the keywords that this schema uses, in the words of `SchemaTraits.hidden`."""
    used = {key for key in _WHOLE if key in schema}
    if isinstance(schema.get("additionalProperties"), bool):
        used.discard("additionalProperties")
    types, items = schema.get("type"), schema.get("items")
    if isinstance(types, list):
        used.add("null" if "null" in types else "types")
    if "enum" in used and types != "string":
        used.add("typed enum")
    if _OTHERS & schema.keys():
        used.add("others")
    if within and schema.get("description"):
        used.add("description")
    if _names(schema):
        used.add("properties")
    if isinstance(items, Mapping) and items:
        used.add("item types" if items.keys() <= {"type", "title"} else "items")
    return used


def _names(schema: Schema) -> frozenset[str]:
    properties = schema.get("properties")
    return frozenset(properties) if isinstance(properties, Mapping) else frozenset()


def _inner(schema: Schema) -> Iterator[Any]:
    properties = schema.get("properties")
    if isinstance(properties, Mapping):
        yield from properties.values()
    yield from (schema[key] for key in ("items", "additionalProperties") if key in schema)


def _joined(first: Any, second: Any) -> str:
    return " ".join(str(text) for text in (first, second) if text)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
