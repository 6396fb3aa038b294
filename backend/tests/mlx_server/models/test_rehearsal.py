"""A model that is new to the machine is loaded by a process of its own first, where others are
answered meanwhile. Here on a CPU, which has nothing to gain from it."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import mlx.core as mx
import pytest
from pools import answer, open_pool, request

from mlx_manager.mlx_server.errors import MLXManagerError
from mlx_manager.mlx_server.models import rehearsal
from mlx_manager.mlx_server.models.pool import ModelPoolManager
from mlx_manager.mlx_server.models.rehearsal import Rehearsals


class Processes(list[subprocess.Popen[bytes]]):
    """Those that have been started."""


@pytest.fixture
def processes(monkeypatch) -> Processes:
    started, popen = Processes(), subprocess.Popen

    def start(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
        started.append(popen(*arguments, **options))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr(rehearsal.subprocess, "Popen", start)
    return started


@pytest.fixture
def settings(models_dir: Path) -> dict[str, object]:
    file = models_dir / "b" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"published": "later"}))
    return {"model": str(models_dir / "a"), "models_dir": str(models_dir), "hf_cache": False}


@pytest.fixture
def rehearsals(settings, tmp_path: Path) -> Rehearsals:
    return Rehearsals(settings, tmp_path / "loaded", "this machine")


@asynccontextmanager
async def answering(pool: ModelPoolManager) -> AsyncIterator[None]:
    """Somebody reads a long answer of the model `a`."""

    async def read() -> None:
        async with pool.lease("a") as lease:
            for number in count():
                prompt = f"story {number}"
                async for _ in lease.backend.generate(request(lease.id, prompt, tokens=1500)):
                    pass

    reading = asyncio.create_task(read())
    while not pool.rows():  # noqa: ASYNC110 the engine tells nobody
        await asyncio.sleep(0.001)
    yield
    assert not reading.done()
    reading.cancel()
    await asyncio.wait([reading])


async def test_a_model_is_rehearsed_once_a_machine_and_then_loaded(
    models_dir: Path, rehearsals: Rehearsals, processes: Processes, tmp_path: Path
) -> None:
    async with open_pool(models_dir, rehearsals=rehearsals) as pool:
        alone = await answer(pool, "a")
        limit = pool.figures()["mlx"]["limit"]
        async with answering(pool):
            steps = (await pool.get_model("a")).backend.stats
            before = steps().steps
            await pool.get_model("b")
            assert [process.returncode for process in processes] == [0]
            assert steps().steps > before + 10
        assert await answer(pool, "a") == alone
        assert pool.figures()["mlx"]["limit"] == limit
        assert not [line for line in pool.ledger.figures() if line.startswith("rehearsal")]
        assert await pool.unload("b") is not None
        async with answering(pool):
            assert await answer(pool, "b")
    assert len(processes) == 1
    # `a`, too, has been loaded here.
    assert len(list((tmp_path / "loaded").iterdir())) == 2


async def test_where_nobody_is_answered_a_load_is_all_there_is(
    models_dir: Path, rehearsals: Rehearsals, processes: Processes
) -> None:
    async with open_pool(models_dir, rehearsals=rehearsals) as pool:
        await pool.get_model("a")
        await pool.get_model("b")
        async with answering(pool):
            assert await pool.unload("b") is not None
            await pool.get_model("b")
    assert not processes


async def test_a_rehearsal_that_fails_says_why_and_the_load_goes_on(
    models_dir: Path, rehearsals: Rehearsals, processes: Processes, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(rehearsal, "PROGRAM", "no_such_program")
    with caplog.at_level(logging.INFO, rehearsal.log.name):
        async with open_pool(models_dir, rehearsals=rehearsals) as pool:
            await pool.get_model("a")
            async with answering(pool):
                assert await answer(pool, "b")
    assert len(processes) == 1
    assert "that failed after" in caplog.text
    assert "No module named no_such_program" in caplog.text


async def test_without_room_for_it_there_is_none(
    models_dir: Path, rehearsals: Rehearsals, processes: Processes
) -> None:
    async with open_pool(models_dir, rehearsals=rehearsals, memory_limit=2**30) as pool:
        await pool.get_model("a")
        async with answering(pool):
            assert await answer(pool, "b")
    assert not processes


async def test_it_ends_with_the_pool(
    models_dir: Path, rehearsals: Rehearsals, processes: Processes
) -> None:
    limit = mx.get_memory_limit()
    async with open_pool(models_dir, rehearsals=rehearsals) as pool:
        await pool.get_model("a")
        async with answering(pool), asyncio.timeout(60):
            loading = asyncio.create_task(pool.get_model("b"))
            while not processes:  # noqa: ASYNC110 nobody tells
                await asyncio.sleep(0.001)
    assert loading.done()
    assert processes[0].returncode is not None
    assert mx.get_memory_limit() == limit


async def test_nothing_of_the_folder_that_the_server_runs_in_is_run(
    models_dir: Path, rehearsals: Rehearsals, monkeypatch, tmp_path: Path, caplog
) -> None:
    monkeypatch.setattr(rehearsal, "PROGRAM", "no_such_program")
    (tmp_path / "no_such_program.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.INFO, rehearsal.log.name):
        async with open_pool(models_dir, rehearsals=rehearsals) as pool:
            await pool.get_model("a")
            async with answering(pool):
                await pool.get_model("b")
    assert "No module named no_such_program" in caplog.text


def test_it_ends_with_its_parent(settings) -> None:
    told = json.dumps({"model": "b", "settings": settings})
    command = [sys.executable, "-m", rehearsal.PROGRAM]
    done = subprocess.run(
        command, input=told + "\n", text=True, capture_output=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


async def test_models_of_one_configuration_need_it_once(
    models_dir: Path, rehearsals: Rehearsals, processes: Processes
) -> None:
    (models_dir / "b" / "config.json").write_bytes((models_dir / "a" / "config.json").read_bytes())
    async with open_pool(models_dir, rehearsals=rehearsals) as pool:
        await pool.get_model("a")
        async with answering(pool):
            await pool.get_model("b")
    assert not processes


async def test_a_model_without_a_configuration_fails_as_in_any_load(
    models_dir: Path, rehearsals: Rehearsals, processes: Processes
) -> None:
    async with open_pool(models_dir, rehearsals=rehearsals) as pool:
        await pool.get_model("a")
        await pool.models()
        (models_dir / "b" / "config.json").unlink()
        async with answering(pool):
            with pytest.raises(MLXManagerError, match=r"config\.json"):
                await pool.get_model("b")
    assert not processes
