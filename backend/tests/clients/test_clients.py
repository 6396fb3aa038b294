"""Clients that people use, each a real package in a process of its own: `make clients` gets them.

A client's script holds one conversation with the server and fails by itself.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from live import LiveServer
from thorough import slow

HERE = Path(__file__).parent
VENVS = HERE.parents[2] / ".venv-clients"
# What lm-eval asks for, `test_tokens` and `test_logprobs` ask for in every run; what litellm does,
# the official packages and those that call them.
LARGE = {"lm_eval", "litellm"}
IN_PYTHON = [
    pytest.param(name, marks=[slow] if name in LARGE else [])
    for name in sorted(found.parent.name for found in HERE.glob("*/talk.py"))
]
IN_NODE = sorted(found.stem for found in HERE.glob("node/*.mjs"))


def talk(command: list[str], server: LiveServer, home: Path) -> None:
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


@pytest.mark.parametrize("name", IN_PYTHON)
def test_a_python_client_holds_its_conversation(name: str, server: LiveServer, tmp_path: Path):
    python = VENVS / name / "bin" / "python"
    if not (VENVS / name / ".setup").exists():
        pytest.skip(f"{name} is not installed in .venv-clients; `make clients` installs it")
    talk([str(python), str(HERE / name / "talk.py")], server, tmp_path)


@pytest.mark.parametrize("name", IN_NODE)
def test_a_node_client_holds_its_conversation(name: str, server: LiveServer, tmp_path: Path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no Node.js here")
    if not (HERE / "node" / "node_modules" / ".setup").exists():
        pytest.skip("the Node packages are not installed; `make clients` installs them")
    talk([node, str(HERE / "node" / f"{name}.mjs")], server, tmp_path)
