"""When Python looks for what only refers to itself among all that has been in memory for a while.

By itself it does so each time a quarter of that is new, as in any burst of requests, and everybody
stands still for it: 64 requests that have just arrived are 27 000 objects, 15 to 60 ms (NOTES 147).
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NEVER = 1 << 30
REST = 1.0
"""Seconds after a request's end until it is looked for, if nobody is answered by then."""
MUCH = 1024
"""What requests may have left behind until it is looked for whoever is answered."""


class Garbage:
    """Counts what requests leave behind, and has it collected. Belongs to the event loop.

    collect: looks through all that is in memory. rest, much: see `REST` and `MUCH`.
    """

    def __init__(
        self, collect: Callable[[], object] = gc.collect, rest: float = REST, much: int = MUCH
    ) -> None:
        self._collect = collect
        self._rest = rest
        self._much = much
        self._left = 0
        self._here = False
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def collected_here(self) -> Iterator[None]:
        """Within, Python looks by itself through nothing but what is new; without, it does all, and
        this does nothing."""
        young, middle, old = gc.get_threshold()
        gc.set_threshold(young, middle, NEVER)
        self._here = True
        try:
            yield
        finally:
            self._here = False
            gc.set_threshold(young, middle, old)

    def leave(self, amount: int, busy: Callable[[], object]) -> None:
        """A request has ended. amount: 1 for one whose prompt is short. busy: whether others are
        answered."""
        if not self._here:
            return
        self._left += amount
        loop = asyncio.get_running_loop()
        if self._left >= self._much:
            self._left = 0
            # What this one holds is still in use.
            loop.call_soon(self._collect)
        elif self._timer is None:
            self._timer = loop.call_later(self._rest, self._rested, busy)

    def _rested(self, busy: Callable[[], object]) -> None:
        self._timer = None
        if self._left and not busy():
            self._left = 0
            self._collect()
