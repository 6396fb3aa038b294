"""The folder of all models' blocks, shared by the processes of one user.

The files are the truth: a block is there once its file has been renamed to its name, and its time
of change is when it was last used. Whoever adds or removes files holds the folder's lock, writer
threads alone; nobody waits for the lock within a step. `state.json` has the bytes written today,
and for each space a number that grows with every change, so that a process looks again only at
spaces that others have changed.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from mlx_manager.mlx_server.config import PrefixDisk
from mlx_manager.mlx_server.engine.disk.names import FILE, FORMAT, TEMPORARY, BlockName, Space
from mlx_manager.mlx_server.utils.revisions import write_whole

log = logging.getLogger(__name__)

LOCK, STATE_FILE, SPACE_FILE = "lock", "state.json", "space.json"
WHOLE = 4096
"""Size of the state's file, or of a part of it; the rest is blank."""
SPARE_DISK = 2 * 2**30
"""Bytes of the disk that are left to others."""
SLACK = 64
"""One part of so many of the budget is freed beyond what a write needs."""
DEPTH = 0.001
"""Seconds by which a page counts as used before the page in front of it: the end of a prefix goes
first, without which the beginning is still of use."""


@dataclass(slots=True)
class Found:
    """A file of a block. used: seconds since 1970."""

    nbytes: int
    used: float


@dataclass(slots=True)
class SpaceFiles:
    """Files of one space's folder. seen: the number of the last change that was looked at."""

    model: str = ""
    seen: int = -1
    files: dict[str, Found] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(found.nbytes for found in self.files.values())


@dataclass(frozen=True, slots=True)
class KeptPrefixes:
    """Blocks of one model that are kept. used: seconds since 1970, of the last use."""

    model: str
    folder: str
    files: int
    nbytes: int
    used: float


class WriteRefused(Exception):
    """Error: there is no room for a block, or too much has been written today."""


class Folder:
    """Blocks of all models.

    Methods may be called on any thread. `add`, `remove`, `purge` and `look` wait for other
    processes.

    limits: its path, and the bytes that all files may take.
    clock: seconds since 1970.
    """

    def __init__(self, limits: PrefixDisk, clock: Callable[[], float] = time.time) -> None:
        self.root = limits.folder / f"v{FORMAT}"
        self.limits = limits
        self._clock = clock
        self._spaces: dict[str, SpaceFiles] = {}
        # Guards `_spaces` between the threads of this process.
        self._own = threading.Lock()
        # Guards the folder between them, as the file's lock does between processes.
        self._turn = threading.Lock()
        self._saved = ""
        self.written_today = 0

    # -- figures -------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Return the bytes of all files that this process knows of."""
        with self._own:
            return sum(space.nbytes for space in self._spaces.values())

    def has(self, space: Space, name: BlockName) -> bool:
        """Return whether a block was there when the folder was last looked at. Does not wait."""
        known = self._spaces.get(space.folder)
        return known is not None and name.file in known.files

    def size(self, space: Space, name: BlockName) -> int:
        """Return the bytes of a block that `has` knows of; 0 if it has gone since."""
        known = self._spaces.get(space.folder)
        found = None if known is None else known.files.get(name.file)
        return 0 if found is None else found.nbytes

    def path(self, space: Space, name: BlockName) -> Path:
        return self.root / space.folder / name.file

    def kept(self) -> list[KeptPrefixes]:
        """Return what is kept of each model, those used last first."""
        with self._own:
            found = [
                KeptPrefixes(
                    space.model,
                    folder,
                    len(space.files),
                    space.nbytes,
                    max((file.used for file in space.files.values()), default=0.0),
                )
                for folder, space in self._spaces.items()
            ]
        return sorted(found, key=lambda kept: -kept.used)

    def excess(self) -> tuple[int, int]:
        """Return how many files the next write would remove first, and their bytes: those used
        least recently that are over the budget, or take what is to be left of the disk."""
        left = over = self.nbytes - self.budget()
        files = 0
        for _, _, found in self._by_age():
            if left <= 0:
                break
            left -= found.nbytes
            files += 1
        return files, max(over - left, 0)

    def space(self, folder: str) -> Space | None:
        """Return the space that a folder is of; None if its file does not say so."""
        try:
            about = json.loads((self.root / folder / SPACE_FILE).read_bytes())
            space = Space(about["model"], about["facts"])
            return space if space.folder == folder else None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def files(self, space: Space) -> dict[str, Found]:
        """Return the files of a space's blocks."""
        with self._own:
            known = self._spaces.get(space.folder)
            return {} if known is None else dict(known.files)

    def room(self) -> int:
        """Return the bytes that could be written now and would all stay, in place of what is
        kept."""
        budget, daily = self.budget(), self.limits.daily
        today = sys.maxsize if daily is None else daily - self.written_today
        return max(0, min(budget - budget // SLACK, today))

    # -- changes -------------------------------------------------------------------------------

    def look(self) -> None:
        """Read the index of all files; remove none but what killed writers left unfinished.

        Raises:
            OSError: the folder can't be made or read.
        """
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._locked() as state:
            self._refresh(state)

    def add(
        self, space: Space, name: BlockName, nbytes: int, write: Callable[[BinaryIO], None]
    ) -> None:
        """Add a block, whose file `write` writes, and remove files used least recently until there
        is room for it. Does nothing if the block is there.

        Raises:
            WriteRefused: there is no room, or too much has been written today.
            OSError: the file can't be written.
        """
        with self._locked() as state:
            self._refresh(state)
            folder = self.root / space.folder
            if self.has(space, name):
                return
            day = self.limits.daily
            if day is not None and state["written"] + nbytes > day:
                raise WriteRefused(f"{state['written']} bytes have been written today")
            self._make_room(state, nbytes)
            # Counted first: who is ended while it writes has written.
            state["written"] += nbytes
            self.written_today = state["written"]
            self._make_space(space, state)
            self._changed(state, space.folder)
            self._save(state)
            temporary = folder / f"{TEMPORARY}{os.getpid()}"
            try:
                with temporary.open("wb", buffering=0) as file:
                    write(file)
                size = temporary.stat().st_size
                used = self._clock() - DEPTH * name.end
                os.utime(temporary, (used, used))
                temporary.rename(folder / name.file)
            except OSError:
                with suppress(OSError):
                    temporary.unlink()
                raise
            with self._own:
                self._spaces[space.folder].files[name.file] = Found(size, used)

    def touch(self, space: Space, name: BlockName) -> None:
        """Note that a block has been used."""
        used = self._clock() - DEPTH * name.end
        with suppress(OSError):
            os.utime(self.path(space, name), (used, used))
        with self._own:
            known = self._spaces.get(space.folder)
            if known is not None and (found := known.files.get(name.file)) is not None:
                found.used = used

    def forget(self, space: Space, name: BlockName) -> None:
        """Forget a block whose file is not there any more."""
        with self._own:
            known = self._spaces.get(space.folder)
            if known is not None:
                known.files.pop(name.file, None)

    def remove(self, space: Space, name: BlockName) -> None:
        """Remove the file of a damaged block.

        Raises:
            OSError: it can't be removed.
        """
        with self._locked() as state:
            self.path(space, name).unlink(missing_ok=True)
            self._changed(state, space.folder)
        self.forget(space, name)

    def purge(self, model: str | None = None, folder: str | None = None) -> None:
        """Remove all blocks: of a model, of one space's folder, or with neither of all models.

        Raises:
            OSError: they can't be removed.
        """
        with self._locked() as state:
            self._refresh(state)
            for name, space in list(self._spaces.items()):
                if model in {None, space.model} and folder in {None, name}:
                    for file in list(space.files):
                        (self.root / name / file).unlink(missing_ok=True)
                    with self._own:
                        del self._spaces[name]
                    shutil.rmtree(self.root / name, ignore_errors=True)
                    self._changed(state, name)

    # -- under the lock ------------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Iterator[dict[str, Any]]:
        """Hold the folder's lock, which ends with the process; yield what `state.json` has."""
        with self._turn, (self.root / LOCK).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            state = self._state()
            self._saved = json.dumps(state)
            yield state
            self._save(state)

    def _state(self) -> dict[str, Any]:
        today = time.strftime("%Y-%m-%d", time.gmtime(self._clock()))
        try:
            state = json.loads((self.root / STATE_FILE).read_bytes())
            changes = {str(k): int(v) for k, v in state["changes"].items()}
            written = int(state["written"]) if state["day"] == today else 0
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            changes, written = {}, 0
            for space in self._spaces.values():
                space.seen = -1
        self.written_today = written
        return {"day": today, "written": written, "changes": changes}

    def _save(self, state: Mapping[str, Any]) -> None:
        """Write the state in place, by one call that a killed process has made or has not. To put
        another file in its place would have the disk written to at each block."""
        content = json.dumps(state)
        if content != self._saved:
            handle = os.open(self.root / STATE_FILE, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                size = max(os.fstat(handle).st_size, len(content))
                os.pwrite(handle, content.encode().ljust(-(-size // WHOLE) * WHOLE), 0)
            finally:
                os.close(handle)
            self._saved = content

    def _changed(self, state: dict[str, Any], folder: str) -> None:
        """Note a change of this process's own, unless another's is still to be looked at. No number
        comes twice, even of a space that was removed and made again."""
        number = state["changes"].get(folder, 0)
        state["changes"][folder] = new = max(number + 1, time.time_ns())
        with self._own:
            known = self._spaces.get(folder)
            if known is not None and known.seen == number:
                known.seen = new

    def _refresh(self, state: dict[str, Any]) -> None:
        """Look at the spaces that others have changed since."""
        there = set()
        for entry in os.scandir(self.root):
            if entry.is_dir():
                there.add(entry.name)
            elif entry.name.startswith(TEMPORARY):
                Path(entry.path).unlink(missing_ok=True)
        with self._own:
            for gone in self._spaces.keys() - there:
                del self._spaces[gone]
        for name in there:
            number = state["changes"].setdefault(name, 0)
            known = self._spaces.get(name)
            if known is None or known.seen != number:
                found = self._read(name, number)
                with self._own:
                    self._spaces[name] = found
        for gone in state["changes"].keys() - there:
            del state["changes"][gone]

    def _read(self, name: str, number: int) -> SpaceFiles:
        """Return the files of a space. What a killed writer left is removed: nobody writes now."""
        folder = self.root / name
        files = {}
        for entry in os.scandir(folder):
            if entry.name.startswith(TEMPORARY):
                Path(entry.path).unlink(missing_ok=True)
            elif FILE.fullmatch(entry.name):
                with suppress(FileNotFoundError):
                    of = entry.stat(follow_symlinks=False)
                    files[entry.name] = Found(of.st_size, of.st_mtime)
        return SpaceFiles(_model_of(folder), number, files)

    def _make_space(self, space: Space, state: dict[str, Any]) -> None:
        folder = self.root / space.folder
        if space.folder in self._spaces:
            return
        folder.mkdir(mode=0o700, exist_ok=True)
        about = {"model": space.model, "space": space.digest.hex(), "facts": space.facts}
        write_whole(folder / SPACE_FILE, json.dumps(about, indent=1).encode())
        with self._own:
            number = state["changes"].setdefault(space.folder, 0)
            self._spaces[space.folder] = SpaceFiles(space.model, number)

    def budget(self) -> int:
        """Return the bytes that all files may take, of the disk's free ones, too."""
        try:
            free = shutil.disk_usage(self.root).free
        except FileNotFoundError:
            return self.limits.budget
        return min(self.limits.budget, self.nbytes + free - SPARE_DISK)

    def _make_room(self, state: dict[str, Any], nbytes: int) -> None:
        budget = self.budget()
        if nbytes > budget:
            raise WriteRefused("the disk has no room")
        over = self.nbytes + nbytes - budget
        if over <= 0:
            return
        # A little more than is needed, so that not every write looks through all files.
        over = min(over + budget // SLACK, self.nbytes)
        for folder, file, found in self._by_age():
            if over <= 0:
                break
            path = self.root / folder / file
            with suppress(FileNotFoundError):
                # Another process may have used it since.
                if (used := path.stat().st_mtime) > found.used + DEPTH:
                    found.used = used
                    continue
                path.unlink()
            with self._own:
                self._spaces[folder].files.pop(file, None)
            self._changed(state, folder)
            over -= found.nbytes
        if self.nbytes + nbytes > budget:
            raise WriteRefused("all that could be removed has been used just now")

    def _by_age(self) -> list[tuple[str, str, Found]]:
        """Return all files with their folders, those used least recently first."""
        with self._own:
            found = [
                (f, n, of) for f, space in self._spaces.items() for n, of in space.files.items()
            ]
        return sorted(found, key=lambda file: file[2].used)


def _model_of(folder: Path) -> str:
    try:
        model = json.loads((folder / SPACE_FILE).read_bytes())["model"]
    except (OSError, ValueError, KeyError, TypeError):
        return folder.name
    return model if isinstance(model, str) else folder.name
