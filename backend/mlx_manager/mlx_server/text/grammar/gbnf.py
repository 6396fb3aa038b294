"""llama.cpp's grammars (GBNF) as llguidance's (Lark), in time that grows with their length.

https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md. llguidance has a converter of
its own, whose time grows with the square of the rules.
"""

from __future__ import annotations

import json
import re
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

DEEPEST_GROUP = 64
"""Parentheses in each other."""

NOTHING = '""'

_TOKEN = re.compile(
    r"""(?P<blank>[ \t]+|\#[^\r\n]*)
    |(?P<line>\r\n|\r|\n)
    |(?P<text>"(?:\\.|[^"\\])*")
    |(?P<chars>\[(?:\\.|[^\]\\])*\])
    |(?P<times>[*+?]|\{\s*\d+\s*(?:,\s*\d*\s*)?\})
    |(?P<is>::=)
    |(?P<mark>[|().])
    |(?P<name>[\w-]+)""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(
    r"""\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([nrt"\\\[\]]))""", re.VERBOSE
)
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}


class GbnfError(ValueError):
    """Error for a text that is no grammar; the message says where and why."""


@dataclass(frozen=True, slots=True)
class _Ref:
    """A rule's name where it is used."""

    name: str
    line: int


@dataclass(slots=True)
class _Rule:
    """The body as Lark, but for the names in it."""

    pieces: list[str | _Ref] = field(default_factory=list)


def is_lark(text: str) -> bool:
    """Return whether a grammar is in Lark's syntax already."""
    return re.search(r"(?m)^\s*(%llguidance\b|start\s*:(?!:=))", text) is not None


def lark_of(text: str) -> str:
    """Return a grammar in GBNF, converted to Lark.

    Raises:
        GbnfError: it is none.
    """
    rules = _Parser(text).rules()
    if "root" not in rules:
        raise GbnfError("there is no rule `root`")
    for rule in rules.values():
        for piece in rule.pieces:
            if isinstance(piece, _Ref) and piece.name not in rules:
                raise GbnfError(f"line {piece.line}: there is no rule `{piece.name[:64]}`")
    names = _names(rules, _terminals(rules))
    lines = ["%llguidance {}", ""]
    for name, rule in rules.items():
        body = (names[piece.name] if isinstance(piece, _Ref) else piece for piece in rule.pieces)
        lines.append(f"{names[name]}: {' '.join(body)}")
    return "\n".join(lines) + "\n"


def _terminals(rules: dict[str, _Rule]) -> set[str]:
    """Return the names of the rules that refer only to each other, and not in circles: each is one
    regular expression. The rule `root` is excluded."""
    users: dict[str, set[str]] = {name: set() for name in rules}
    open_refs: dict[str, int] = {}
    for name, rule in rules.items():
        used = {piece.name for piece in rule.pieces if isinstance(piece, _Ref)}
        open_refs[name] = len(used)
        for each in used:
            users[each].add(name)
    ready = deque(name for name, count in open_refs.items() if not count and name != "root")
    found: set[str] = set()
    while ready:
        name = ready.popleft()
        found.add(name)
        for user in users[name]:
            open_refs[user] -= 1
            if not open_refs[user] and user != "root":
                ready.append(user)
    return found


def _names(rules: dict[str, _Rule], terminals: set[str]) -> dict[str, str]:
    """Return each rule's name in Lark, where case tells rules from terminals."""
    names, taken = {"root": "start"}, {"start"}
    for name in rules:
        if name == "root":
            continue
        plain = re.sub(r"([a-z])([A-Z])", r"\1_\2", name)
        plain = re.sub(r"[^a-z0-9_]", "_", plain.lower())
        if not plain[0].isalpha():
            plain = f"r{plain}"
        plain = plain.upper() if name in terminals else plain
        number, unique = 1, plain
        while unique in taken:
            number += 1
            unique = f"{plain}_{number}"
        taken.add(unique)
        names[name] = unique
    return names


class _Parser:
    """Reads a grammar once, from its beginning to its end."""

    def __init__(self, text: str) -> None:
        self._tokens = list(_tokens(text))
        self._at = 0

    def rules(self) -> dict[str, _Rule]:
        """Return the rules by name. Of several with one name the last counts.

        Raises:
            GbnfError: the text is no grammar.
        """
        found: dict[str, _Rule] = {}
        while True:
            self._skip("line")
            kind, name, line = self._next()
            if kind == "end":
                return found
            if kind != "name" or self._peek()[0] != "is":
                raise GbnfError(f"line {line}: a rule begins with its name and `::=`")
            self._at += 1
            self._skip("line")
            found[name] = _Rule(self._body())

    def _body(self) -> list[str | _Ref]:
        """Read alternatives up to the end of a line that is in no parentheses."""
        pieces: list[str | _Ref] = []
        groups: list[int] = []
        empty, repeats = True, False
        while True:
            kind, text, line = self._peek()
            if kind == "end" or (kind == "line" and not groups):
                break
            self._at += 1
            if kind == "line":
                continue
            if kind == "times" and repeats:
                pieces.append(_times(text))
                repeats = False
                continue
            if text in ("(", "|"):
                if text == "(" and len(groups) == DEEPEST_GROUP:
                    raise GbnfError(f"line {line}: more than {DEEPEST_GROUP} nested parentheses")
                if text == "(":
                    groups.append(line)
                elif empty:
                    pieces.append(NOTHING)
                pieces.append(text)
                self._skip("line")
                empty, repeats = True, False
                continue
            if text == ")" and groups:
                groups.pop()
                pieces += [NOTHING, ")"] if empty else [")"]
            else:
                pieces.append(_item(kind, text, line))
            empty, repeats = False, True
        if groups:
            raise GbnfError(f"line {groups[-1]}: a parenthesis is not closed")
        return [*pieces, NOTHING] if empty else pieces

    def _peek(self) -> tuple[str, str, int]:
        return self._tokens[self._at]

    def _next(self) -> tuple[str, str, int]:
        found = self._tokens[self._at]
        # The end is the next one for ever.
        self._at += found[0] != "end"
        return found

    def _skip(self, kind: str) -> None:
        while self._peek()[0] == kind:
            self._at += 1


def _tokens(text: str) -> Iterator[tuple[str, str, int]]:
    """Yield each token's kind, text and line, without blanks; "end" last.

    Raises:
        GbnfError: something is none.
    """
    at, line = 0, 1
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise GbnfError(f"line {line}: {text[at : at + 20]!r} can't be read")
        at = found.end()
        kind = found.lastgroup or ""
        if kind != "blank":
            yield kind, found[0], line
        line += found[0].count("\n")
    yield "end", "", line


def _item(kind: str, text: str, line: int) -> str | _Ref:
    match kind:
        case "name":
            return _Ref(text, line)
        case "text":
            # JSON lets this one stand as it is, and llguidance does not.
            plain = _plain(text[1:-1], line)
            return json.dumps(plain, ensure_ascii=False).replace("\x7f", "\\u007f")
        case "chars":
            return _class(text[1:-1], line)
        case "mark" if text == ".":
            return "/(?s:.)/"
    raise GbnfError(f"line {line}: {text[:20]!r} can't be there")


def _times(text: str) -> str:
    """Return a repetition as Lark has it."""
    if text in "*+?":
        return text
    least, comma, most = re.sub(r"\s", "", text[1:-1]).partition(",")
    return f"{{{least},{most if comma else least}}}"


def _plain(text: str, line: int) -> str:
    """Return `text` with its escapes replaced.

    Raises:
        GbnfError: there is no such escape.
    """
    return "".join(char for char, _ in _chars(text, line))


def _class(text: str, line: int) -> str:
    """Return the text between brackets as a regular expression between slashes.

    Raises:
        GbnfError: there is no such escape.
    """
    negated = text.startswith("^")
    chars = list(_chars(text[negated:], line))
    last = len(chars) - 1

    def written(at: int, char: str, escaped: bool) -> str:
        spans = char == "-" and not escaped and 0 < at < last
        return char if spans or (char.isascii() and char.isalnum()) else rf"\x{{{ord(char):X}}}"

    inner = "".join(written(at, char, escaped) for at, (char, escaped) in enumerate(chars))
    return f"/[{'^' * negated}{inner}]/"


def _chars(text: str, line: int) -> Iterator[tuple[str, bool]]:
    """Yield each character, and whether it was escaped."""
    at = 0
    while at < len(text):
        if text[at] != "\\":
            yield text[at], False
            at += 1
            continue
        found = _ESCAPE.match(text, at)
        if found is None:
            raise GbnfError(f"line {line}: there is no escape {text[at : at + 2]!r}")
        at = found.end()
        number = found[1] or found[2] or found[3]
        if number is None:
            yield _CONTROLS.get(found[4], found[4]), True
        elif int(number, 16) > sys.maxunicode:
            raise GbnfError(f"line {line}: there is no character {number}")
        else:
            yield chr(int(number, 16)), True
