"""Workers, and servers, that run in threads of the test's own process: real ones, which start at
once and whose parts a test can reach."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
from fastapi.testclient import TestClient

from mlx_manager.mlx_server.config import MLXServerSettings
from mlx_manager.mlx_server.main import create_app
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


@contextmanager
def served_here(**settings: Any) -> Iterator[TestClient]:
    """A client of a server in this process, once its default model is loaded: for what needs
    neither a process nor a socket, which cost three seconds."""
    app = create_app(MLXServerSettings(hf_cache=False, **settings), start=start_here)
    place = {"base_url": "http://localhost", "client": ("127.0.0.1", 50000)}
    with TestClient(app, **place) as client:
        due = time.monotonic() + 60
        while client.get("/readyz").status_code != 200:
            assert time.monotonic() < due, app.state.server.failure
            time.sleep(0.01)
        yield client


def check_refusal(client: httpx.Client, model: str, status: int, words: Sequence[str]) -> None:
    """Check that a chat with a model is refused, with these words in the message."""
    body = {"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == status, answer.text
    message = answer.json()["error"]["message"]
    assert all(word in message for word in words), message
