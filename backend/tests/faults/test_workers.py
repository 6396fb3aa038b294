"""A model's process that dies, hangs, stops or starves, beside eight answers of another model."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from crowd import PEOPLE, Crowd, SteadyCrowd
from faulty_model import (
    ABORTS,
    EXITS,
    GPU_IGNORES,
    HANGS,
    HOLDS_LOCK,
    QUITS,
    SEGFAULTS,
    SPELL,
    SPINS,
    STARVES,
    make_faulty_model,
)
from linux import needs_linux
from live import LiveServer, live_server
from prometheus_client.parser import text_string_to_metric_families
from thorough import slow

COMPLETIONS = "/v1/completions"
DEMO = "mlx-manager/demo"
FAULTY = "faulty"
WATCHDOG, LOAD_LIMIT = 3, 20
"""Seconds; a step, and what a load does at a time, take less on a busy machine."""
AT_LOAD = {
    "aborts": "os.abort()",
    "hangs": "time.sleep(86400)",
    "holds": "ctypes.PyDLL(None).sleep(86400)",
}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "errors"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, log: Path) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("models")
    make_faulty_model(folder / FAULTY)
    for name, code in AT_LOAD.items():
        make_faulty_model(folder / name, code)
    settings = {
        "models_dir": folder,
        "trust_remote_code": True,
        "watchdog_seconds": WATCHDOG,
        "load_timeout_seconds": LOAD_LIMIT,
    }
    with live_server(log, **settings) as running:
        yield running


@pytest.fixture
async def http(server: LiveServer) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
        yield client


async def cast(http: httpx.AsyncClient, how: int) -> httpx.Response:
    asked = {"model": FAULTY, "prompt": [*SPELL, how], "max_tokens": 1}
    return await http.post(COMPLETIONS, json=asked)


async def answers(http: httpx.AsyncClient, model: str = FAULTY) -> httpx.Response:
    asked = {"model": model, "prompt": "hello", "max_tokens": 2}
    return await http.post(COMPLETIONS, json=asked)


async def process_of(http: httpx.AsyncClient, model: str = FAULTY) -> int:
    """The id of the process of a model, which is loaded for it."""
    assert (await answers(http, model)).status_code == 200
    pid: int = (await http.get("/debug/state")).json()["workers"][model]
    return pid


async def failures(http: httpx.AsyncClient, model: str = FAULTY) -> float:
    return (await samples(http, "worker_failures_total", model)).get("", 0)


async def samples(http: httpx.AsyncClient, name: str, model: str) -> dict[str, float]:
    """The values of a metric of a model, by their reason."""
    families = text_string_to_metric_families((await http.get("/metrics")).text)
    return {
        sample.labels.get("reason", ""): sample.value
        for family in families
        for sample in family.samples
        if sample.name == f"mlx_manager_{name}" and sample.labels["model_name"] == model
    }


async def status(http: httpx.AsyncClient, model: str = FAULTY) -> dict[str, Any]:
    listed = (await http.get("/v1/models")).json()["data"]
    [found] = [one for one in listed if one["id"] == model]
    return found


@asynccontextmanager
async def others(http: httpx.AsyncClient) -> AsyncIterator[None]:
    """Eight people read answers of the embedded model, and lose no token meanwhile."""
    before = await process_of(http, DEMO)
    async with SteadyCrowd(http, model=DEMO) as crowd:
        yield
    assert len(crowd.all_told) >= PEOPLE
    assert crowd.well
    assert await process_of(http, DEMO) == before


def is_told(answer: httpx.Response, reason: str) -> None:
    assert answer.status_code == 500
    names_the_reason(answer.json()["error"], reason)


def names_the_reason(error: dict[str, Any], reason: str) -> None:
    assert error["code"] == "worker_failed"
    assert reason in error["message"]
    assert FAULTY in error["message"]
    assert "can be retried" in error["message"]


IN_A_STEP = [
    (SEGFAULTS, "SIGSEGV"),
    pytest.param(ABORTS, "SIGABRT", marks=slow),
    pytest.param(QUITS, "exit code 3", marks=slow),
    pytest.param(STARVES, "it was ended by SIG", marks=[slow, needs_linux("/proc")]),
    pytest.param(EXITS, "its MLX thread has ended", marks=slow),
    pytest.param(GPU_IGNORES, "SubmissionsIgnored", marks=slow),
    pytest.param(SPINS, f"no step was done for {WATCHDOG} s", marks=slow),
    pytest.param(HANGS, f"no step was done for {WATCHDOG} s", marks=slow),
    (HOLDS_LOCK, f"no step was done for {WATCHDOG} s"),
]


@pytest.mark.parametrize(("how", "reason"), IN_A_STEP)
async def test_what_a_step_does_to_its_process_touches_no_other_model(
    http: httpx.AsyncClient, log: Path, how: int, reason: str
):
    await process_of(http)
    before, said = await failures(http), len(await asyncio.to_thread(log.read_text))
    async with others(http):
        is_told(await cast(http, how), reason)
        assert await failures(http) == before + 1
    again = await answers(http)
    assert again.status_code == 200, again.text
    written = (await asyncio.to_thread(log.read_text))[said:]
    assert f"the process of {FAULTY} has failed while answering: " in written
    assert reason in written
    if how in (SEGFAULTS, ABORTS, STARVES, SPINS, HANGS, HOLDS_LOCK):
        assert "Fatal Python error: " in written
        assert "faulty.py" in written


@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGKILL, "SIGKILL"), (signal.SIGSTOP, f"no step was done for {WATCHDOG} s")],
)
async def test_a_signal_to_a_process_touches_no_other_model(
    http: httpx.AsyncClient, number: signal.Signals, reason: str
):
    pid, before = await process_of(http), await failures(http)
    async with others(http):
        async with Crowd(http, 4000, model=FAULTY) as lost:
            os.kill(pid, number)
        for told in lost.told:
            assert told.pieces
            assert told.error is not None
            names_the_reason(told.error, reason)
        assert await failures(http) == before + 1
        assert await process_of(http) != pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_process_that_dies_in_its_load_touches_no_other_and_is_tried_thrice(
    http: httpx.AsyncClient,
):
    async with others(http):
        died = [await answers(http, "aborts")]
    died += [await answers(http, "aborts") for _ in range(2)]
    for answer in died:
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "worker_failed")
        assert "it was ended by SIGABRT" in answer.json()["error"]["message"]
    down = await answers(http, "aborts")
    assert (down.status_code, down.json()["error"]["code"]) == (503, "model_down")
    assert "failed 3 times in a row" in down.json()["error"]["message"]
    assert await failures(http, "aborts") == 3


@slow
@pytest.mark.parametrize("name", ["holds", "hangs"])
async def test_a_process_that_hangs_in_its_load_touches_no_other(
    http: httpx.AsyncClient, log: Path, name: str
):
    said = len(await asyncio.to_thread(log.read_text))
    async with others(http):
        stalled = await answers(http, name)
        error = stalled.json()["error"]
        assert (stalled.status_code, error["code"]) == (504, "model_load_stalled")
        assert "MLX_SERVER_LOAD_TIMEOUT_SECONDS" in error["message"]
        # Its process writes where it hangs, and has ended then.
        async with asyncio.timeout(10):
            while not await failures(http, name):
                pass
    written = (await asyncio.to_thread(log.read_text))[said:]
    assert "Fatal Python error: Aborted" in written
    assert "faulty.py" in written


@slow
@pytest.mark.parametrize("allowed", ["unload", "reload"])
async def test_three_failures_in_a_row_leave_a_model_down_until_its_owner_wants_it_again(
    http: httpx.AsyncClient, allowed: str
):
    for _ in range(2):
        # Those with an answer between them are not in a row.
        await process_of(http)
        is_told(await cast(http, QUITS), "exit code 3")
    await process_of(http)
    for _ in range(3):
        is_told(await cast(http, QUITS), "exit code 3")
    reason = "its process has failed 3 times in a row while answering: it ended with exit code 3"
    found = await status(http)
    assert (found["state"], found["failure"]) == ("down", reason)
    down = await answers(http)
    assert (down.status_code, down.json()["error"]["code"]) == (503, "model_down")
    assert reason in down.json()["error"]["message"]
    assert down.headers["x-should-retry"] == "false"
    assert await samples(http, "model_down", FAULTY) == {"it ended with exit code 3": 1}
    # It is not the default model.
    assert (await http.get("/readyz")).status_code == 200
    if allowed == "unload":
        told = await http.post("/v1/admin/models/unload", json={"model": FAULTY})
    else:
        told = await http.post("/v1/admin/reload")
    assert told.status_code == 200
    assert (await status(http))["state"] == "loadable"
    assert not await samples(http, "model_down", FAULTY)
    assert (await answers(http)).status_code == 200
