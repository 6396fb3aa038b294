"""Coding agents from npm as programs, which `make clients` installs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

MODULES = Path(__file__).parents[1] / "clients" / "agents" / "node_modules"


def turn(agent: str, *arguments: str, home: Path, **environment: str) -> str:
    """Return the words of an agent that knows nothing but `environment`, in its one turn. Skips
    where the agents are not installed."""
    if not (MODULES / ".setup").exists():
        pytest.skip("the agents are not installed; `make clients` installs them, with npm")
    ended = subprocess.run(
        [str(MODULES / ".bin" / agent), *arguments],
        env={"PATH": os.environ["PATH"], "HOME": str(home), **environment},
        cwd=home,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    return ended.stdout.strip()
