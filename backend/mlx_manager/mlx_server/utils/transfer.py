"""Files straight into an NVIDIA GPU's memory, by CUDA's driver, on threads of their own.

MLX's CUDA build reads a file on the thread that evaluates, into memory that the device can't fetch
from by itself: who steps on that thread waits, for seconds where an embedding has a gigabyte.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from mlx_manager.mlx_server.utils.driver import Driver

READERS = 4
AT_ONCE = 8 * 2**20
"""Bytes that a reader has under way."""

# Of the CUDA driver API: stream management, and stream capture.
_NON_BLOCKING = 1
_RELAXED = 2


@dataclass(frozen=True, slots=True)
class Stretch:
    """`nbytes` of a file from `start` on, and the address in the GPU's memory that they go to."""

    file: Path
    start: int
    nbytes: int
    address: int

    def pieces(self) -> Iterator[Stretch]:
        """Of `AT_ONCE` bytes at most."""
        for done in range(0, self.nbytes, AT_ONCE):
            nbytes = min(AT_ONCE, self.nbytes - done)
            yield replace(self, start=self.start + done, nbytes=nbytes, address=self.address + done)


@dataclass(frozen=True, slots=True)
class Lane:
    """Memory of the host that the device fetches from, and the stream on which it does."""

    buffer: ctypes.c_void_p
    stream: ctypes.c_void_p

    @property
    def memory(self) -> memoryview:
        whole = (ctypes.c_char * AT_ONCE).from_address(self.buffer.value or 0)
        return memoryview(whole).cast("B")


class Transfer:
    """Brings files' bytes to the GPU. Made on a thread that has used it, `close`d on any.

    Raises:
        OSError, AttributeError, RuntimeError: there is no driver, or it lacks or refuses something.
    """

    def __init__(self) -> None:
        self._driver = Driver()
        self._context = ctypes.c_void_p()
        self._driver.call("cuCtxGetCurrent", ctypes.byref(self._context))
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="transfer")
        self._lanes: list[Lane] = []

    def open(self) -> None:
        """Make the lanes, which takes some milliseconds.

        Raises:
            AttributeError, RuntimeError: as above.
        """
        while len(self._lanes) < READERS:
            self._lanes.append(self._readers.submit(self._lane).result())

    def copy(self, stretches: Iterable[Stretch]) -> None:
        """Returns when all has arrived.

        Raises:
            OSError: a file can't be read, or ends early.
            RuntimeError: the driver refuses.
        """
        pieces = [piece for stretch in stretches for piece in stretch.pieces()]
        share = -(-len(pieces) // READERS)
        tasks = [
            self._readers.submit(self._carry, lane, pieces[number * share :][:share])
            for number, lane in enumerate(self._lanes)
        ]
        # All of them have ended when one's failure is told.
        failures = [task.exception() for task in tasks]
        for failure in filter(None, failures):
            raise failure

    def close(self) -> None:
        """Safe to call twice, but not while `copy` is under way."""
        while self._lanes:
            self._readers.submit(self._free, self._lanes.pop()).result()
        self._readers.shutdown()

    def _carry(self, lane: Lane, pieces: Sequence[Stretch]) -> None:
        self._bind()
        memory = lane.memory
        opened: dict[Path, int] = {}
        try:
            for piece in pieces:
                if piece.file not in opened:
                    opened[piece.file] = os.open(piece.file, os.O_RDONLY)
                _read(opened[piece.file], piece, memory)
                place, nbytes = ctypes.c_uint64(piece.address), ctypes.c_size_t(piece.nbytes)
                self._driver.call("cuMemcpyHtoDAsync_v2", place, lane.buffer, nbytes, lane.stream)
                self._driver.call("cuStreamSynchronize", lane.stream)
        finally:
            for descriptor in opened.values():
                os.close(descriptor)

    def _lane(self) -> Lane:
        self._bind()
        buffer, stream = ctypes.c_void_p(), ctypes.c_void_p()
        self._driver.call(
            "cuMemHostAlloc", ctypes.byref(buffer), ctypes.c_size_t(AT_ONCE), ctypes.c_uint(0)
        )
        self._driver.call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING))
        return Lane(buffer, stream)

    def _free(self, lane: Lane) -> None:
        self._bind()
        self._driver.call("cuStreamDestroy_v2", lane.stream)
        self._driver.call("cuMemFreeHost", lane.buffer)

    def _bind(self) -> None:
        """Let this thread use the GPU as the one that made this does, also while that one captures
        a graph, which by default forbids much to all threads."""
        self._driver.call("cuCtxSetCurrent", self._context)
        mode = ctypes.c_int(_RELAXED)
        self._driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


def _read(descriptor: int, piece: Stretch, memory: memoryview) -> None:
    done = 0
    while done < piece.nbytes:
        count = os.preadv(descriptor, [memory[done : piece.nbytes]], piece.start + done)
        if not count:
            raise OSError(f"{piece.file} ends before its byte {piece.start + piece.nbytes:,}")
        done += count
