"""Texts made tokens a few at a time, and of a long text no more than tells what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

Sized = TypeVar("Sized", bound=Sequence[object])
Encode = Callable[[Sequence[str]], list[list[int]]]

AT_ONCE = 64
"""Texts of a slice: no other thread of Python runs while what a tokenizer gave is freed."""
SLICE = 2**18
"""Characters or token ids of a slice, unless it is a single text."""
HEAD = 4096
"""Characters of a text that are looked at first, at least."""
PER_TOKEN = 8
"""And for each token that is enough. Prose has 3 to 5 to a token."""
GROWTH = 8
"""Where these were too few tokens, as of blanks, so many times as many characters are next."""
BORDER = 128
"""Tokens before a cut that might be others without it: WordPiece knows words of 100 characters."""


@dataclass(frozen=True, slots=True)
class Content:
    """The tokens of a text, or its first, which are more than enough.

    unread: about how many more tokens the text has; 0 if `ids` are all of them.
    """

    ids: list[int]
    unread: int = 0

    @property
    def total(self) -> int:
        """About how many tokens the whole text has."""
        return len(self.ids) + self.unread


def sliced(inputs: Sequence[Sized], enough: int) -> Iterator[tuple[int, Sequence[Sized]]]:
    """The inputs, which are texts or token ids, in parts of a call of the tokenizer each; with the
    index of each part's first."""
    first = size = 0
    for index, given in enumerate(inputs):
        length = min(len(given), head(enough))
        if index > first and (index - first == AT_ONCE or size + length > SLICE):
            yield first, inputs[first:index]
            first, size = index, 0
        size += length
    if inputs:
        yield first, inputs[first:]


def contents(encode: Encode, texts: Sequence[str], enough: int) -> list[Content]:
    """Of each text all tokens, or more than `enough` of its first, which the rest does not change,
    but for a choice between two ways to say the same that a Unigram leaves to the end.

    No count of characters tells that a text is too long: WordPiece makes a word of any length one
    token, and of blanks none.
    """
    begun = encode([text[: head(enough)] for text in texts]) if texts else []
    return [continued(encode, text, ids, enough) for text, ids in zip(texts, begun, strict=True)]


def continued(encode: Encode, text: str, ids: list[int], enough: int) -> Content:
    size = head(enough)
    while size < len(text) and len(ids) <= enough + BORDER:
        size *= GROWTH
        [ids] = encode([text[:size]])
    if size >= len(text):
        return Content(ids)
    kept = ids[: len(ids) - BORDER]
    # As many to a character as in the part that was read.
    return Content(kept, max(1, len(ids) * len(text) // size - len(kept)))


def head(enough: int) -> int:
    return max(HEAD, PER_TOKEN * enough)
