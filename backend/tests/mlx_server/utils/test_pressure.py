from __future__ import annotations

import ctypes
import sys

import pytest

from mlx_manager.mlx_server.utils import pressure
from mlx_manager.mlx_server.utils.pressure import (
    FRESH,
    Pressure,
    PressureGauge,
    level_of,
    pressure_level,
)


class Darwin:
    """Stand-in for the part of macOS's C library that is asked here."""

    def __init__(self, level: int, failed: int = 0) -> None:
        self.level = level
        self.failed = failed

    def sysctlbyname(self, name, to, size, new, length) -> int:
        assert name == b"kern.memorystatus_vm_pressure_level"
        assert (size._obj.value, new, length.value) == (ctypes.sizeof(ctypes.c_int), None, 0)
        to._obj.value = self.level
        return self.failed


@pytest.mark.parametrize(
    ("level", "failed", "found"),
    [
        (1, 0, Pressure.NORMAL),
        (2, 0, Pressure.WARNING),
        (4, 0, Pressure.CRITICAL),
        (4, -1, Pressure.NORMAL),
    ],
)
def test_macos_is_asked_how_short_memory_is(monkeypatch, level, failed, found):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Darwin(level, failed))
    assert pressure_level() is found


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has a level")
def test_elsewhere_nobody_says():
    assert pressure_level() is Pressure.NORMAL


def test_a_level_that_is_not_known_stands_for_the_next_lower():
    assert [level_of(number) for number in (0, 1, 2, 3, 4, 9)] == [1, 1, 2, 2, 4, 4]


def test_a_level_is_read_once_a_second():
    read, now = [], [0.0]
    gauge = PressureGauge(lambda: read.append(1) or pressure.Pressure(len(read)), lambda: now[0])
    assert [gauge(), gauge()] == [1, 1]
    now[0] += FRESH
    assert [gauge(), gauge()] == [2, 2]
