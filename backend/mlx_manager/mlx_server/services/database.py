"""SQLite database of the server: in a file, or in memory until the end."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mlx_manager.mlx_server.errors import MLXManagerError, StorageFailed
from mlx_manager.mlx_server.utils.daemon_threads import DaemonThreads

T = TypeVar("T")


class Database:
    """One connection, and one job at a time on it: all of a job's statements take effect, or none.

    A file that is made here may be read by its owner alone, as is what SQLite puts beside it.

    Args:
        path: None for memory.
        setting: the variable that named the path, for the error.
        schema: statements that make what is not there yet.

    Raises:
        MLXManagerError: the file can't be opened, or is no database.
    """

    def __init__(self, path: Path | None, setting: str, schema: Sequence[str]) -> None:
        self._setting = setting
        self._lock = threading.Lock()
        # A thread of its own, apart from those of chats: another program may hold the file.
        self._thread = DaemonThreads(1)
        try:
            self._connection = sqlite3.connect(place_of(path), check_same_thread=False)
            with self._connection:
                for statement in schema:
                    self._connection.execute(statement)
        except OSError as error:
            raise MLXManagerError(f"{setting}: {path} can't be used: {error.strerror}.") from error
        except sqlite3.Error as error:
            raise MLXManagerError(f"{setting}: {path} can't be used: {error}.") from error

    def run(self, job: Callable[..., T], *args: object) -> T:
        """Run `job(*args)`, which may `execute`, in one transaction, and return its result.

        Raises:
            StorageFailed: SQLite failed, as on a full disk; the transaction is rolled back.
        """
        try:
            with self._lock, self._connection:
                return job(*args)
        except sqlite3.Error as error:
            raise StorageFailed(f"{self._setting}: the file can't be used: {error}.") from error

    async def call(self, job: Callable[..., T], *args: object) -> T:
        """Run `job` as `run` does, on a thread."""
        return await self._thread.run(partial(self.run, job, *args))

    def execute(self, statement: str, values: Sequence[object] = ()) -> sqlite3.Cursor:
        """Execute one statement. Only within a job."""
        return self._connection.execute(statement, values)

    def execute_all(self, statement: str, rows: Iterable[Sequence[object]]) -> None:
        """Execute the statement once for each row. Only within a job."""
        self._connection.executemany(statement, rows)

    def number(self, statement: str) -> int:
        """Return the one number that `statement` finds. Only within a job."""
        found: Any = self._connection.execute(statement).fetchone()[0]
        return int(found)

    def close(self) -> None:
        with self._lock:
            self._connection.close()


def place_of(path: Path | None) -> str:
    """Return the name for SQLite to open: the file, created with mode 0600 if missing, or memory.

    Raises:
        OSError: the file can't be created.
    """
    if path is None:
        return ":memory:"
    path.touch(mode=0o600)
    return str(path)
