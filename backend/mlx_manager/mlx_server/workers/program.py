"""The beginning of a worker's program, and of those of its other ranks."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import sys
import threading

from mlx_manager.mlx_server.workers.process import LogSettings

STDIO = "stdio"
"""Argument for a connection by standard input and output."""
PIECE = 2**16
DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux's prctl(2)."""


def begin(arguments: list[str]) -> socket.socket:
    """Set the process up; return its end of the connection.

    arguments: the number of an inherited socket, or `STDIO`; the name for the log, its level and
    form.
    """
    from mlx_manager.mlx_server.observability import logs

    number, name, *_ = arguments
    log = log_settings(arguments)
    faulthandler.enable()
    if sys.platform == "linux":
        # Also where it hangs in native code and nobody reads the connection's end.
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    if log.level:
        logs.configure(log.level, log.form, worker=name)
        if log.form == "json":
            logs.capture_output()
    return by_stdio() if number == STDIO else socket.socket(fileno=int(number))


def log_settings(arguments: list[str]) -> LogSettings:
    """Return the settings of the log that a program has been started with; see
    `process.arguments`."""
    _, _, level, form = arguments
    return LogSettings(level, "json" if form == "json" else "pretty")


def by_stdio() -> socket.socket:
    """Return an end of a connection by standard input and output, such as ssh's. From now on what
    is printed goes to stderr."""
    ours, inner = socket.socketpair()
    given, taken = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def bring() -> None:
        while data := os.read(given, PIECE):
            inner.sendall(data)
        inner.shutdown(socket.SHUT_RDWR)

    def take() -> None:
        while data := inner.recv(PIECE):
            left = memoryview(data)
            while left:
                left = left[os.write(taken, left) :]
        os.close(taken)

    for pump in (bring, take):
        threading.Thread(target=pump, name=f"stdio {pump.__name__}", daemon=True).start()
    return ours
