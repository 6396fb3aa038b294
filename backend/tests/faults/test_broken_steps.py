"""A step that raises, beside eight answers of the same model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from crowd import Crowd
from faulty_model import GPU_FAILS, QUITS, RAISES, SPELL, make_faulty_model
from live import LiveServer, live_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("faulty")
    model = make_faulty_model(folder / "model")
    with live_server(folder / "log", model=model, trust_remote_code=True) as running:
        yield running


@pytest.fixture
async def http(server: LiveServer) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
        yield client


async def cast(http: httpx.AsyncClient, how: int) -> httpx.Response:
    return await http.post("/v1/completions", json={"prompt": [*SPELL, how], "max_tokens": 1})


async def figures(http: httpx.AsyncClient) -> dict[str, Any]:
    return (await http.get("/debug/memory")).json()


async def ready(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(60):
        while (await http.get("/readyz")).status_code != 200:  # noqa: ASYNC110 another process's
            await asyncio.sleep(0.05)


async def all_is_well(http: httpx.AsyncClient) -> None:
    """The server answers as ever, and holds nothing of those who failed."""
    await ready(http)
    async with Crowd(http, 5) as crowd:
        pass
    assert all(told.well for told in crowd.told)
    [engine] = (await figures(http))["engines"].values()
    assert (engine["running"], engine["prefilling"], engine["waiting"]) == (0, 0, 0)
    assert engine["pages_held"] == 0


def all_were_told(crowd: Crowd, message: str) -> None:
    for told in crowd.told:
        assert told.error is not None
        assert told.error["code"] == "generation_failed"
        assert message in told.error["message"]


async def test_a_step_that_raises_fails_its_rows_and_the_engine_goes_on(http: httpx.AsyncClient):
    async with Crowd(http, 1000) as crowd:
        broken = await cast(http, RAISES)
    assert (broken.status_code, broken.json()["error"]["code"]) == (500, "generation_failed")
    all_were_told(crowd, "can be retried")
    await all_is_well(http)


async def test_a_gpu_that_fails_three_times_has_the_model_begin_anew(http: httpx.AsyncClient):
    [before] = (await http.get("/debug/state")).json()["workers"].values()
    for code in ("generation_failed", "generation_failed", "worker_failed"):
        failed = await cast(http, GPU_FAILS)
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, code)
    assert "3 errors in 60 s" in failed.json()["error"]["message"]
    await all_is_well(http)
    [after] = (await http.get("/debug/state")).json()["workers"].values()
    assert after != before


async def test_a_default_model_that_is_down_is_not_ready_and_says_why(http: httpx.AsyncClient):
    for _ in range(3):
        assert (await cast(http, QUITS)).json()["error"]["code"] == "worker_failed"
    for path in ("/readyz", "/health"):
        unready = await http.get(path)
        assert unready.status_code == 503
        assert "failed 3 times in a row while answering" in unready.text
        assert "it ended with exit code 3" in unready.text
    assert (await http.get("/livez")).status_code == 200
    assert (await http.post("/v1/admin/reload")).status_code == 200
    await all_is_well(http)
