"""Times of an engine's steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class StepClock:
    """Clock of one engine: how long the host and the device take.

    now: returns seconds.

    Attributes:
        waited: seconds of this step in which the host has waited for the device.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.waited = 0.0
        self._began = 0.0
        self._last_read: float | None = None

    def begin(self) -> None:
        """Begin a step."""
        self._began, self.waited = self.now(), 0.0

    @property
    def on_host(self) -> float:
        """Return the seconds that the step has taken so far, less the wait for the device."""
        return self.now() - self._began - self.waited

    def wait(self, function: Callable[[], T]) -> tuple[T, float]:
        """Call a function that waits for the device. Return its result, and the time after it."""
        asked = self.now()
        result = function()
        now = self.now()
        self.waited += now - asked
        return result, now

    def interval(self, now: float) -> float | None:
        """Return the seconds between the reads of the last two steps' tokens, the latter at `now`;
        None if they do not say how long a step takes."""
        last, self._last_read = self._last_read, now
        return None if last is None else now - last

    def disturb(self) -> None:
        """Note that the time until the next read is not that of one step alone."""
        self._last_read = None
