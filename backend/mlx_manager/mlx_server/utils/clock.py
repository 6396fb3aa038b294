"""A clock for the ages of stored entries, unaffected by changes to the machine's clock."""

from __future__ import annotations

import time


class SteadyClock:
    """Clock of the seconds since 1970, set by the machine's clock once, when this object is made.

    Setting the machine's clock ahead later makes no entry older.
    """

    def __init__(self) -> None:
        self._ahead = time.time() - time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() + self._ahead


def ahead_of(now: float, newest: float, most: float) -> float:
    """Return the seconds to add to a clock that says `now`, to tell the ages of a file's entries.

    The clock is taken to have been set if it is behind the newest entry, or if all entries are more
    than `most` seconds old by it. Entries that are really so old are kept for that time once more.
    """
    return newest - now if newest > now or now - newest > most else 0.0
