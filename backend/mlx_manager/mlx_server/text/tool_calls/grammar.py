"""Tool calls in a model's own format, as a grammar in llguidance's Lark.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mlx_manager.mlx_server.core import Tool
from mlx_manager.mlx_server.errors import InvalidParameter, OutOfRange
from mlx_manager.mlx_server.formats import (
    Aside,
    CallForm,
    Json,
    Keywords,
    Maybe,
    Pattern,
    Piece,
    Tagged,
    ToolFormat,
    Unquoted,
    last_text,
)
from mlx_manager.mlx_server.text.grammar.in_strings import in_json
from mlx_manager.mlx_server.text.tool_calls.schemas import (
    Branch,
    Kind,
    MalformedError,
    OversizedError,
    UnwritableError,
    branches,
    moved,
    parameters_schema,
    properties,
    required,
)

Split = Callable[[str], Sequence[tuple[str, int | None]]]
"""A text to its parts, with their ids for those that are tokens of their own."""

BLANKS = r"\x20|\n{1,2}[\x20\t]{0,20}"
"""Between JSON's tokens: a space or a line break with its indentation. With blanks without end,
which JSON allows, small models write nothing else."""

ANYTHING = "/(?s:.*)/"

MOST_WRITTEN = 2**22
"""Characters of all rules for the calls of a request: a parameter's has all definitions."""

_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"
_ZONE = r"(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = rf"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{{1,9}})?{_ZONE}"
_LABEL = r"[a-z0-9]{1,32}(-[a-z0-9]{1,16}){0,3}"
_WORD = r"[A-Za-z0-9_+-]{1,32}"
_BYTE = "(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])"
_FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": r"P([0-9]{1,9}[DWMY]|T[0-9]{1,9}[HMS])",
    "email": rf"{_WORD}(\.{_WORD}){{0,3}}@({_LABEL}\.){{1,4}}[a-z]{{2,16}}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,4}}",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "ipv6": r"([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}",
    "uuid": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "uri": r"[a-z][a-z0-9+.-]{1,15}://[A-Za-z0-9._~:/?#@!$&'*+,;=-]+",
}
"""Text of these formats; not all of it, but none that is not."""

_CLASSES = {
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[0-9A-Za-z_]",
    r"\W": "[^0-9A-Za-z_]",
}
"""As ECMA 262 has them, and with it JSON Schema; in Rust they are Unicode's."""


def calls_grammar(form: ToolFormat, tools: Sequence[Tool], split: Split, *, parallel: bool) -> str:
    """Return a grammar in Lark for calls of `tools`, written in a format: one or, if
    `parallel`, one or more.

    Raises:
        InvalidParameter: a tool can't be called in this form; says why.
    """
    writer = _Writer(form, split)
    call = writer.calls(tools)
    more = f"({writer.pieces(form.between)} {call})*" if parallel else ""
    opening, closing = writer.pieces(form.opening), writer.pieces(form.closing)
    writer.rules.insert(0, f"start: {opening} {call} {more} {closing}")
    return "\n".join(writer.rules) + "\n"


def free_calls_grammar(
    form: ToolFormat, tools: Sequence[Tool], split: Split, openers: Sequence[str]
) -> str:
    """Return a grammar in Lark for text of any kind, in which `openers` begin calls of `tools`.

    Where calls need no marker, the brace of an object at the beginning is one.

    Raises:
        InvalidParameter: a tool can't be called in this form; says why.
    """
    writer = _Writer(form, split)
    call = writer.calls(tools)
    if form.bare:
        return _free_bare_calls(writer, tools, openers)
    closing = writer.pieces(form.closing)
    more = f"({writer.pieces(form.between)} {call})*"
    starts = [
        f"{writer.opened(ANYTHING, opener)} {writer.after(opener, call)} {more} {closing}"
        for opener in openers
        if writer.begins_with(opener)
    ]
    free = writer.without(ANYTHING, openers)
    start = f"({' | '.join(starts)})* {free}"
    if form.message:
        message, joint = writer.pieces(form.message), writer.pieces(form.joint)
        start = f"(message {joint})* (message | {call} {more})\nmessage: {message} {free}"
    return "\n".join([f"start: {start}", *writer.rules]) + "\n"


def _free_bare_calls(writer: _Writer, tools: Sequence[Tool], openers: Sequence[str]) -> str:
    """Return the grammar of text and bare calls. Of two lexemes that match, the longer one counts,
    so a text must end where the first lexeme of a call does."""
    named = writer.keyword_calls(tools)
    begun = "".join(f" & ~/{_slashed(re.escape(first))}(?s:.*)/" for first, _ in named)
    text = rf"/\s*[^\s{{](?s:.*)/{begun}"
    several = "objects: calls (/[;\\s]+/ calls)*"
    starts = [f"{writer.opened(text, opener)} objects" for opener in openers]
    starts += [f"{writer.pieces([opener])} objects" for opener in openers]
    ways = [r"/\s+/? objects", *starts, *(rule for _, rule in named), writer.without(text, openers)]
    start = f"start: ({' | '.join(ways)})?"
    return "\n".join([start, several, *writer.rules, bare_calls(writer.form, tools)])


def bare_calls(form: ToolFormat, tools: Sequence[Tool]) -> str:
    """Return the rule `calls`: one call as a JSON object of free layout."""
    assert form.call.keys is not None
    name_key, key = form.call.keys
    objects = []
    for tool in tools:
        if tool.text_grammar is not None:
            blank = f"/({BLANKS})?/"
            named = literal(json.dumps(name_key))
            name = f'{named} {blank} ":" {blank} {literal(json.dumps(tool.name))}'
            text = json_text(tool.text_grammar, *tool.parameters["required"])
            members = f'{name} {blank} "," {blank} {literal(json.dumps(key))} {blank} ":" {blank}'
            objects.append(f'"{{" {blank} {members} {text} {blank} "}}"')
            continue
        arguments = json_of(parameters_schema(tool), lenient=not tool.strict)
        layout = arguments.pop("x-guidance")
        # References are relative to it, and these are to be to the call.
        arguments.pop("$id", None)
        schema = {
            "type": "object",
            "properties": {
                name_key: {"const": tool.name},
                key: moved(arguments, f"#/properties/{key}"),
            },
            "required": [name_key, key],
            "additionalProperties": False,
            "x-guidance": layout,
        }
        objects.append(f"%json {json.dumps(schema)}")
    rules = ["calls: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    rules += [f"call_{i}: {body}" for i, body in enumerate(objects)]
    return "\n".join(rules) + "\n"


def json_text(grammar: str, name: str) -> str:
    """Return the grammar of a JSON object with one member, a text that `grammar`, in Lark,
    derives."""
    blank = f"/({BLANKS})?/"
    key = literal(json.dumps(name))
    return f'"{{" {blank} {key} {blank} ":" {blank} {_quoted(grammar)} {blank} "}}"'


def _quoted(grammar: str) -> str:
    return f'"\\"" {_nested(in_json(grammar))} "\\""'


def _nested(grammar: str) -> str:
    """Return a grammar within a grammar, with rules of its own. It is known to be valid by
    itself."""
    return f"%lark {{\n{grammar}\n}}"


def json_of(schema: Any, lenient: bool = False) -> dict[str, Any]:
    """Return `schema` with our blanks, unless it brings its own.

    lenient: what llguidance can't hold an answer to is left out, and named by its warnings.
    """
    if not isinstance(schema, dict):
        return json_of({} if schema is True else {"enum": []}, lenient)
    own = schema.get("x-guidance", {})
    if not isinstance(own, dict):
        return schema
    ours = {"whitespace_pattern": BLANKS} | ({"lenient": True} if lenient else {})
    return {**schema, "x-guidance": ours | own}


def literal(text: str) -> str:
    # JSON lets this one stand as it is, and llguidance does not.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _slashed(regex: str) -> str:
    """Return a regular expression as it stands between slashes."""
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", regex)


class _Writer:
    """Collects the rules of one grammar."""

    def __init__(self, form: ToolFormat, split: Split) -> None:
        self.form = form
        self._split = split
        self.rules: list[str] = []
        self._known: dict[str, str] = {}
        self._names: list[str] = []
        # An expression for what would be read as the next argument or call, where text is as it is.
        self._markup = ""
        self._size = 0
        # Of the tool whose arguments are written.
        self._lenient = False

    # -- Calls ---------------------------------------------------------------------------------

    def calls(self, tools: Sequence[Tool]) -> str:
        """Return the rule for a call of any of `tools`."""
        self._names = [tool.name for tool in tools]
        self._called = [(tool.name, self._checked(tool)) for tool in tools]
        ways = filter(None, [self.form.call, self.form.other])
        found = [f"{self.pieces(call.head)} {self._bodies(call)}" for call in ways]
        return self._rule("call", " | ".join(found))

    def _checked(self, tool: Tool) -> str:
        """Return the rule for a tool's arguments, if it can be called in this form."""
        param = tool.schema_param
        if not re.fullmatch(self.form.call.names, tool.name):
            raise InvalidParameter(
                f"`{tool.param}.name`: this model's format of calls has no form for {tool.name!r}.",
                param=f"{tool.param}.name",
            )
        try:
            return self._arguments(tool)
        except MalformedError as error:
            raise InvalidParameter(f"`{param}` is no JSON schema: {error}.", param=param) from error
        except OversizedError as error:
            raise OutOfRange(f"`{param}` can't be honoured: {error}.", param=param) from error
        except UnwritableError as error:
            raise InvalidParameter(
                f"`{param}` can't be honoured in this model's format of calls: {error}.",
                param=param,
            ) from error

    def _bodies(self, call: CallForm) -> str:
        """Return the rule for the rest of a call after its head."""
        between, tail = self.pieces(call.middle), self.pieces(call.tail)
        ways = [
            self._rule("body", f"{self._text(name)} {between} {arguments} {tail}")
            for name, arguments in self._called
        ]
        return self._rule("bodies", " | ".join(ways))

    # -- Text around calls ---------------------------------------------------------------------

    def after(self, opener: str, call: str) -> str:
        """Return the rest of the first call, and of the text before it, after `opener`."""
        first, *rest = self.form.opening or self.form.call.head
        begun = self.pieces([str(first).removeprefix(opener), *rest])
        return f"{begun} {call if self.form.opening else self._bodies(self.form.call)}"

    def begins_with(self, opener: str) -> bool:
        """Return whether calls in this format may begin with `opener`."""
        first = (self.form.opening + self.form.call.head)[:1]
        return last_text(first).startswith(opener)

    def opened(self, text: str, opener: str) -> str:
        """Return a rule for `text`, a terminal's expression, up to and with the first `opener`."""
        return self._rule("opened", self._until(text, opener))

    def keyword_calls(self, tools: Sequence[Tool]) -> list[tuple[str, str]]:
        """Return the beginning and the rule of lists of calls as in Python, one for each first
        tool."""
        named = []
        for tool in tools:
            if tool.text_grammar is not None:
                only = f"{literal('input=')} {_quoted(tool.text_grammar)}"
                named.append((tool.name, self._rule("text", only)))
                continue
            root = self._root(tool)
            try:
                named.append((tool.name, self._listed(self._keywords(root))))
            except UnwritableError:
                continue
        calls = [f'{literal(f"{name}(")} {arguments} ")"' for name, arguments in named]
        more = self._rule("more", f'(", " ({" | ".join(calls)}))* "]"') if calls else ""
        return [
            (f"[{name}(", self._rule("list", f'{literal(f"[{name}(")} {arguments} ")" {more}'))
            for name, arguments in named
        ]

    def without(self, text: str, openers: Sequence[str]) -> str:
        """Return a rule for matches of `text`, a terminal's expression, without any of
        `openers`."""
        excluded = " ".join(f"& ~{_containing(opener)}" for opener in openers)
        return self._rule("TEXT", f"({text}) {excluded}", terminal=True)

    # -- Arguments -----------------------------------------------------------------------------

    def _root(self, tool: Tool) -> dict[str, Any]:
        """Return the schema of a tool's arguments, of which rules are written from now on."""
        self._lenient = not tool.strict
        return parameters_schema(tool)

    def _arguments(self, tool: Tool) -> str:
        if tool.text_grammar is not None:
            return self._text_argument(tool.text_grammar, *tool.parameters["required"])
        root = self._root(tool)
        match self.form.call.arguments:
            case Json():
                return self._json(root, root)
            case Tagged() as form:
                self._markup = self._heads(form, properties(root))
                ways = [
                    (self._parameter(form, name, schema, root), name in required(root))
                    for name, schema in properties(root).items()
                ]
                return " ".join(rule if needed else f"{rule}?" for rule, needed in ways)
            case Keywords():
                return self._listed(self._keywords(root))
            case Unquoted(quote):
                return f'"{{" {self._members(root, root, quote)} "}}"'

    def _text_argument(self, grammar: str, name: str) -> str:
        """Return the grammar of a tool's only argument, a text that `grammar` derives."""
        match self.form.call.arguments:
            case Json():
                return self._rule("text", json_text(grammar, name))
            case Tagged() as form:
                begin, middle = map(self._text, (f"{form.begin}{name}", form.before("string")))
                end, after = map(self._text, (form.end, form.after))
                return self._rule("text", f"{begin} {middle} {_nested(grammar)} {end} {after}")
            case Keywords():
                return f"{literal(f'{name}=')} {_quoted(grammar)}"
            case Unquoted(quote):
                mark = self._text(quote)
                text = f'{literal("{" + name + ":")} {mark} {_nested(grammar)} {mark} "}}"'
                return self._rule("text", text)

    def _keywords(self, root: Mapping[str, Any]) -> list[tuple[str, bool]]:
        needed = required(root)
        found = []
        for name, schema in properties(root).items():
            if not re.fullmatch(r"[^\s()\[\]{}<>\"'\\,=]+", name):
                raise UnwritableError(f"{name!r} can't be the name of an argument")
            found.append((f"{literal(name + '=')} {self._json(schema, root)}", name in needed))
        return found

    def _listed(self, ways: Sequence[tuple[str, bool]], comma: str = ", ") -> str:
        """Return the grammar of members in their order with commas between them; optional members
        may be absent."""
        first, more = '""', '""'
        for member, needed in reversed(ways):
            absent_first, absent_more = ("", "") if needed else (f" | {first}", f" | {more}")
            first = self._rule("first", f"{member} {more}{absent_first}")
            more = self._rule("more", f"{literal(comma)} {member} {more}{absent_more}")
        return first

    def _parameter(self, form: Tagged, name: str, schema: Any, root: Mapping[str, Any]) -> str:
        if re.search(r'[<>"\'\n]', name) or name != name.strip() or not name:
            raise UnwritableError(f"{name!r} can't be the name of a parameter")
        values = []
        found = branches(schema, root)
        kinds = {branch.kind for branch in found}
        for branch in found:
            if branch.kind in ("string", "any"):
                values.append(self._written(form, branch, kinds))
            else:
                before, end = map(self._text, (form.before(branch.kind), form.end))
                values.append(f"{before} {self._json(branch.schema, root)} {end}")
        if not values:
            raise UnwritableError(f"{name!r} can have no value")
        begin, after = map(self._text, (f"{form.begin}{name}", form.after))
        return self._rule("parameter", f"{begin} ({' | '.join(values)}) {after}")

    def _heads(self, form: Tagged, names: Iterable[str]) -> str:
        """Return an expression for what stands before each argument, and before each call."""
        call = last_text(self.form.call.head).rpartition("\n")[2]
        ways = [(form.begin, list(names)), (call, self._names)]
        found = []
        for begin, named in ways:
            tag, blank, _ = begin.partition(" ")
            start = re.escape(tag) + (r"\s[^<>\n]*" if blank else r"[\s\"']*")
            found.append(f"{start}({'|'.join(map(re.escape, named))})")
        return "|".join(found)

    def _written(self, form: Tagged, branch: Branch, kinds: set[Kind]) -> str:
        """Return the grammar of text as it is, and of its end."""
        mark = self._text(form.before("string"))
        text = text_of(branch)
        if not form.kind and kinds - {"string", "any", "null"}:
            # What looks like another of the types that are allowed would be read as such.
            text = rf"({text}) & ~/\s*(?:[-0-9\[{{]|true|false)(?s:.*)/"
        text = f"({text}) & ~/(?s:.*)({_slashed(self._markup)})(?s:.*)/"
        if form.wrap is None or branch.schema:
            return f"{mark} {self._until(text, form.end)}"
        plain = self._until("/[^<&\\n]*/", form.end)
        opening, closing = form.wrap
        wrapped = self._until(text, closing + form.end)
        return f"{mark} ({plain} | {self._text(opening)} {wrapped})"

    # -- Objects without quotes ----------------------------------------------------------------

    def _members(self, schema: Mapping[str, Any], root: Mapping[str, Any], quote: str) -> str:
        named = properties({**schema, **_definitions(root)})
        for name in named:
            if not re.fullmatch(r"[^\s,:=(){}\[\]\"'<>]+(?::[^\s,:=(){}\[\]\"'<>]+)*", name):
                raise UnwritableError(f"{name!r} can't be the name of a parameter")
        needed = set(schema.get("required", ()))
        if not named and schema is not root and schema.get("additionalProperties") is not False:
            value = self._value(schema.get("additionalProperties", {}), root, quote)
            member = f'/[A-Za-z_]\\w*/ ":" {value}'
            return self._rule("members", f'({member} ("," {member})*)?')
        ways = [
            (f"{literal(name + ':')} {self._value(inner, root, quote)}", name in needed)
            for name, inner in named.items()
        ]
        return self._listed(ways, ",")

    def _value(self, schema: Any, root: Mapping[str, Any], quote: str) -> str:
        key = f"{self._lenient} {json.dumps(schema, sort_keys=True)}"
        if key not in self._known:
            # Known before it is written: a schema may hold itself.
            self._known[key] = name = f"value_{len(self._known)}"
            ways = [self._branch(branch, root, quote) for branch in branches(schema, root)]
            if not ways:
                raise UnwritableError("a value that nothing fits")
            self._append(f"{name}: {' | '.join(ways)}")
        return self._known[key]

    def _branch(self, branch: Branch, root: Mapping[str, Any], quote: str) -> str:
        match branch.kind:
            case "string":
                return f"{self._text(quote)} {self._until(text_of(branch), quote)}"
            case "any":
                scalars = {"type": ["integer", "number", "boolean", "null"]}
                text = self._branch(Branch("string", {}), root, quote)
                return f"{text} | {self._json(scalars, root)}"
            case "array":
                return self._array(branch.schema, root, quote)
            case "object":
                return f'"{{" {self._members(branch.schema, root, quote)} "}}"'
            case _:
                return self._json(branch.schema, root)

    def _array(self, schema: Mapping[str, Any], root: Mapping[str, Any], quote: str) -> str:
        for word in ("prefixItems", "uniqueItems", "contains", "enum"):
            if schema.get(word):
                raise UnwritableError(f"`{word}` for a list")
        item = self._value(schema.get("items", {}), root, quote)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        upper = "" if most is None else most - 1
        members = f'{item} ("," {item}){{{max(least - 1, 0)},{upper}}}'
        return f'"[" ({members}) "]"' if least else f'"[" ({members})? "]"'

    # -- Pieces --------------------------------------------------------------------------------

    def pieces(self, pieces: Sequence[Piece]) -> str:
        return " ".join(filter(None, map(self._piece, pieces)))

    def _piece(self, piece: Piece) -> str:
        match piece:
            case Pattern(regex):
                return f"/{_slashed(regex)}/"
            case Aside(begin, end):
                return f"({self._text(begin)} {self._until(ANYTHING, end)})?"
            case Maybe(pieces):
                return f"({self.pieces(pieces)})?"
            case text:
                return self._text(text)

    def _text(self, text: str) -> str:
        """Return a rule for `text`; tokens in it that were added to the vocabulary stand by their
        ids."""
        return " ".join(
            literal(part) if number is None else f"<[{number}]>"
            for part, number in self._split(text)
            if part
        )

    def _until(self, text: str, end: str) -> str:
        """Return a rule for matches of `text`, a terminal's expression, without `end`; then
        `end`."""
        parts = list(self._split(end))
        before = ""
        if parts[0][1] is None:
            before = literal(parts.pop(0)[0])
        inner = f"(({text}) & ~{_containing(end.strip())}) {before}"
        found = self._rule("TEXT", inner, terminal=True)
        if not parts:
            return self._rule("lazy", found, "[lazy]")
        after = "".join(part for part, _ in parts)
        return f"{found} {self._text(after)}"

    def _json(self, schema: Mapping[str, Any] | bool, root: Mapping[str, Any]) -> str:
        if schema is False:
            raise UnwritableError("a value that nothing fits")
        if schema is True:
            schema = {}
        if schema is not root:
            for reference in _references(schema):
                if not reference.startswith(("#/$defs/", "#/definitions/")):
                    raise UnwritableError(f"a reference to {reference}")
            schema = {**schema, **_definitions(root)}
        return self._rule("json", f"%json {json.dumps(json_of(dict(schema), self._lenient))}")

    def _rule(self, kind: str, body: str, option: str = "", *, terminal: bool = False) -> str:
        """Return the name of the rule, or terminal, with this body; add one if there is none."""
        key = f"{kind}{option}: {body}"
        if key not in self._known:
            name = f"{kind}_{len(self._known)}"
            self._known[key] = name.upper() if terminal else name
            self._append(f"{self._known[key]}{option}: {body}")
        return self._known[key]

    def _append(self, rule: str) -> None:
        self._size += len(rule)
        if self._size > MOST_WRITTEN:
            raise OversizedError(
                f"written out, all schemas have more than {MOST_WRITTEN} characters"
            )
        self.rules.append(rule)


def text_of(branch: Branch) -> str:
    """Return the texts that a schema allows, as the expression of a terminal."""
    schema = branch.schema
    if branch.kind == "any":
        return ANYTHING
    if "enum" in schema:
        return " | ".join(map(literal, schema["enum"]))
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    found = [f"/(?s:.){{{least},{most}}}/" if least or most != "" else ANYTHING]
    if "pattern" in schema:
        found.append(f"/{_slashed(_anywhere(_of_ecma(schema['pattern'])))}/")
    if schema.get("format") in _FORMATS:
        found.append(f"/{_slashed(_FORMATS[schema['format']])}/")
    return " & ".join(found)


def _of_ecma(pattern: str) -> str:
    return re.sub(r"(?s)\\.", lambda found: _CLASSES.get(found[0], found[0]), pattern)


def _anywhere(pattern: str) -> str:
    """Return a pattern of JSON Schema, which may match anywhere, as one for the whole text."""
    begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[begins : len(pattern) - ends]
    return ("" if begins else "(?s:.*)") + f"({inner})" + ("" if ends else "(?s:.*)")


def _containing(text: str) -> str:
    return f"/(?s:.*){_slashed(re.escape(text))}(?s:.*)/"


def _definitions(root: Mapping[str, Any]) -> dict[str, Any]:
    return {key: root[key] for key in ("$defs", "definitions") if key in root}


def _references(schema: Any) -> list[str]:
    if isinstance(schema, list):
        return [found for inner in schema for found in _references(inner)]
    if not isinstance(schema, Mapping):
        return []
    own = [schema["$ref"]] if isinstance(schema.get("$ref"), str) else []
    return own + [found for inner in schema.values() for found in _references(inner)]
