"""Workers that run in threads of the test's own process: real ones, which start at once and whose
parts a test can reach."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable

from mlx_manager.mlx_server.workers.host import Host
from mlx_manager.mlx_server.workers.model import Model
from mlx_manager.mlx_server.workers.process import NO_LOG, LogSettings, Process

Make = Callable[[Callable[[object], None]], Model]


class ThreadOfAWorker:
    """Stands for a process; it ends with its connection."""

    pid = os.getpid()

    def __init__(self, end: socket.socket, make: Make) -> None:
        async def serve() -> None:
            await Host(end, make).serve()

        self._thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        self._thread.start()

    def kill(self, *, report: bool = False) -> None:
        pass

    def leave(self, seconds: float) -> None:
        self._thread.join(seconds)

    def wait(self) -> str:
        self._thread.join(60)
        return "it ended"


class Here:
    """Starts workers in this process; as `workers.process.start_process`. None of them sets MLX's
    limit, which is that of all.

    Attributes:
        models: the model of the worker that was started last under each name.
    """

    def __init__(self, make: type[Model] = Model) -> None:
        self.models: dict[str, Model] = {}
        self._make = make

    def __call__(self, name: str, log: LogSettings = NO_LOG) -> tuple[socket.socket, Process]:
        def make(send: Callable[[object], None]) -> Model:
            model = self.models[name] = self._make(send, alone=False)
            return model

        ours, theirs = socket.socketpair()
        return ours, ThreadOfAWorker(theirs, make)


def start_here(name: str, log: LogSettings = NO_LOG) -> tuple[socket.socket, Process]:
    """Start a worker in this process."""
    return Here()(name, log)
