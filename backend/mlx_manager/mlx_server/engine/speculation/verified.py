"""Rows whose drafts have been tried: what was drawn is kept up to the first that differs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mlx_manager.mlx_server.core import TokenLogprob
from mlx_manager.mlx_server.engine.sequence import Sequence as Row
from mlx_manager.mlx_server.engine.speculation.draft import Draft
from mlx_manager.mlx_server.execution.forward import Snapshot
from mlx_manager.mlx_server.text.grammar.guide import Masks


@dataclass(frozen=True, slots=True)
class Tried:
    """Draft with the tokens that were drawn at its places, and their scores by their places."""

    draft: Draft
    tokens: Sequence[int]
    scores: Mapping[int, TokenLogprob]

    @property
    def row(self) -> Row:
        return self.draft.sequence


class TriedDrafts:
    """Drafts between two steps.

    masks: finds the masks of guided rows. restore: has recurrent layers go back to what they had
        kept of a row.
    """

    def __init__(self, masks: Masks, restore: Callable[[Row, Snapshot], None]) -> None:
        self._masks = masks
        self._restore = restore
        self._waiting: deque[Tried] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __iter__(self) -> Iterator[Row]:
        return (tried.row for tried in self._waiting)

    def add(self, tried: Tried) -> None:
        """Take what a step has drawn. Nothing of the draft counts as computed before it is
        accepted."""
        tried.row.computed -= len(tried.draft.tokens)
        self._waiting.append(tried)

    def next(self) -> Tried:
        """Remove and return the oldest."""
        return self._waiting.popleft()

    def accept(self, tried: Tried) -> int:
        """Append what was drawn to the row, up to and including the first token that differs from
        the draft, or that ends the row. Return the number of tokens.

        A place at which the row now excludes other tokens than was foreseen is drawn again by the
        next step. Where recurrent layers have seen more of the draft than was drawn, they go back,
        and the row's next step has them see again what was drawn.
        """
        row, draft = tried.row, tried.draft
        kept = self._append(tried)
        going = row.outcome is None and row.failure is None
        if kept < draft.places and draft.before is not None and going:
            self._restore(row, draft.before)
            row.computed -= kept - 1 + draft.due
        return kept

    def _append(self, tried: Tried) -> int:
        row, draft = tried.row, tried.draft
        for place, token in enumerate(tried.tokens):
            if place:
                if row.tokens[-1] != draft.tokens[place - 1]:
                    return place
                if not row.sampler.allows_the_same(draft.samplers[place]):
                    return place
                row.computed += 1
            row.append(token)
            if row.outcome != "stop":
                row.parse_ahead(token, tried.scores.get(place))
            if row.outcome is not None or row.failure is not None:
                return place + 1
            if row.guide is not None:
                self._masks.update([row.guide])
                row.follow_guide()
                if row.failure is not None:
                    return place + 1
        return len(tried.tokens)
