"""`GET /metrics`: what Prometheus reads."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from mlx_manager.mlx_server.api.state import server_of

router = APIRouter()


@router.get("/metrics", response_class=PlainTextResponse)
def metrics(request: Request) -> Response:
    """The server's metrics in Prometheus's text format, or OpenMetrics if that is asked for."""
    text, content_type = server_of(request).metrics.text(request.headers.get("accept", ""))
    return Response(text, media_type=content_type)
