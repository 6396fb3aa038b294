from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from live import live_server
from other_server import OtherServer, other_server
from typer.testing import CliRunner

from mlx_manager.cli import app
from mlx_manager.demo_model import demo_model_path

TOKEN = "open-sesame"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model `mine`."""
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(demo_model_path(), folder / "mine")
    return folder


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> Iterator[str]:
    """The address of a server with the embedded model, those of `models_dir`, and a token."""
    log = tmp_path_factory.mktemp("server") / "log"
    with live_server(log, models_dir=models_dir, admin_token=TOKEN) as live:
        yield live.url


@pytest.fixture
def other() -> Iterator[OtherServer]:
    with other_server() as server:
        yield server


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A person's, with nothing of ours in it yet."""
    own = {
        "HOME": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "1",
        "TERM": "xterm-256color",
        # The prompt need not ask a terminal that nobody draws where its cursor is.
        "PROMPT_TOOLKIT_NO_CPR": "1",
        "MLX_SERVER_PORT": "1",
    }
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MLX_", "HF_"))}
    return inherited | own


@pytest.fixture
def run(environment: dict[str, str]) -> Run:
    """A command in this process, with nothing to read unless there is `input`."""

    def run(*arguments: str, input: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        wanted = environment | variables
        changed = {name: wanted.get(name) for name in os.environ.keys() | wanted.keys()}
        done = CliRunner().invoke(app, arguments, input=input, env=changed)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)

    return run


@pytest.fixture
def program(environment: dict[str, str]) -> Run:
    """The same in a process of its own, for what reads its environment when it is imported."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "mlx_manager.cli", *arguments],
            stdin=subprocess.DEVNULL,
            env=environment | variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    return run
