"""`GET /metrics`: what Prometheus reads."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from mlx_manager.mlx_server.api.state import server_of

router = APIRouter()


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """The server's metrics in Prometheus's text format, or OpenMetrics if that is asked for."""
    server = server_of(request)
    ready, accept = server.unready() is None, request.headers.get("accept", "")
    await server.look()
    # Reading them waits for locks, and writing so many lines takes its time.
    text, content_type = await asyncio.to_thread(server.metrics.text, accept, ready)
    return Response(text, media_type=content_type)
