"""The composition root: `create_app`, the module's `app`, and the server as a program.

Run with `python -m mlx_manager.mlx_server.main`, or `uvicorn mlx_manager.mlx_server.main:app`.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import logging
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from pydantic import BaseModel

from mlx_manager import __version__
from mlx_manager.mlx_server.api import (
    access,
    admin,
    audit,
    auth,
    debug,
    documentation,
    errors,
    health,
    metrics,
    ollama,
    websocket,
)
from mlx_manager.mlx_server.api.listener import Listener
from mlx_manager.mlx_server.api.state import Server
from mlx_manager.mlx_server.api.v1 import unversioned_router, v1_router
from mlx_manager.mlx_server.config import MLXServerSettings, doubts
from mlx_manager.mlx_server.core import Kind
from mlx_manager.mlx_server.engine.sandbox import Sandbox
from mlx_manager.mlx_server.engine.thread import MLXThread
from mlx_manager.mlx_server.engine.watchdog import Fault, find_fault, revive
from mlx_manager.mlx_server.errors import InvalidSettings, MLXManagerError, MLXThreadFailed
from mlx_manager.mlx_server.models.catalog import check_models_dir
from mlx_manager.mlx_server.models.settings import ModelsFile, Wishes, read_models_file
from mlx_manager.mlx_server.observability import logs
from mlx_manager.mlx_server.observability.tracing import start_tracing
from mlx_manager.mlx_server.schemas.admin import ClearRequest, ModelRef, PinRequest
from mlx_manager.mlx_server.schemas.anthropic import CountTokensRequest, MessagesRequest
from mlx_manager.mlx_server.schemas.embeddings import EmbeddingsRequest, RerankRequest
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
from mlx_manager.mlx_server.services.drain import LAST_WORDS
from mlx_manager.mlx_server.services.inference import ModelPool
from mlx_manager.mlx_server.utils import open_files
from mlx_manager.mlx_server.utils.notify import READY, notify

if TYPE_CHECKING:
    from mlx_manager.mlx_server.models.encoder_loading import LoadedEncoder
    from mlx_manager.mlx_server.models.loading import LoadedModel
    from mlx_manager.mlx_server.models.pool import ModelPoolManager
    from mlx_manager.mlx_server.models.rehearsal import Rehearsals
    from mlx_manager.mlx_server.utils.memory import Ledger
    from mlx_manager.mlx_server.utils.steps import Steps

log = logging.getLogger(__name__)

STALLED = 70
"""Exit code (EX_SOFTWARE) when the MLX thread hangs in native code: to be started again."""
LOST_GPU = 69
"""Exit code (EX_UNAVAILABLE) when the GPU takes no more work from this process: likewise."""

BODIES: list[type[BaseModel]] = [
    ClearRequest,
    ModelRef,
    PinRequest,
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
"""For a model of each kind: where to ask it, and what."""

MOST_NAMED = 5

CLOSING = 5.0
"""Seconds that the MLX thread gets to end what it is doing, and as many once it is interrupted."""

BEARING_ON_LOADS = {
    "available_models",
    "hf_cache",
    "load_timeout_seconds",
    "max_rows",
    "max_waiting",
    "model",
    "model_aliases",
    "models_dir",
    "models_file",
    "page_size",
    "prefill_chunk",
    "prefix_cache",
    "trust_remote_code",
    "weights",
}
"""The settings that another process needs to load a model as this one does."""


# ---------------------------------------------------------------------------------------------
# The application
# ---------------------------------------------------------------------------------------------


def create_app(settings: MLXServerSettings | None = None, pool: ModelPool | None = None) -> FastAPI:
    """The server as an ASGI application. A `pool` that is handed in is not closed here.

    Raises:
        InvalidSettings: the models' settings can't be read, or there is no folder of models.
    """
    server = Server(settings or MLXServerSettings())
    for doubt in doubts(server.settings, os.environ):
        log.warning("%s", doubt)
    check_models_dir(server.settings.models_dir)
    file = server.settings.models_file
    wishes = Wishes(read_models_file(file))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        def models() -> AbstractAsyncContextManager[Models]:
            if pool is not None:
                return nullcontext(Models(pool))
            wishes.models = read_again(file, wishes.models)
            return open_models(server.settings, wishes)

        serving = asyncio.create_task(serve_models(server, models))
        serving.add_done_callback(partial(report_end, server))
        beside = [serving]
        if server.settings.keep_awake:
            beside.append(asyncio.create_task(keep_awake(server.calls)))
        try:
            with server.calls.garbage.collected_here():
                yield
        finally:
            for task in beside:
                task.cancel()
            await asyncio.wait(beside)
            for close in server.at_end:
                await asyncio.to_thread(close)

    app = FastAPI(title="MLX Manager", version=__version__, lifespan=lifespan)
    app.state.server = server
    auth.install(app, server)
    errors.install(app)
    access.install(app, server.metrics)
    auth.install_cors(app, server.settings.access)
    websocket.install(app, server)
    for router in ROUTERS:
        app.include_router(router)
    documentation.describe(
        app,
        BODIES,
        need_key=server.settings.access.need_key,
        out_of_range=server.settings.validation_status,
    )
    if server.settings.log_prompts:
        server.observers.append(logs.PromptLog())
    if server.settings.traces.wanted:
        tracing = start_tracing(app, server.settings.traces)
        server.observers.append(tracing.observer)
        server.at_end.append(tracing.close)
    return app


@dataclass(frozen=True, slots=True)
class Models:
    """An open pool, and the thread that it runs on; None for a pool that was handed in."""

    pool: ModelPool
    thread: MLXThread | None = None


async def serve_models(
    server: Server, open_models: Callable[[], AbstractAsyncContextManager[Models]]
) -> None:
    """Keep a pool open until cancelled, a new one on a new thread whenever the thread dies.

    Runs beside the HTTP server, so that `/health` and `/v1/models` answer while a model loads.
    """
    while True:
        async with open_models() as models:
            server.open(models.pool)
            starting = asyncio.create_task(load_default(server, models.pool))
            starting.add_done_callback(partial(report_end, server))
            try:
                await guard(server, models.thread)
            finally:
                starting.cancel()
                await asyncio.wait([starting])
            server.close()
        # What the calls held of the old models is to be gone before the new ones are loaded.
        await server.calls.ended(LAST_WORDS)
        del models
        gc.collect()
        if server.failure is not None:
            # It died of its default model, which is not loaded again and again without a pause.
            await asyncio.sleep(LAST_WORDS)


async def load_default(server: Server, pool: ModelPool) -> None:
    failure: MLXManagerError | None = None
    try:
        async with pool.lease(server.settings.model):
            await pool.complete()
    except MLXManagerError as error:
        failure = error
    server.finish_start(failure)


async def guard(server: Server, thread: MLXThread | None) -> None:
    """Return when the thread has died; what it was working on has failed then.

    A thread that makes no progress is interrupted, which its engines survive. One that hangs in
    native code can't be ended, and what it holds can't be freed: a new process is needed. So it is
    where the GPU ignores this one.
    """
    if thread is None:
        await asyncio.Event().wait()
        return
    limit = server.settings.watchdog_seconds
    while (fault := await find_fault(thread, limit)) is not Fault.DEAD:
        if fault is Fault.LOST_GPU:
            server.fail(MLXThreadFailed("The GPU has failed. The request can be retried."))
            server.lose(f"the GPU takes no more work: {thread.lost_gpu}", LOST_GPU)
            await asyncio.Event().wait()
        stall = f"no step was done for {limit:g} s (MLX_SERVER_WATCHDOG_SECONDS)"
        log.error("%s: all running requests fail, and the engine starts over", stall)
        server.fail(MLXThreadFailed(f"The model got stuck: {stall}. The request can be retried."))
        if not await revive(thread, limit):
            server.lose("the MLX thread hangs in native code", STALLED)
            await asyncio.Event().wait()
        if thread.alive:
            log.warning("the engine works again")
            server.recover()
    log.error("the MLX thread has died: all running requests fail, and the models are loaded again")
    server.fail(MLXThreadFailed("The models' thread has died. The request can be retried."))


def report_end(server: Server, task: asyncio.Task[None]) -> None:
    """If the models are gone for a reason that nobody foresaw, say so instead of waiting."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("the models can't be served", exc_info=error)
        server.finish_start(MLXManagerError(f"{type(error).__name__}: {error}"))


@asynccontextmanager
async def open_models(
    settings: MLXServerSettings, wishes: Wishes | None = None
) -> AsyncIterator[Models]:
    """The MLX thread and the pool on it, which is tended. wishes: the owner's, if they are known;
    the pool keeps them up to date."""
    thread = MLXThread()
    thread.start()
    sandbox = Sandbox()
    try:
        pool = await thread.call(partial(make_pool, settings, thread, wishes, sandbox))
        tending = asyncio.create_task(pool.tend(), name="tend the pool")
        try:
            yield Models(pool, thread)
        finally:
            tending.cancel()
            await asyncio.wait([tending])
            if thread.alive:
                await close(pool, thread)
    finally:
        sandbox.close()
        await asyncio.to_thread(thread.close, CLOSING)


async def close(pool: ModelPoolManager, thread: MLXThread) -> None:
    """Close the pool, or leave its models to the end of the process where the MLX thread does not
    come back: what it is doing must not keep the process from that."""
    closing = asyncio.create_task(pool.close(), name="close the pool")
    done, _ = await asyncio.wait([closing], timeout=CLOSING)
    if not done:
        thread.interrupt()
        done, _ = await asyncio.wait([closing], timeout=CLOSING)
    if not done:
        log.error("the MLX thread does not come back; its models end with the process")
        closing.cancel()


def read_again(file: Path | None, last: ModelsFile) -> ModelsFile:
    """What the models' settings say now, or said last if they have become unreadable."""
    try:
        return read_models_file(file)
    except InvalidSettings as error:
        log.error("the models' settings stay as they were: %s", error.message)
        return last


@asynccontextmanager
async def open_pool(settings: MLXServerSettings) -> AsyncIterator[ModelPool]:
    """The pool alone, for those who watch no thread."""
    async with open_models(settings) as models:
        yield models.pool


def make_pool(
    settings: MLXServerSettings,
    thread: MLXThread,
    wishes: Wishes | None = None,
    sandbox: Sandbox | None = None,
) -> ModelPoolManager:
    """On the MLX thread: importing mlx takes a second, which the HTTP server uses to start."""
    with open_files.as_many_as_before():
        from mlx_manager.mlx_server.backends.embedding import EncoderBackend, preparing_encoder
        from mlx_manager.mlx_server.backends.text import TextBackend, preparing
        from mlx_manager.mlx_server.engine.encoder_engine import kept_bytes
        from mlx_manager.mlx_server.engine.fused.packed import multiplies_packed
        from mlx_manager.mlx_server.engine.step_size import least_working
        from mlx_manager.mlx_server.models.encoder import Encoder
        from mlx_manager.mlx_server.models.encoder_loading import LoadedEncoder
        from mlx_manager.mlx_server.models.loading import Foresight
        from mlx_manager.mlx_server.models.pool import ModelPoolManager

    # What has been imported by now stays: to look through it at every full collection would stop
    # all streams for 50 ms. Models come later, since what is frozen can't be freed.
    gc.collect()
    gc.freeze()

    sandbox = sandbox or Sandbox()

    def make_backend(
        loaded: LoadedModel | LoadedEncoder, ledger: Ledger
    ) -> Steps[TextBackend | EncoderBackend]:
        match loaded:
            case LoadedEncoder():
                return (yield from preparing_encoder(loaded, thread, settings.engine, ledger))
            case _:
                return (
                    yield from preparing(loaded, thread, settings.engine, ledger, sandbox=sandbox)
                )

    def working(model: Any, context_length: int) -> int:
        match model:
            case Encoder():
                return kept_bytes(model, context_length)
            case _:
                return least_working(settings.engine, model)

    return ModelPoolManager(
        settings.pool,
        settings.catalog,
        thread,
        make_backend,
        foresight=Foresight(working, multiplies_packed),
        wishes=wishes,
        rehearsals=make_rehearsals(settings),
    )


def make_rehearsals(settings: MLXServerSettings) -> Rehearsals | None:
    """None where a load compiles nothing that others would wait for, or nothing is kept of it."""
    from mlx_manager.mlx_server.models import rehearsal

    told = settings.model_dump(mode="json", include=BEARING_ON_LOADS)
    try:
        return rehearsal.Rehearsals(told, rehearsal.loaded_folder(), rehearsal.machine())
    except (OSError, RuntimeError) as error:
        log.debug("first loads are loads as any other: %s", error)
        return None


def make_script_pool(settings: MLXServerSettings | None = None) -> ModelPoolManager:
    """A pool for scripts without a server, by the environment's settings if no others are given; it
    lasts as they do."""
    thread = MLXThread()
    thread.start()
    # A daemon thread that the interpreter ends within MLX's code takes the process with it.
    atexit.register(thread.close, CLOSING)
    return make_pool(settings or MLXServerSettings(), thread)


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
        # uvicorn hands on the signal that it ended for, after everything has been closed.
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
    beside = [asyncio.create_task(job) for job in (announce(server, listener), end_lost(server))]
    reread_on_hangup(server)
    await listener.serve()
    for task in beside:
        task.cancel()
    return server.failure is None


def reread_on_hangup(server: Server) -> None:
    """Read the files of settings again on SIGHUP; without any it ends the program, as ever."""
    if server.settings.models_file is None and server.settings.api_keys_file is None:
        return
    running: set[asyncio.Task[None]] = set()

    def reread() -> None:
        task = asyncio.create_task(reread_settings(server))
        running.add(task)
        task.add_done_callback(running.discard)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reread)


async def reread_settings(server: Server) -> None:
    # Who asks while the server starts has changed something that it may have read already.
    await server.started.wait()
    try:
        await server.reload()
    except MLXManagerError as error:
        log.error("settings were not read again, those in force stay: %s", error.message)
    else:
        log.info("settings have been read again")


async def end_lost(server: Server) -> None:
    """End the program once nothing else can help, when the clients have been told."""
    await server.lost.wait()
    log.critical("%s; ending with %d, to be restarted", server.last_word, server.exit_code)
    await server.calls.ended(LAST_WORDS)
    await asyncio.sleep(LAST_WORDS / 10)
    os._exit(server.exit_code)


async def announce(server: Server, listener: Listener) -> None:
    """Say where the server is once it is ready, or stop it if it can't be."""
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
        )
        logs.tell(text, sys.stdout, url=f"{url}/v1", models=ids)
        notify(READY, f"STATUS=Ready: {url}/v1")
    else:
        reason = server.failure.message
        problem = f"mlx-manager: the default model can't be served: {reason}"
        logs.tell(problem, level=logging.ERROR)
        listener.should_exit = True


def greeting(
    url: str, models: Sequence[str], kind: Kind = "text", *, need_key: bool = False
) -> str:
    """What a person reads when the server is ready, with a line to paste.

    kind: the first model's, which is the default one.
    """
    path, body = TO_PASTE[kind]
    key = ' -H "Authorization: Bearer $KEY"' if need_key else ""
    more = f" and {len(models) - MOST_NAMED} more" if len(models) > MOST_NAMED else ""
    return (
        f"MLX Manager {__version__} is ready: {url}/v1\n"
        f"Models: {', '.join(models[:MOST_NAMED])}{more}\n\n"
        f"  curl {url}/v1/{path} -H 'Content-Type: application/json'{key} "
        f"-d {shlex.quote(body)}\n"
    )


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where there is one, or else asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


if __name__ == "__main__":
    # The same command by another name: it takes its options, and says what is wrong with a setting.
    from mlx_manager import cli

    cli.main(["serve", *sys.argv[1:]])
