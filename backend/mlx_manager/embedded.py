"""A server for one session: started on a free port of this machine, ended with the session."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

READY = re.compile(r"is ready: (http://\S+)/v1")
END_SECONDS = 15
LAST_LINES = 5
NOT_FOR_IT = {
    "MLX_SERVER_API_KEY",
    "MLX_SERVER_API_KEYS_FILE",
    "MLX_SERVER_AUDIT_LOG",
    "MLX_SERVER_RESPONSE_STORE",
}
"""Whose files and keys belong to the server that runs for good."""


class StartFailed(Exception):
    """The server ended before it was ready; the message is what it said."""


@contextmanager
def embedded_server(model: str | None) -> Iterator[str]:
    """The address of a server that serves `model` (None: what the settings say).

    It is a process of its own, out of the terminal's reach, so that Ctrl-C does not end it.

    Raises:
        StartFailed: it could not start.
    """
    own = {
        "MLX_SERVER_HOST": "127.0.0.1",
        "MLX_SERVER_PORT": "0",
        "MLX_SERVER_LOG_LEVEL": "error",
    }
    if model is not None:
        own["MLX_SERVER_MODEL"] = model
    inherited = {name: value for name, value in os.environ.items() if name not in NOT_FOR_IT}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "mlx_manager.mlx_server.main"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=inherited | own,
            start_new_session=True,
        )
        try:
            yield ready_address(process, log)
        finally:
            process.terminate()
            try:
                process.communicate(timeout=END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


def ready_address(process: subprocess.Popen[str], log: IO[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found := READY.search(line):
            return found[1]
    log.seek(0)
    said = log.read().strip().splitlines()[-LAST_LINES:]
    raise StartFailed("\n".join(said) or "it said nothing")
