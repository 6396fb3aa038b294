"""The soak test in small; `benchmarks/soak.py` has what it does, and the 5 000. And models that
are loaded and unloaded, time after time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
from linux import descendants, needs_linux
from live import live_server
from thorough import ALL, slow
from tiny_models import make_tiny_model

ROUNDS = 50 if ALL else 1
WARMUP = 2 if ALL else 1
"""Rounds after which the server has what it keeps."""
GROWTH = 4 * 2**20
"""Bytes that an allocator may keep more of; a leak of 100 KB a round shows in 50."""
PROGRAM = Path(__file__).parents[3] / "benchmarks" / "soak.py"


@slow
def test_after_hundreds_of_requests_of_every_kind_nothing_is_left() -> None:
    # So few do not bring the allocator to where it stays: memory itself is the long version's.
    options = ("--requests", "300", "--warmup", "150", "--tolerance", "0.5")
    ended = subprocess.run(
        [sys.executable, str(PROGRAM), *options], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads(ended.stdout)
    assert sum(report["ended"].values()) == 300
    assert report["growth"]["ledger"] == 0


@needs_linux("/proc")
def test_after_rounds_of_loads_and_unloads_nothing_is_left(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "models" / "a")
    with (
        live_server(tmp_path / "log", models_dir=tmp_path / "models") as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):

        def round_and_state() -> dict[str, Any]:
            for deed in ("load", "unload"):
                told = http.post(f"/v1/admin/models/{deed}", json={"model": "a"})
                assert told.status_code == 200, told.text
            state = http.get("/debug/state").json()
            state["processes"] = len(descendants(server.process.pid))
            state["memory"] = http.get("/debug/memory").json()["ledger"]["limit"]
            return state

        before = [round_and_state() for _ in range(WARMUP)][-1]
        after = [round_and_state() for _ in range(ROUNDS)][-1]
    for counted in ("leases", "workers", "tasks", "threads", "open_files", "processes", "memory"):
        assert after[counted] == before[counted], counted
    assert after["rss_bytes"] - before["rss_bytes"] < GROWTH
