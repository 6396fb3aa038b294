"""Starting a worker's process, and what its end says."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import mlx_manager

PROGRAM = "mlx_manager.mlx_server.workers.host"
ROOT = Path(mlx_manager.__file__).parent.parent
LogFormat = Literal["pretty", "json"]
LAST_WORDS = 2.0
"""Seconds in which a process that is aborted may write where it was."""

STUBBORN = 10.0
"""Seconds until a process that has been killed, and still hangs in a driver, is waited for no
longer."""

# Linux ends a child with the thread that has started it (`host.DIE_WITH_PARENT`), so that thread
# lasts as long as the program.
_STARTER = ThreadPoolExecutor(1, "start workers")


class Process(Protocol):
    """A worker's process, or what stands for one."""

    @property
    def pid(self) -> int: ...

    def kill(self, *, report: bool = False) -> None:
        """End it at once. report: let it write where it is first."""
        ...

    def wait(self) -> str:
        """Wait for the end of a process that ends, and return how it ended, in words."""
        ...


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Log settings of workers; without a level, Python's defaults hold."""

    level: str = ""
    form: LogFormat = "pretty"


NO_LOG = LogSettings()


class WorkerProcess:
    """A process of its own group: Ctrl-C is the server's to heed."""

    def __init__(self, end: socket.socket, name: str, log: LogSettings) -> None:
        command = [sys.executable, "-P", "-m", PROGRAM, str(end.fileno()), name, log.level]
        # A program that was started without stderr may have given its number to another file.
        log_end = subprocess.DEVNULL if sys.__stderr__ is None else 2
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [*command, log.form],
            pass_fds=[end.fileno()],
            stdin=subprocess.DEVNULL,
            # Its stdout is the server's log: what libraries print is no answer of the server's.
            stdout=log_end,
            stderr=log_end,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self, *, report: bool = False) -> None:
        if report:
            self._process.send_signal(signal.SIGABRT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(LAST_WORDS)
        self._process.kill()

    def wait(self) -> str:
        try:
            return ending(self._process.wait(STUBBORN))
        except subprocess.TimeoutExpired:
            return "it hangs, and the system can't end it"


def start_process(name: str, log: LogSettings) -> tuple[socket.socket, Process]:
    """Start a worker; returns this side's end of the connection.

    Raises:
        OSError: the system starts no more processes.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            return ours, _STARTER.submit(WorkerProcess, theirs, name, log).result()
        except OSError:
            ours.close()
            raise


def ending(code: int) -> str:
    """Return how a process ended, by its exit code.

    >>> ending(-11), ending(3)
    ('it was ended by SIGSEGV', 'it ended with exit code 3')
    """
    if code >= 0:
        return f"it ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    why = ", as the kernel does when memory runs out" if code == -signal.SIGKILL else ""
    return f"it was ended by {name}{why}"
