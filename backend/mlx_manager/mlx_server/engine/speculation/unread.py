"""Hidden states of a row's tokens that an MTP head has not read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from mlx_manager.mlx_server.devices.cuda.mapped import send

# Part of an array of states below which what is left of it is copied, so that the rest can go.
SMALL = 1 / 8


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """States of tokens that follow each other: `count` rows of `states`, (tokens, width), from row
    `number` on. first: the first of the tokens."""

    first: int
    count: int
    states: mx.array
    number: int

    @property
    def end(self) -> int:
        return self.first + self.count

    def between(self, first: int, end: int) -> Part | None:
        """Return the states of the tokens from `first` up to `end`; None if there are none."""
        begin, behind = max(self.first, first), min(self.end, end)
        if begin >= behind:
            return None
        number = self.number + begin - self.first
        return replace(self, first=begin, count=behind - begin, number=number)


class UnreadStates:
    """Hidden states of one row's tokens that follow each other, as the model's steps give them.

    Attributes:
        skipped: numbers of the row's pages that the head's layer has nothing in, in order: nobody
            had the head read what is in them.
        noted: number of the row's pages of which it is known whether the head has filled them.
        begun: whether these two have been found out.
    """

    def __init__(self) -> None:
        self.skipped: list[int] = []
        self.noted = 0
        self.begun = False
        self._parts: list[Part] = []

    def begin(self, skipped: Iterable[int], noted: int) -> None:
        """Begin with the pages that a row has found."""
        self.skipped, self.noted, self.begun = list(skipped), noted, True

    @property
    def end(self) -> int:
        """Return the token behind the last one with a state; 0 if there are no states."""
        return self._parts[-1].end if self._parts else 0

    @property
    def first(self) -> int:
        """Return the first token with a state; 0 if there are no states."""
        return self._parts[0].first if self._parts else 0

    def put(self, part: Part) -> None:
        """Take states in place of those that there are from their first token on. Where they do not
        follow the states that there are, these are dropped."""
        if self.end > part.first:
            self._parts = list(self._between(0, part.first))
        if self.end != part.first:
            self._parts = []
        self._parts.append(part)

    def of(self, first: int, count: int) -> list[Part]:
        """Return the states of `count` tokens from `first` on."""
        return list(self._between(first, first + count))

    def keep_from(self, first: int) -> mx.array | None:
        """Drop the states before token `first`. Return an array that is to be evaluated, if there
        is one: of a step with many tokens, what is left is copied."""
        self._parts = list(self._between(first, self.end))
        if len(self._parts) != 1:
            return None
        (part,) = self._parts
        if part.count >= SMALL * part.states.shape[0]:
            return None
        copy = mx.contiguous(part.states[part.number : part.number + part.count])
        self._parts = [Part(part.first, part.count, copy, 0)]
        return copy

    def _between(self, first: int, end: int) -> Iterator[Part]:
        parts = (part.between(first, end) for part in self._parts)
        return (part for part in parts if part is not None)


def gathered(parts: Sequence[Part]) -> mx.array:
    """Return the states of all parts, (tokens, width), in their order."""
    places: dict[int, int] = {}
    arrays: list[mx.array] = []
    total = 0
    for part in parts:
        if id(part.states) not in places:
            places[id(part.states)] = total
            arrays.append(part.states)
            total += int(part.states.shape[0])
    if len(parts) == 1 and parts[0].count == total:
        return arrays[0]
    wanted = [np.arange(part.count) + part.number + places[id(part.states)] for part in parts]
    states = arrays[0] if len(arrays) == 1 else mx.concatenate(arrays)
    return states[send(np.concatenate(wanted).astype(np.int32))]


def without(pages: Sequence[int], skipped: Sequence[int]) -> list[int]:
    """Return a row's pages without those of the skipped numbers."""
    gone = set(skipped)
    return [page for number, page in enumerate(pages) if number not in gone]
