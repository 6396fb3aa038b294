"""The threads that write and read blocks of one model."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, Full, Queue, SimpleQueue
from time import monotonic, perf_counter
from typing import Any

from mlx_manager.mlx_server.engine.disk import blocks
from mlx_manager.mlx_server.engine.disk.blocks import Damaged, PrefixBlock
from mlx_manager.mlx_server.engine.disk.folder import Folder, WriteRefused
from mlx_manager.mlx_server.engine.disk.names import BlockName, Space
from mlx_manager.mlx_server.engine.disk.prices import LearntRate
from mlx_manager.mlx_server.utils.revisions import Stamp, revision_of
from mlx_manager.mlx_server.utils.text import sized

log = logging.getLogger(__name__)

WRITES_AHEAD = 4
"""Blocks that may wait for the disk; further ones are not copied before."""
READS_AHEAD = 4
"""Blocks that may wait to be put into pages."""
PAUSE = 60.0
"""Seconds without writes after a block was refused or could not be written."""
BEHIND = 10
"""Niceness of the thread that writes, on Linux, where a thread has its own."""
MEMORY = "revisions.json"


@dataclass(eq=False)
class Reading:
    """Blocks that are to be read, in order. cancelled: nobody waits for them any more."""

    names: list[BlockName]
    cancelled: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A block of a reading; None after its last one, or where the next can't be read."""

    reading: Reading
    block: PrefixBlock | None


class BlockDisk:
    """Blocks of one model. Its methods may be called on one thread, and do not wait.

    Args:
        folder: of all models' blocks.
        model: its id.
        facts: all that keys and values depend on, besides the files.
        files: those that the model was made of.
        wake: called on another thread when blocks have come or gone.

    Attributes:
        space: what the blocks belong to; None while the files are looked at, or if they can't be
            used.
        settled: true once `space` is known, or will never be.
        read_bytes, written_bytes, dropped: bytes read and written, and blocks that were not
            written.
    """

    def __init__(
        self,
        folder: Folder,
        model: str,
        facts: Mapping[str, Any],
        files: tuple[Stamp, ...],
        wake: Callable[[], None],
    ) -> None:
        self.folder = folder
        self.space: Space | None = None
        self.settled = threading.Event()
        self._moved = threading.Event()
        self.read_bytes = self.written_bytes = self.dropped = 0
        self.read_rate = LearntRate()
        self._model, self._facts, self._files = model, facts, files
        self._wake = wake
        self._paused_until = 0.0
        # How often all blocks were to be removed, and of these times, how many are done with.
        self._purges = self._purged = 0
        self._writes: Queue[Callable[[], None] | None] = Queue(WRITES_AHEAD)
        self._readings: SimpleQueue[Reading | None] = SimpleQueue()
        self._arrived: Queue[Arrival] = Queue(READS_AHEAD)
        self._writer = threading.Thread(target=self._write, name="prefix-writer", daemon=True)
        self._reader = threading.Thread(target=self._read, name="prefix-reader", daemon=True)
        self._writer.start()
        self._reader.start()

    # -- on the MLX thread ---------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """Return whether there is a space, or it is not known yet."""
        return self.space is not None or not self.settled.is_set()

    @property
    def writable(self) -> bool:
        """Return whether a block would be taken now."""
        waits = self._writes.full() or monotonic() < self._paused_until
        return self.space is not None and not waits

    @property
    def waiting(self) -> bool:
        """Return whether nothing has arrived."""
        return self._arrived.empty()

    @property
    def _purging(self) -> bool:
        return self._purged < self._purges

    def has(self, name: BlockName) -> bool:
        if self.space is None or self._purging:
            return False
        return self.folder.has(self.space, name)

    def write(self, block: PrefixBlock) -> None:
        """Have a block written; it is dropped if too many wait."""
        try:
            self._writes.put_nowait(partial(self._write_block, block, self._purges))
        except Full:
            self.dropped += 1

    def wait(self, seconds: float) -> bool:
        """Wait until a block may be written; return whether one may be before long."""
        if not self.settled.wait(seconds) or self.space is None:
            return False
        if monotonic() < self._paused_until:
            return False
        self._moved.clear()
        return self.writable or self._moved.wait(seconds)

    def read(self, names: list[BlockName]) -> Reading:
        """Have blocks read, in order."""
        reading = Reading(names)
        self._readings.put(reading)
        return reading

    def arrived(self) -> Arrival | None:
        """Return the next block that has been read, if there is one."""
        with suppress(Empty):
            return self._arrived.get_nowait()
        return None

    def purge(self) -> None:
        """Have all blocks of the model removed, those that wait to be written included. None is
        found from now on."""
        self._purges += 1
        # The writer, if it is busy, looks by itself.
        with suppress(Full):
            self._writes.put_nowait(self._purge)

    def close(self, seconds: float) -> None:
        """Wait for what is to be written, and end the threads."""
        self._readings.put(None)
        with suppress(Full):
            self._writes.put(None, timeout=max(seconds, 0.01))
            self._writer.join(max(seconds, 0.01))

    # -- on the writer's -----------------------------------------------------------------------

    def _write(self) -> None:
        if sys.platform == "linux":
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BEHIND)
        self._begin()
        self.settled.set()
        self._wake()
        while (work := self._writes.get()) is not None:
            work()
            if self._purging:
                self._purge()
            self._moved.set()
            self._wake()

    def _begin(self) -> None:
        """Find the space, and read the folder's index."""
        folder = self.folder
        try:
            folder.look()
            revision = revision_of(self._files, folder.limits.folder / MEMORY)
        except OSError as error:
            log.warning("%s: no prefixes are kept on disk: %s", self._model, error)
            return
        if revision is None:
            log.warning(
                "%s: no prefixes are kept on disk, as its files have changed since it was loaded",
                self._model,
            )
            return
        self.space = Space(self._model, {**self._facts, "revision": revision})
        own = folder.root / self.space.folder
        log.info(
            "%s: prefixes are kept in %s; all models' take %s of %s",
            self._model,
            own,
            sized(folder.nbytes),
            sized(folder.limits.budget),
        )
        files, nbytes = folder.excess()
        if files:
            log.warning(
                "the kept prefixes are over their limit: the next that is written removes the %d "
                "files used least recently, %s; `mlx-manager cache list` shows them",
                files,
                sized(nbytes),
            )

    def _write_block(self, block: PrefixBlock, purges: int) -> None:
        """Write a block that was to be written after so many purges had been asked for."""
        space = self.space
        if space is None or purges < self._purges or monotonic() < self._paused_until:
            self.dropped += 1
            return
        header = blocks.header_of(space, block)
        nbytes = len(header) + block.nbytes
        try:
            self.folder.add(
                space, block.name, nbytes, partial(blocks.write, header=header, block=block)
            )
        except (OSError, WriteRefused) as error:
            self.dropped += 1
            self._paused_until = monotonic() + PAUSE
            log.log(
                logging.INFO if isinstance(error, WriteRefused) else logging.WARNING,
                "%s: no prefixes are written to disk for %d seconds: %s",
                self._model,
                PAUSE,
                error,
            )
        else:
            self.written_bytes += nbytes

    def _purge(self) -> None:
        asked = self._purges
        if self._purging and self.space is not None:
            try:
                self.folder.purge(folder=self.space.folder)
            except OSError as error:
                log.warning("%s: kept prefixes can't be removed: %s", self._model, error)
        self._purged = asked

    # -- on the reader's -----------------------------------------------------------------------

    def _read(self) -> None:
        while (reading := self._readings.get()) is not None:
            for name in reading.names:
                block = None if reading.cancelled else self._read_block(name)
                if block is None:
                    break
                self._arrived.put(Arrival(reading, block))
                self._wake()
            self._arrived.put(Arrival(reading, None))
            self._wake()

    def _read_block(self, name: BlockName) -> PrefixBlock | None:
        """Return a block; None if it has gone, or was damaged and is removed."""
        space, folder = self.space, self.folder
        assert space is not None
        begun = perf_counter()
        path = folder.path(space, name)
        try:
            block = blocks.read(path, space, name)
        except FileNotFoundError:
            folder.forget(space, name)
            return None
        except (OSError, Damaged) as error:
            log.warning("%s is not used, and is removed: %s", path, error)
            self._discard(name)
            return None
        self.read_rate.observe(block.nbytes, perf_counter() - begun)
        self.read_bytes += block.nbytes
        folder.touch(space, name)
        return block

    def _discard(self, name: BlockName) -> None:
        assert self.space is not None
        # Not asked for again, even where it can't be removed.
        self.folder.forget(self.space, name)
        try:
            self.folder.remove(self.space, name)
        except OSError as error:
            log.warning("%s can't be removed: %s", name.file, error)
