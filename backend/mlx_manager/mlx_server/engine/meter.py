"""Durations measured in an engine, counted by size so that a token costs next to nothing."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

HOST_BOUNDS = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005),
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
)
GAP_BOUNDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15),
    *(0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Durations by size. `counts[i]` of them are at most `bounds[i]` and more than the bound
    before, the last count is of those beyond all bounds; `total` is their sum. In seconds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class Durations:
    """Counts durations by size. One thread adds; any may take a `distribution`."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += times
        self._total += seconds * times

    def distribution(self) -> Distribution:
        return Distribution(self._bounds, tuple(self._counts), self._total)


class Meter:
    """Durations of one engine's steps, and of the gaps between its tokens.

    host: time of each step less the wait for the device.
    gaps: time between a row's tokens, as the host reads them.
    """

    def __init__(self) -> None:
        self.host = Durations(HOST_BOUNDS)
        self.gaps = Durations(GAP_BOUNDS)

    def read(self, now: float, before: Sequence[float]) -> None:
        """Count the gaps before the tokens that were read at `now`, one of each row.

        All rows of the last step share one time, and are counted at once.

        Args:
            now: when the tokens were read, in seconds.
            before: when each row's token before was read; 0 if the row has had none.
        """
        for earlier in set(before):
            if earlier:
                self.gaps.add(now - earlier, before.count(earlier))
