"""A disk of a few kilobytes that really fills up: a file system in memory, mounted for itself."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path

import pytest
from linux import skip_without_linux

MOUNT = 'mount -t tmpfs -o size="$1"k none "$0" && echo mounted && read -r'


@dataclass(frozen=True, slots=True)
class SmallDisk:
    """Only programs that `command` starts see it, at `folder`; all others do at `outside`.

    To them, `outside` is good for plain opening alone: it begins with a link that isn't followed
    by name, as SQLite does.
    """

    folder: Path
    outside: Path
    command: tuple[str, ...]

    @contextmanager
    def full(self) -> Iterator[None]:
        """Every write to it fails with ENOSPC for the length of the context."""
        filler = self.outside / "filler"
        no_room = pytest.raises(OSError, match=os.strerror(errno.ENOSPC))
        with filler.open("wb", buffering=0) as file, no_room:
            write_for_ever(file)
        try:
            yield
        finally:
            filler.unlink()


def write_for_ever(file: RawIOBase) -> None:
    while True:
        file.write(bytes(4096))


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[SmallDisk]:
    """Mounted in a namespace of its own, which takes no privilege where Linux allows it."""
    skip_without_linux("a small disk is mounted in a namespace")
    folder.mkdir()
    apart = ("unshare", "--user", "--map-root-user", "--mount")
    try:
        holder = subprocess.Popen(
            [*apart, "bash", "-c", MOUNT, str(folder), str(kilobytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    except FileNotFoundError:
        pytest.skip("there is no `unshare` here, which mounts a small disk without privileges")
    with holder:
        try:
            assert holder.stdout is not None
            if holder.stdout.readline() != "mounted\n":
                assert holder.stderr is not None
                pytest.skip(f"no small disk can be mounted here: {holder.stderr.read().strip()}")
            inside = ["nsenter", "--user", "--mount", "--preserve-credentials"]
            yield SmallDisk(
                folder,
                Path(f"/proc/{holder.pid}/root{folder}"),
                (*inside, "--target", str(holder.pid)),
            )
        finally:
            holder.kill()
