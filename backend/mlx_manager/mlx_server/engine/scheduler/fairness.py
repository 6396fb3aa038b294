"""Fairness: the parts of rows, pages and steps that owners have while several want the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from operator import attrgetter

from mlx_manager.mlx_server.engine.scheduler.queues import Queues
from mlx_manager.mlx_server.engine.scheduler.schedule import Schedule
from mlx_manager.mlx_server.engine.scheduler.shares import DRAWN, Shares, newest
from mlx_manager.mlx_server.engine.sequence import Sequence

# Steps for which rows take turns after several owners were here at once: who comes back after a
# minute or two finds short steps, and a crowd that has the engine to itself goes on at its best.
LATELY = 4096


class Fairness:
    """Claims of the owners of an engine's sequences.

    Args:
        queues: the sequences.
        pages_for: returns the number of pages that so many tokens take.
        abreast: running rows that are enough for a step, or 0 where it is best for all of them to
            go at once. Where several owners want the engine, and there are twice as many or more,
            they take turns, so that whoever comes waits for a shorter step.
    """

    def __init__(self, queues: Queues, pages_for: Callable[[int], int], abreast: int = 0) -> None:
        self.shares = Shares()
        self._queues = queues
        self._pages_for = pages_for
        self._abreast = abreast
        # The prompt that found no room in the last step.
        self._refused: Sequence | None = None
        # Whether the running rows were left out of the last step.
        self._gave_way = False
        # The last step before which several owners were here.
        self._contested_at = -LATELY

    @property
    def has_claims(self) -> bool:
        """Return whether a row may be left out of the next step or paused for another owner."""
        return (
            self._gave_way
            or any(map(self.is_owed, self._queues.prompts))
            or self.in_the_way() is not None
        )

    def may_queue(self, sequence: Sequence, most: int) -> bool:
        """Return whether a sequence may wait: there is room among `most`, or its owner has less
        than its part of them."""
        waiting = self._queues.waiting
        if len(waiting) < most:
            return True
        own = sum(other.owner == sequence.owner for other in waiting)
        return own < self.shares.part(sequence, most)

    # -- steps ---------------------------------------------------------------------------------

    def turn(self, step: int) -> list[Sequence]:
        """Return the running rows whose turn it is: those that have waited longest, if they take
        turns."""
        running = self._queues.running
        together = step - self._contested_at > LATELY
        turns = len(running) // self._abreast if self._abreast and not together else 1
        if turns <= 1:
            return list(running)
        most = -(-len(running) // turns)
        return sorted(running, key=attrgetter("stepped_at"))[:most]

    def is_owed(self, sequence: Sequence) -> bool:
        """Return whether the sequence's key has no running row while others, no more urgent, have.
        Not twice in a row: the others' readers wait for one step at most."""
        running = self._queues.running
        return (
            self.shares.contested
            and not self._gave_way
            and not sequence.blocked
            and bool(running)
            and all(
                row.owner != sequence.owner and row.priority >= sequence.priority for row in running
            )
        )

    def settle(self, chosen: Schedule, step: int, gave_way: bool, refused: Sequence | None) -> None:
        """Charge the owners for a step.

        gave_way: whether the running rows were left out of it. refused: the prompt that found no
        room.
        """
        self._gave_way, self._refused = gave_way, refused
        if not self.shares.contested:
            return
        self._contested_at = step
        for row in chosen.rows:
            self.shares.charge(row, DRAWN)
        for prefill in chosen.prefills:
            # Tokens that are computed again after a pause are not charged to the owner.
            if not prefill.sequence.started:
                self.shares.charge(prefill.sequence, prefill.tokens)

    # -- rows and pages ------------------------------------------------------------------------

    def last_in(self) -> Sequence:
        """Return the row that gives way to others: the newest, of the owner with the most pages if
        several owners are here."""
        rows = self._queues.rows
        if self.shares.contested:
            least_urgent = max(row.priority for row in rows)
            rows = [row for row in rows if row.priority == least_urgent]
            held = _held(rows, _pages_of)
            most = max(held, key=held.__getitem__)
            rows = [row for row in rows if row.owner == most]
        return max(rows, key=newest)

    def in_the_way(self) -> Sequence | None:
        """Return the row to pause so that another owner gets its part of the rows, or of the pages.

        None where that would leave the row's owner with less than the other then has: rows and
        pages that are taken are never taken back.
        """
        waiting = self._queues.waiting
        if not self.shares.contested or not waiting:
            return None
        rows = self._queues.rows
        if len(rows) >= self._queues.max_rows:
            held = _held(rows, _one)
            most = max(held.values())
            owed = [s for s in waiting if held[s.owner] + 1 < most]
            if not owed:
                return None
            first = min(owed, key=lambda s: (s.priority, self.shares.served(s), s.submitted_at))
            return self._pausable(rows, held, first, _one, 1)
        refused = self._refused
        if refused is None or refused.ended or not rows:
            return None
        needed = self._pages_for(len(refused.tokens) + 1)
        return self._pausable(rows, _held(rows, _pages_of), refused, _pages_of, needed)

    def _pausable(
        self,
        rows: list[Sequence],
        held: Counter[str],
        first: Sequence,
        weight: Callable[[Sequence], int],
        needed: int,
    ) -> Sequence | None:
        """Return the newest row of the owner that holds most, by `weight`, if it may be paused for
        `first`, which needs so much."""
        most = max(held, key=held.__getitem__)
        theirs = [row for row in rows if row.owner == most and row.priority >= first.priority]
        if not theirs or self.shares.served(theirs[0]) < self.shares.served(first):
            return None
        last = max(theirs, key=newest)
        left = held[most] - weight(last)
        return last if left >= held[first.owner] + needed else None


def _held(rows: Iterable[Sequence], weight: Callable[[Sequence], int]) -> Counter[str]:
    held: Counter[str] = Counter()
    for row in rows:
        held[row.owner] += weight(row)
    return held


def _one(_: Sequence) -> int:
    return 1


def _pages_of(row: Sequence) -> int:
    return len(row.table)
