"""`GET /v1/admin/events`: what the server is doing, as a stream, for its owner."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse

from mlx_manager import __version__
from mlx_manager.mlx_server.api.operations.admin import admin_memory, admin_model, running_requests
from mlx_manager.mlx_server.api.state import Server, server_of
from mlx_manager.mlx_server.schemas.admin import Download, RecentCall, Sample, ServerState
from mlx_manager.mlx_server.schemas.openai import ErrorBody

router = APIRouter(
    prefix="/v1/admin",
    tags=["admin"],
    responses={status: {"model": ErrorBody} for status in (400, 401, 403)},
)


@dataclass(slots=True)
class Seen:
    """The last sample's time, and the last call's number, that a reader has been told of."""

    sample: float = 0.0
    call: int = 0


@router.get("/state")
async def state(request: Request) -> ServerState:
    """Return what the server is doing now, and what it has done in the last hour."""
    return await state_of(server_of(request), Seen())


@router.get(
    "/events",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {}}, "description": "`ServerState`s"}},
)
async def events(
    request: Request,
    interval: Annotated[
        float, Query(ge=0.2, le=60, allow_inf_nan=False, description="Seconds between two")
    ] = 1.0,
) -> StreamingResponse:
    """Stream the same, again and again, as server-sent events until the reader leaves."""
    server = server_of(request)
    # A server that starts, and has no pool yet, is told by a status.
    assert server.pool
    return StreamingResponse(
        states(server, interval),
        media_type="text/event-stream",
        headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
    )


async def states(server: Server, interval: float) -> AsyncIterator[str]:
    """Yield the state as events until the program is about to end."""
    seen = Seen()
    while not server.drain.final:
        found = await state_of(server, seen)
        yield f"event: state\ndata: {found.model_dump_json()}\n\n"
        await asyncio.sleep(interval)


async def state_of(server: Server, seen: Seen) -> ServerState:
    """Return the state, with the samples and calls that are new, and note that they are seen."""
    pool, history = server.pool, server.history
    await pool.look()
    figures, models = pool.figures(), await pool.models()
    engines = figures["engines"].values()
    samples = [sample for sample in history.samples if sample.time > seen.sample]
    calls = [call for call in history.calls if call.number > seen.call]
    if samples:
        seen.sample = samples[-1].time
    if calls:
        seen.call = calls[-1].number
    return ServerState(
        time=time.time(),
        version=__version__,
        draining=server.drain.begun,
        models=[admin_model(status, figures) for status in models],
        memory=admin_memory(figures),
        requests=running_requests(server),
        downloads=[Download.model_validate(found) for found in server.downloads.told()],
        generated_tokens=sum(engine.get("generated_tokens", 0) for engine in engines),
        prompt_tokens=sum(engine.get("prompt_tokens", 0) for engine in engines),
        samples=[Sample.model_validate(asdict(sample)) for sample in samples],
        calls=[RecentCall.model_validate(asdict(call)) for call in calls],
    )
