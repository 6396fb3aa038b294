"""A model's own head for multi-token prediction (MTP), as a draft model.

The head reads a token and the model's hidden state before it, behind the model's last norm: at
place p it has token p + 1 and the state of token p, and guesses token p + 2. To guess on, it reads
what it has guessed, and its own state in place of the model's. What is drawn is then read again,
with the model's states. Sources: vLLM's `deepseek_mtp.py`, `qwen3_5_mtp.py` and proposer; for the
states, behind the norm in either case, its pull requests 45895 and 47448, and Rapid-MLX's 3371.

The model's steps give the states, so whatever the model computes the head reads, at most
`READ_AT` tokens later. What nobody has had it read, since it was computed for a row without drafts
or came from disk, can't be read any more: those pages are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx
import numpy as np

from mlx_manager.mlx_server.devices.cuda.mapped import send
from mlx_manager.mlx_server.engine.kv.pages import PageTable
from mlx_manager.mlx_server.engine.sequence import Sequence as Row
from mlx_manager.mlx_server.engine.speculation.draft import Method
from mlx_manager.mlx_server.engine.speculation.draft_model import DraftModel, Guess
from mlx_manager.mlx_server.engine.speculation.unread import (
    Part,
    UnreadStates,
    gathered,
    without,
)
from mlx_manager.mlx_server.execution.attention.paged import Span

READ_AT = 32
"""Hidden states of a row that are kept until the head reads them, unless it guesses before."""
# Part of a step's states up to which those that rows keep are copied, so that the rest can go.
MUCH = 1 / 2


@dataclass(frozen=True, slots=True)
class RowStates:
    """Place of a row's hidden states among those of a step.

    unread: what takes them. first, count: the row's first token in the step, and how many there
    are. number: of the first one's state.
    """

    row: Row
    unread: UnreadStates
    first: int
    count: int
    number: int


@dataclass(frozen=True, slots=True)
class StepStates:
    """Hidden states of one step of the model, (tokens, width). rows: those that may bring
    drafts."""

    states: mx.array
    rows: Sequence[RowStates]


class DraftHead(DraftModel):
    """Runs an MTP head over the rows' pages, all rows together. Made as `DraftModel`."""

    method: ClassVar[Method] = "mtp"
    lag: ClassVar[int] = 1

    # -- what it has read ----------------------------------------------------------------------

    def absorb(self, step: StepStates) -> None:
        """Take the hidden states of a step that has been computed."""
        taken: list[tuple[UnreadStates, Part]] = []
        for each in step.rows:
            row, unread, first = each.row, each.unread, each.first
            if row.ended or row.unread is not unread:
                # It has been paused since, and begins again.
                continue
            if not unread.begun:
                unread.begin(self._unfilled(row), row.adopted // self._pool.page_size)
                row.drafted = row.adopted
            begin = first
            if first > (unread.end or row.drafted):
                begin = self._skip_to(row, first)
            count = first + each.count - begin
            if count > 0:
                number = each.number + begin - first
                taken.append((unread, Part(begin, count, step.states, number)))
        for unread, part in _apart(taken, int(step.states.shape[0])):
            unread.put(part)

    def _skip_to(self, row: Row, first: int) -> int:
        """Leave the row's pages out up to the one that begins with token `first`, or the next one.
        Return its first token."""
        assert row.unread is not None
        size = self._pool.page_size
        behind = -(-first // size)
        row.unread.skipped += range(row.drafted // size, behind)
        row.drafted = behind * size
        return row.drafted

    def catch_up(self, rows: Iterable[Row]) -> None:
        """Read what rows have had computed, where that is much."""
        reads = []
        for row in rows:
            unread = row.unread
            if unread is None:
                continue
            self._note(row, row.drafted)
            # The last one is read for the guess.
            count = min(unread.end, len(row.tokens) - 2) - row.drafted
            if count >= READ_AT:
                reads.append((row, count))
        if reads:
            self.read(reads)

    def _note(self, row: Row, before: int) -> None:
        unread, size = row.unread, self._pool.page_size
        assert unread is not None
        # Pages are indexed a step or more after they are filled.
        for number in range(unread.noted, min(row.drafted, row.computed) // size):
            page = int(row.table.pages[number])
            content = self._pool.content(page)
            if content is None:
                return
            if number not in unread.skipped:
                self._filled[page] = content
            unread.noted = number + 1

    def takes(self, row: Row, tokens: int) -> bool:
        """Return whether it can guess so many tokens for a row: none for one with pictures."""
        if row.unread is None or not super().takes(row, tokens):
            return False
        last = len(row.tokens) - 2
        # The state of a token whose step has not been collected comes with it.
        return bool(row.pending) or row.unread.first <= last < row.unread.end

    def behind(self, row: Row) -> int:
        """Return the number of places that it has not filled, at least one: the last one is filled
        for what follows. The host must know all tokens of the row."""
        row.drafted = min(row.drafted, len(row.tokens) - 2)
        return len(row.tokens) - 1 - row.drafted

    # -- work ----------------------------------------------------------------------------------

    def _stays(self, guess: Guess) -> list[int]:
        return []

    def _span(self, row: Row, length: int, queries: int) -> Span:
        skipped = [] if row.unread is None else row.unread.skipped
        if not skipped:
            return Span(row.table, length, queries)
        table = PageTable(without(row.table.pages.tolist(), skipped))
        return Span(table, length - len(skipped) * self._pool.page_size, queries)

    def _hand_over(self, read: Sequence[tuple[Row, int, int]]) -> None:
        parts: list[Part] = []
        firsts, number = [], 0
        for row, first, count in read:
            assert row.unread is not None
            parts += row.unread.of(first, count)
            if not first:
                firsts.append(number)
            number += count
        self._give(gathered(parts), firsts)
        self._ends = list(np.cumsum([count for _, _, count in read]) - 1)

    def _continue(self, guesses: Sequence[Guess]) -> None:
        states = self._forward.hidden
        assert states is not None
        places = [self._ends[guess.number] for guess in guesses]
        self._give(states[send(np.array(places, np.int32))], [])
        self._ends = list(range(len(guesses)))

    def _give(self, states: mx.array, firsts: Sequence[int]) -> None:
        assert self._of.give is not None
        self._of.give(states, firsts)

    def _let_go(self, rows: Sequence[Row]) -> None:
        left = []
        for row in rows:
            assert row.unread is not None
            # The next guess may follow the same token.
            left.append(row.unread.keep_from(min(row.drafted, max(len(row.tokens) - 2, 0))))
        mx.async_eval([array for array in left if array is not None])  # type: ignore[no-untyped-call]

    def _finish_reading(self, logits: mx.array, tokens: int, begun: float) -> None:
        if self._forward.looks_ahead:
            # A GPU reads while a step is under way, and what that takes is not known.
            mx.async_eval(logits, self._forward.state())  # type: ignore[no-untyped-call]
        else:
            super()._finish_reading(logits, tokens, begun)


def _apart(
    taken: Sequence[tuple[UnreadStates, Part]], tokens: int
) -> Iterator[tuple[UnreadStates, Part]]:
    """Yield what is taken of a step of so many tokens. What rows keep for longer is copied if that
    is little of the step: prompts' states would stay with it."""
    few = [part for _, part in taken if part.count < READ_AT]
    count = sum(part.count for part in few)
    if not few or count > MUCH * tokens:
        yield from taken
        return
    copy, number = gathered(few), 0
    mx.async_eval(copy)  # type: ignore[no-untyped-call]
    for unread, part in taken:
        if part.count < READ_AT:
            yield unread, Part(part.first, part.count, copy, number)
            number += part.count
        else:
            yield unread, part
