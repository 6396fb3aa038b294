"""A real server in a process of its own, started the way the README says."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAM = Path(sys.executable).parent / "mlx-manager"
READY = re.compile(r"is ready: (http://\S+)/v1")


@dataclass(frozen=True, slots=True)
class LiveServer:
    url: str
    process: subprocess.Popen[str]


@contextmanager
def live_server(
    errors: Path,
    command: Sequence[str] = (str(PROGRAM), "serve"),
    *,
    offline: bool = True,
    **settings: object,
) -> Iterator[LiveServer]:
    """`mlx-manager serve` on a free port, interrupted at the end; it must then end by itself.

    offline: it asks no hub.
    """
    own = {f"MLX_SERVER_{name.upper()}": str(value) for name, value in settings.items()}
    environment = (
        os.environ
        | {
            "HF_HUB_OFFLINE": str(int(offline)),
            "MLX_SERVER_HF_CACHE": "false",
            "MLX_SERVER_PORT": "0",
        }
        | own
    )
    with errors.open("w") as log:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if found := READY.search(line):
                    break
            else:
                raise AssertionError(f"the server did not start:\n{errors.read_text()}")
            yield LiveServer(found[1], process)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=60)
            finally:
                process.kill()


@contextmanager
def server_before(
    behind: LiveServer, folder: Path, tables: str, **settings: object
) -> Iterator[LiveServer]:
    """A server that has the models of `tables`, which another one has under the same names."""
    folder.mkdir(exist_ok=True)
    log, models = folder / "log.txt", folder / "models.toml"
    lines = [
        f'{line}\nurl = "{behind.url}/v1"' if line.startswith("[models.") else line
        for line in tables.splitlines()
    ]
    models.write_text("\n".join(lines))
    with live_server(log, models_file=models, **settings) as running:
        yield running
    assert "Traceback" not in log.read_text(), log.read_text()
    assert running.process.returncode == 0
