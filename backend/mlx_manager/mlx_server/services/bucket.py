"""Token bucket: a limit in units a minute, a minute's worth of them at once."""

from __future__ import annotations

import math
from collections.abc import Callable


class Bucket:
    """Bucket that fills at its rate up to a minute's worth of units.

    Units may be taken beyond the level; the debt must be refilled before the next. Own code, since
    libraries that count hits refuse a cost that is known only afterwards, as that of tokens.

    Args:
        per_minute: units that flow in a minute, and the most that are kept.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._at = clock()

    def take(self, units: int) -> None:
        self._fill()
        self._level -= units

    @property
    def left(self) -> int:
        """Units that can be taken now; 0 in debt."""
        self._fill()
        return max(0, math.floor(self._level))

    @property
    def wait(self) -> float:
        """Seconds until a unit can be taken."""
        return self._seconds(1)

    @property
    def reset(self) -> float:
        """Seconds until the bucket is full, if nothing more is taken."""
        return self._seconds(self.per_minute)

    def _seconds(self, units: int) -> float:
        self._fill()
        return max(0.0, units - self._level) * 60 / self.per_minute

    def _fill(self) -> None:
        now = self._clock()
        inflow = (now - self._at) * self.per_minute / 60
        self._level = min(float(self.per_minute), self._level + inflow)
        self._at = now
