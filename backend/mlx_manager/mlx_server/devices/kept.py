"""Content that is kept in the user's cache from one process to the next."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from mlx_manager.mlx_server.devices.cuda.graphs import cache_folder

log = logging.getLogger(__name__)

_DIGEST = 32


class Kept:
    """Content on disk, by key.

    Each file begins with its content's digest. Files are accessible to the user only.

    folder: folder of the files; None to keep nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @staticmethod
    def in_cache(name: str) -> Kept:
        """Return what is kept in a folder of `cache_folder`."""
        try:
            return Kept(cache_folder() / name)
        except RuntimeError:
            # There is no home to keep anything in.
            return Kept(None)

    def read(self, key: str) -> bytes | None:
        """Return the content; None if there is none, or if its digest does not match."""
        if self._folder is None:
            return None
        try:
            packed = (self._folder / key).read_bytes()
        except OSError:
            return None
        digest, content = packed[:_DIGEST], packed[_DIGEST:]
        return content if hashlib.sha256(content).digest() == digest else None

    def write(self, key: str, content: bytes) -> None:
        """Write a file as a whole, since other processes read the same folder."""
        if self._folder is None:
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._folder, prefix=".new-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(hashlib.sha256(content).digest() + content)
                Path(name).replace(self._folder / key)
            except OSError:
                with suppress(OSError):
                    Path(name).unlink()
                raise
        except OSError as error:
            log.debug("Nothing is kept in %s: %s", self._folder, error)
