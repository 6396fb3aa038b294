"""Loads that would never end, on a real server: they hold up nobody, and not its end either."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import LiveServer, live_server
from tiny_models import make_tiny_model

from mlx_manager.mlx_server.services.drain import LAST_WORDS

ENDLESS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{{ messages[0].content }}"
)
LIMIT, DRAIN = 8, 1
"""Seconds; what the other models' loads wait for takes less on a machine that does much else."""
SLACK = 20
"""Seconds more for such a machine; what is tried would take hours."""


def with_template(folder: Path, template: str) -> None:
    settings = make_tiny_model(folder) / "tokenizer_config.json"
    written = json.loads(settings.read_text()) | {"chat_template": template}
    settings.write_text(json.dumps(written))


def with_fifo(folder: Path, name: str) -> None:
    make_tiny_model(folder)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_tiny_model(folder / "good")
    make_tiny_model(folder / "fine", seed=1)
    with_template(folder / "endless", ENDLESS)
    for name in ("config.json", "tokenizer.json", "generation_config.json", "model.safetensors"):
        with_fifo(folder / f"fifo-{name.replace('.', '-')}", name)
    config = make_tiny_model(folder / "layers") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 10**9}))
    return folder


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "errors"


@pytest.fixture(scope="module")
def server(models: Path, log: Path) -> Iterator[LiveServer]:
    with live_server(log, models_dir=models, load_timeout_seconds=LIMIT) as running:
        yield running


@pytest.fixture
async def http(server: LiveServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        yield client


async def ask(http: httpx.AsyncClient, model: str) -> httpx.Response:
    body: dict[str, Any] = {"model": model, "prompt": "hi", "max_tokens": 2}
    return await http.post("/v1/completions", json=body)


async def test_a_load_that_never_ends_is_given_up_and_holds_up_no_other(
    http: httpx.AsyncClient, log: Path
):
    stalled = asyncio.create_task(ask(http, "endless"))
    await until_loading(http, "endless")
    good = await ask(http, "good")
    assert good.status_code == 200
    answer = await stalled
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "model_load_stalled")
    assert answer.headers["x-should-retry"] == "false"
    assert "its chat template is tried out" in answer.json()["error"]["message"]
    assert "MLX_SERVER_LOAD_TIMEOUT_SECONDS" in answer.json()["error"]["message"]
    written = await asyncio.to_thread(log.read_text)
    assert "The load of endless got no further" in written
    assert (await ask(http, "fine")).status_code == 200


async def until_loading(http: httpx.AsyncClient, model: str) -> None:
    async with asyncio.timeout(SLACK):
        while True:
            listed = (await http.get("/v1/models")).json()["data"]
            if any(one["id"] == model and one["state"] == "loading" for one in listed):
                return


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "generation_config.json", "model.safetensors"]
)
async def test_a_fifo_is_refused_by_name(http: httpx.AsyncClient, name: str):
    answer = await ask(http, f"fifo-{name.replace('.', '-')}")
    assert answer.status_code == 400
    assert f"{name} is a FIFO; a regular file is expected" in answer.json()["error"]["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert "retry-after" not in answer.headers


async def test_a_billion_layers_are_refused(http: httpx.AsyncClient):
    answer = await ask(http, "layers")
    assert answer.status_code == 400
    assert "num_hidden_layers 1,000,000,000" in answer.json()["error"]["message"]
    assert (await ask(http, "good")).status_code == 200


async def test_the_server_ends_in_its_time_while_a_load_hangs(models: Path, tmp_path: Path):
    settings = {"models_dir": models, "load_timeout_seconds": 0, "drain_seconds": DRAIN}
    with live_server(tmp_path / "log", **settings) as running:
        async with httpx.AsyncClient(base_url=running.url, timeout=60) as http:
            stalled = asyncio.create_task(ask(http, "endless"))
            await until_loading(http, "endless")
            begun = time.monotonic()
            running.process.send_signal(signal.SIGTERM)
            answer = await stalled
        await asyncio.to_thread(running.process.wait, DRAIN + LAST_WORDS + SLACK)
        assert time.monotonic() - begun < DRAIN + LAST_WORDS + SLACK
    assert answer.status_code == 503
    assert running.process.returncode == -signal.SIGTERM
