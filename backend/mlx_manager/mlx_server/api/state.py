"""State that the routes share: the settings, what the start-up has made so far, and for each call
its `Inference`, with those who observe it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastapi import Request

from mlx_manager.mlx_server.api.deadlines import limits_of
from mlx_manager.mlx_server.api.http.paths import routed
from mlx_manager.mlx_server.config import MLXServerSettings
from mlx_manager.mlx_server.core import HOPS, Caller
from mlx_manager.mlx_server.errors import MLXManagerError, ServerNotReady
from mlx_manager.mlx_server.images.reader import ImageReader
from mlx_manager.mlx_server.observability.history import History
from mlx_manager.mlx_server.observability.metrics import Metrics
from mlx_manager.mlx_server.observability.observer import Observer, Recorder
from mlx_manager.mlx_server.schemas.wire import Timed
from mlx_manager.mlx_server.services.accounts import Account, Accounts
from mlx_manager.mlx_server.services.audit import AuditLog
from mlx_manager.mlx_server.services.calls import Calls
from mlx_manager.mlx_server.services.downloads import Downloads
from mlx_manager.mlx_server.services.drain import Drain
from mlx_manager.mlx_server.services.inference import Inference, ModelPool
from mlx_manager.mlx_server.services.response_store import ResponseStore

if TYPE_CHECKING:
    from mlx_manager.mlx_server.models.status import Reloaded

LATEST = ":latest"
MOST_DIGITS = 3
PROTOCOLS = {
    "/admin/prefix-cache/warm": "warm",
    "/api/chat": "ollama",
    "/api/embed": "ollama",
    "/api/embeddings": "ollama",
    "/api/generate": "ollama",
    "/apply-template": "tokens",
    "/chat/completions": "chat",
    "/completions": "completions",
    "/detokenize": "tokens",
    "/embeddings": "embeddings",
    "/messages": "messages",
    "/messages/count_tokens": "messages",
    "/rerank": "rerank",
    "/responses": "responses",
    "/responses/compact": "responses",
    "/responses/input_tokens": "responses",
    "/tokenize": "tokens",
    "/tokenizer_info": "tokens",
}


class Server:
    """One server's state. `main` writes it while starting; the routes read it.

    calls: those under way. drain: begun when the server is to go out of service. failure: why the
    default model is missing.
    """

    def __init__(self, settings: MLXServerSettings, images: ImageReader | None = None) -> None:
        self.settings = settings
        self.created = int(time.time())
        self.accounts = Accounts(settings.access)
        self.responses = ResponseStore(settings.responses)
        self.images = images or ImageReader(settings.images)
        self.metrics = Metrics(self.figures, self.offers, by_key=settings.metrics_by_key)
        self.audit = AuditLog(settings.audit, self.metrics.count_lost_records)
        self.history = History(self.look, self.figures)
        self.downloads = Downloads()
        self.observers: list[Observer] = []
        self.at_end: list[Callable[[], object]] = [self.responses.close, self.audit.close]
        self.started = asyncio.Event()
        self.failure: MLXManagerError | None = None
        self.calls = Calls(self.refusal)
        self.drain = Drain(self.calls, settings.drain_seconds)
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
        """Return the pool's figures.

        Raises:
            ServerNotReady: there is no pool yet.
        """
        return self.pool.figures()

    async def look(self) -> None:
        """Have loaded models tell their figures, if there is a pool."""
        if self._pool is not None:
            await self._pool.look()

    def offers(self, model_id: str) -> bool:
        """Return whether there is a pool, and it offers a model of that id."""
        return self._pool is not None and self._pool.offers(model_id)

    def refusal(self) -> ServerNotReady | None:
        """Return why no calls are taken; None if they are."""
        if (refusal := self.drain.refusal()) is not None:
            return refusal
        if not self.started.is_set():
            return ServerNotReady(f"The server is starting: {self._progress()}.")
        return None

    def _progress(self) -> str:
        """Return what the start is at, in a person's words."""
        doing = None if self._pool is None else self._pool.doing(self.settings.model)
        loads = "its default model is being loaded"
        return loads if doing is None else f"{loads} ({doing})"

    def unready(self) -> ServerNotReady | None:
        """Return why no requests should be routed here; None if they should.

        Either no calls are taken, or the default model is missing.
        """
        if (refusal := self.refusal()) is not None:
            return refusal
        if self.failure is not None:
            return ServerNotReady(f"The default model is not loaded: {self.failure.message}")
        if (down := self.pool.failure(self.settings.model)) is not None:
            return ServerNotReady(f"The default model is down: {down}.")
        return None

    def inference(self, request: Request, body: Timed | None = None) -> Inference:
        """Return the inference for the caller of `request`, within the time limits of both sides.

        Raises:
            ServerNotReady: no calls are taken.
            InvalidParameter: a header's time-out is no number of seconds.
        """
        if (refusal := self.refusal()) is not None:
            raise refusal
        limits = self.settings.time.and_also(limits_of(request, body))
        path = routed(request.scope).removeprefix("/v1").removeprefix("/v2")
        account: Account = request.state.account
        caller = Caller(
            account.key.name,
            PROTOCOLS.get(path, ""),
            request.state.request_id,
            hops_of(request),
        )
        sinks = (self.metrics.count_call, self.audit.put, request.state.calls.append)
        recorder = Recorder(sinks)
        return Inference(
            self.pool,
            [recorder, self.history, *self.observers],
            caller,
            account,
            calls=self.calls,
            limits=limits,
        )

    async def reload(self) -> Reloaded:
        """Read the models' settings and the keys again, and return the effects of the former.

        Raises:
            MLXManagerError: one of the files can't be read; all that is in force stays.
        """
        keys = self.accounts.read()
        reloaded = await self.pool.reload()
        self.accounts.know(keys)
        return reloaded

    def open(self, pool: ModelPool) -> None:
        """Set the pool: models can be listed from now on."""
        self._pool = pool

    def finish_start(self, failure: MLXManagerError | None) -> None:
        """End the start: requests are taken now. failure: why the default model is missing."""
        self.failure = failure
        self.started.set()


def meant(server: Server, name: str | None, *, ollama: bool = False) -> str:
    """Return the id of the model that a request names.

    ollama: `:latest` stands for no tag at all, unless a model is called so.
    """
    if ollama and name is not None and name.endswith(LATEST) and not server.pool.offers(name):
        name = name.removesuffix(LATEST)
    return server.pool.resolve(name)


def server_of(request: Request) -> Server:
    server = request.app.state.server
    assert isinstance(server, Server)
    return server


def hops_of(request: Request) -> int:
    """Return the number of servers of this program's that have passed the request on."""
    told = request.headers.get(HOPS, "")
    return int(told) if told.isdecimal() and len(told) <= MOST_DIGITS else 0


def caller_of(request: Request) -> str:
    """The name of the key that a request came with; "" without keys."""
    account: Account = request.state.account
    return account.key.name
