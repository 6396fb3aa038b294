"""Durations measured in an engine, counted by size so that a token costs next to nothing."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


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
