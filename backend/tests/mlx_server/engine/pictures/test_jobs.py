"""Jobs of a tower beside steps: the slices that a picture gets for the seconds that steps leave."""

from __future__ import annotations

import threading
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlx_manager.mlx_server.core import Image
from mlx_manager.mlx_server.engine.memory.line import Line
from mlx_manager.mlx_server.engine.pictures.features import FeatureCache
from mlx_manager.mlx_server.engine.pictures.jobs import TowerJobs
from mlx_manager.mlx_server.execution.images import Features
from mlx_manager.mlx_server.utils.memory import Ledger

USUAL, LOADING = 1 / 64, 32.0
BESIDE = 2 * USUAL
"""Seconds that each step leaves to the tower."""


class TimedTower:
    """A tower whose slices of the first picture take so many seconds by its own clock, and those of
    later ones the usual time."""

    width, levels = 8, 0

    def __init__(self, slices: list[float]) -> None:
        self.now = 0.0
        self._slices = slices

    def clock(self) -> float:
        return self.now

    def pixels(self, image: Image) -> Image:
        return image

    def stages(self, image: Image) -> Generator[list[mx.array], None, Features]:
        slices, self._slices = self._slices, [USUAL] * len(self._slices)
        for seconds in slices:
            self.now += seconds
            yield [mx.zeros(1)]
        return Features(mx.zeros((4, 8)))


def steps_for(tower: TimedTower, pictures: int) -> list[int]:
    """Return beside how many steps each picture is read, one after another."""
    came = threading.Event()
    cache = FeatureCache(Line(Ledger(1 << 30, cache_bytes=lambda: 0), "images:tiny"), 1 << 20)
    jobs = TowerJobs(tower, cache, came.set, tower.clock)
    found = []
    for number in range(pictures):
        row: Any = SimpleNamespace(key=number, priority=0)
        came.clear()
        jobs.want(str(number), Image(b"", str(number), 2, 2), 4, row)
        assert came.wait(30)
        steps = 1
        while jobs.advance(BESIDE) is None:
            steps += 1
            assert steps < 1000
        found.append(steps)
    return found


@pytest.mark.parametrize("place", [0, 3, 7])
def test_a_slice_that_loads_kernels_does_not_hold_up_the_next_ones(place: int) -> None:
    slices = [USUAL] * 8
    slices[place] = LOADING
    first, second = steps_for(TimedTower(slices), 2)
    # Two slices a step, but for the first steps, in which their seconds are not known yet.
    assert first <= 8
    assert second <= 8


def test_slices_take_no_more_than_steps_leave() -> None:
    slices, pictures = 8, 20
    tower = TimedTower([USUAL] * slices)
    steps = sum(steps_for(tower, pictures))
    assert steps * BESIDE >= tower.now - 2 * USUAL
