"""Starting a worker's process, and what its end says."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
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

    def leave(self, seconds: float) -> None:
        """Give it so many seconds to end by itself."""
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
NO_VARIABLES: Mapping[str, str] = {}


class WorkerProcess:
    """A process of a worker's.

    apart: whether the process begins a group of processes, which ends as a whole.
    """

    def __init__(self, start: Callable[[], subprocess.Popen[bytes]], apart: bool) -> None:
        self._process = start()
        self._apart = apart

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self, *, report: bool = False) -> None:
        if report:
            self._process.send_signal(signal.SIGABRT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(LAST_WORDS)
        if self._apart:
            # Its other ranks, too, if it has any. The group has the number of a process that may
            # have ended, but has not been waited for.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()

    def leave(self, seconds: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def wait(self) -> str:
        try:
            return ending(self._process.wait(STUBBORN))
        except subprocess.TimeoutExpired:
            return "it hangs, and the system can't end it"


def start_process(
    name: str,
    log: LogSettings,
    *,
    program: str = PROGRAM,
    environment: Mapping[str, str] = NO_VARIABLES,
    apart: bool = True,
) -> tuple[socket.socket, Process]:
    """Start a worker; returns this side's end of the connection.

    program: the module that is run. environment: variables of its own. apart: the process begins a
    group of processes: Ctrl-C is the server's to heed.

    Raises:
        OSError: the system starts no more processes.
    """

    def start(end: socket.socket) -> subprocess.Popen[bytes]:
        command = [sys.executable, *arguments(program, str(end.fileno()), name, log)]
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return subprocess.Popen(
            command,
            pass_fds=[end.fileno()],
            stdin=subprocess.DEVNULL,
            # Its stdout is the server's log: what libraries print is no answer of the server's.
            stdout=log_end(),
            stderr=log_end(),
            start_new_session=apart,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
        )

    return _started(start, apart)


def start_by(command: Sequence[str]) -> tuple[socket.socket, Process]:
    """Start a program that speaks by its standard input and output; returns this side's end of the
    connection.

    Raises:
        OSError: there is no such program, or the system starts no more processes.
    """

    def start(end: socket.socket) -> subprocess.Popen[bytes]:
        number = end.fileno()
        return subprocess.Popen(command, stdin=number, stdout=number, stderr=log_end())

    return _started(start, False)


def arguments(program: str, end: str, name: str, log: LogSettings) -> list[str]:
    """Return the arguments with which Python runs a worker's program; see `program.begin`."""
    return ["-P", "-m", program, end, name, log.level, log.form]


def log_end() -> int:
    """Return where the log goes. A program that was started without stderr may have given its
    number to another file."""
    return subprocess.DEVNULL if sys.__stderr__ is None else 2


def _started(
    start: Callable[[socket.socket], subprocess.Popen[bytes]], apart: bool
) -> tuple[socket.socket, Process]:
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            return ours, _STARTER.submit(WorkerProcess, partial(start, theirs), apart).result()
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
