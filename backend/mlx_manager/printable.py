"""Text by others, made safe for terminals, which obey control characters from any source."""

from __future__ import annotations

import os

_MARK = "\N{REPLACEMENT CHARACTER}"
_CONTROLS = dict.fromkeys((*range(0x20), *range(0x7F, 0xA0), *range(0xD800, 0xE000)), _MARK)
# Lines end as they do here, and a carriage return alone would have one written over.
_IN_TEXT = _CONTROLS | {ord("\n"): "\n", ord("\t"): "\t", ord("\r"): ""}


def is_dumb() -> bool:
    """Return whether TERM says that the terminal knows no escape sequences at all."""
    return os.environ.get("TERM") in ("dumb", "unknown")


def on_one_line(text: str) -> str:
    """`text` less what is no character to read, for a name in a table."""
    return "".join(char if char.isprintable() else _MARK for char in text)


def in_lines(text: str) -> str:
    """`text` less what would do something to a terminal, or can't be written there.

    All else stays, also what has no width and what only some fonts have.
    """
    return text.translate(_IN_TEXT)


def in_utf8(text: str) -> str:
    """`text` with the halves of a character joined, which come apart where a server counts in
    UTF-16, and a mark for each that has lost its other half: no file or request can hold it.
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
