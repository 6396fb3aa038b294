"""Texts as an encoder reads them: their tokens between the tokenizer's special ones, and cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wrapping:
    """The special tokens before, between and after texts, told from what a tokenizer made of one.

    Adding them here avoids the tokenizer's truncation, which is state that all of its users share.
    """

    before: Ids
    between: Ids
    after: Ids
    segments: bool

    @staticmethod
    def single(tokenizer: Any) -> Wrapping:
        """
        Raises:
            ValueError: the tokenizer can't tell.
        """
        made = tokenizer("a", return_special_tokens_mask=True)
        before, after = runs(made["input_ids"], made["special_tokens_mask"], texts=1)
        return Wrapping(before, (), after, segments=False)

    @staticmethod
    def pair(tokenizer: Any) -> Wrapping:
        """
        Raises:
            ValueError: the tokenizer puts two texts together as if they were one.
        """
        made = tokenizer("a", "a", return_special_tokens_mask=True, return_token_type_ids=True)
        before, between, after = runs(made["input_ids"], made["special_tokens_mask"], texts=2)
        return Wrapping(before, between, after, segments=any(made["token_type_ids"]))

    @property
    def special(self) -> Ids:
        return (*self.before, *self.between, *self.after)

    @property
    def length(self) -> int:
        return len(self.special)

    def of(self, text: Sequence[int]) -> Ids:
        return (*self.before, *text, *self.after)

    def of_pair(self, first: Sequence[int], second: Sequence[int]) -> tuple[Ids, int | None]:
        """Return the ids, and where the second segment begins; None: the model has no segments."""
        opening = (*self.before, *first, *self.between)
        return (*opening, *second, *self.after), len(opening) if self.segments else None


def runs(ids: Sequence[int], special: Sequence[int], *, texts: int) -> list[Ids]:
    """Return the special tokens before, between and after `texts` texts.

    Raises:
        ValueError: as many texts can't be told apart.
    """
    found: list[list[int]] = [[]]
    for is_special, run in groupby(zip(ids, special, strict=True), key=lambda pair: pair[1]):
        if is_special:
            found[-1] += [token for token, _ in run]
        else:
            found.append([])
    if len(found) == 1:
        raise ValueError("its tokenizer has no token for the letter 'a', by which it is tried.")
    if len(found) < texts + 1:
        raise ValueError("its tokenizer puts no separator between the two texts of a pair.")
    if len(found) > texts + 1:
        raise ValueError("its tokenizer puts special tokens inside a text, not around it.")
    return [tuple(run) for run in found]


def shortened(first: int, second: int, most: int) -> tuple[int, int]:
    """Return how many tokens stay of each of two texts, `most` together: the longer is cut first.

    This is the tokenizers library's "longest first".
    """
    if first + second <= most:
        return first, second
    shorter, longer = sorted((first, second))
    longer = shorter if shorter > most else max(shorter, most - shorter)
    if shorter + longer > most:
        shorter = most // 2
        longer = shorter + most % 2
    return (longer, shorter) if first > second else (shorter, longer)
