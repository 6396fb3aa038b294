"""Service that each key has had of an engine, so that keys share it evenly while several want it.

Virtual token counters, as in "Fairness in Serving Large Language Models" (arXiv:2401.00588): the
key that has been served least goes first; a drawn token counts as two prompt tokens; and a key that
comes back starts from the least of the present keys, so that no key saves up. With one key nothing
is counted.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Protocol, TypeVar

DRAWN = 2
"""Weight of a drawn token; the weight of a prompt token is 1."""


class Owned(Protocol):
    """Work of an owner: a sequence, or the texts of a request."""

    @property
    def owner(self) -> str: ...


class Member(Owned, Protocol):
    """Work that is counted while it is here. key: unique among members."""

    @property
    def key(self) -> int: ...


class Work(Protocol):
    """Work to be put in order. remaining: tokens to be read before anything is drawn."""

    @property
    def remaining(self) -> int: ...


T = TypeVar("T", bound=Owned)
W = TypeVar("W", bound=Work)


class Shares:
    """Counters of the tokens served to each owner of members."""

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._present: dict[str, set[int]] = {}
        self._last = 0

    @property
    def contested(self) -> bool:
        """Return whether members of several owners are here."""
        return len(self._present) > 1

    def part(self, member: Member, whole: int) -> int:
        """Return the part of `whole` that the member's owner has beside the other owners here."""
        others = len(self._present) - (member.owner in self._present)
        return whole // (others + 1)

    def enter(self, member: Member) -> None:
        owner = member.owner
        if owner not in self._present:
            if self._present:
                # One less: an owner that comes goes before those that are served already.
                start = min(self._served[name] for name in self._present) - 1
            else:
                # One more: an owner that comes next may have been served as little, and goes first.
                start = max(self._served.get(owner, 0), self._last) + 1
            self._served[owner] = max(self._served.get(owner, start), start)
            self._present[owner] = set()
        self._present[owner].add(member.key)

    def leave(self, member: Member) -> None:
        """Remove a member that has ended; removing it twice does no harm."""
        members = self._present.get(member.owner)
        if members is not None:
            members.discard(member.key)
            if not members:
                del self._present[member.owner]
                self._last = self._served[member.owner]

    def charge(self, member: Member, tokens: int) -> None:
        self._served[member.owner] += tokens

    def served(self, member: Member) -> int:
        return self._served[member.owner]

    def in_turn(
        self, queues: Mapping[str, list[W]], rank: Callable[[W], tuple[int, int]]
    ) -> Iterator[W]:
        """Yield all work by priority, then least served owner, then rank.

        Work that has been yielded counts as served from then on, within this call.

        Args:
            queues: each owner's work, sorted by rank.
            rank: returns the priority of work, and its place among work of the same priority; less
                goes first.
        """
        iterators = {owner: iter(queue) for owner, queue in queues.items()}
        heads: list[tuple[int, int, tuple[int, int], str, W]] = []

        def push(owner: str, served: int) -> None:
            work = next(iterators[owner], None)
            if work is not None:
                place = rank(work)
                heapq.heappush(heads, (place[0], served, place, owner, work))

        for owner in queues:
            push(owner, self._served[owner])
        while heads:
            _, served, _, owner, work = heapq.heappop(heads)
            cost = work.remaining
            yield work
            push(owner, served + cost)


def by_owner(all_of_them: Iterable[T]) -> defaultdict[str, list[T]]:
    found: defaultdict[str, list[T]] = defaultdict(list)
    for one in all_of_them:
        found[one.owner].append(one)
    return found


newest = attrgetter("priority", "submitted_at", "key")
"""Sort key of rows: the greatest is paused first."""
