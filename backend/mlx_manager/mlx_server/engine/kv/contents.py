"""Numbers in the keys of pages, which stand for what tokens do not tell: pictures and salts."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from itertools import count

MOST = 1 << 16
"""Names whose numbers are known; the least recently used are forgotten."""


class ContentNumbers:
    """One negative number for each name, since tokens are not negative.

    A number is never given to another name. A name that has been forgotten gets a new number, so
    that its pages are computed again.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._of: OrderedDict[str, int] = OrderedDict()
        self._numbers = count(-1, -1)

    def of(self, name: str) -> int:
        number = self._of.pop(name, None)
        if number is None:
            number = next(self._numbers)
            if len(self._of) >= self._most:
                self._of.popitem(last=False)
        self._of[name] = number
        return number


def salted(salt: str, content: object) -> str:
    """Return a name of `content` that is another one for each salt, which it does not tell."""
    return hashlib.sha256(
        f"{len(salt)}:{salt}{content}".encode("utf-8", "surrogatepass")
    ).hexdigest()
