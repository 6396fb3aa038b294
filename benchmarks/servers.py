"""Servers as processes of their own, and load on them."""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import ROOT
from load_client import Answer

START_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Server:
    """A running server. `model` is what requests must name; None where its default will do."""

    name: str
    base_url: str
    model: str | None = None

    def request(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        named = {"model": self.model} if self.model else {}
        return {"url": f"{self.base_url}{path}", "body": {**named, **body}}


@contextmanager
def our_server(model: Path, **settings: str) -> Iterator[Server]:
    """`mlx-manager serve` with `settings` as MLX_SERVER_ variables."""
    port = free_port()
    command = [sys.executable, "-m", "mlx_manager.mlx_server.main"]
    environment = {
        "MLX_SERVER_MODEL": str(model),
        "MLX_SERVER_PORT": str(port),
        "MLX_SERVER_LOG_LEVEL": "warning",
        **{f"MLX_SERVER_{name.upper()}": value for name, value in settings.items()},
    }
    with running("mlx-manager", command, port, environment) as server:
        yield server


@contextmanager
def mlx_lm_server(model: Path, streams: int, as_installed: bool = False) -> Iterator[Server]:
    """`mlx_lm.server` that decodes `streams` together.

    As installed it has its own BLAS and 32 streams; the listen backlog is raised either way.
    """
    port = free_port()
    command = [sys.executable, str(ROOT / "benchmarks" / "mlx_lm_server.py")]
    environment = {"PEER_BLAS": "own"} if as_installed else {}
    if not as_installed:
        command += ["--decode-concurrency", str(streams)]
    command += ["--model", str(model), "--port", str(port), "--log-level", "WARNING"]
    with running("mlx_lm.server", command, port, environment, "default_model") as server:
        yield server


@contextmanager
def running(
    name: str,
    command: Sequence[str],
    port: int,
    environment: Mapping[str, str],
    model: str | None = None,
) -> Iterator[Server]:
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            start_new_session=True,
        )
        try:
            if not is_healthy(f"http://127.0.0.1:{port}/health", process):
                log.seek(0)
                sys.exit(f"{name} did not start:\n{log.read().decode(errors='replace')}")
            yield Server(name, f"http://127.0.0.1:{port}/v1", model)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
            end_group(process)


def end_group(process: subprocess.Popen[Any]) -> None:
    """End whatever a process with a session of its own has started and left behind: one of vLLM's
    outlives its parent."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def is_healthy(url: str, process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=10):
                return True
        except OSError:
            time.sleep(0.1)
    return False


def first_model(base_url: str) -> str:
    with urllib.request.urlopen(f"{base_url}/models", timeout=10) as response:
        return str(json.load(response)["data"][0]["id"])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def load(requests: Sequence[Mapping[str, Any]]) -> list[Answer]:
    """Send all requests at once from a process of its own.

    Raises:
        RuntimeError: an answer failed.
    """
    finished = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "load_client.py")],
        input=json.dumps(list(requests)),
        capture_output=True,
        text=True,
        check=True,
    )
    found = [Answer(**answer) for answer in json.loads(finished.stdout)]
    for answer in found:
        if answer.error or answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {answer.error}")
    return found


def tokens_per_second(found: Sequence[Answer]) -> float:
    """All generated tokens over the time from the first request to the end of the last answer."""
    spent = max(a.ended for a in found) - min(a.started for a in found)
    return sum(a.tokens for a in found) / spent


def time_to_first(found: Sequence[Answer]) -> float:
    """Median seconds from request to first text."""
    return statistics.median(a.first - a.started for a in found)
