"""The composition root: `create_app`, the module's `app`, and the server as a program.

Run with `python -m mlx_manager.mlx_server.main`, or `uvicorn mlx_manager.mlx_server.main:app`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path

from fastapi import FastAPI
from pydantic import BaseModel

from mlx_manager import __version__
from mlx_manager.mlx_server.api import auth, documentation, errors, ollama, page
from mlx_manager.mlx_server.api.http import access, websocket
from mlx_manager.mlx_server.api.http.listener import Listener
from mlx_manager.mlx_server.api.operations import (
    admin,
    audit,
    debug,
    events,
    health,
    hub,
    metrics,
)
from mlx_manager.mlx_server.api.state import Server
from mlx_manager.mlx_server.api.v1 import unversioned_router, v1_router
from mlx_manager.mlx_server.config import MLXServerSettings, doubts
from mlx_manager.mlx_server.core import Kind
from mlx_manager.mlx_server.errors import InvalidSettings, MLXManagerError
from mlx_manager.mlx_server.images.reader import ImageReader
from mlx_manager.mlx_server.models.catalog import check_models_dir
from mlx_manager.mlx_server.models.loads import Start
from mlx_manager.mlx_server.models.pool import ModelPoolManager
from mlx_manager.mlx_server.models.settings import ModelsFile, Wishes, read_models_file
from mlx_manager.mlx_server.observability import logs
from mlx_manager.mlx_server.observability.tracing import start_tracing
from mlx_manager.mlx_server.schemas.admin import ClearRequest, ModelRef, PinRequest, WarmRequest
from mlx_manager.mlx_server.schemas.anthropic import CountTokensRequest, MessagesRequest
from mlx_manager.mlx_server.schemas.embeddings import EmbeddingsRequest, RerankRequest
from mlx_manager.mlx_server.schemas.hub import SettingsChange
from mlx_manager.mlx_server.schemas.ollama import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaModelRequest,
)
from mlx_manager.mlx_server.schemas.openai import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    PromptRequest,
    TokenizeRequest,
)
from mlx_manager.mlx_server.schemas.responses import (
    CompactRequest,
    InputTokensRequest,
    ResponsesRequest,
)
from mlx_manager.mlx_server.services.awake import keep_awake
from mlx_manager.mlx_server.services.inference import ModelPool
from mlx_manager.mlx_server.utils import open_files
from mlx_manager.mlx_server.utils.loops import loop_factory
from mlx_manager.mlx_server.utils.notify import READY, notify
from mlx_manager.mlx_server.workers.process import LogSettings, start_process

log = logging.getLogger(__name__)

BODIES: list[type[BaseModel]] = [
    ClearRequest,
    ModelRef,
    PinRequest,
    WarmRequest,
    ChatCompletionRequest,
    CompletionRequest,
    CountTokensRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    CompactRequest,
    InputTokensRequest,
    MessagesRequest,
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaEmbeddingsRequest,
    OllamaGenerateRequest,
    OllamaModelRequest,
    PromptRequest,
    RerankRequest,
    ResponsesRequest,
    SettingsChange,
    TokenizeRequest,
]

ROUTERS = (
    health.router,
    debug.router,
    metrics.router,
    audit.router,
    v1_router,
    unversioned_router,
    admin.router,
    events.router,
    hub.router,
    ollama.router,
)

TO_PASTE: dict[Kind, tuple[str, str]] = {
    "text": (
        "chat/completions",
        '{"messages": [{"role": "user", "content": "What can you do?"}]}',
    ),
    "embedding": ("embeddings", '{"input": ["one text", "another"]}'),
    "reranker": ("rerank", '{"query": "a question", "documents": ["one text", "another"]}'),
}
"""Path and body of an example request, by the kind of the model."""

MOST_NAMED = 5

# ---------------------------------------------------------------------------------------------
# The application
# ---------------------------------------------------------------------------------------------


def create_app(
    settings: MLXServerSettings | None = None,
    pool: ModelPool | None = None,
    *,
    start: Start | None = None,
    images: ImageReader | None = None,
) -> FastAPI:
    """Return the server as an ASGI application. A `pool` that is handed in is not closed here.

    start: as for `open_pool`. images: reads pictures; None: as the settings say.

    Raises:
        InvalidSettings: the models' settings can't be read, or there is no folder of models.
    """
    server = Server(settings or MLXServerSettings(), images)
    for doubt in doubts(server.settings, os.environ):
        log.warning("%s", doubt)
    check_models_dir(server.settings.models_dir)
    file = server.settings.models_file
    wishes = Wishes(read_models_file(file))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        def models() -> AbstractAsyncContextManager[ModelPool]:
            if pool is not None:
                return nullcontext(pool)
            wishes.models = read_again(file, wishes.models)
            return open_pool(server.settings, wishes, start)

        serving = asyncio.create_task(serve_models(server, models))
        serving.add_done_callback(partial(report_end, server))
        history = asyncio.create_task(server.history.keep(server.calls.begun))
        beside = [serving, history]
        if server.settings.keep_awake:
            beside.append(asyncio.create_task(keep_awake(server.calls)))
        try:
            yield
        finally:
            for task in beside:
                task.cancel()
            await asyncio.wait(beside)
            for close in server.at_end:
                await asyncio.to_thread(close)

    app = FastAPI(title="MLX Manager", version=__version__, lifespan=lifespan)
    app.state.server = server
    install_layers(app, server)
    include_routes(app, server.settings)
    documentation.describe(
        app,
        BODIES,
        need_key=server.settings.access.need_key,
        out_of_range=server.settings.validation_status,
    )
    watch(app, server)
    return app


def install_layers(app: FastAPI, server: Server) -> None:
    """Put the layers around the routes, the innermost first."""
    auth.install(app, server)
    errors.install(app)
    access.install(app, server.metrics)
    auth.install_cors(app, server.settings.access)
    websocket.install(app, server)


def include_routes(app: FastAPI, settings: MLXServerSettings) -> None:
    if settings.ui:
        page.install(app)
    for router in ROUTERS:
        app.include_router(router)


def watch(app: FastAPI, server: Server) -> None:
    """Log and trace requests if the owner wants it."""
    if server.settings.log_prompts:
        server.observers.append(logs.PromptLog())
    if server.settings.traces.wanted:
        tracing = start_tracing(app, server.settings.traces)
        server.observers.append(tracing.observer)
        server.at_end.append(tracing.close)


async def serve_models(
    server: Server, open_models: Callable[[], AbstractAsyncContextManager[ModelPool]]
) -> None:
    """Keep a pool open until cancelled.

    Runs beside the HTTP server, so that `/health` and `/v1/models` answer while a model loads.
    """
    async with open_models() as pool:
        server.open(pool)
        await load_default(server, pool)
        await asyncio.Event().wait()


async def load_default(server: Server, pool: ModelPool) -> None:
    failure: MLXManagerError | None = None
    try:
        async with pool.lease(server.settings.model):
            pass
    except MLXManagerError as error:
        failure = error
    server.finish_start(failure)


def report_end(server: Server, task: asyncio.Task[None]) -> None:
    """Report an unforeseen end of the task that serves models, so that nobody waits for them."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("the models can't be served", exc_info=error)
        server.finish_start(MLXManagerError(f"{type(error).__name__}: {error}"))


@asynccontextmanager
async def open_pool(
    settings: MLXServerSettings, wishes: Wishes | None = None, start: Start | None = None
) -> AsyncIterator[ModelPoolManager]:
    """Open a pool that is tended, and whose workers are watched.

    wishes: the owner's wishes, if they are known; the pool keeps them up to date. start: starts a
    worker; None: as a process.
    """
    pool = await asyncio.to_thread(make_pool, settings, wishes, start)
    beside = [
        asyncio.create_task(pool.tend(), name="tend the pool"),
        asyncio.create_task(pool.end_hanging(settings.watchdog_seconds), name="watch workers"),
    ]
    try:
        yield pool
    finally:
        for task in beside:
            task.cancel()
        await asyncio.wait(beside)
        await pool.close()


def read_again(file: Path | None, last: ModelsFile) -> ModelsFile:
    """Return the models' settings as the file has them now, or `last` if it became invalid."""
    try:
        return read_models_file(file)
    except InvalidSettings as error:
        log.error("the models' settings stay as they were: %s", error.message)
        return last


def make_pool(
    settings: MLXServerSettings, wishes: Wishes | None = None, start: Start | None = None
) -> ModelPoolManager:
    """Return a new pool, which reads the disk to look for models."""
    return ModelPoolManager(
        settings.pool,
        settings.catalog,
        settings.engine,
        wishes=wishes,
        start=start or start_process,
        log_settings=LogSettings(settings.log_level, settings.log_format)
        if logging.getLogger().handlers
        else LogSettings(),
    )


def __getattr__(name: str) -> FastAPI:
    """Return `main:app`, made from the environment's settings on first use."""
    if name == "app":
        app = create_app()
        globals()[name] = app
        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# ---------------------------------------------------------------------------------------------
# The program
# ---------------------------------------------------------------------------------------------


def run(settings: MLXServerSettings) -> None:
    """Serve until interrupted; end the program with 1 if the server could not start, with 2 if a
    file of settings is wrong.
    """
    logs.configure(settings.log_level, settings.log_format)
    if settings.log_format == "json":
        logs.capture_output()
    open_files.allow_many()
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            ready = runner.run(listen(settings))
    except MLXManagerError as error:
        logs.tell(f"mlx-manager: {error.message}", level=logging.ERROR)
        sys.exit(2 if type(error) is InvalidSettings else 1)
    except KeyboardInterrupt:
        # uvicorn raises the signal that ended it again, after everything has been closed.
        return
    finally:
        logs.let_go()
    if not ready:
        sys.exit(1)


async def listen(settings: MLXServerSettings) -> bool:
    """Serve until told to stop; False if the server never became ready."""
    auth.check_bind(settings.access)
    app = create_app(settings)
    server: Server = app.state.server
    listener = Listener(app, server)
    beside = [asyncio.create_task(announce(server, listener))]
    reread_on_hangup(server)
    await listener.serve()
    for task in beside:
        task.cancel()
    return server.failure is None


def reread_on_hangup(server: Server) -> None:
    """Read the files of settings again on SIGHUP. Without such files SIGHUP ends the program."""
    if server.settings.models_file is None and server.settings.api_keys_file is None:
        return
    running: set[asyncio.Task[None]] = set()

    def reread() -> None:
        task = asyncio.create_task(reread_settings(server))
        running.add(task)
        task.add_done_callback(running.discard)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reread)


async def reread_settings(server: Server) -> None:
    # A signal during the start may be for a change to a file that has been read already.
    await server.started.wait()
    try:
        await server.reload()
    except MLXManagerError as error:
        log.error("settings were not read again, those in force stay: %s", error.message)
    else:
        log.info("settings have been read again")


async def announce(server: Server, listener: Listener) -> None:
    """Print the server's address once it is ready, or stop the server if it can't be."""
    await server.started.wait()
    if server.failure is None:
        models = await server.pool.models()
        ids = [model.id for model in models]
        url = await listener.url
        text = greeting(
            url,
            ids,
            models[0].kind or "text",
            need_key=server.settings.access.need_key,
            page=server.settings.ui,
        )
        logs.tell(text, sys.stdout, url=f"{url}/v1", models=ids)
        notify(READY, f"STATUS=Ready: {url}/v1")
    else:
        reason = server.failure.message
        problem = f"mlx-manager: the default model can't be served: {reason}"
        logs.tell(problem, level=logging.ERROR)
        listener.should_exit = True


def greeting(
    url: str,
    models: Sequence[str],
    kind: Kind = "text",
    *,
    need_key: bool = False,
    page: bool = False,
) -> str:
    """Return the text for people when the server is ready, with a command to paste.

    kind: the kind of the first model, which is the default one. page: there is a page for browsers.
    """
    path, body = TO_PASTE[kind]
    key = ' -H "Authorization: Bearer $KEY"' if need_key else ""
    more = f" and {len(models) - MOST_NAMED} more" if len(models) > MOST_NAMED else ""
    browser = f"In a browser: {url}\n" if page else ""
    return (
        f"MLX Manager {__version__} is ready: {url}/v1\n"
        f"Models: {', '.join(models[:MOST_NAMED])}{more}\n{browser}\n"
        f"  curl {url}/v1/{path} -H 'Content-Type: application/json'{key} "
        f"-d {shlex.quote(body)}\n"
    )


if __name__ == "__main__":
    # The same command by another name: it takes its options, and says what is wrong with a setting.
    from mlx_manager import cli

    cli.main(["serve", *sys.argv[1:]])
