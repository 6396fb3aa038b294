"""What the routes share: the settings, and what the start-up has brought so far."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from fastapi import Request

from mlx_manager.mlx_server.config import MLXServerSettings
from mlx_manager.mlx_server.core import Caller
from mlx_manager.mlx_server.errors import MLXManagerError, ServerNotReady
from mlx_manager.mlx_server.observability.metrics import Metrics
from mlx_manager.mlx_server.observability.observer import Observer
from mlx_manager.mlx_server.observability.records import Recorder
from mlx_manager.mlx_server.services.accounts import Account, Accounts
from mlx_manager.mlx_server.services.inference import Inference, ModelPool
from mlx_manager.mlx_server.services.response_store import ResponseStore

PROTOCOLS = {
    "/chat/completions": "chat",
    "/completions": "completions",
    "/messages": "messages",
    "/responses": "responses",
}


class Server:
    """One server's state. `main` writes it while starting; the routes read it."""

    def __init__(self, settings: MLXServerSettings) -> None:
        self.settings = settings
        self.created = int(time.time())
        self.accounts = Accounts(settings.access)
        self.responses = ResponseStore(settings.responses)
        self.metrics = Metrics(self.figures, by_key=settings.metrics_by_key)
        self.observers: list[Observer] = []
        self.at_end: list[Callable[[], object]] = []
        self.started = asyncio.Event()
        self.failure: MLXManagerError | None = None
        self._pool: ModelPool | None = None

    @property
    def pool(self) -> ModelPool:
        """
        Raises:
            ServerNotReady: there is no pool yet.
        """
        if self._pool is None:
            raise ServerNotReady("The server is starting.")
        return self._pool

    def figures(self) -> dict[str, Any]:
        """The pool's.

        Raises:
            ServerNotReady: there is no pool yet.
        """
        return self.pool.figures()

    def inference(self, request: Request) -> Inference:
        """The way to the models for who sent `request`.

        Raises:
            ServerNotReady: start-up has not finished.
        """
        if not self.started.is_set():
            raise ServerNotReady("The server is starting: its default model is being loaded.")
        protocol = PROTOCOLS.get(request.url.path.removeprefix("/v1"), "")
        account: Account = request.state.account
        caller = Caller(account.key.name, protocol, request.state.request_id)
        recorder = Recorder((self.metrics.count_call, request.state.calls.append))
        return Inference(self.pool, [recorder, *self.observers], caller, account)

    def open(self, pool: ModelPool) -> None:
        """Models can be listed from now on."""
        self._pool = pool

    def finish_start(self, failure: MLXManagerError | None) -> None:
        """Requests are taken from now on; `failure` is why the default model is missing."""
        self.failure = failure
        self.started.set()


def server_of(request: Request) -> Server:
    server = request.app.state.server
    assert isinstance(server, Server)
    return server
