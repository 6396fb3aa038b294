"""A pool whose models are spread over ranks, in processes of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pools import events_of

from mlx_manager.mlx_server.config import CatalogSources, EngineLimits, PoolLimits
from mlx_manager.mlx_server.core import Finished, GenerationRequest, Sampling, TextDelta, Tokens
from mlx_manager.mlx_server.models.catalog import Catalog
from mlx_manager.mlx_server.models.loads import Start
from mlx_manager.mlx_server.models.pool import ModelPoolManager
from mlx_manager.mlx_server.workers.process import start_process

GREEDY = Sampling(temperature=0.0)


@asynccontextmanager
async def spread_pool(
    folder: Path,
    devices: int = 2,
    engine: EngineLimits | None = None,
    start: Start = start_process,
    *,
    models_file: Path | None = None,
    **limits: Any,
) -> AsyncIterator[ModelPoolManager]:
    """A pool of the models in the folder, each on so many devices."""
    sources = CatalogSources(
        str(folder / "none"), models_file=models_file, models_dir=folder, hf_cache=False
    )
    pool = ModelPoolManager(
        PoolLimits(devices=devices, **limits),
        sources,
        engine,
        start=start,
        catalog=Catalog(sources, cache_folder=folder / "no-cache"),
    )
    try:
        yield pool
    finally:
        await pool.close()


def asking(ids: Sequence[int], tokens: int = 16, **more: Any) -> GenerationRequest:
    return GenerationRequest(
        "m", Tokens(tuple(ids)), GREEDY, max_tokens=tokens, return_ids=True, **more
    )


async def finished(pool: ModelPoolManager, model: str, asked: GenerationRequest) -> Finished:
    """Return the end of an answer."""
    async with pool.lease(model) as lease:
        async for events in events_of(lease.backend, asked):
            last = events[-1]
    assert isinstance(last, Finished)
    return last


async def drawn(
    pool: ModelPoolManager, model: str, requests: Sequence[GenerationRequest]
) -> list[tuple[int, ...]]:
    """Return the tokens of answers that are asked for together."""
    found = await asyncio.gather(*(finished(pool, model, asked) for asked in requests))
    return [each.ids for each in found]


async def text_of(pool: ModelPoolManager, model: str, asked: GenerationRequest) -> str:
    """Return the text of an answer."""
    text = ""
    async with pool.lease(model) as lease:
        async for events in events_of(lease.backend, asked):
            text += "".join(event.text for event in events if isinstance(event, TextDelta))
    return text
