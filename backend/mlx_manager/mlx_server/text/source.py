"""Text that arrives in pieces, for a reader that looks as far ahead as it has to.

Readers are generators: they yield where they need text that has not arrived. What they make of it
depends on the text alone, and not on how it was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Container, Generator
from typing import TypeVar

import regex

T = TypeVar("T")
Reading = Generator[None, None, T]
Steps = Reading[None]

LONGEST_MARKUP = 512
"""Characters after which no markup is recognised; bounds what looking at a run of blanks costs."""


class Source:
    """
    Attributes:
        at: the place of the next character.
        mark: the place up to which all is understood; what is between this and `at` is text after
            all if nothing comes of it.
        ended: nothing follows what is there.
        cut: the output was cut off there, and not ended by the model.
    """

    def __init__(self, text: str) -> None:
        self._chars = list(text)
        self.at = len(text)
        self.mark = 0
        self.ended = False
        self.cut = False

    def add(self, text: str) -> None:
        self._chars += text

    def end(self, cut: bool) -> None:
        self.ended, self.cut = True, cut

    def decide(self) -> None:
        """Mark all that has been read as understood."""
        self.mark = self.at

    @property
    def undecided(self) -> str:
        return "".join(self._chars[self.mark : self.at])

    @property
    def rest(self) -> str:
        return "".join(self._chars[self.at :])

    def take(self, length: int) -> str:
        """Read the next `length` characters, which have arrived."""
        self.at += length
        return "".join(self._chars[self.at - length : self.at])

    def seen(self, start: int, stop: int) -> str:
        """Return text that has arrived, by places relative to the next character."""
        return "".join(self._chars[self.at + start : self.at + stop])

    def run(self, special: Container[str]) -> str:
        """Read the next characters that have arrived, up to the first special one."""
        start = self.at
        while self.at < len(self._chars) and self._chars[self.at] not in special:
            self.at += 1
        return "".join(self._chars[start : self.at])

    def char(self, ahead: int = 0) -> Reading[str]:
        """Return the character at a place relative to the next; "" past the end."""
        while self.at + ahead >= len(self._chars):
            if self.ended:
                return ""
            yield
        return self._chars[self.at + ahead]

    def next(self) -> Reading[str]:
        """Read the next character; "" at the end."""
        char = yield from self.char()
        self.at += len(char)
        return char

    def blanks(self, ahead: int = 0) -> Reading[int]:
        """Return the place of the first character from `ahead` on that is no blank, or of the
        end."""
        while (yield from self.char(ahead)).isspace():
            ahead += 1
        return ahead

    def says(self, text: str, ahead: int = 0) -> Reading[bool]:
        """Return whether `text` stands `ahead` characters on."""
        for place, char in enumerate(text):
            if (yield from self.char(ahead + place)) != char:
                return False
        return True

    def match(
        self, pattern: regex.Pattern[str], ahead: int = 0
    ) -> Reading[regex.Match[str] | None]:
        """Return the shortest text from a place on that a pattern matches."""
        text = ""
        while len(text) <= LONGEST_MARKUP:
            char = yield from self.char(ahead + len(text))
            text += char
            found = pattern.fullmatch(text, partial=bool(char))
            if found is None or not found.partial:
                return found
        return None

    def begun(self, pattern: regex.Pattern[str]) -> int:
        """Return how many characters that have arrived may be the beginning of what a pattern
        matches."""
        length = 0
        while length < LONGEST_MARKUP:
            text = self.seen(0, length + 1)
            if len(text) == length or not pattern.fullmatch(text, partial=True):
                break
            length += 1
        return length
