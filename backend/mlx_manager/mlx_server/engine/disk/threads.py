"""The threads that write and read blocks of one model."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic, perf_counter
from typing import Any

from mlx_manager.mlx_server.engine.disk import blocks
from mlx_manager.mlx_server.engine.disk.blocks import Damaged, PrefixBlock
from mlx_manager.mlx_server.engine.disk.folder import Folder, WriteRefused
from mlx_manager.mlx_server.engine.disk.names import BlockName, Space
from mlx_manager.mlx_server.engine.disk.prices import LearntRate
from mlx_manager.mlx_server.engine.disk.room import Room
from mlx_manager.mlx_server.utils.daemon_threads import DaemonThreads
from mlx_manager.mlx_server.utils.revisions import Stamp, revision_of
from mlx_manager.mlx_server.utils.text import sized

log = logging.getLogger(__name__)

PAUSE = 60.0
"""Seconds without writes after a block was refused or could not be written."""
BEHIND = 10
"""Niceness of the thread that writes, on Linux, where a thread has its own."""
READERS = max(1, min(4, (os.cpu_count() or 1) // 4))
"""Blocks that are read at once, where there are cores besides those that steps take."""
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
    """Blocks of one model. Its methods may be called on one thread, and do not wait; `fetch` may be
    called on any, and waits.

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
        writes, reads: room for blocks on their way to disk, which is taken before a block is copied
            off the device, and for those on their way back. Nothing fits before a limit is set.
        read_rate: bytes a second that `read` reads.
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
        self.writes, self.reads = Room(), Room()
        self.read_bytes = self.written_bytes = self.dropped = 0
        # Guards what is counted of reads, on several threads.
        self._counting = threading.Lock()
        self.read_rate = LearntRate()
        self._model, self._facts, self._files = model, facts, files
        self._wake = wake
        self._paused_until = 0.0
        # How often all blocks were to be removed, and of these times, how many are done with.
        self._purges = self._purged = 0
        self._writes: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._readings: SimpleQueue[Reading | None] = SimpleQueue()
        self._arrived: SimpleQueue[Arrival] = SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="prefix-writer", daemon=True)
        self._readers = DaemonThreads(READERS)
        self._reader = threading.Thread(target=self._read, name="prefix-reader", daemon=True)
        self._writer.start()
        self._reader.start()

    # -- on the MLX thread ---------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """Return whether there is a space, or it is not known yet."""
        return self.space is not None or not self.settled.is_set()

    def writable(self, nbytes: int) -> bool:
        """Return whether a block of so many bytes would be taken now."""
        paused = monotonic() < self._paused_until
        return self.space is not None and not paused and self.writes.has(nbytes)

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

    def size(self, name: BlockName) -> int:
        """Return the bytes of a block's file; 0 if it is not there."""
        return 0 if self.space is None else self.folder.size(self.space, name)

    def write(self, block: PrefixBlock) -> None:
        """Have a block written, for which room has been taken."""
        self._writes.put(partial(self._write_block, block, self._purges))

    def wait(self, nbytes: int, seconds: float) -> bool:
        """Wait until a block of so many bytes may be written; return whether one may be before
        long."""
        if not self.settled.wait(seconds) or self.space is None:
            return False
        if monotonic() < self._paused_until:
            return False
        self._moved.clear()
        return self.writable(nbytes) or self._moved.wait(seconds)

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
        self._writes.put(self._purge)

    def close(self, seconds: float) -> None:
        """Wait for what is to be written, and end the threads."""
        self._readings.put(None)
        self._writes.put(None)
        self._writer.join(max(seconds, 0.01))

    # -- on any --------------------------------------------------------------------------------

    def fetch(self, name: BlockName) -> PrefixBlock | None:
        """Return a block; None if it has gone, was damaged and is removed, or if there is no room
        for it beside others that are read."""
        nbytes = self.size(name)
        return self._read_block(name, nbytes) if self.reads.take(nbytes) else None

    # -- on the writer's -----------------------------------------------------------------------

    def _write(self) -> None:
        if sys.platform == "linux":
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BEHIND)
        self._begin()
        self.settled.set()
        self._wake()
        while self._write_next():
            if self._purging:
                self._purge()
            self._moved.set()
            self._wake()

    def _write_next(self) -> bool:
        """Do what is asked next; return False at the end. No block is held after that."""
        work = self._writes.get()
        if work is not None:
            work()
        return work is not None

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
            self._read_all(reading)
            self._arrived.put(Arrival(reading, None))
            self._wake()

    def _read_all(self, reading: Reading) -> None:
        """Read blocks, some at once, until one can't be read; they arrive in order."""
        begun: deque[Future[PrefixBlock | None]] = deque()
        for name in reading.names:
            if len(begun) == READERS and not self._deliver(reading, begun.popleft()):
                return
            nbytes = self.size(name)
            if nbytes > self.reads.limit and self.space is not None:
                log.warning("%s is not used: it has %s", name.file, sized(nbytes))
                self.folder.forget(self.space, name)
                break
            # What has been begun must arrive, or there will never be room.
            while begun and not self.reads.has(nbytes):
                if not self._deliver(reading, begun.popleft()):
                    return
            if not self.reads.wait(nbytes, lambda: not reading.cancelled):
                return
            begun.append(self._readers.submit(partial(self._timed, name, nbytes, len(begun) + 1)))
        while begun and self._deliver(reading, begun.popleft()):
            pass

    def _deliver(self, reading: Reading, coming: Future[PrefixBlock | None]) -> bool:
        """Hand a block on once it has been read; return whether it could be. No block is held after
        that."""
        block = coming.result()
        if block is None:
            return False
        self._arrived.put(Arrival(reading, block))
        self._wake()
        return True

    def _timed(self, name: BlockName, nbytes: int, abreast: int) -> PrefixBlock | None:
        """Return a block as `_read_block` does, and learn how fast blocks are read. abreast: how
        many are read at once."""
        begun = perf_counter()
        block = self._read_block(name, nbytes)
        if block is not None:
            with self._counting:
                self.read_rate.observe(abreast * block.nbytes, perf_counter() - begun)
        return block

    def _read_block(self, name: BlockName, nbytes: int) -> PrefixBlock | None:
        """Return a block, for which so much room has been taken; None if it has gone, or was
        damaged and is removed."""
        space, folder = self.space, self.folder
        assert space is not None
        path, memory = folder.path(space, name), self.reads.memory(nbytes)
        try:
            block = blocks.read(path, space, name, memory)
        except FileNotFoundError:
            self.reads.give(nbytes)
            folder.forget(space, name)
            return None
        except (OSError, Damaged) as error:
            self.reads.give(nbytes)
            log.warning("%s is not used, and is removed: %s", path, error)
            self._discard(name)
            return None
        self.reads.lend(nbytes, memory, block)
        with self._counting:
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
