"""Scripts of clients, each with the packages that `make clients` installs for it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from live import LiveServer

CLIENTS = Path(__file__).parents[1] / "clients"
VENVS = CLIENTS.parents[2] / ".venv-clients"
WAYS = ("own", "elsewhere")
"""Places of a server's models: in processes of its own, or on another server."""


def talk_in_python(name: str, script: str, server: LiveServer, home: Path, *arguments: str) -> None:
    """Run a script of the client `name`, or skip the test where that is not installed."""
    python = VENVS / name / "bin" / "python"
    if not (VENVS / name / ".setup").exists():
        pytest.skip(f"{name} is not installed in .venv-clients; `make clients` installs it")
    _talk([str(python), str(CLIENTS / name / script), *arguments], server, home)


def talk_in_node(script: str, server: LiveServer, home: Path, *arguments: str) -> None:
    """Run a script for Node.js, or skip the test where its packages are not installed."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no Node.js here")
    if not (CLIENTS / "node" / "node_modules" / ".setup").exists():
        pytest.skip("the Node packages are not installed; `make clients` installs them")
    _talk([node, str(CLIENTS / "node" / script), *arguments], server, home)


def _talk(command: list[str], server: LiveServer, home: Path) -> None:
    """Run a client's script with nothing of ours around it: no settings, no home, no key."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    ended = subprocess.run(
        [*command, f"{server.url}/v1"],
        env=kept | {"HOME": str(home)},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
