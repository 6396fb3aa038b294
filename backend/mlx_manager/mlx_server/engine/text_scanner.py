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

    def feed(self, text: str) -> tuple[str, int | None, str]:
        """Text before a match, the match's number, text after it.

        With no match: text that can't be part of one, None, "". The rest is held back.
        """
        if self._state is self._start and self._first.isdisjoint(text):
            return text, None, ""
        self._state, segments = TextStateMachine.split(self._state, text)
        if len(segments) == 1:
            if not self._state[3]:
                self._state = self._start
            return segments[0][1], None, ""
        self._state = self._start
        return segments[0][1], segments[1][0], segments[1][1]

    def flush(self) -> str:
        """What was held back, which is no match after all."""
        held: str = self._state[3]
        self._state = self._start
        return held
