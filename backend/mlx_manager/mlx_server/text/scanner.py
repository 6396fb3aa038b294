"""Finds the first of some strings in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mlx_lm.generate import TextStateMachine


@dataclass(frozen=True, slots=True)
class Trie:
    """What is sought: the machine's first state, the strings' first characters, and of each node,
    by identity, how many characters of what may be the beginning of a match lead to it."""

    start: tuple[Any, ...]
    first: frozenset[str]
    depths: Mapping[int, int]


@lru_cache(maxsize=16)
def trie_of(strings: tuple[str, ...]) -> Trie:
    """One for all the rows that seek the same: it has a node for each character."""
    edges = [(text, number) for number, text in enumerate(strings)]
    machine = TextStateMachine({"searching": edges} | {number: [] for _, number in edges})
    start = machine.make_state("searching")
    depths: dict[int, int] = {}
    nodes = [(start[1], 0)]
    while nodes:
        node, depth = nodes.pop()
        depths[id(node)] = depth
        nodes += [(next, depth + 1) for key, next in node.items() if len(key) == 1]
    return Trie(start, frozenset(text[0] for text in strings), depths)


class TextScanner:
    """Finds the first of some strings in text that comes in pieces.

    Of several occurrences, the one that is complete first; of those, the longest.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._trie = trie_of(tuple(strings))
        self._state = self._trie.start

    def feed(self, text: str) -> tuple[str, int | None, str]:
        """Text before a match, the match's number, text after it.

        With no match: text that can't be part of one, None, "". The rest is held back.
        """
        if self._state is self._trie.start and self._trie.first.isdisjoint(text):
            return text, None, ""
        self._state, segments = TextStateMachine.split(self._state, text)
        if len(segments) == 1:
            return segments[0][1] + self._free(), None, ""
        self._state = self._trie.start
        return segments[0][1], segments[1][0], segments[1][1]

    def _free(self) -> str:
        """Of the text that is held back, what can't be part of a match any more: mlx-lm's machine
        holds all of it until none of it can."""
        held: str
        name, node, states, held = self._state
        free = len(held) - self._trie.depths[id(node)]
        self._state = (name, node, states, held[free:]) if free < len(held) else self._trie.start
        return held[:free]

    def flush(self) -> str:
        """What was held back, which is no match after all."""
        held: str = self._state[3]
        self._state = self._trie.start
        return held
