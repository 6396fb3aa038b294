"""Downloads that are watched, paused, resumed and cancelled; the fetching is a thread's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from mlx_manager.mlx_server.errors import DiskFull, RequestCancelled, RequestNotFound
from mlx_manager.mlx_server.services.downloads import MOST_KEPT, Download, Downloads

TOTAL = 4


class Hub:
    """Fetches a block whenever it is let."""

    def __init__(self) -> None:
        self.blocks = threading.Semaphore(0)
        self.fetched = 0

    async def fetch(self, model: str, report: Callable[[int, int], None]) -> None:
        await asyncio.to_thread(self._fetch, report)

    def _fetch(self, report: Callable[[int, int], None]) -> None:
        for there in range(1, TOTAL + 1):
            assert self.blocks.acquire(timeout=30)
            self.fetched = there
            report(there, TOTAL)

    def let(self, blocks: int) -> None:
        self.blocks.release(blocks)


async def reaches(download: Download, there: int) -> None:
    async for found, _ in download.progress():
        if found == there:
            return


async def all_of(download: Download) -> list[tuple[int, int]]:
    return [step async for step in download.progress()]


async def test_progress_is_told_to_its_end() -> None:
    hub, downloads = Hub(), Downloads()
    download = downloads.begin("a/b", hub.fetch)
    hub.let(TOTAL)
    assert (await all_of(download))[-1] == (TOTAL, TOTAL)
    assert downloads.told() == [
        {"id": 1, "model": "a/b", "state": "done", "there": 4, "total": 4, "error": None}
    ]


async def test_a_paused_download_waits_and_goes_on_where_it_was() -> None:
    hub, downloads = Hub(), Downloads()
    download = downloads.begin("a/b", hub.fetch)
    download.pause()
    hub.let(TOTAL)
    # The first report waits.
    await reaches(download, 1)
    assert (hub.fetched, download.state) == (1, "paused")
    download.resume()
    await download.done()
    assert (hub.fetched, download.state) == (4, "done")


@pytest.mark.parametrize("paused", [False, True])
async def test_a_cancelled_download_ends(paused: bool) -> None:
    hub, downloads = Hub(), Downloads()
    download = downloads.begin("a/b", hub.fetch)
    if paused:
        download.pause()
    hub.let(1)
    await reaches(download, 1)
    download.cancel()
    hub.let(TOTAL)
    assert download.task is not None
    await download.task
    assert hub.fetched <= 2
    assert download.state == "cancelled"
    with pytest.raises(RequestCancelled):
        await download.done()


async def test_a_failure_is_kept() -> None:
    async def fail(model: str, report: Callable[[int, int], None]) -> None:
        raise DiskFull("No room.")

    downloads = Downloads()
    download = downloads.begin("a/b", fail)
    with pytest.raises(DiskFull, match="No room"):
        await download.done()
    assert downloads.told()[0]["error"] == "No room."


async def test_one_model_has_one_download_at_a_time() -> None:
    hub, downloads = Hub(), Downloads()
    first = downloads.begin("a/b", hub.fetch)
    assert downloads.begin("a/b", hub.fetch) is first
    hub.let(2 * TOTAL)
    await first.done()
    second = downloads.begin("a/b", hub.fetch)
    assert second is not first
    await second.done()


async def test_only_the_last_ones_are_remembered() -> None:
    async def fetch(model: str, report: Callable[[int, int], None]) -> None: ...

    downloads = Downloads()
    for number in range(MOST_KEPT + 5):
        await downloads.begin(f"a/{number}", fetch).done()
    assert len(downloads.told()) == MOST_KEPT + 1
    with pytest.raises(RequestNotFound):
        downloads.find(1)
