"""Shortage of the machine's memory, as macOS reports it."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from enum import IntEnum

from mlx_manager.mlx_server.errors import OutOfMemory

NAME = b"kern.memorystatus_vm_pressure_level"
"""Name of the memory pressure level in macOS (sysctl(3); xnu's
bsd/kern/kern_memorystatus_notify.c)."""
FRESH = 1.0
"""Seconds for which a reading is valid."""


class Pressure(IntEnum):
    """Memory pressure levels, in macOS's own numbers. At CRITICAL macOS ends programs."""

    NORMAL = 1
    WARNING = 2
    CRITICAL = 4


def is_told() -> bool:
    """Return whether the system reports a memory pressure level at all."""
    return sys.platform == "darwin"


def pressure_level() -> Pressure:
    """Return the level now; NORMAL where the system reports none."""
    if not is_told():
        return Pressure.NORMAL
    level = ctypes.c_int()
    size = ctypes.c_size_t(ctypes.sizeof(level))
    libc = ctypes.CDLL(None)
    if libc.sysctlbyname(NAME, ctypes.byref(level), ctypes.byref(size), None, ctypes.c_size_t(0)):
        return Pressure.NORMAL
    return level_of(level.value)


def level_of(number: int) -> Pressure:
    """Return the level of macOS's number; for an unknown number, the next lower level."""
    return max((level for level in Pressure if level <= number), default=Pressure.NORMAL)


class PressureGauge:
    """Reader of the level, at most once in `FRESH` seconds. Any thread may call it."""

    def __init__(
        self,
        read: Callable[[], Pressure] = pressure_level,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._clock = clock
        self._level = Pressure.NORMAL
        self._good_until = 0.0

    def __call__(self) -> Pressure:
        now = self._clock()
        if now >= self._good_until:
            self._level, self._good_until = self._read(), now + FRESH
        return self._level


def out_of_reach(what: str) -> OutOfMemory:
    """Return the error for work that is not begun while macOS is about to end programs for their
    memory. what: the work, and that it is not begun."""
    return OutOfMemory(
        f"{what}: this machine is critically short of memory, as macOS says. Other programs use "
        "it, too.",
        retry_after=10,
    )
