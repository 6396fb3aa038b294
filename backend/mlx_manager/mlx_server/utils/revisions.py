"""Revision of a model: the content of the files that it is made of, whatever their names and times.

Files are hashed once: what was found is remembered by path, size, time of change and inode. A file
in the hub's cache needs no reading, as it is named by its content.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

log = logging.getLogger(__name__)

SUFFIXES = frozenset({".json", ".safetensors", ".py"})
"""Endings of the files that change what a model computes."""
MOST_REMEMBERED = 1024
SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Stamp:
    """A file as it was at one time. changed: in nanoseconds since 1970."""

    path: Path
    size: int
    changed: int
    inode: int

    @staticmethod
    def of(path: Path) -> Stamp:
        """Return the stamp of a file.

        Raises:
            OSError: it is not there.
        """
        found = path.stat()
        return Stamp(path, found.st_size, found.st_mtime_ns, found.st_ino)

    @property
    def key(self) -> str:
        return f"{self.path}|{self.size}|{self.changed}|{self.inode}"


def stamps_of(folders: Iterable[Path]) -> tuple[Stamp, ...]:
    """Return the stamps of the files in each folder that a model is made of.

    Raises:
        OSError: a folder can't be read.
    """
    return tuple(
        Stamp.of(path)
        for folder in folders
        for path in sorted(folder.iterdir())
        if path.suffix in SUFFIXES and path.is_file()
    )


def revision_of(stamps: Iterable[Stamp], memory: Path) -> str | None:
    """Return the digest of the files' names and contents; None if one has changed since.

    Reads all bytes of files that `memory`, a file of JSON, does not know: seconds for a large
    model.

    Raises:
        OSError: a file can't be read.
    """
    known = _remembered(memory)
    found = {}
    whole = hashlib.sha256()
    for stamp in stamps:
        content = _named(stamp.path) or known.get(stamp.key) or _hashed(stamp.path)
        if Stamp.of(stamp.path) != stamp:
            return None
        found[stamp.key] = content
        whole.update(f"{stamp.path.name}\0{content}\0".encode())
    if not found.keys() <= known.keys():
        kept = [(key, value) for key, value in known.items() if key not in found]
        _remember(memory, dict([*kept, *found.items()][-MOST_REMEMBERED:]))
    return whole.hexdigest()


def _named(path: Path) -> str | None:
    """Return the SHA-256 by which the hub's cache names a file; None for any other file."""
    real = Path(os.path.realpath(path))
    found = real.parent.name == "blobs" and SHA256.fullmatch(real.name)
    return real.name if found else None


def _hashed(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remembered(memory: Path) -> dict[str, str]:
    try:
        content = json.loads(memory.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {k: v for k, v in content.items() if isinstance(v, str) and SHA256.fullmatch(v)}


def _remember(memory: Path, content: dict[str, str]) -> None:
    try:
        write_whole(memory, json.dumps(content).encode())
    except OSError as error:
        log.debug("revisions are not remembered: %s", error)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that others see either as it was or whole.

    Raises:
        OSError: it can't be written.
    """
    with writing_whole(path) as file:
        file.write(content)


@contextmanager
def writing_whole(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that only its owner may read, and that takes the place of `path` at the end;
    nothing of it stays where the end is not come to.

    Raises:
        OSError: it can't be written.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        Path(name).replace(path)
    finally:
        with suppress(OSError):
            Path(name).unlink()
