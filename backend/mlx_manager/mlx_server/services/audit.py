"""Audit log: caller, model, time, cost and outcome of every call, never its content.

Kept in SQLite for a limited time; the oldest entries are removed first. Written by a
thread of its own: no answer waits for the disk, and none fails because of it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from mlx_manager.mlx_server.config import AuditLimits
from mlx_manager.mlx_server.errors import StorageFailed
from mlx_manager.mlx_server.services.database import Database
from mlx_manager.mlx_server.timeline import Timeline
from mlx_manager.mlx_server.utils.clock import SteadyClock, ahead_of

log = logging.getLogger(__name__)

SCHEMA = (
    """
    CREATE TABLE IF NOT EXISTS calls (
        id INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, request_id TEXT NOT NULL,
        key TEXT NOT NULL, model TEXT NOT NULL, protocol TEXT NOT NULL, answers INTEGER NOT NULL,
        prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,
        completion_tokens INTEGER NOT NULL, seconds REAL NOT NULL, outcome TEXT NOT NULL
    )
    """,
    "CREATE INDEX IF NOT EXISTS by_time ON calls (time)",
)
COLUMNS = (
    "time, request_id, key, model, protocol, answers, prompt_tokens, cached_tokens, "
    "completion_tokens, seconds, outcome"
)
INSERT = f"INSERT INTO calls ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"  # nosec B608
SELECT = (
    f"SELECT id, {COLUMNS} FROM calls WHERE time >= ? AND (? IS NULL OR key = ?) "  # nosec B608  # a constant
    "AND (? IS NULL OR id < ?) ORDER BY id DESC LIMIT ?"
)
OLDEST_TENTH = """
DELETE FROM calls WHERE id IN (
    SELECT id FROM calls ORDER BY id LIMIT 1 + (SELECT COUNT(*) / 10 FROM calls)
)
"""
LONGEST_MODEL = 256
"""Characters of a model's name: a caller may have sent megabytes as one."""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One call. time: its arrival, in seconds since 1970. outcome: why its answers ended, `stop`
    say, `cancelled` if the caller left, or the code of the error that ended it."""

    id: int
    time: float
    request_id: str
    key: str
    model: str
    protocol: str
    answers: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    seconds: float
    outcome: str


class AuditLog:
    """Keeps an entry of each call for as long as `limits` say.

    lost: told how many calls could not be written.

    Raises:
        MLXManagerError: the file can't be opened, or is no database.
    """

    def __init__(
        self,
        limits: AuditLimits,
        lost: Callable[[int], None],
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._limits = limits
        self._lost = lost
        self._failed = 0
        self._database = Database(limits.path, "MLX_SERVER_AUDIT_LOG", SCHEMA)
        said = clock or SteadyClock()
        ahead = self._database.run(self._ahead, said())
        self._clock: Callable[[], float] = lambda: said() + ahead
        # Calls to write; who waits until everything before them has been; None at the end.
        self._inbox: SimpleQueue[Timeline | Future[None] | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._write_all, name="audit", daemon=True)
        self._writer.start()

    def put(self, timeline: Timeline) -> None:
        """Queue a call that has ended for writing. Never waits, never fails."""
        self._inbox.put(timeline)

    async def entries(
        self,
        since: float = 0.0,
        key: str | None = None,
        limit: int = 100,
        before: int | None = None,
    ) -> list[AuditEntry]:
        """Return the last `limit` calls since `since`, of one key or all, newest first.

        since: earliest arrival, in seconds since 1970. before: id of an entry; only entries written
        before it are returned.

        Raises:
            StorageFailed: the file can't be read.
        """
        written: Future[None] = Future()
        self._inbox.put(written)
        await asyncio.wrap_future(written)
        return await self._database.call(self._entries, since, key, limit, before)

    def close(self) -> None:
        """Write the records queued so far."""
        self._inbox.put(None)
        self._writer.join()
        self._database.close()

    def _write_all(self) -> None:
        ended = False
        while not ended:
            batch = [self._inbox.get()]
            while True:
                try:
                    batch.append(self._inbox.get_nowait())
                except Empty:
                    break
            self._write([item for item in batch if isinstance(item, Timeline)])
            for item in batch:
                if isinstance(item, Future) and item.set_running_or_notify_cancel():
                    item.set_result(None)
            ended = None in batch

    def _write(self, calls: Sequence[Timeline]) -> None:
        if not calls:
            return
        try:
            self._database.run(self._insert, calls)
        except StorageFailed as error:
            self._lost(len(calls))
            if not self._failed:
                log.warning("calls can't be written to the audit log, and are lost: %s", error)
            self._failed += len(calls)
        else:
            if self._failed:
                log.warning("the audit log works again; it lacks %s calls", self._failed)
            self._failed = 0

    def _insert(self, calls: Sequence[Timeline]) -> None:
        self._forget()
        self._database.execute_all(INSERT, map(_row, calls))
        while self._bytes() > self._limits.max_bytes and self._forget_tenth():
            pass

    def _bytes(self) -> int:
        pages = self._database.number("PRAGMA page_count")
        pages -= self._database.number("PRAGMA freelist_count")
        return pages * self._database.number("PRAGMA page_size")

    def _forget_tenth(self) -> bool:
        return self._database.execute(OLDEST_TENTH).rowcount > 0

    def _ahead(self, now: float) -> float:
        newest = self._database.execute("SELECT MAX(time) FROM calls").fetchone()[0]
        # Calls that came while the clock was ahead say nothing about the others.
        return 0.0 if newest is None else min(0.0, ahead_of(now, newest, self._limits.max_age))

    def _forget(self) -> None:
        oldest = self._clock() - self._limits.max_age
        self._database.execute("DELETE FROM calls WHERE time < ?", (oldest,))

    def _entries(
        self, since: float, key: str | None, limit: int, before: int | None
    ) -> list[AuditEntry]:
        oldest = max(since, self._clock() - self._limits.max_age)
        found = self._database.execute(SELECT, (oldest, key, key, before, before, limit)).fetchall()
        return [AuditEntry(*row) for row in found]


def _row(call: Timeline) -> tuple[object, ...]:
    usage, caller = call.usage, call.caller
    return (
        # A `since` is no finer.
        round(call.arrived, 6),
        caller.request_id,
        caller.key,
        call.model[:LONGEST_MODEL],
        caller.protocol,
        len(call.rows),
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.completion_tokens,
        round(call.seconds, 6),
        call.outcome,
    )
