"""Ranks of a model on two devices that die or stop at any step, and servers that die with them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from linux import descendants, needs_linux, running
from live import LiveServer, live_server
from thorough import slow
from tiny_models import make_tiny_model

pytestmark = needs_linux("/proc, for the processes of ranks")
WATCHDOG = 12
"""Seconds; a rank that gives no sign of life for half as long is given up."""
SPREAD = "spread"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_tiny_model(folder / SPREAD, "qwen3")
    make_tiny_model(folder / "whole", "gemma2")
    (folder / "models.toml").write_text(
        "[models.spread]\ndevices = 2\n[models.whole]\ndevices = 2\n"
    )
    return folder


def serving(folder: Path, log: Path, **more: Any) -> Any:
    settings = {"models_dir": folder, "models_file": folder / "models.toml", **more}
    return live_server(log, watchdog_seconds=WATCHDOG, **settings)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(folder, tmp_path_factory.mktemp("log") / "errors") as server:
        yield server


@pytest.fixture
async def http(server: LiveServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        yield client


async def answers(http: httpx.AsyncClient, model: str = SPREAD) -> httpx.Response:
    asked = {"model": model, "prompt": "hello", "max_tokens": 2}
    return await http.post("/v1/completions", json=asked)


async def ranks_of(http: httpx.AsyncClient) -> list[int]:
    """The processes of the model, rank 0 first; it is loaded for that."""
    answer = await answers(http)
    assert answer.status_code == 200, answer.text
    first = await first_of(http)
    assert first is not None
    return [first, *filter(is_rank, descendants(first))]


async def first_of(http: httpx.AsyncClient) -> int | None:
    found: int | None = (await http.get("/debug/state")).json()["workers"].get(SPREAD)
    return found


def is_rank(pid: int) -> bool:
    return b"workers.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()


async def stream(
    http: httpx.AsyncClient, seen: list[str], enough: int, reached: asyncio.Event
) -> dict[str, Any]:
    """Read an answer until it fails; return the error. reached: set once so many events have been
    seen of all answers."""
    asked = {"model": SPREAD, "prompt": "hello", "max_tokens": 2000, "ignore_eos": True}
    async with http.stream("POST", "/v1/completions", json={**asked, "stream": True}) as got:
        async for line in got.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    error: dict[str, Any] = event["error"]
                    return error
                seen.append(line)
                if len(seen) >= enough:
                    reached.set()
    raise AssertionError("the answer has not failed")


async def all_end(pids: list[int]) -> None:
    async with asyncio.timeout(30):
        while running(set(pids)):  # noqa: ASYNC110 other processes'
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("rank", "how"),
    [
        (1, signal.SIGSTOP),
        pytest.param(1, signal.SIGKILL, marks=slow),
        pytest.param(0, signal.SIGKILL, marks=slow),
        pytest.param(0, signal.SIGSTOP, marks=slow),
    ],
)
async def test_a_rank_that_ends_or_stops_fails_its_rows_and_the_model_comes_back(
    http: httpx.AsyncClient, rank: int, how: signal.Signals
) -> None:
    ranks = await ranks_of(http)
    assert len(ranks) == 2
    seen: list[str] = []
    reached = asyncio.Event()
    enough = random.randrange(1, 200)
    reading = [asyncio.create_task(stream(http, seen, enough, reached)) for _ in range(3)]
    await reached.wait()
    os.kill(ranks[rank], how)
    async with asyncio.timeout(60):
        errors = await asyncio.gather(*reading)
    assert {error["code"] for error in errors} == {"worker_failed"}
    if rank:
        said = {signal.SIGKILL: "rank 1 of 2 has ended: ", signal.SIGSTOP: "no sign of life"}[how]
        assert all(said in error["message"] for error in errors)
    await all_end(ranks)
    assert (await answers(http)).status_code == 200


@slow
async def test_a_rank_that_ends_while_nobody_asks_costs_no_request(
    http: httpx.AsyncClient,
) -> None:
    ranks = await ranks_of(http)
    os.kill(ranks[1], signal.SIGKILL)
    await all_end(ranks)
    async with asyncio.timeout(30):
        while await first_of(http) == ranks[0]:  # noqa: ASYNC110 another process's
            await asyncio.sleep(0.05)
    assert await ranks_of(http) != ranks


@slow
async def test_a_model_that_can_not_be_shared_out_is_refused_over_http(
    http: httpx.AsyncClient,
) -> None:
    answer = await answers(http, "whole")
    assert answer.status_code == 400
    assert "can't spread over several devices" in answer.json()["error"]["message"]


@slow
async def test_no_rank_outlives_a_server_that_is_killed(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path / "errors") as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
            ranks = await ranks_of(http)
        server.process.kill()
        await all_end(ranks)
