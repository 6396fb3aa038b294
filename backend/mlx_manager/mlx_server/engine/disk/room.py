"""Memory of the host for blocks on their way to disk and back."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mlx_manager.mlx_server.engine.disk.blocks import PrefixBlock

BLOCKS, LEAST = 6, 2
"""Blocks that may be on their way in one direction, and the fewest for which there must be room."""
MOST_BYTES = 1 << 28
"""Most bytes of these, where they are more than `LEAST` blocks."""
POLL = 1.0
"""Seconds between two looks for whether room is still wanted."""


class Room:
    """Memory that blocks on their way in one direction may take. Its methods may be called on any
    thread.

    Memory that the system gives out anew is slow the first time, so what blocks have had is kept
    and given to the next ones, where they are about as large as the largest.

    limit: the most bytes at once; 0 before `open`.
    """

    def __init__(self) -> None:
        self.limit = 0
        self._usual = 0
        self._taken = 0
        self._kept: list[NDArray[np.uint8]] = []
        # Of a lock that its holder may take again: a block may be collected at any place.
        self._changed = threading.Condition()

    def open(self, limit: int, usual: int) -> None:
        """Have so much room. usual: bytes of the largest block of pages."""
        self.limit, self._usual = limit, usual

    @property
    def taken(self) -> int:
        return self._taken

    def counted(self, nbytes: int) -> int:
        """Return the bytes that a block of so many takes."""
        return self._usual if self._usual // 2 < nbytes <= self._usual else nbytes

    def has(self, nbytes: int) -> bool:
        """Return whether there is room for a block of so many bytes."""
        return self._taken + self.counted(nbytes) <= self.limit

    def take(self, nbytes: int) -> bool:
        """Take room for a block of so many bytes if it is there; return whether it was."""
        with self._changed:
            there = self.has(nbytes)
            if there:
                self._taken += self.counted(nbytes)
            return there

    def wait(self, nbytes: int, wanted: Callable[[], bool]) -> bool:
        """Take room as soon as it is there; return False once it is not `wanted`."""
        with self._changed:
            while wanted():
                if self.take(nbytes):
                    return True
                self._changed.wait(POLL)
            return False

    def give(self, nbytes: int) -> None:
        """Give back what was taken for a block of so many bytes."""
        with self._changed:
            self._taken -= self.counted(nbytes)
            self._changed.notify_all()

    def memory(self, nbytes: int) -> NDArray[np.uint8]:
        """Return the memory for which room has been taken, with anything in it."""
        size = self.counted(nbytes)
        with self._changed:
            if self._kept and size == self._usual:
                return self._kept.pop()
            while self._kept and self._taken + len(self._kept) * self._usual > self.limit:
                self._kept.pop()
        return np.empty(size, np.uint8)

    def lend(self, nbytes: int, memory: NDArray[np.uint8], block: PrefixBlock) -> None:
        """Give back what was taken for a block in `memory` once nobody has the block any more."""
        weakref.finalize(block, self._return, nbytes, memory).atexit = False

    def _return(self, nbytes: int, memory: NDArray[np.uint8]) -> None:
        with self._changed:
            if len(memory) == self._usual:
                self._kept.append(memory)
            self.give(nbytes)


def room_of(block_bytes: int, blocks: int = BLOCKS) -> int:
    """Return the bytes for one direction, where the largest block takes `block_bytes`."""
    return max(LEAST * block_bytes, min(blocks * block_bytes, MOST_BYTES))
