"""A pool as `main` composes it, over a folder of tiny models."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import mlx.core as mx
from here import start_here

from mlx_manager.mlx_server.config import CatalogSources, MLXServerSettings, PoolLimits
from mlx_manager.mlx_server.core import (
    Backend,
    Event,
    GenerationRequest,
    Sampling,
    Text,
    TextDelta,
)
from mlx_manager.mlx_server.engine.stream import Steps, steps
from mlx_manager.mlx_server.models.catalog import Catalog
from mlx_manager.mlx_server.models.loads import Start
from mlx_manager.mlx_server.models.pool import ModelPoolManager
from mlx_manager.mlx_server.utils.memory import clear_cache
from mlx_manager.mlx_server.workers.model import Model

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
    start: Start = start_here,
    **limits: object,
) -> AsyncIterator[ModelPoolManager]:
    """A pool as `main` composes it, with workers in this process."""
    named = MLXServerSettings(model_aliases=aliases).catalog.model_aliases
    sources = CatalogSources(
        str(models_dir / default),
        models_file=models_file,
        models_dir=models_dir,
        hf_cache=False,
        model_aliases=named,
    )
    pool = ModelPoolManager(
        PoolLimits(**limits),  # type: ignore[arg-type]
        sources,
        start=start,
        catalog=Catalog(sources, cache_folder=models_dir / "no-cache"),
        patience=patience,
        clock=clock,
    )
    before = mx.get_memory_limit()
    try:
        yield pool
    finally:
        await pool.close()
        # What workers are granted moves it, and in a process of its own goes with that.
        mx.set_memory_limit(before)


async def events_of(
    backend: Backend, request: GenerationRequest
) -> AsyncGenerator[list[Event], None]:
    """Yield the events of one request's answer; closing the iterator cancels the request.

    Raises:
        MLXManagerError: as `Backend.generate`.
    """

    async def work(inbox: Steps) -> None:
        await backend.generate(request, lambda events, _: inbox.put([(0, events)]))

    async with aclosing(steps(work)) as progress:
        async for [(_, events)] in progress:
            yield events


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
        async for step in events_of(lease.backend, request(lease.id, tokens=tokens)):
            events += step
    return "".join(event.text for event in events if isinstance(event, TextDelta))


async def states(pool: ModelPoolManager) -> dict[str, str]:
    return {status.id: status.state for status in await pool.models() if len(status.id) == 1}


async def taken(pool: ModelPoolManager, model: str) -> int:
    """Return the bytes that a model has."""
    await pool.look()
    lines = pool.figures()["ledger"]
    return sum(nbytes for line, nbytes in lines.items() if line.endswith(f":{model}"))


async def lose(worker: Model, left: int) -> None:
    """Have a worker's device turn out to have less: `left` bytes more than are used."""

    def shrink() -> None:
        clear_cache()
        lost = worker.ledger.available() - left
        worker.ledger.total -= lost
        worker.ledger.extend(-lost)
        worker.memory.tell()

    await worker.thread.call(shrink)


async def given_back(before: int) -> None:
    """Wait until MLX holds no more than `before`. A worker here leaves to the collector what the
    end of its process would free."""
    async with asyncio.timeout(30):
        while mx.get_active_memory() - before >= A_FEW_BYTES:
            gc.collect()
            await asyncio.sleep(0.01)
