"""SIGTERM, SIGINT, SIGKILL while eight answers are being read: of the server and its models'
processes nothing is left."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from crowd import PEOPLE, Crowd, connect, question
from faulty_model import make_faulty_model
from linux import descendants, needs_linux, running
from live import PROGRAM, LiveServer, live_server
from thorough import slow
from tiny_models import make_tiny_model

from mlx_manager import demo_model

DEMO = Path(demo_model.__file__).parent
CHAT = "/v1/chat/completions"
SERVE = (str(PROGRAM), "serve")
UNHEARD = ("bash", "-c", f"exec {shlex.join(SERVE)} 2> >(:)")
"""Its stderr is a pipe that nobody reads any more."""
OWN_GROUP = f"import os; os.setsid(); os.execv({SERVE[0]!r}, {list(SERVE)!r})"
FOREGROUND = (sys.executable, "-c", OWN_GROUP)
"""A process group of its own, as a terminal's foreground job has, all of which Ctrl-C is sent to."""


@asynccontextmanager
async def served(
    errors: Path, command: Sequence[str] = SERVE, **settings: object
) -> AsyncIterator[tuple[LiveServer, httpx.AsyncClient]]:
    with live_server(errors, command, **settings) as server:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as http:
            yield server, http


async def ended(server: LiveServer) -> int:
    return await asyncio.to_thread(server.process.wait, 60)


async def refused(http: httpx.AsyncClient, path: str) -> httpx.Response:
    """The first answer that is no 200: a signal takes a moment to arrive."""
    while (response := await http.get(path)).status_code == 200:
        pass
    return response


@pytest.mark.parametrize("sent", [pytest.param(signal.SIGTERM, marks=slow), signal.SIGINT])
async def test_after_sigterm_or_ctrl_c_running_answers_finish_and_new_ones_are_refused(
    tmp_path: Path, sent: signal.Signals
):
    log = tmp_path / "log"
    async with served(log, FOREGROUND, drain_seconds=60) as (server, http):
        async with Crowd(http, 200) as crowd:
            os.killpg(server.process.pid, sent)
            unready = await refused(http, "/readyz")
            assert 1 <= int(unready.headers["retry-after"]) <= 60
            assert (await http.get("/livez")).status_code == 200
            late = await http.post(CHAT, json=question(1))
            assert (late.status_code, late.json()["error"]["code"]) == (503, "server_not_ready")
            assert "retry-after" in late.headers
        assert all(told.well for told in crowd.told)
        assert await ended(server) in (0, -signal.SIGTERM)
    text = log.read_text()
    assert "8 running requests have 60 s to finish" in text
    assert "Traceback" not in text


async def test_at_the_deadline_each_client_is_told_that_its_answer_was_cut(tmp_path: Path):
    log = tmp_path / "log"
    async with served(log, drain_seconds=0.1) as (server, http):
        async with Crowd(http, 5000) as crowd:
            whole = asyncio.create_task(http.post(CHAT, json=question(5000, stream=False)))
            while (await http.get("/debug/memory")).json()["engines"]["mlx-manager/demo"][
                "running"
            ] <= PEOPLE:
                pass
            server.process.terminate()
        assert {told.error["code"] for told in crowd.told if told.error} == {"server_not_ready"}
        assert all(told.error and told.pieces and not told.done for told in crowd.told)
        assert ((await whole).status_code, (await whole).json()["error"]["code"]) == (
            503,
            "server_not_ready",
        )
        assert await ended(server) == -signal.SIGTERM
    assert "Traceback" not in log.read_text()


async def test_a_server_whose_terminal_is_gone_stops_all_the_same(tmp_path: Path):
    async with served(tmp_path / "log", command=UNHEARD, drain_seconds=0.1) as (server, http):
        async with Crowd(http, 5000) as crowd:
            server.process.terminate()
        assert {told.error["code"] for told in crowd.told if told.error} == {"server_not_ready"}
        assert await ended(server) == -signal.SIGTERM


def test_a_server_that_can_tell_nobody_why_it_can_not_start_ends_all_the_same(tmp_path: Path):
    missing = os.environ | {"MLX_SERVER_PORT": "0", "MLX_SERVER_MODEL": str(tmp_path)}
    assert subprocess.run(UNHEARD, check=False, env=missing, timeout=60).returncode == 1


async def test_clients_that_do_nothing_keep_the_server_from_ending_for_seconds_at_most(
    tmp_path: Path,
):
    log = tmp_path / "log"
    model = make_tiny_model(tmp_path / "model", max_position_embeddings=200_000)
    endless = {"prompt": "hello " * 170, "max_tokens": 150_000, "ignore_eos": True, "stream": True}
    body = json.dumps(endless | {"n": 8, "echo": True, "logprobs": 20}).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(body)
    )
    # They would be dropped anyway, but minutes later.
    patience = {"drain_seconds": 0.1, "client_timeout_seconds": 600}
    async with served(log, model=model, **patience) as (server, http):
        sends_half = await connect(server, head + body[:10])
        reads_nothing = await connect(server, head + body, receive_buffer=2048)
        # Behind 8 000 of the prompts; each is 0.7 KB or so, and a system takes on 4 MB for a reader.
        while await drawn(http) < 1000:
            pass
        server.process.terminate()
        assert await ended(server) == -signal.SIGTERM
        sends_half.close()
        reads_nothing.close()
    assert "Traceback" not in log.read_text()


async def drawn(http: httpx.AsyncClient) -> int:
    """Tokens of all answers so far."""
    engines = (await http.get("/debug/memory")).json()["engines"].values()
    return sum(engine["generated_tokens"] for engine in engines)


@pytest.mark.parametrize("second", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=slow)])
async def test_a_second_signal_ends_the_server_at_once(tmp_path: Path, second: signal.Signals):
    async with served(tmp_path / "log", drain_seconds=600) as (server, http):
        async with Crowd(http, 5000) as crowd:
            server.process.terminate()
            await refused(http, "/readyz")
            server.process.send_signal(second)
        assert all(told.broken for told in crowd.told)
        assert await ended(server) == -second


@needs_linux("a process's end with its parent's")
@pytest.mark.parametrize("sent", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=slow)])
async def test_no_process_of_a_model_outlives_the_server(tmp_path: Path, sent: signal.Signals):
    models = tmp_path / "models"
    shutil.copytree(DEMO, models / "stopped")
    hangs = tmp_path / "hangs"
    code = f"open({str(hangs)!r}, 'w').close()\nctypes.PyDLL(None).sleep(86400)"
    make_faulty_model(models / "loading", code)
    settings = {"models_dir": models, "trust_remote_code": True, "drain_seconds": 0.1}
    async with served(tmp_path / "log", **settings) as (server, http):
        # Each has a process that tries grammars, too.
        for model in ("mlx-manager/demo", "stopped"):
            form = {"type": "json_schema", "json_schema": {"name": "any", "schema": {}}}
            asked = question(2, stream=False, model=model, ignore_eos=False, response_format=form)
            assert (await http.post(CHAT, json=asked)).status_code == 200
        loading = asyncio.create_task(http.post(CHAT, json=question(1, model="loading")))
        while not hangs.exists():  # noqa: ASYNC110 another process's
            await asyncio.sleep(0.1)
        workers = (await http.get("/debug/state")).json()["workers"]
        os.kill(workers["stopped"], signal.SIGSTOP)
        async with Crowd(http, 5000):
            pids = descendants(server.process.pid)
            assert len(pids) == len([*workers, "loading"]) + len(["sandbox"] * 2)
            os.kill(server.process.pid, sent)
        await asyncio.wait([loading])
        assert await ended(server) == -sent
        async with asyncio.timeout(20):
            while running(pids):  # noqa: ASYNC110 other processes'
                await asyncio.sleep(0.05)


@slow
async def test_after_sigkill_a_new_server_goes_on_from_what_was_kept(tmp_path: Path):
    kept = tmp_path / "responses.db"
    asked = {"input": "What is 3 + 4?", "temperature": 0}
    async with served(tmp_path / "log", response_store=kept) as (server, http):
        first = (await http.post("/v1/responses", json=asked)).json()
        async with Crowd(http, 5000) as crowd:
            writers = [
                asyncio.create_task(http.post("/v1/responses", json=asked)) for _ in range(8)
            ]
            await asyncio.wait(writers, return_when=asyncio.FIRST_COMPLETED)
            os.kill(server.process.pid, signal.SIGKILL)
            await asyncio.wait(writers)
        assert all(told.broken for told in crowd.told)
        answered = [w.result().json() for w in writers if w.exception() is None]
        assert answered
    async with served(tmp_path / "log", response_store=kept) as (_, http):
        for answer in [first, *answered]:
            again = await http.get(f"/v1/responses/{answer['id']}")
            assert again.json()["output"] == answer["output"]
        went_on = asked | {"previous_response_id": first["id"]}
        assert (await http.post("/v1/responses", json=went_on)).status_code == 200
    with sqlite3.connect(kept) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
