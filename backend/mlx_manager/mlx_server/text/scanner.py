"""Search for the first of some strings in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mlx_lm.generate import TextStateMachine


@dataclass(frozen=True, slots=True)
class Trie:
    """Trie of the strings to find.

    start: the machine's first state. first: the strings' first characters. depths: by a node's
    identity, how many characters of a possible match lead to the node.
    """

    start: tuple[Any, ...]
    first: frozenset[str]
    depths: Mapping[int, int]


@lru_cache(maxsize=16)
def trie_of(strings: tuple[str, ...]) -> Trie:
    """Return the trie of `strings`, one for all rows with the same: it has a node a character."""
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
    """Scanner that finds the first of some strings in text that comes in pieces.

    Of several occurrences, it finds the one that is complete first; of those, the longest.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._trie = trie_of(tuple(strings))
        self._state = self._trie.start

    def feed(self, text: str) -> tuple[str, int | None, str]:
        """Return the text before a match, the match's number and the text after it.

        Without a match, return the text that can't be part of one, None and "". The rest is held
        back.
        """
        if self._state is self._trie.start and self._trie.first.isdisjoint(text):
            return text, None, ""
        self._state, segments = TextStateMachine.split(self._state, text)
        if len(segments) == 1:
            return segments[0][1] + self._free(), None, ""
        self._state = self._trie.start
        return segments[0][1], segments[1][0], segments[1][1]

    def _free(self) -> str:
        """Take from the held text, and return, what can't be part of a match any more. mlx-lm's
        machine holds all of the text until none of it can be."""
        held: str
        name, node, states, held = self._state
        free = len(held) - self._trie.depths[id(node)]
        self._state = (name, node, states, held[free:]) if free < len(held) else self._trie.start
        return held[:free]

    def flush(self) -> str:
        """Return the text that was held back, which is no match after all."""
        held: str = self._state[3]
        self._state = self._trie.start
        return held
