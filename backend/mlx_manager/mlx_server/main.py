"""The composition root: `create_app`, the module's `app`, and the server as a program.

Run with `python -m mlx_manager.mlx_server.main`, or `uvicorn mlx_manager.mlx_server.main:app`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from socket import socket
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from mlx_manager import __version__
from mlx_manager.mlx_server.api import access, auth, debug, documentation, errors, health, metrics
from mlx_manager.mlx_server.api.state import Server
from mlx_manager.mlx_server.api.v1 import tokens, v1_router
from mlx_manager.mlx_server.config import MLXServerSettings
from mlx_manager.mlx_server.engine.thread import MLXThread
from mlx_manager.mlx_server.errors import MLXManagerError
from mlx_manager.mlx_server.observability import logs
from mlx_manager.mlx_server.observability.tracing import start_tracing
from mlx_manager.mlx_server.schemas.anthropic import CountTokensRequest, MessagesRequest
from mlx_manager.mlx_server.schemas.openai import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    PromptRequest,
    TokenizeRequest,
)
from mlx_manager.mlx_server.schemas.responses import ResponsesRequest
from mlx_manager.mlx_server.services.inference import ModelPool

if TYPE_CHECKING:
    from mlx_manager.mlx_server.models.loading import LoadedModel
    from mlx_manager.mlx_server.models.pool import ModelPoolManager
    from mlx_manager.mlx_server.utils.memory import Ledger

log = logging.getLogger(__name__)

BACKLOG = 2048
"""Connections that may wait to be accepted: a burst of them is no reason to turn any away."""

GRACE = 5
"""Seconds that running requests get to finish when the server is told to stop."""

KEEP_ALIVE = 75
"""Seconds that an idle connection stays open. Clients keep theirs for 5 to 60; were ours shorter, a
request could meet a connection that is being closed."""

BODIES: list[type[BaseModel]] = [
    ChatCompletionRequest,
    CompletionRequest,
    CountTokensRequest,
    DetokenizeRequest,
    MessagesRequest,
    PromptRequest,
    ResponsesRequest,
    TokenizeRequest,
]

OPEN_FILES = 65_536
MOST_NAMED = 5


# ---------------------------------------------------------------------------------------------
# The application
# ---------------------------------------------------------------------------------------------


def create_app(settings: MLXServerSettings | None = None, pool: ModelPool | None = None) -> FastAPI:
    """The server as an ASGI application. A `pool` that is handed in is not closed here."""
    server = Server(settings or MLXServerSettings())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        models = open_pool(server.settings) if pool is None else nullcontext(pool)
        serving = asyncio.create_task(serve_models(server, models))
        serving.add_done_callback(partial(report_end, server))
        try:
            yield
        finally:
            serving.cancel()
            await asyncio.wait([serving])
            server.responses.close()
            for close in server.at_end:
                await asyncio.to_thread(close)

    app = FastAPI(title="MLX Manager", version=__version__, lifespan=lifespan)
    app.state.server = server
    auth.install(app, server)
    errors.install(app)
    access.install(app, server.metrics)
    auth.install_cors(app, server.settings.access)
    app.include_router(health.router)
    app.include_router(debug.router)
    app.include_router(metrics.router)
    app.include_router(v1_router)
    app.include_router(tokens.router, include_in_schema=False)
    documentation.describe(app, BODIES)
    if server.settings.log_prompts:
        server.observers.append(logs.PromptLog())
    if server.settings.traces.wanted:
        tracing = start_tracing(app, server.settings.traces)
        server.observers.append(tracing.observer)
        server.at_end.append(tracing.close)
    return app


async def serve_models(server: Server, models: AbstractAsyncContextManager[ModelPool]) -> None:
    """Open the pool, load the default model, and keep the pool until cancelled.

    Runs beside the HTTP server, so that `/health` and `/v1/models` answer while a model loads.
    """
    failure: MLXManagerError | None = None
    async with models as pool:
        server.open(pool)
        try:
            async with pool.lease(server.settings.model):
                pass
        except MLXManagerError as error:
            failure = error
        server.finish_start(failure)
        await asyncio.Event().wait()


def report_end(server: Server, serving: asyncio.Task[None]) -> None:
    """If the models are gone for a reason that nobody foresaw, say so instead of waiting."""
    if not serving.cancelled() and (error := serving.exception()) is not None:
        log.critical("the models can't be served", exc_info=error)
        server.finish_start(MLXManagerError(f"{type(error).__name__}: {error}"))


@asynccontextmanager
async def open_pool(settings: MLXServerSettings) -> AsyncIterator[ModelPool]:
    """The MLX thread and the pool on it."""
    thread = MLXThread()
    thread.start()
    try:
        pool = await thread.call(partial(make_pool, settings, thread))
        try:
            yield pool
        finally:
            await pool.close()
    finally:
        await asyncio.to_thread(thread.close)


def make_pool(settings: MLXServerSettings, thread: MLXThread) -> ModelPoolManager:
    """On the MLX thread: importing mlx takes a second, which the HTTP server uses to start."""
    from mlx_manager.mlx_server.backends.text import TextBackend
    from mlx_manager.mlx_server.models.pool import ModelPoolManager

    # What has been imported by now stays: to look through it at every full collection would stop
    # all streams for 50 ms. Models come later, since what is frozen can't be freed.
    gc.collect()
    gc.freeze()

    def make_backend(loaded: LoadedModel, ledger: Ledger) -> TextBackend:
        return TextBackend(loaded, thread, settings.engine, ledger)

    return ModelPoolManager(settings.pool, settings.catalog, thread, make_backend)


def make_script_pool() -> ModelPoolManager:
    """A pool for scripts without a server, by the environment's settings; it lasts as they do."""
    thread = MLXThread()
    thread.start()
    return make_pool(MLXServerSettings(), thread)


def __getattr__(name: str) -> FastAPI:
    """`main:app`, made from the environment's settings when it is first asked for."""
    if name == "app":
        app = create_app()
        globals()[name] = app
        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# ---------------------------------------------------------------------------------------------
# The program
# ---------------------------------------------------------------------------------------------


class Listener(uvicorn.Server):
    """uvicorn's server, which says where it listens once it does."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.url: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        if self.should_exit:
            return
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
        self.url.set_result(f"http://{shown}:{port}")


def run(settings: MLXServerSettings | None = None) -> None:
    """Serve until interrupted; end the program with 1 if the server could not start."""
    settings = settings or MLXServerSettings()
    logs.configure(settings.log_level, settings.log_format)
    allow_many_connections()
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            ready = runner.run(listen(settings))
    except MLXManagerError as error:
        sys.exit(f"mlx-manager: {error.message}")
    except KeyboardInterrupt:
        # uvicorn hands on the signal that it ended for, after everything has been closed.
        return
    if not ready:
        sys.exit(1)


async def listen(settings: MLXServerSettings) -> bool:
    """Serve until told to stop; False if the server never became ready."""
    auth.check_bind(settings.access)
    app = create_app(settings)
    server: Server = app.state.server
    listener = Listener(
        uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            http="httptools",
            ws="none",
            backlog=BACKLOG,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=GRACE,
        )
    )
    announcing = asyncio.create_task(announce(server, listener))
    await listener.serve()
    announcing.cancel()
    return server.failure is None


async def announce(server: Server, listener: Listener) -> None:
    """Say where the server is once it is ready, or stop it if it can't be."""
    await server.started.wait()
    if server.failure is None:
        models = [model.id for model in await server.pool.models()]
        need_key = server.settings.access.need_key
        print(greeting(await listener.url, models, need_key=need_key), flush=True)
    else:
        print(f"{server.settings.model}: {server.failure.message}", file=sys.stderr)
        listener.should_exit = True


def greeting(url: str, models: Sequence[str], *, need_key: bool = False) -> str:
    """What a person reads when the server is ready, with a line to paste."""
    body = '{"messages": [{"role": "user", "content": "What can you do?"}]}'
    key = ' -H "Authorization: Bearer $KEY"' if need_key else ""
    more = f" and {len(models) - MOST_NAMED} more" if len(models) > MOST_NAMED else ""
    return (
        f"MLX Manager {__version__} is ready: {url}/v1\n"
        f"Models: {', '.join(models[:MOST_NAMED])}{more}\n\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} "
        f"-d {shlex.quote(body)}\n"
    )


def allow_many_connections() -> None:
    """Each connection is an open file, and macOS allows a program 256 unless it asks for more."""
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where there is one, or else asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


if __name__ == "__main__":
    run()
