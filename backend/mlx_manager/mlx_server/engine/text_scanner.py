"""Finds the first of some strings in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_lm.generate import TextStateMachine


class TextScanner:
    """Finds the first of some strings in text that comes in pieces.

    Of several occurrences, the one that is complete first; of those, the longest.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        edges = [(text, number) for number, text in enumerate(strings)]
        machine = TextStateMachine({"searching": edges} | {number: [] for _, number in edges})
        self._start = self._state = machine.make_state("searching")
        self._first = frozenset(text[0] for text in strings)
        # Of each node of the trie, by identity: characters of what may be the beginning of a match.
        self._depths: dict[int, int] = {}
        nodes = [(self._start[1], 0)]
        while nodes:
            node, depth = nodes.pop()
            self._depths[id(node)] = depth
            nodes += [(next, depth + 1) for key, next in node.items() if len(key) == 1]

    def feed(self, text: str) -> tuple[str, int | None, str]:
        """Text before a match, the match's number, text after it.

        With no match: text that can't be part of one, None, "". The rest is held back.
        """
        if self._state is self._start and self._first.isdisjoint(text):
            return text, None, ""
        self._state, segments = TextStateMachine.split(self._state, text)
        if len(segments) == 1:
            return segments[0][1] + self._free(), None, ""
        self._state = self._start
        return segments[0][1], segments[1][0], segments[1][1]

    def _free(self) -> str:
        """Of the text that is held back, what can't be part of a match any more: mlx-lm's machine
        holds all of it until none of it can."""
        held: str
        name, node, states, held = self._state
        free = len(held) - self._depths[id(node)]
        self._state = (name, node, states, held[free:]) if free < len(held) else self._start
        return held[:free]

    def flush(self) -> str:
        """What was held back, which is no match after all."""
        held: str = self._state[3]
        self._state = self._start
        return held
