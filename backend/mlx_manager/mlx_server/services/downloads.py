"""Downloads from the hub that somebody watches: each can be paused, resumed and cancelled.

A paused download's thread waits where it is. The hub's client goes on where it was, also if the
connection has broken meanwhile. Whole files of a cancelled or failed download stay.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Literal

from mlx_manager.mlx_server.errors import MLXManagerError, RequestCancelled, RequestNotFound

State = Literal["running", "paused", "done", "failed", "cancelled"]
Fetch = Callable[[str, Callable[[int, int], None]], Awaitable[None]]
"""Fetches a model and reports the bytes that are there, and their total; a report may raise."""

MOST_KEPT = 32
"""Downloads that are remembered once they have ended."""


class Cancelled(RequestCancelled):
    """The end of a download that its owner cancelled, raised where it reports."""


class Download:
    """One download. `report` runs on the threads that download, all else in the event loop.

    Attributes:
        there: bytes that are here, of `total`; 0 of 0 until the hub has told.
        error: the reason why it failed.
    """

    def __init__(self, number: int, model: str) -> None:
        self.id = number
        self.model = model
        self.state: State = "running"
        self.there = self.total = 0
        self.error: MLXManagerError | None = None
        self.task: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._goes_on = threading.Event()
        self._goes_on.set()
        self._given_up = False
        self._changed = asyncio.Event()

    def report(self, there: int, total: int) -> None:
        """Note progress, and wait while the download is paused.

        Raises:
            Cancelled: it has been given up.
        """
        self._loop.call_soon_threadsafe(self._note, there, total)
        self._goes_on.wait()
        if self._given_up:
            raise Cancelled(f"The download of {self.model} was cancelled.")

    def pause(self) -> None:
        if self.state == "running":
            self._goes_on.clear()
            self._become("paused")

    def resume(self) -> None:
        if self.state == "paused":
            self._become("running")
            self._goes_on.set()

    def cancel(self) -> None:
        if self.state in ("running", "paused"):
            self._given_up = True
            self._become("cancelled")
            self._goes_on.set()

    @property
    def ended(self) -> bool:
        return self.state not in ("running", "paused")

    async def progress(self) -> AsyncIterator[tuple[int, int]]:
        """Yield (bytes there, total) whenever they change, until the download has ended."""
        last = (0, 0)
        while True:
            changed = self._changed
            if (self.there, self.total) != last:
                last = (self.there, self.total)
                yield last
            elif self.ended:
                return
            else:
                await changed.wait()

    @property
    def failure(self) -> MLXManagerError | None:
        """Return why an ended download has not brought the model; None if it has."""
        if self.state == "cancelled":
            return Cancelled(f"The download of {self.model} was cancelled.")
        return self.error

    async def done(self) -> None:
        """Wait for the end.

        Raises:
            MLXManagerError: the model was not brought; says why.
        """
        async for _ in self.progress():
            pass
        if (failure := self.failure) is not None:
            raise failure

    def end(self, error: MLXManagerError | None) -> None:
        """Note the end of the fetching."""
        if error is None:
            self.there = self.total
            self._become("done")
        elif not self.ended:
            self.error = error
            self._become("failed")

    def told(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "model": self.model,
            "state": self.state,
            "there": self.there,
            "total": self.total,
            "error": None if self.error is None else self.error.message,
        }

    def _note(self, there: int, total: int) -> None:
        self.there, self.total = there, total
        self._tell()

    def _become(self, state: State) -> None:
        self.state = state
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Downloads:
    """The downloads under way, and the last ones that have ended. Belongs to the event loop."""

    def __init__(self) -> None:
        self._downloads: dict[int, Download] = {}
        self._number = 0

    def begin(self, model: str, fetch: Fetch) -> Download:
        """Start a download; return the one that is under way already, if there is one."""
        for download in self._downloads.values():
            if download.model == model and not download.ended:
                return download
        self._number += 1
        download = self._downloads[self._number] = Download(self._number, model)
        ended = [each.id for each in self._downloads.values() if each.ended]
        for number in ended[:-MOST_KEPT]:
            del self._downloads[number]
        download.task = asyncio.create_task(_fetched(download, fetch), name=f"download {model}")
        return download

    def find(self, number: int) -> Download:
        """
        Raises:
            RequestNotFound: there is no such download.
        """
        if number not in self._downloads:
            raise RequestNotFound(f"There is no download {number}.", param="id")
        return self._downloads[number]

    def told(self) -> list[dict[str, Any]]:
        """Return the downloads as the admin API tells them, the oldest first."""
        return [download.told() for download in self._downloads.values()]


async def _fetched(download: Download, fetch: Fetch) -> None:
    error: MLXManagerError | None = None
    try:
        await fetch(download.model, download.report)
    except MLXManagerError as found:
        error = found
    download.end(error)
