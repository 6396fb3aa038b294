"""Ages of what is kept, whatever is made of the machine's clock meanwhile."""

from __future__ import annotations

import time


class SteadyClock:
    """Seconds since 1970, as the machine's clock had them when this was made.

    It goes on by itself: who sets the machine's clock ahead makes nothing older.
    """

    def __init__(self) -> None:
        self._ahead = time.time() - time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() + self._ahead


def ahead_of(now: float, newest: float, most: float) -> float:
    """Return the seconds to add to a clock that says `now`, to tell the ages of a file's entries.

    A clock that is behind the newest of these was set, and so was one by which all of them are more
    than `most` seconds old, unless nobody has used them for as long: they get that time once more.
    """
    return newest - now if newest > now or now - newest > most else 0.0
