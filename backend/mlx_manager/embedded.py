"""A server for one session: started on a free port of this machine, ended with the session.

Its stdin is a pipe whose other end only the session's process holds. Nothing is ever written there:
that it is at its end says that the session is over, also where its process was killed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
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
"""Variables that are not inherited: their files and keys belong to the permanent server."""


class StartFailed(Exception):
    """The server ended before it was ready; the message is what it said."""


@contextmanager
def embedded_server(model: str | None) -> Iterator[str]:
    """Run a server for `model` (None: the settings' model) and yield its address.

    It is a process of its own, out of the terminal's reach, so that Ctrl-C does not end it.

    Raises:
        StartFailed: it could not start.
    """
    own = {
        "MLX_SERVER_HOST": "127.0.0.1",
        "MLX_SERVER_PORT": "0",
        "MLX_SERVER_LOG_LEVEL": "error",
        "MLX_SERVER_LOG_FORMAT": "pretty",
    }
    if model is not None:
        own["MLX_SERVER_MODEL"] = model
    inherited = {name: value for name, value in os.environ.items() if name not in NOT_FOR_IT}
    with log_file() as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "mlx_manager.embedded"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=inherited | own,
            start_new_session=True,
        )
        try:
            yield ready_address(process, log)
        finally:
            try:
                # Closes its stdin.
                process.communicate(timeout=END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


def log_file() -> IO[str]:
    """
    Raises:
        StartFailed: there is no folder for it.
    """
    try:
        return tempfile.TemporaryFile("w+")
    except OSError as error:
        raise StartFailed(f"its log needs a folder for temporary files: {error}") from error


def ready_address(process: subprocess.Popen[str], log: IO[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found := READY.search(line):
            return found[1]
    log.seek(0)
    said = log.read().strip().splitlines()[-LAST_LINES:]
    raise StartFailed("\n".join(said) or "it said nothing")


def stdin_ends() -> None:
    """Wait until stdin ends, as it does when the process with its other end ends."""
    while os.read(sys.stdin.fileno(), 1):
        pass


def end_with_session() -> None:
    """Stop as on SIGTERM once stdin ends; END_SECONDS later end at once."""
    stdin_ends()
    signal.alarm(END_SECONDS)  # Nobody handles it, which ends the program.
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """`mlx-manager serve` by the environment's settings, for as long as the session lasts."""
    threading.Thread(target=end_with_session, name="end with the session", daemon=True).start()
    from mlx_manager import cli

    cli.main(["serve"])


if __name__ == "__main__":
    main()
