"""Queues of an engine's sequences, and the order in which prompts have their turn."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from mlx_manager.mlx_server.engine.scheduler.shares import Shares, by_owner
from mlx_manager.mlx_server.engine.sequence import Sequence

# A waiting prompt gains this many tokens of priority with each step, so that a long one is
# overtaken by shorter ones for a while, and not for ever.
AGEING = 8
# Number of waiting prompts that one step looks at: a GPU's is to be full of short ones.
LOOK = 128


class Queues:
    """Sequences by their state: waiting for a row, prefilling, running.

    max_rows: most sequences that may have a row, that is, prefill or run, at once.
    """

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.waiting: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.running: list[Sequence] = []
        # The first step before which a running row may have drawn all its tokens.
        self._full_at = 0

    def __iter__(self) -> Iterator[Sequence]:
        return iter((*self.running, *self.prefilling, *self.waiting))

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.prefilling or self.waiting)

    @property
    def prompts(self) -> list[Sequence]:
        return [*self.prefilling, *self.waiting]

    @property
    def rows(self) -> list[Sequence]:
        """Return the sequences that have a row."""
        return [*self.running, *self.prefilling]

    @property
    def admitted(self) -> int:
        """Return the number of sequences that have a row."""
        return len(self.running) + len(self.prefilling)

    @property
    def ahead(self) -> tuple[int, int]:
        """Return the prompt tokens still to be processed: of all prompts, and of the shortest.
        Prompts that wait for pictures are left out."""
        lengths = [prompt.remaining for prompt in self.prompts if not prompt.blocked]
        return sum(lengths), min(lengths, default=0)

    def beginning(self, few: int, most: int) -> int:
        """Return the number of prompts that are worked on or could be, and of rows that have only
        just begun, after the first of these prompts was submitted: sequences that arrive together
        have the same claim to a start. Prompts that wait for pictures are left out.

        few: most tokens that a row has drawn while it has just begun. most: most such rows.
        """
        prefilling = [prompt for prompt in self.prefilling if not prompt.blocked]
        prompts = [*prefilling, *self.waiting]
        if not prompts:
            return 0
        # Rows that have drawn all their tokens are as good as gone.
        running = [row for row in self.running if row.drawn < row.limit]
        free = max(self.max_rows - len(running) - len(self.prefilling), 0)
        first = min(prompt.submitted_at for prompt in prompts)
        begun = sum(row.drawn <= few and row.joined_at >= first for row in running)
        return len(prefilling) + min(len(self.waiting), free) + min(begun, most)

    # -- moves ---------------------------------------------------------------------------------

    def admit(self, sequence: Sequence) -> None:
        """Give a waiting sequence a row."""
        self.waiting.remove(sequence)
        self.prefilling.append(sequence)

    def join(self, sequence: Sequence) -> None:
        """Let a sequence run whose prompt is done."""
        self.prefilling.remove(sequence)
        self.running.append(sequence)
        self._full_at = 0

    def put_back(self, sequence: Sequence) -> None:
        """Let a sequence that has a row wait again."""
        (self.running if sequence in self.running else self.prefilling).remove(sequence)
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from whichever queue it is in; removing it twice does no harm."""
        for queue in (self.running, self.prefilling, self.waiting):
            if sequence in queue:
                queue.remove(sequence)

    def set_full_aside(self, step: int) -> list[Sequence]:
        """Take the rows that have drawn all their tokens out of `running`, and return them. The
        host has yet to read the last of these tokens."""
        if step < self._full_at:
            return []
        full = [row for row in self.running if row.drawn >= row.limit]
        for row in full:
            self.running.remove(row)
        self._full_at = step + min([row.limit - row.drawn for row in self.running], default=0)
        return full

    def look_again(self) -> None:
        """Look at all running rows again before the next step: one may draw more than a token."""
        self._full_at = 0

    # -- order ---------------------------------------------------------------------------------

    def in_order(self, step: int, shares: Shares) -> Iterable[Sequence]:
        """Return prompts by priority, then least served owner, then shortest remaining, with
        ageing."""

        def rank(sequence: Sequence) -> tuple[int, int]:
            waited = step - sequence.submitted_at
            return sequence.priority, sequence.remaining - AGEING * waited

        def ranked(prefilling: list[Sequence], waiting: list[Sequence]) -> list[Sequence]:
            first = heapq.nsmallest(LOOK, waiting, key=rank) if waiting else []
            return sorted([*prefilling, *first], key=rank)

        if not shares.contested:
            return ranked(self.prefilling, self.waiting)
        prefilling, waiting = by_owner(self.prefilling), by_owner(self.waiting)
        owners = dict.fromkeys([*prefilling, *waiting])
        queues = {owner: ranked(prefilling[owner], waiting[owner]) for owner in owners}
        return shares.in_turn(queues, rank)
