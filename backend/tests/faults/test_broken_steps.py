"""A step that raises, never ends, hangs in native code or ends its thread, beside eight answers."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from crowd import Crowd, question
from faulty_model import (
    EXITS,
    GPU_FAILS,
    GPU_IGNORES,
    HANGS,
    RAISES,
    SPELL,
    SPINS,
    make_faulty_model,
)
from live import LiveServer, live_server
from thorough import slow

from mlx_manager import demo_model
from mlx_manager.mlx_server.main import LOST_GPU, STALLED

CHAT = "/v1/chat/completions"
WATCHDOG = 3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("faulty")
    model = make_faulty_model(folder / "model")
    settings = {"trust_remote_code": True, "watchdog_seconds": WATCHDOG}
    with live_server(folder / "log", model=model, **settings) as running:
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


async def test_a_step_that_never_ends_is_interrupted_and_its_rows_are_told(
    http: httpx.AsyncClient,
):
    async with Crowd(http, 1000) as crowd:
        stuck = await cast(http, SPINS)
    assert stuck.json()["error"]["code"] == "generation_failed"
    all_were_told(crowd, f"no step was done for {WATCHDOG} s")
    await all_is_well(http)


async def test_when_the_thread_dies_its_rows_are_told_and_a_new_one_loads_the_model(
    http: httpx.AsyncClient,
):
    before = await figures(http)
    async with Crowd(http, 1000) as crowd:
        died = await cast(http, EXITS)
        assert died.status_code == 500
    all_were_told(crowd, "thread has died")
    refused = await http.post(CHAT, json=question(1))
    assert refused.status_code in (200, 503)
    await all_is_well(http)
    after = await figures(http)
    weights = {name: size for name, size in before["ledger"].items() if "weights" in name}
    assert weights.items() <= after["ledger"].items()
    assert after["mlx"]["active"] < 1.5 * before["mlx"]["active"]


async def test_when_the_thread_dies_pins_and_the_settings_read_last_stay_in_force(tmp_path: Path):
    shutil.copytree(Path(demo_model.__file__).parent, tmp_path / "models" / "b")
    file = tmp_path / "models.toml"
    file.write_text("[models.b]\naliases = ['at-the-start']\n")
    settings = {"trust_remote_code": True, "models_dir": tmp_path / "models", "models_file": file}
    model = make_faulty_model(tmp_path / "faulty")
    with live_server(tmp_path / "log", model=model, **settings) as running:
        async with httpx.AsyncClient(base_url=running.url, timeout=60) as http:
            pin = {"model": "b", "pinned": True}
            assert (await http.post("/v1/admin/models/pin", json=pin)).status_code == 200
            file.write_text("[models.b]\naliases = ['lately']\n")
            assert (await http.post("/v1/admin/reload")).status_code == 200
            file.write_text("models = [")
            for _ in range(2):
                assert (await cast(http, EXITS)).status_code == 500
                await ready(http)
                models = (await http.get("/v1/admin/models")).json()["data"]
                [b] = [model for model in models if model["id"] == "b"]
                assert (b["pinned"], b["aliases"]) == (True, ["lately"])
                asked = {"model": "lately", "prompt": "hello", "max_tokens": 1}
                answer = await http.post("/v1/completions", json=asked)
                assert (answer.status_code, answer.json()["model"]) == (200, "b")
    assert "the models' settings stay as they were" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(("how", "times"), [(GPU_IGNORES, 1), (GPU_FAILS, 3)])
async def test_a_gpu_that_takes_no_more_work_ends_the_server_for_the_service_manager(
    tmp_path: Path, how: int, times: int
):
    model = make_faulty_model(tmp_path / "model")
    with live_server(tmp_path / "log", model=model, trust_remote_code=True) as running:
        async with httpx.AsyncClient(base_url=running.url, timeout=60) as http:
            async with Crowd(http, 1000) as crowd:
                for _ in range(times):
                    failed = await cast(http, how)
                    assert failed.json()["error"]["code"] == "generation_failed"
            assert all(told.error["code"] == "generation_failed" for told in crowd.told)
        assert await asyncio.to_thread(running.process.wait, 60) == LOST_GPU
    [last] = [line for line in (tmp_path / "log").read_text().splitlines() if "restarted" in line]
    assert "the GPU takes no more work" in last
    assert f"ending with {LOST_GPU}" in last


@slow
async def test_a_step_that_hangs_ends_the_server_for_the_service_manager(
    server: LiveServer, http: httpx.AsyncClient
):
    async with Crowd(http, 1000) as crowd:
        hung = await cast(http, HANGS)
        assert hung.json()["error"]["code"] == "generation_failed"
        unready = await http.get("/readyz")
        assert unready.status_code == 503
        assert "recovering" in unready.text
    all_were_told(crowd, f"no step was done for {WATCHDOG} s")
    assert await asyncio.to_thread(server.process.wait, 60) == STALLED
