"""A pool as `main` composes it, over a folder of tiny models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import mlx.core as mx

from mlx_manager.mlx_server.backends.text import TextBackend, preparing
from mlx_manager.mlx_server.config import (
    CatalogSources,
    EngineLimits,
    MLXServerSettings,
    PoolLimits,
)
from mlx_manager.mlx_server.core import Event, GenerationRequest, Sampling, Text, TextDelta
from mlx_manager.mlx_server.engine.step_size import least_working
from mlx_manager.mlx_server.engine.thread import MLXThread
from mlx_manager.mlx_server.models.catalog import Catalog
from mlx_manager.mlx_server.models.loading import Foresight, LoadedModel
from mlx_manager.mlx_server.models.pool import ModelPoolManager
from mlx_manager.mlx_server.models.rehearsal import Rehearsals
from mlx_manager.mlx_server.utils.memory import Ledger
from mlx_manager.mlx_server.utils.steps import Steps

Prepare = Callable[[LoadedModel, MLXThread, EngineLimits, Ledger], Steps[TextBackend]]
GREEDY = Sampling(temperature=0.0)
A_FEW_BYTES = 1024


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def open_pool(
    models_dir: Path,
    *,
    default: str = "a",
    patience: float = 60.0,
    aliases: str = "",
    models_file: Path | None = None,
    clock: Callable[[], float] = time.monotonic,
    prepare: Prepare = preparing,
    rehearsals: Rehearsals | None = None,
    **limits: object,
) -> AsyncIterator[ModelPoolManager]:
    """A pool as `main` composes it: an MLX thread, text backends, made by `prepare`."""
    thread = MLXThread()
    thread.start()
    named = MLXServerSettings(model_aliases=aliases).catalog.model_aliases
    sources = CatalogSources(
        str(models_dir / default),
        models_file=models_file,
        models_dir=models_dir,
        hf_cache=False,
        model_aliases=named,
    )

    def make_backend(loaded: LoadedModel, ledger: Ledger) -> Steps[TextBackend]:
        return prepare(loaded, thread, EngineLimits(), ledger)

    build = partial(
        ModelPoolManager,
        PoolLimits(**limits),  # type: ignore[arg-type]
        sources,
        thread,
        make_backend,
        foresight=Foresight(lambda model, _: least_working(EngineLimits(), model)),
        rehearsals=rehearsals,
        catalog=Catalog(sources, cache_folder=models_dir / "no-cache"),
        patience=patience,
        clock=clock,
    )
    pool = await thread.call(build)
    try:
        yield pool
    finally:
        await pool.close()
        await asyncio.to_thread(thread.close)


@asynccontextmanager
async def tended(pool: ModelPoolManager) -> AsyncIterator[None]:
    """As `main` has it tended."""
    tending = asyncio.create_task(pool.tend())
    try:
        yield
    finally:
        tending.cancel()
        await asyncio.wait([tending])


def request(model: str, prompt: str = "hello", tokens: int = 8) -> GenerationRequest:
    return GenerationRequest(model, Text(prompt), GREEDY, max_tokens=tokens)


async def answer(pool: ModelPoolManager, model: str, tokens: int = 8) -> str:
    async with pool.lease(model) as lease:
        events: list[Event] = []
        async for step in lease.backend.generate(request(lease.id, tokens=tokens)):
            events += step
    return "".join(event.text for event in events if isinstance(event, TextDelta))


async def states(pool: ModelPoolManager) -> dict[str, str]:
    return {status.id: status.state for status in await pool.models() if len(status.id) == 1}


async def given_back(before: int) -> None:
    """Wait until MLX holds no more than `before`: a thread that was told to compute beside others'
    steps lets go of what it had only after it has said that it is done."""
    async with asyncio.timeout(30):
        while mx.get_active_memory() - before >= A_FEW_BYTES:  # noqa: ASYNC110 nobody tells
            await asyncio.sleep(0.001)
