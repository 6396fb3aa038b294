"""`GET /health`: whether requests are taken."""

from __future__ import annotations

from fastapi import APIRouter, Request

from mlx_manager import __version__
from mlx_manager.mlx_server.api.state import server_of
from mlx_manager.mlx_server.errors import ServerNotReady

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> dict[str, str]:
    """`healthy` once start-up has finished; 503 before, and when the default model is missing."""
    server = server_of(request)
    if not server.started.is_set():
        raise ServerNotReady("The server is starting.")
    if server.failure is not None:
        raise ServerNotReady(f"The default model is not loaded: {server.failure.message}")
    return {"status": "healthy", "version": __version__}
