"""A circuit breaker: a server that fails again and again is left alone for a while."""

from __future__ import annotations

import time
from collections.abc import Callable

FAILURES = 2
"""Failures in a row after which a server is left alone."""
SHORTEST, LONGEST = 1.0, 30.0
"""Bounds of the seconds for which it is left alone; they double with each failure."""


class Breaker:
    """The breaker of one server. Belongs to the event loop.

    It is closed while the server answers. It opens after `FAILURES` in a row, for a pause. After
    the pause a single request is let through: its success closes the breaker, and its failure
    opens it again, for twice as long.

    Attributes:
        failures: number of failures since the last success.
        reason: the last failure in words, "" after a success.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.failures = 0
        self.reason = ""
        self._clock = clock
        self._until = 0.0
        self._trying = False

    @property
    def is_open(self) -> bool:
        """Return whether the server has failed so often that it is left alone, or tried once."""
        return self.failures >= FAILURES

    @property
    def rest(self) -> float:
        """Return the seconds until a request is let through; 0 if one is now."""
        if not self.is_open:
            return 0.0
        return max(0.0, self._until - self._clock()) or (SHORTEST if self._trying else 0.0)

    def enter(self) -> bool:
        """Let a request through, if `rest` is 0; return whether it is the one after a pause."""
        trial = self.is_open
        self._trying = self._trying or trial
        return trial

    def leave(self, trial: bool) -> None:
        """Note the end of a request that `enter` let through, whatever came of it."""
        if trial:
            self._trying = False

    def succeeded(self) -> None:
        self.failures = 0
        self.reason = ""

    def failed(self, reason: str) -> None:
        self.failures += 1
        self.reason = reason
        doubled = SHORTEST * 2.0 ** min(self.failures - FAILURES, 10)
        self._until = self._clock() + min(doubled, LONGEST)
