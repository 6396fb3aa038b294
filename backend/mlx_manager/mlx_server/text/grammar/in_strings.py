"""A client's grammar for a text that stands in a JSON string: the same language, escaped.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from mlx_manager.mlx_server.text.tool_calls.schemas import UnwritableError

_STRING = r'"(?:[^"\\\n]|\\.)*"'
_PIECE = re.compile(
    rf"(?P<comment>//[^\n]*|\#[^\n]*)|(?P<range>{_STRING}\s*\.\.\s*{_STRING})"
    rf"|(?P<string>{_STRING})(?P<fold>i?)|/(?P<regex>(?!/)(?:[^/\\\n]|\\.)*)/(?P<flags>[a-z]*)"
    r"|%import\s+common\s*\.\s*(?P<common>\w+)(?:\s*->\s*(?P<alias>\w+))?"
    r"|(?P<ignore>%ignore[^\n]*)|(?P<other>%\w+|<|&|~(?!\s*\d))"
    r"|(?P<name>\b_?[A-Z][A-Z0-9_]*\b)(?:\.\d+(?=\s*:))?"
)
_DEFINITION = re.compile(r"^_?[A-Z][A-Z0-9_]*(?:\.\d+)?\s*:.*(?:\n[ \t]*\|.*)*", re.MULTILINE)
_COMMON = {
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
}
"""Terminals of Lark's library with characters that JSON escapes."""
_PLAIN = frozenset(
    {
        *("DIGIT", "HEXDIGIT", "INT", "SIGNED_INT", "DECIMAL", "FLOAT", "SIGNED_FLOAT", "NUMBER"),
        *("SIGNED_NUMBER", "LCASE_LETTER", "UCASE_LETTER", "LETTER", "WORD", "CNAME"),
    }
)
_ESCAPED = tuple(map(chr, [*range(0x20), ord('"'), ord("\\")]))
_UNESCAPED = r'[^"\\\x00-\x1f]'
_ATOM = re.compile(
    r"(?P<set>\[\^?\]?(?:[^\]\\]|\\.)*\])|(?P<escape>\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.))"
    r"|(?P<refused>[\^$]|\(\?(?!:))|(?P<open>\((?:\?:)?)|(?P<close>\))|(?P<or>\|)|(?P<any>\.)"
    r"|(?P<often>(?:[*+?]|\{\d+(?:,\d*)?\})\??)|(?P<plain>.)",
    re.DOTALL,
)
_BEYOND_PYTHON = re.compile(r"\[:|&&|--|~~|\\[pP]")
"""Syntax that sets in llguidance's regular expressions may hold, and sets in Python's may not."""
_ALL = "".join(
    chr(c) for c in range(0x20, 0xFFFF) if chr(c) not in '"\\' and not 0xD7FF < c < 0xE000
)


def in_json(lark: str) -> str:
    """Return a grammar for what `json.dumps` makes of the texts that `lark` derives, less quotes.

    Its lexemes are runs of characters that stay as they are, and single escapes: a lexeme of both
    would be the longest, and swallow the backslash of what follows. So terminals become rules.

    Raises:
        UnwritableError: it can't be told; says what stands in the way.
    """
    lark = _PIECE.sub(lambda found: "" if found["comment"] else found[0], lark)
    written = _PIECE.sub(_Form(lark).piece, lark)
    if "%ignore" not in lark:
        return written
    terminals = _DEFINITION.findall(lark)
    return "\n".join([written, *(_PIECE.sub(_Form(lark, lexeme=True).piece, t) for t in terminals)])


class _Form:
    """Writes the pieces of a grammar; as a `lexeme`, those of terminals that are ignored."""

    def __init__(self, lark: str, *, lexeme: bool = False) -> None:
        imported = {found["alias"] or found["common"]: found["common"] for found in _imports(lark)}
        self._kept = {known_as for known_as, name in imported.items() if name in _PLAIN}
        self._lark, self._lexeme = lark, lexeme

    def piece(self, found: re.Match[str]) -> str:
        if found["string"] is not None:
            return self._string(found)
        if found["regex"] is not None and not found["flags"]:
            return self._regex(found["regex"])
        if found["common"] is not None:
            return self._common(found["common"], found["alias"] or found["common"], found[0])
        match found.lastgroup:
            case "range":
                first, last = (json.loads(end) for end in re.findall(_STRING, found[0]))
                return self._regex(f"[{re.escape(first)}-{re.escape(last)}]")
            case "ignore":
                rest = found[0].removeprefix("%ignore")
                return "%ignore" + _PIECE.sub(_Form(self._lark, lexeme=True).piece, rest)
            case "name":
                return self._named(found["name"])
        raise UnwritableError(f"{found[0]!r} in a grammar for text")

    def _named(self, name: str) -> str:
        return name if self._lexeme or name in self._kept else f"t_{name.lower()}"

    def _string(self, found: re.Match[str]) -> str:
        text = json.loads(found["string"])
        inner = json.dumps(text, ensure_ascii=False)[1:-1]
        if found["fold"] and inner != text:
            raise UnwritableError(f"{found[0]}: of no case, with characters that JSON escapes")
        return json.dumps(inner, ensure_ascii=False) + found["fold"]

    def _common(self, name: str, known_as: str, whole: str) -> str:
        if name in _PLAIN:
            return whole
        if name not in _COMMON:
            raise UnwritableError(f"`common.{name}` in a grammar for text")
        lexeme = _Form(self._lark, lexeme=True)._regex(_COMMON[name])
        return f"{known_as}: {lexeme}\n{self._named(known_as)}: {self._regex(_COMMON[name])}"

    def _regex(self, pattern: str) -> str:
        atoms = list(_ATOM.finditer(pattern))
        if self._lexeme:
            return "/" + "".join(_lexeme(atom) for atom in atoms) + "/"
        after = [*(atom["often"] for atom in atoms[1:]), None]
        before = ["(", *(atom[0] for atom in atoms)]
        pieces = [
            _rule(atom, often, empty=last.startswith("(") or last == "|")
            for atom, often, last in zip(atoms, after, before, strict=False)
        ]
        if not atoms or atoms[-1]["or"]:
            pieces.append('""')
        return f"({' '.join(pieces)})"


def _imports(lark: str) -> Iterator[re.Match[str]]:
    return (found for found in _PIECE.finditer(lark) if found["common"] is not None)


def _rule(atom: re.Match[str], often: str | None, *, empty: bool) -> str:
    """Return an atom of a regular expression in a rule. often: its quantifier."""
    match atom.lastgroup:
        case "open":
            return "("
        case "close" | "or":
            return f'"" {atom[0]}' if empty else atom[0]
        case "often":
            return atom[0] if atom[0] == "?" else atom[0].removesuffix("?")
    held, pattern = _characters(atom)
    runs = "+" if often and often[0] in "*+" else ""
    ways = [f"/[{pattern}&&{_UNESCAPED}]{runs}/"] if held.search(_ALL) else []
    escapes = [json.dumps(c)[1:-1] for c in _ESCAPED if held.fullmatch(c)]
    ways += [json.dumps(escape) for escape in escapes]
    return f"({' | '.join(ways)})"


def _lexeme(atom: re.Match[str]) -> str:
    """Return an atom of a regular expression in a lexeme."""
    if atom.lastgroup in ("open", "close", "or", "often"):
        return atom[0]
    held, pattern = _characters(atom)
    ways = [f"[{pattern}&&{_UNESCAPED}]"] if held.search(_ALL) else []
    ways += [re.escape(json.dumps(c)[1:-1]) for c in _ESCAPED if held.fullmatch(c)]
    return f"(?:{'|'.join(ways)})"


def _characters(atom: re.Match[str]) -> tuple[re.Pattern[str], str]:
    """Return what tells the characters that an atom stands for, and the set that they are."""
    match atom.lastgroup:
        case "any":
            pattern = r"[^\n]"
        case "set":
            pattern = atom[0]
        case "plain":
            pattern = f"[{re.escape(atom[0])}]"
        case "escape" if atom[0][1] not in "bBAzZpPkQE":
            pattern = f"[{atom[0]}]"
        case _:
            raise UnwritableError(f"{atom[0]!r} in a regular expression for text")
    pattern = pattern.replace("\\/", "/")
    # A set that begins with a colon is none of the classes that stand in sets.
    if _BEYOND_PYTHON.search(pattern, 1):
        raise UnwritableError(f"the set {pattern} in a regular expression for text")
    try:
        return re.compile(pattern), pattern.replace("/", "\\x2f")
    except re.error as error:
        raise UnwritableError(f"the set {pattern}: {error}") from error
