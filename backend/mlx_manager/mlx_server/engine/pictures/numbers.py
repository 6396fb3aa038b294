"""Numbers of pictures' contents, which stand for their places in the keys of pages."""

from __future__ import annotations

from collections import OrderedDict
from itertools import count

MOST = 1 << 16
"""Digests whose numbers are known; the least recently used are forgotten."""


class ContentNumbers:
    """One negative number for each digest, since tokens are not negative.

    A number is never given to another digest. A digest that has been forgotten gets a new number,
    so that its pages are computed again.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._of: OrderedDict[str, int] = OrderedDict()
        self._numbers = count(-1, -1)

    def of(self, digest: str) -> int:
        number = self._of.pop(digest, None)
        if number is None:
            number = next(self._numbers)
            if len(self._of) >= self._most:
                self._of.popitem(last=False)
        self._of[digest] = number
        return number
