"""A thread's time cut into slices, between which others have their turn."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter, thread_time
from types import FrameType

SLICE = 0.005
"""Seconds of a thread's time, at least, between two turns of others."""


@contextmanager
def sliced(others: Callable[[], None]) -> Iterator[None]:
    """Let others have their turn whenever this thread has worked half as long as their last took.

    For what libraries do in Python, whose lock a call into native code may hold for 0.2 s. A step
    of a model needs the lock several times and lets go of it in between, so it would meet one such
    call after the other; if it is waited for after each, it meets one. Threads that somebody
    profiles are left alone.

    others: returns when they have had their turn.
    """
    if sys.getprofile() is not None:
        yield
        return
    sys.setprofile(_Slices(others).look)
    try:
        yield
    finally:
        sys.setprofile(None)


class _Slices:
    """Of one thread, which calls `look` before and after each call that it makes."""

    def __init__(self, others: Callable[[], None]) -> None:
        self._others = others
        self._slice = SLICE
        self._worked = thread_time()
        self._earliest = perf_counter() + SLICE

    def look(self, frame: FrameType, event: str, argument: object) -> None:
        now = perf_counter()
        if now < self._earliest:
            return
        left = self._slice - (thread_time() - self._worked)
        if left > 0:
            self._earliest = now + left
            return
        self._others()
        self._slice = max(SLICE, (perf_counter() - now) / 2)
        self._worked = thread_time()
        self._earliest = perf_counter() + self._slice
