"""Half a character in JSON: a surrogate's escape without the other half.

A client that cuts a text to a length may cut a character outside Unicode's first plane in two, and
JSON can escape either half. No text has such a half, so U+FFFD stands for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

REPLACEMENT = rb"\ufffd"
"""The escape for U+FFFD."""
_ESCAPED = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_SECOND = b"cdefCDEF"
"""The second digit of the escape of a pair's second half."""


def halves(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield the place (start, end) of each escaped half of a character in JSON without the other.

    A backslash that is itself escaped begins no escape.
    """
    seen = 0
    first: tuple[int, int] | None = None
    for found in _ESCAPED.finditer(data):
        start, end = found.span()
        before = data[seen:start]
        seen = end
        if (len(before) - len(before.rstrip(b"\\"))) % 2:
            continue
        second = data[start + 3] in _SECOND
        pair = second and first is not None and first[1] == start
        if first is not None and not pair:
            yield first
        if second and not pair:
            yield start, end
        first = None if second else (start, end)
    if first is not None:
        yield first


def mended(data: bytes) -> bytes:
    """Return JSON with U+FFFD for each half; for texts that take no time."""
    pieces: list[bytes] = []
    done = 0
    for start, end in halves(data):
        pieces += data[done:start], REPLACEMENT
        done = end
    return b"".join((*pieces, data[done:]))
