"""JSON Schemas of tools' parameters: as JSON Schema has them, and taken apart by type.

Formats that write arguments one by one write text as it is and everything else as JSON, so that
the type of each parameter decides how it is read and written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from mlx_manager.mlx_server.core import STRING_FORMATS, Tool
from mlx_manager.mlx_server.limits import MOST_SCHEMA
from mlx_manager.mlx_server.text.grammar.bounds import (
    TooMuchError,
    check_schema,
    check_size,
)

Kind = Literal["string", "integer", "number", "boolean", "null", "array", "object", "any"]

LARGEST_INTEGER = 10**18 - 1
"""Integers that a tool is called with have 18 digits at most, where its schema says nothing: they
fit 64 bits, and a model that repeats a digit for ever comes to an end."""

_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})

_TYPE_ALIASES = {
    **{"dict": "object", "float": "number", "tuple": "array", "any": None},
    **{"str": "string", "int": "integer", "bool": "boolean", "list": "array", "None": "null"},
    **{name.upper(): name for name in _TYPES},
}
"""Names of types that tools for Python or for Gemini carry; JSON Schema has none of them."""

MOST_LOOKED_AT = 4096
"""Schemas of one value, counting each as often as something refers to it."""

_DATA = frozenset({"enum", "const", "default", "examples"})
"""Keywords whose values are no schemas."""

_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values are schemas by name."""

_SCHEMAS = frozenset(
    {
        *("anyOf", "oneOf", "allOf", "prefixItems", "items", "additionalItems", "contains"),
        *("additionalProperties", "unevaluatedProperties", "propertyNames", "not"),
        *("if", "then", "else"),
    }
)
"""Keywords whose values are schemas or lists of them."""

_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})

_IMPLIED: Mapping[str, Kind] = {
    "properties": "object",
    "required": "object",
    "additionalProperties": "object",
    "items": "array",
    "prefixItems": "array",
    "minItems": "array",
    "maxItems": "array",
    "pattern": "string",
    "format": "string",
    "minLength": "string",
    "maxLength": "string",
    "minimum": "number",
    "maximum": "number",
    "exclusiveMinimum": "number",
    "exclusiveMaximum": "number",
    "multipleOf": "number",
}
"""The type that a keyword speaks of, for schemas that don't name it."""

_KINDS: Sequence[tuple[type, Kind]] = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
)

_OPEN = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties"})
"""Keywords that say what else an object may have."""

_OF_THE_SAME = frozenset({"$ref", "allOf", "anyOf", "oneOf", "if", "then", "else", "not"})
"""Keywords whose schemas are of the very value that theirs is of."""

_COMBINED = ("allOf", "not", "if", "dependentSchemas", "$dynamicRef")


_SHAPES: Mapping[str, tuple[type, str]] = {
    "type": (object, "a text or a list of texts"),
    "$ref": (str, "a text"),
    "format": (str, "a text"),
    "pattern": (str, "a text"),
    "required": (list, "a list of texts"),
    "enum": (list, "a list"),
    "x-guidance": (dict, "an object"),
    **dict.fromkeys(_NAMED, (dict, "an object of schemas")),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), (list, "a list of schemas")),
}
"""Type that a keyword's value must have, and its description, where code here reads the value."""


class UnwritableError(ValueError):
    """The arguments that a schema asks for have no form in the format that calls are written in."""


class OversizedError(UnwritableError):
    """A schema is larger, or deeper, than may be."""


class MalformedError(UnwritableError):
    """A tool's schema is no JSON Schema."""


class Effort:
    """Counter of the schemas that are looked at. A schema that is referred to twice is looked at
    twice, so there may be more of them than a schema has characters."""

    def __init__(self) -> None:
        self._left = MOST_LOOKED_AT

    def spend(self) -> None:
        """
        Raises:
            UnwritableError: there were too many.
        """
        self._left -= 1
        if self._left < 0:
            raise UnwritableError(f"more than {MOST_LOOKED_AT} alternatives in each other")


@dataclass(frozen=True, slots=True)
class Branch:
    """One of the types that a schema allows, and what it demands of values of that type."""

    kind: Kind
    schema: Mapping[str, Any]


def parameters_schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments, an object in any case.

    What a model may write is narrowed where the schema leaves it open: no parameters that it does
    not name, and no integers of endless length.

    Raises:
        MalformedError: it is no schema.
        OversizedError: it is too large or too deep.
        UnwritableError: the tool is strict, and has a format that is not enforced.
    """
    try:
        check_size("the schema", len(json.dumps(tool.parameters)), MOST_SCHEMA)
        check_schema(tool.parameters)
    except TooMuchError as error:
        raise OversizedError(str(error)) from error
    check(tool.parameters)
    if tool.strict and (formats := unknown_formats(tool.parameters)):
        raise UnwritableError(f"the format {formats[0]!r:.40}")
    schema: dict[str, Any] = without_unknown_formats(_with_json_types(dict(tool.parameters)))
    whole = _object(schema or {"properties": {}})
    known = check(whole)
    narrowed: dict[str, Any] = _narrowed(whole, whole, known, _parts(whole, known), part=False)
    return narrowed


def _object(schema: dict[str, Any]) -> dict[str, Any]:
    """Return `schema`, of objects alone; unsatisfiable if it allows none."""
    match schema.get("type", "object"):
        case "object":
            return {"type": "object", **schema}
        case [*kinds] if "object" in kinds:
            return {**schema, "type": "object"}
    return {"type": "object", "allOf": [schema]}


def check(root: Any) -> frozenset[str]:
    """Look through a schema and all that it refers to; the references that there are.

    Raises:
        MalformedError: names the keyword whose value has another type than in JSON Schema.
    """
    found: set[str] = set()
    waiting = [root]
    while waiting:
        own: set[str] = set()
        _check(waiting.pop(), own)
        for reference in own - found:
            # What there is not is told where it is asked for.
            with suppress(UnwritableError):
                waiting.append(_at(root, reference))
        found |= own
    return frozenset(found)


def _check(schema: Any, references: set[str]) -> None:
    """Check the keywords of `schema`, and add its references to `references`."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise MalformedError(f"a schema must be an object, not {schema!r:.40}")
    for key, value in schema.items():
        kind, wanted = _SHAPES.get(key, (object, ""))
        texts = value if isinstance(value, list) else [value]
        fits = isinstance(value, kind)
        if key in ("type", "required"):
            fits = fits and all(isinstance(text, str) for text in texts)
        if not fits:
            raise MalformedError(f"`{key}` must be {wanted}")
        if key == "$ref":
            references.add(value)
        if key in _NAMED:
            inner: Iterable[Any] = value.values()
        elif key in _SCHEMAS:
            inner = value if isinstance(value, list) else [value]
        else:
            continue
        for each in inner:
            _check(each, references)


def _is_data(key: str, value: Any, known: frozenset[str]) -> bool:
    """Return whether a keyword's value is no schema and holds none. A value under an unknown
    keyword has not been checked, unless something refers to it: then all its own references are
    `known`."""
    if key in _DATA or key in _NAMED or key in _SCHEMAS:
        return key in _DATA
    held = value if isinstance(value, list) else [value]
    if not (inner := [each for each in held if isinstance(each, Mapping)]):
        return False
    references: set[str] = set()
    try:
        for each in inner:
            _check(each, references)
    except MalformedError:
        return True
    return not references <= known


def _within(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return `schema` with `change` made to each of the schemas in it."""

    def changed(key: str, value: Any) -> Any:
        if key in _DATA:
            return value
        if key in _NAMED and isinstance(value, Mapping):
            return {name: change(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [change(inner) for inner in value]
        return change(value)

    return {key: changed(key, value) for key, value in schema.items()}


def without_unknown_formats(schema: Any) -> Any:
    """Return `schema` less unknown formats, which are annotations (JSON Schema 2020-12, 7.2.3)."""
    if not isinstance(schema, Mapping):
        return schema
    found = _within(schema, without_unknown_formats)
    if isinstance(found.get("format"), str) and found["format"] not in STRING_FORMATS:
        del found["format"]
    return found


LEFT_OUT = "left out: "
"""Prefix of an unknown format that names an obstacle: llguidance warns of unknown formats."""


@dataclass(frozen=True, slots=True)
class Easing:
    """Takes out of schemas the patterns that no answer can be held to, and the references that
    lead nowhere.

    holds: whether an answer can be held to a pattern. leads: whether there is anything that a
    reference refers to. named: whether an unknown format names each in its place. left_out: the
    keywords so far.
    """

    holds: Callable[[str], bool]
    leads: Callable[[str], bool]
    named: bool
    left_out: dict[str, None] = field(default_factory=dict)

    def of(self, schema: Any) -> Any:
        """Return the part of `schema` that is left after easing."""
        if not isinstance(schema, Mapping) or not isinstance(schema.get("allOf", []), list):
            return schema
        found = _within(schema, self.of)
        lost = [key for key, value in schema.items() if not self._is_held(key, value)]
        for key in lost:
            del found[key]
            self.left_out[key] = None
        if lost and self.named:
            names = [{"format": f"{LEFT_OUT}{key}"} for key in lost]
            return {**found, "allOf": [*found.get("allOf", ()), *names]}
        return found

    def _is_held(self, key: str, value: Any) -> bool:
        match key, value:
            case "pattern", str():
                return self.holds(value)
            case "patternProperties", dict():
                return all(map(self.holds, value))
            case "$ref", str():
                return self.leads(value)
        return True


def unknown_formats(schema: Any) -> list[str]:
    """Return the formats in `schema` that `without_unknown_formats` takes out, each once."""
    found: dict[str, None] = {}

    def look(inner: Any) -> None:
        if isinstance(inner, Mapping):
            _within(inner, look)
            name = inner.get("format")
            if isinstance(name, str) and name not in STRING_FORMATS:
                found[name] = None

    look(schema)
    return list(found)


def moved(schema: Any, place: str) -> Any:
    """Return `schema` as it is at `place` in another, a JSON pointer: references to its root
    become references to that place."""
    if not isinstance(schema, Mapping):
        return schema
    found = _within(schema, partial(moved, place=place))
    reference = found.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        found["$ref"] = f"{place}{reference[1:]}"
    return found


def _with_json_types(schema: Any) -> Any:
    """Return `schema` with the names of types in JSON Schema's, and OpenAPI's `nullable` as the
    type that it is."""
    if not isinstance(schema, Mapping):
        return schema
    found = _within(schema, _with_json_types)
    named = found.get("type")
    among = named if isinstance(named, list) else [named]
    names = [name for name in among if isinstance(name, str)]
    if not _TYPE_ALIASES.keys().isdisjoint(names):
        del found["type"]
        meant = [_TYPE_ALIASES.get(name, name) for name in names]
        if None not in meant:
            found = {"type": meant if isinstance(named, list) else meant[0], **found}
    if found.get("nullable") is True and isinstance(found.get("type"), str):
        found["type"] = list(dict.fromkeys([found["type"], "null"]))
    return found


def _narrowed(
    schema: Any,
    root: Mapping[str, Any],
    known: frozenset[str],
    shared: frozenset[str],
    part: bool,
) -> Any:
    """
    Args:
        root: what references are relative to. known: those that there are, shared: those to what is
            a part somewhere.
        part: what it demands is demanded of an object beside what others do: it can't be closed.
    """
    if not isinstance(schema, Mapping):
        return schema

    def narrowed(key: str, value: Any) -> Any:
        if _is_data(key, value, known):
            return value
        if key in _NAMED and isinstance(value, Mapping):
            return {
                name: _narrowed(inner, root, known, shared, f"#/{key}/{name}" in shared)
                for name, inner in value.items()
            }
        inside = key in _OF_THE_SAME and (part or _is_combined(schema))
        if isinstance(value, list):
            return [_narrowed(inner, root, known, shared, inside) for inner in value]
        return _narrowed(value, root, known, shared, inside)

    found = {key: narrowed(key, value) for key, value in schema.items()}
    if found.get("type") == "integer":
        found = _bounded(found)
    if part:
        return found
    if _is_combined(schema):
        names = _names(schema, root, 0, Effort())
        if names:
            found["properties"] = {name: {} for name in names} | found.get("properties", {})
            found["additionalProperties"] = False
    elif "properties" in found and not (_OPEN | _OF_THE_SAME) & found.keys():
        found["additionalProperties"] = False
    return found


def _bounded(integer: dict[str, Any]) -> dict[str, Any]:
    """Return `integer` with `LARGEST_INTEGER`'s bounds where it has none, and they leave it any."""
    least = [integer[key] for key in ("minimum", "exclusiveMinimum") if key in integer]
    most = [integer[key] for key in ("maximum", "exclusiveMaximum") if key in integer]
    if not least and all(_is_number(bound) and bound > -LARGEST_INTEGER for bound in most):
        integer = integer | {"minimum": -LARGEST_INTEGER}
    if not most and all(_is_number(bound) and bound < LARGEST_INTEGER for bound in least):
        integer = integer | {"maximum": LARGEST_INTEGER}
    return integer


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_combined(schema: Mapping[str, Any]) -> bool:
    """Return whether `schema` names an object's properties in more than one place."""
    places = len(schema.keys() & (_OF_THE_SAME | {"properties"}))
    return places > 1 or len(schema.get("allOf", ())) > 1


def _shared(schema: Any, known: frozenset[str], found: dict[str, None], part: bool) -> None:
    """Add to `found` the references in `schema` to what is a part where it is referred to."""
    if not isinstance(schema, Mapping):
        return
    inside = part or _is_combined(schema)
    if inside and isinstance(schema.get("$ref"), str):
        found[schema["$ref"]] = None
    for key, value in schema.items():
        if _is_data(key, value, known):
            continue
        if key in _NAMED and isinstance(value, Mapping):
            for inner in value.values():
                _shared(inner, known, found, False)
        else:
            for inner in value if isinstance(value, list) else [value]:
                _shared(inner, known, found, inside and key in _OF_THE_SAME)


def _parts(root: Mapping[str, Any], known: frozenset[str]) -> frozenset[str]:
    """Return all references to schemas that are a part somewhere, also by way of another
    reference."""
    found: dict[str, None] = {}
    _shared(root, known, found, False)
    seen: set[str] = set()
    while waiting := [reference for reference in found if reference not in seen]:
        seen |= set(waiting)
        for reference in waiting:
            with suppress(UnwritableError):
                _shared(_at(root, reference), known, found, True)
    return frozenset(found)


def _names(
    schema: Any, root: Mapping[str, Any], depth: int, effort: Effort
) -> dict[str, None] | None:
    """Return the properties that a schema and its parts name, in order; None if there may be
    others."""
    if not isinstance(schema, Mapping):
        return {} if schema is True else None
    effort.spend()
    if depth > 16 or _OPEN & schema.keys() or "if" in schema:
        return None
    named: dict[str, None] = dict.fromkeys(schema.get("properties", ()))
    members = [each for key in ("allOf", "anyOf", "oneOf") for each in schema.get(key, ())]
    if "$ref" in schema:
        try:
            members.append(_at(root, schema["$ref"]))
        except UnwritableError:
            return None
    for member in members:
        more = _names(member, root, depth + 1, effort)
        if more is None:
            return None
        named |= more
    return named


# ---------------------------------------------------------------------------------------------
# Taken apart
# ---------------------------------------------------------------------------------------------


def properties(root: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that a tool's schema names, and those that it only requires.

    Raises:
        UnwritableError: it is no plain object of parameters.
    """
    found = resolved(root, root)
    for keyword in ("anyOf", "oneOf", *_COMBINED, "minProperties", "dependentRequired"):
        if keyword in found:
            raise UnwritableError(f"`{keyword}` is about several parameters at once")
    named = dict(found.get("properties", {}))
    return named | {key: {} for key in found.get("required", ()) if key not in named}


def required(root: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(resolved(root, root).get("required", ()))


def branches(schema: Any, root: Mapping[str, Any]) -> Sequence[Branch]:
    """Return `schema` as alternatives of one type each.

    Args:
        root: what its references are relative to.

    Raises:
        UnwritableError: it can't be taken apart.
    """
    return tuple(_branches(schema, root, 0, Effort()))


def _branches(schema: Any, root: Mapping[str, Any], depth: int, effort: Effort) -> Iterator[Branch]:
    effort.spend()
    if depth > 16:
        raise UnwritableError("a schema that refers to nothing but itself")
    if schema is True:
        schema = {}
    if schema is False:
        return
    found = resolved(schema, root)
    for keyword in ("anyOf", "oneOf"):
        if keyword in found:
            rest = {key: value for key, value in found.items() if key != keyword}
            for option in found[keyword]:
                inner = _joined(rest, resolved(option, root))
                yield from _branches(inner, root, depth + 1, effort)
            return
    if "const" in found or "enum" in found:
        values = [found["const"]] if "const" in found else found["enum"]
        yield from _values(values)
        return
    named = found.get("type")
    if isinstance(named, list):
        for one in named:
            yield from _branches({**found, "type": one}, root, depth + 1, effort)
        return
    implied: Sequence[Kind] = [_IMPLIED[key] for key in found if key in _IMPLIED]
    kind: Kind = named or (implied[0] if implied else "any")
    if kind in ("string", "any") and (combined := found.keys() & set(_COMBINED)):
        raise UnwritableError(f"`{min(combined)}` for text")
    yield Branch(kind, found)


def _values(values: Sequence[Any]) -> Iterator[Branch]:
    texts = [value for value in values if isinstance(value, str)]
    others = [value for value in values if not isinstance(value, str)]
    if texts:
        yield Branch("string", {"enum": texts})
    for value in others:
        yield Branch(kind_of(value), {"enum": [value]})


def kind_of(value: Any) -> Kind:
    """Return the type of a value that JSON held."""
    if value is None:
        return "null"
    return next((kind for held, kind in _KINDS if isinstance(value, held)), "object")


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `schema` with the schemas that it refers to in place of references.

    Raises:
        UnwritableError: there is nothing there, or the reference leads in a circle.
    """
    seen = 0
    while isinstance(schema, Mapping) and ("$ref" in schema or len(schema.get("allOf", ())) == 1):
        seen += 1
        if seen > 16:
            raise UnwritableError("a reference to itself")
        if "$ref" in schema:
            rest = {key: value for key, value in schema.items() if key != "$ref"}
            schema = _joined(rest, _at(root, schema["$ref"]))
        else:
            rest = {key: value for key, value in schema.items() if key != "allOf"}
            schema = _joined(rest, schema["allOf"][0])
    if not isinstance(schema, Mapping):
        return {}
    return schema


def _at(root: Mapping[str, Any], reference: str) -> Any:
    found: Any = root
    if not reference.startswith("#"):
        raise UnwritableError(f"a reference to {reference}")
    for step in reference[1:].strip("/").split("/"):
        if not step:
            continue
        key = step.replace("~1", "/").replace("~0", "~")
        try:
            found = found[int(key) if isinstance(found, list) else key]
        except (LookupError, TypeError, ValueError) as error:
            raise UnwritableError(f"a reference to {reference}, which is not there") from error
    return found


def _joined(outer: Mapping[str, Any], inner: Any) -> Mapping[str, Any]:
    """Return one schema for two that both hold; annotations don't count."""
    if not isinstance(inner, Mapping):
        return outer
    outer = {key: value for key, value in outer.items() if key not in _ANNOTATIONS}
    if any(inner[key] != value for key, value in outer.items() if key in inner):
        raise UnwritableError("schemas that say different things of one value")
    return {**outer, **inner}


# ---------------------------------------------------------------------------------------------
# What a value that has been written may be
# ---------------------------------------------------------------------------------------------

TEXT: frozenset[Kind] = frozenset({"string"})
ANYTHING: frozenset[Kind] = frozenset({"any"})


@dataclass(frozen=True, slots=True)
class Typed:
    """The schema of a value as its reader needs it: the types that the value may have, and the
    schemas of what is in it.

    root: what references are relative to.
    """

    schema: Any
    root: Mapping[str, Any]

    @property
    def kinds(self) -> frozenset[Kind]:
        """Return the types, as far as they can be told; "any" alone where they can't."""
        return _kinds(self.schema, self.root, {}) or ANYTHING

    @property
    def names(self) -> Mapping[str, Typed]:
        """Return the properties that an object's schema names, wherever it does."""
        named: dict[str, list[Any]] = {}
        for part in self._parts():
            for name, schema in part.get("properties", {}).items():
                named.setdefault(name, []).append(schema)
        return {name: self._of(found) for name, found in named.items()}

    def member(self, name: str) -> Typed:
        """Return the schema of an object's property."""
        if name in (names := self.names):
            return names[name]
        return self._of([part.get("additionalProperties", {}) for part in self._parts()])

    @property
    def element(self) -> Typed:
        """Return the schema of a list's elements."""
        parts = [part for part in self._parts() if "prefixItems" not in part]
        return self._of([part.get("items", {}) for part in parts])

    def _parts(self) -> list[Mapping[str, Any]]:
        """Return the schema, and all schemas that it refers to or combines."""
        found: list[Mapping[str, Any]] = []
        waiting, seen = [self.schema], set[str]()
        while waiting:
            schema = waiting.pop()
            if not isinstance(schema, Mapping):
                continue
            found.append(schema)
            for keyword in _COMBINATIONS:
                waiting += reversed(schema.get(keyword, ()))
            if "$ref" in schema and schema["$ref"] not in seen:
                seen.add(schema["$ref"])
                with suppress(UnwritableError):
                    waiting.append(_at(self.root, schema["$ref"]))
        return found

    def _of(self, found: list[Any]) -> Typed:
        return Typed(found[0] if len(found) == 1 else {"anyOf": found} if found else {}, self.root)


def typed_parameters(parameters: Mapping[str, Any]) -> Typed:
    """Return a tool's parameters; of any type if its schema is none."""
    try:
        check(parameters)
    except MalformedError:
        return Typed({}, {})
    root = _with_json_types(parameters)
    return Typed(root, root)


_COMBINATIONS = ("anyOf", "oneOf", "allOf")


def _kinds(
    schema: Any, root: Mapping[str, Any], known: dict[str, frozenset[Kind]]
) -> frozenset[Kind]:
    """Return the types that `schema` allows; none where it refers to nothing but itself.

    known: the types of what has been referred to, none yet of what is being looked at.
    """
    if not isinstance(schema, Mapping):
        return ANYTHING
    found = _own_kinds(schema)
    if (reference := schema.get("$ref")) is not None:
        if reference not in known:
            known[reference] = frozenset()
            with suppress(UnwritableError):
                known[reference] = _kinds(_at(root, reference), root, known)
        found = _both(found, known[reference])
    for each in schema.get("allOf", ()):
        found = _both(found, _kinds(each, root, known))
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            options = [_kinds(option, root, known) for option in schema[keyword]]
            allowed = frozenset[Kind]().union(*options)
            found = _both(found, ANYTHING if "any" in allowed else allowed)
    implied: Sequence[Kind] = [_IMPLIED[key] for key in schema if key in _IMPLIED]
    return frozenset(implied[:1]) if "any" in found and implied else found


def _own_kinds(schema: Mapping[str, Any]) -> frozenset[Kind]:
    named = schema.get("type", ())
    among = [named] if isinstance(named, str) else named
    found = frozenset(among) if among and _TYPES.issuperset(among) else ANYTHING
    if "const" in schema or schema.get("enum"):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return _both(found, frozenset(map(kind_of, values)))
    return found


def _both(one: frozenset[Kind], other: frozenset[Kind]) -> frozenset[Kind]:
    """Return the types that two schemas both allow; those of the first where they exclude each
    other."""
    if not other or "any" in other:
        return one
    if not one or "any" in one:
        return other
    return frozenset(kind for kind in one | other if _has(one, kind) and _has(other, kind)) or one


def _has(kinds: frozenset[Kind], kind: Kind) -> bool:
    return kind in kinds or (kind == "integer" and "number" in kinds)
