"""caffeinate runs while calls are under way, and ends after them: a program of that name stands in
for macOS's."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from live import live_server

from mlx_manager.mlx_server.core import GenerationRequest, Text
from mlx_manager.mlx_server.services.awake import keep_awake
from mlx_manager.mlx_server.services.calls import Call, Calls

CAFFEINATE = """#!/bin/sh
echo "$* by $$" >>"{log}"
trap 'echo ended >>"{log}"; exit 0' TERM
while :; do sleep 0.05; done
"""

REQUEST = GenerationRequest("m", Text("x"))


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Return a function for what the program that is found as caffeinate was told."""
    log, programs = tmp_path / "said", tmp_path / "bin"
    log.touch()
    programs.mkdir()
    (programs / "caffeinate").write_text(CAFFEINATE.format(log=log))
    (programs / "caffeinate").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    return lambda: log.read_text().splitlines()


@asynccontextmanager
async def kept_awake(calls: Calls, linger: float) -> AsyncIterator[None]:
    task = asyncio.create_task(keep_awake(calls, linger))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 another process's
            await asyncio.sleep(0.01)


async def test_it_runs_from_the_first_call_to_the_end_of_the_last(said) -> None:
    calls = Calls()
    async with kept_awake(calls, linger=0.0):
        assert said() == []
        with calls.enter(Call([REQUEST])), calls.enter(Call([REQUEST])):
            await until(lambda: len(said()) == 1)
        await until(lambda: said()[1:] == ["ended"])
        with calls.enter(Call([REQUEST])):
            await until(lambda: len(said()) == 3)
        await until(lambda: said()[3:] == ["ended"])
    assert said()[0].startswith(f"-i -w {os.getpid()} by ")


async def test_a_call_that_follows_soon_finds_it_running(said) -> None:
    calls = Calls()
    async with kept_awake(calls, linger=600.0):
        for _ in range(3):
            with calls.enter(Call([REQUEST])):
                await until(lambda: len(said()) == 1)
    assert said()[1:] == ["ended"]


async def test_without_such_a_program_the_log_says_that_it_has_no_effect(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    await keep_awake(Calls())
    assert "MLX_SERVER_KEEP_AWAKE has no effect" in caplog.text


def test_a_server_that_is_told_so_keeps_the_machine_awake(said, tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    with live_server(tmp_path / "log", keep_awake=True) as server:
        httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).raise_for_status()
        process = server.process.pid
    assert said()[0].startswith(f"-i -w {process} by ")
    assert said()[1:] == ["ended"]
