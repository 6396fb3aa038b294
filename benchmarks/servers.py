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
DUMP_SECONDS = 2.0
"""Seconds in which processes that are aborted may write where they are."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server. `model` is what requests must name; None where its default will do.

    pid: of its process. log: the file that it writes to.
    """

    name: str
    base_url: str
    model: str | None = None
    pid: int = 0
    log: Path | None = None

    def request(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        named = {"model": self.model} if self.model else {}
        return {"url": f"{self.base_url}{path}", "body": {**named, **body}}


class DidNotStart(SystemExit):
    """A server that was not healthy in time; the message has its log."""


@contextmanager
def our_server(
    model: Path,
    *,
    seconds: float = START_SECONDS,
    environment: Mapping[str, str] | None = None,
    **settings: str,
) -> Iterator[Server]:
    """`mlx-manager serve` with `settings` as MLX_SERVER_ variables, and with more variables.
    seconds: as in `running`."""
    port = free_port()
    command = [sys.executable, "-m", "mlx_manager.mlx_server.main"]
    variables = {
        "MLX_SERVER_MODEL": str(model),
        "MLX_SERVER_PORT": str(port),
        "MLX_SERVER_LOG_LEVEL": "warning",
        **{f"MLX_SERVER_{name.upper()}": value for name, value in settings.items()},
        **(environment or {}),
    }
    with running("mlx-manager", command, port, variables, seconds=seconds) as server:
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
    *,
    seconds: float = START_SECONDS,
) -> Iterator[Server]:
    """A server's process, as soon as it is healthy.

    Raises:
        DidNotStart: it was not in so many seconds. Its processes have written where they were.
    """
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            start_new_session=True,
        )
        try:
            found = Server(name, f"http://127.0.0.1:{port}/v1", model, process.pid, Path(log.name))
            if not is_healthy(f"http://127.0.0.1:{port}/health", process, seconds):
                dump(process.pid)
                raise DidNotStart(f"{name} did not start:\n{last_of(found, 2**20)}")
            yield found
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


def dump(pid: int) -> None:
    """Abort the processes below one, which write the stacks of their threads if Python's
    faulthandler is on there (our workers, and all with PYTHONFAULTHANDLER=1). Linux only."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # The name before it may have spaces.
            told = entry.joinpath("stat").read_text().rpartition(")")[2]
            parents[int(entry.name)] = int(told.split()[1])
    below = {pid}
    while more := {child for child, parent in parents.items() if parent in below} - below:
        below |= more
    for each in sorted(below - {pid}, reverse=True):
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGABRT)
    time.sleep(DUMP_SECONDS)


def last_of(server: Server, characters: int) -> str:
    """Return the end of what a server has written."""
    assert server.log is not None
    return server.log.read_text(errors="replace")[-characters:]


def is_healthy(url: str, process: subprocess.Popen[bytes], seconds: float = START_SECONDS) -> bool:
    deadline = time.monotonic() + seconds
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


def load(requests: Sequence[Mapping[str, Any]], seconds: float | None = None) -> list[Answer]:
    """Send all requests at once from a process of its own.

    Raises:
        RuntimeError: an answer failed.
        subprocess.TimeoutExpired: the answers took more than so many seconds.
    """
    finished = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "load_client.py")],
        input=json.dumps(list(requests)),
        capture_output=True,
        text=True,
        check=True,
        timeout=seconds,
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
