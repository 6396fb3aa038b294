"""How much of an engine each key has had, so that keys share it evenly while several want it.

Virtual token counters, as in "Fairness in Serving Large Language Models" (arXiv:2401.00588): who
has been served least goes first; a token drawn counts as two of a prompt; and whoever comes back
starts from the least of those who are there, so that nobody saves up. With one key there is
nothing to count, and nothing is.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter

from mlx_manager.mlx_server.engine.sequence import Sequence

DRAWN = 2
"""What a drawn token counts, a prompt's counting 1."""

Rank = Callable[[Sequence], tuple[int, int]]
"""A sequence's priority, and its place among others of the same; less goes first."""


class Shares:
    """Counts what is served to whom, by the sequences' `owner`."""

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._present: dict[str, set[int]] = {}
        self._last = 0

    @property
    def contested(self) -> bool:
        """Whether sequences of several owners are here."""
        return len(self._present) > 1

    def part(self, sequence: Sequence, whole: int) -> int:
        """An owner's part of `whole`, shared by those that are here and itself; all if alone."""
        others = len(self._present) - (sequence.owner in self._present)
        return whole // (others + 1)

    def enter(self, sequence: Sequence) -> None:
        owner = sequence.owner
        if owner not in self._present:
            if self._present:
                # One less: who comes goes before those who are served already.
                start = min(self._served[name] for name in self._present) - 1
            else:
                # One more: who comes next may have been served as little, and goes before it.
                start = max(self._served.get(owner, 0), self._last) + 1
            self._served[owner] = max(self._served.get(owner, start), start)
            self._present[owner] = set()
        self._present[owner].add(sequence.key)

    def leave(self, sequence: Sequence) -> None:
        """It has ended; told twice is no harm."""
        members = self._present.get(sequence.owner)
        if members is not None:
            members.discard(sequence.key)
            if not members:
                del self._present[sequence.owner]
                self._last = self._served[sequence.owner]

    def charge(self, sequence: Sequence, tokens: int) -> None:
        self._served[sequence.owner] += tokens

    def served(self, sequence: Sequence) -> int:
        return self._served[sequence.owner]

    def in_turn(self, queues: Mapping[str, list[Sequence]], rank: Rank) -> Iterator[Sequence]:
        """All sequences by priority, then least served owner, then rank.

        What is handed out counts as served from then on, within this call.

        Args:
            queues: each owner's sequences, sorted by rank.
        """
        iterators = {owner: iter(queue) for owner, queue in queues.items()}
        heads: list[tuple[int, int, tuple[int, int], str, Sequence]] = []

        def push(owner: str, served: int) -> None:
            sequence = next(iterators[owner], None)
            if sequence is not None:
                place = rank(sequence)
                heapq.heappush(heads, (place[0], served, place, owner, sequence))

        for owner in queues:
            push(owner, self._served[owner])
        while heads:
            _, served, _, owner, sequence = heapq.heappop(heads)
            cost = sequence.remaining
            yield sequence
            push(owner, served + cost)


newest = attrgetter("priority", "submitted_at", "key")
"""Which of several rows is paused first: the greatest."""
