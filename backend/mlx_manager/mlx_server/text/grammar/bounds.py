"""Limits of a demanded form's size, and of the depth to which its parts refer to each other.

llguidance follows references by recursion. What is too deep for a stack is refused here with the
numbers, before anything native sees it; `text/grammar/sandbox.py` catches what these miss.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, TypeVar
from urllib.parse import unquote

from mlx_manager.mlx_server.limits import DEEPEST, MOST_PATTERN

Node = TypeVar("Node", bound=Hashable)

DATA = frozenset({"enum", "const", "default", "examples"})
"""Keywords whose values are no schemas."""

NAMED = frozenset({"properties", "patternProperties", "dependentSchemas"})
"""Keywords whose values are schemas by name."""

DEFINITIONS = frozenset({"$defs", "definitions"})
"""Keywords whose values are schemas by name, which count where something refers to them."""

REFERENCES = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})

_TOKEN = re.compile(
    r"""(?P<skip>//[^\n]*|\#[^\n]*)
    |(?P<text>"(?:\\.|[^"\\\n])*"i?|/(?:\\.|[^/\\\n])+/[imslux]*)
    |(?P<json>%json\s*(?=\{))
    |(?P<id><[^<>\s]*>)
    |(?P<define>^[ \t]*[?!]?(?P<defined>[A-Za-z_]\w*)
        (?:::[\w(),]+)?(?:\.\d+)?\s*(?:\[[^\]\n]*\])?\s*:)
    |(?P<name>@?[A-Za-z_]\w*)""",
    re.VERBOSE | re.MULTILINE,
)
"""Pattern of the tokens that count in a Lark grammar; all other text lies between tokens."""


class TooMuchError(ValueError):
    """A form that is too large or too deep; the message says by how much."""


def check_size(what: str, size: int, most: int) -> None:
    """
    Raises:
        TooMuchError: it is more than may be.
    """
    if size > most:
        raise TooMuchError(f"{what} has {size} characters; this server takes at most {most}")


def check_schema(schema: Any) -> None:
    """Check how deep a schema is, and how long its patterns are.

    schema: JSON.

    Raises:
        TooMuchError: too many schemas lie on one path through `schema` and what it refers to, or a
            pattern is too long.
    """
    found = _Schemas(schema)
    _check_depth("schemas", _depths([found.root], found.below).values())


def resolver(schema: Any) -> Callable[[str], bool]:
    """Return a function that says whether a reference in `schema` refers to anything in
    `schema`."""
    found = _Schemas(schema)
    return lambda reference: found.at(reference) is not None


def check_lark(text: str) -> None:
    """Check how deep and how large a grammar is.

    text: a grammar in Lark.

    Raises:
        TooMuchError: rules or terminals refer to each other too deep, a terminal is too large, or a
            schema in it is too deep.
    """
    rules = _rules(text)
    depths = _depths(rules, lambda name: (n for n in rules[name].names if n in rules))
    _check_depth("rules or terminals", depths.values())
    sizes: dict[str, int] = {}
    # What a rule refers to comes before it.
    for name in depths:
        terminal = name.isupper()
        sizes[name] = rules[name].size + sum(
            sizes.get(inner, 0) for inner in rules[name].names if inner.isupper()
        )
        if terminal:
            what = f"the terminal {name[:64]}, with those that it refers to,"
            check_size(what, sizes[name], MOST_PATTERN)


def _check_depth(what: str, depths: Iterable[int]) -> None:
    deepest = max(depths, default=0)
    if deepest > DEEPEST:
        raise TooMuchError(
            f"{deepest} {what} are nested in each other, counting what they refer to; this server "
            f"takes at most {DEEPEST}"
        )


def _depths(starts: Iterable[Node], below: Callable[[Node], Iterable[Node]]) -> dict[Node, int]:
    """Return the number of nodes on the longest path from each node on, itself included. Circles
    are cut where they close. Nodes below a node come before it."""
    depths: dict[Node, int] = {}
    for start in starts:
        path: dict[Node, tuple[Iterator[Node], list[int]]] = {}
        if start not in depths:
            path[start] = (iter(below(start)), [0])
        while path:
            node, (waiting, seen) = next(reversed(path.items()))
            following = next(waiting, None)
            if following is None:
                del path[node]
                depths[node] = 1 + max(seen)
                if path:
                    next(reversed(path.values()))[1].append(depths[node])
            elif following in depths:
                seen.append(depths[following])
            elif following not in path:
                path[following] = (iter(below(following)), [0])
    return depths


# ---------------------------------------------------------------------------------------------
# Grammars
# ---------------------------------------------------------------------------------------------


class _Rule:
    """Names that a rule or a terminal refers to, and the characters of its own texts and
    patterns."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.size = 0


def _rules(text: str) -> dict[str, _Rule]:
    rules: dict[str, _Rule] = {}
    rule = _Rule()
    at = 0
    while (found := _TOKEN.search(text, at)) is not None:
        at = found.end()
        if found["defined"] is not None:
            rule = rules.setdefault(found["defined"], _Rule())
        elif found["name"] is not None:
            rule.names.append(found["name"])
        elif found["text"] is not None:
            rule.size += len(found["text"])
        elif found["json"] is not None:
            at = _past_schema(text, at)
    return rules


def _past_schema(text: str, at: int) -> int:
    """Return the end of the schema that begins at `at`, or `at` if none does: llguidance reports
    errors."""
    try:
        schema, end = json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError):
        return at
    check_schema(schema)
    return end


# ---------------------------------------------------------------------------------------------
# Schemas
# ---------------------------------------------------------------------------------------------


class _Schemas:
    """Finds what lies in each part of a schema, and what it refers to. Parts go by their `id`.

    Attributes:
        root: the whole's.
    """

    def __init__(self, schema: Any) -> None:
        self._whole = schema
        self.root = id(schema)
        self._known: dict[int, Any] = {self.root: schema}
        self._named: dict[str, Any] | None = None

    def below(self, part: int) -> Iterator[int]:
        """
        Raises:
            TooMuchError: a pattern is too long.
        """
        schema = self._known[part]
        if not isinstance(schema, dict):
            return
        for key, value in schema.items():
            if key in DATA or key in DEFINITIONS:
                continue
            if key in REFERENCES and isinstance(value, str):
                found: Iterable[Any] = [self.at(value)]
            elif key == "pattern" and isinstance(value, str):
                check_size("`pattern`", len(value), MOST_PATTERN)
                continue
            elif key in NAMED and isinstance(value, dict):
                if key == "patternProperties":
                    for pattern in value:
                        check_size("a pattern of `patternProperties`", len(pattern), MOST_PATTERN)
                found = value.values()
            else:
                found = value if isinstance(value, list) else [value]
            for each in found:
                if isinstance(each, dict):
                    self._known[id(each)] = each
                    yield id(each)

    def at(self, reference: str) -> Any:
        """Return the part of the schema that `reference` leads to; None if there is no such
        part."""
        if reference == "#":
            return self._whole
        if not reference.startswith("#/"):
            return self._by_name().get(_name(reference))
        found = self._whole
        for step in unquote(reference[2:]).split("/"):
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, dict):
                found = found.get(key)
            else:
                return None
        return found

    def _by_name(self) -> dict[str, Any]:
        """Return the schemas that have an id or an anchor."""
        if self._named is None:
            self._named = {}
            waiting = [self._whole]
            while waiting:
                value = waiting.pop()
                if isinstance(value, dict):
                    for key in ("$id", "id", "$anchor", "$dynamicAnchor"):
                        if isinstance(name := value.get(key), str):
                            self._named[_name(name)] = value
                    waiting += value.values()
                elif isinstance(value, list):
                    waiting += value
        return self._named


def _name(reference: str) -> str:
    """Return the end of an id, an anchor or a reference, by which they are compared: llguidance
    knows what these are relative to."""
    return re.split(r"[/#]", reference.rstrip("/#"))[-1]
