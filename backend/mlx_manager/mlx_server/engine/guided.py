"""Guided rows: those whose next token must fit what has been drawn so far."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from mlx_manager.mlx_server.core import TokenLogprob
from mlx_manager.mlx_server.engine.sequence import Sequence
from mlx_manager.mlx_server.text.grammar.guide import Masks

DrawnToken = tuple[Sequence, int, TokenLogprob | None]
"""A row, the token that has been drawn for it, and its score if the row asks for scores."""


class GuidedRows:
    """Guided rows between two draws: first the last token is parsed, then the mask is found.

    masks: finds the masks of several rows at once.
    """

    def __init__(self, masks: Masks) -> None:
        self._masks = masks
        self._unparsed: deque[DrawnToken] = deque()
        self._unmasked: list[Sequence] = []

    def __bool__(self) -> bool:
        return bool(self._unparsed)

    def __iter__(self) -> Iterator[Sequence]:
        return (row for row, *_ in self._unparsed)

    def add(self, drawn: DrawnToken) -> None:
        self._unparsed.append(drawn)

    def next(self) -> DrawnToken:
        """Remove and return the oldest token that has not been parsed."""
        return self._unparsed.popleft()

    def parsed(self, row: Sequence) -> None:
        """Note that a row waits for its mask."""
        self._unmasked.append(row)

    def find_masks(self) -> None:
        """Set the masks of the rows that wait for theirs, and go on."""
        if not self._unmasked:
            return
        rows = [row for row in self._unmasked if row.outcome is None and not row.ended]
        self._masks.update([row.guide for row in rows if row.guide is not None])
        for row in rows:
            row.follow_guide()
        self._unmasked = []
