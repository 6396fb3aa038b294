"""`GET /livez`, `/readyz` and `/health`: does the server work, and does it take requests?"""

from __future__ import annotations

from fastapi import APIRouter, Request

from mlx_manager import __version__
from mlx_manager.mlx_server.api.state import Server, server_of

router = APIRouter(tags=["health"])


@router.head("/livez", include_in_schema=False)
@router.get("/livez")
async def live(request: Request) -> dict[str, str]:
    """Answer while the program runs; starting and draining are alive."""
    return {"status": "alive", "version": __version__}


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz")
async def ready(request: Request) -> dict[str, str]:
    """503 with Retry-After while requests are refused: the body says why."""
    check(server_of(request))
    return {"status": "ready", "version": __version__}


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(request: Request) -> dict[str, str]:
    """The same as `/readyz`, under the name that other servers use."""
    check(server_of(request))
    return {"status": "healthy", "version": __version__}


def check(server: Server) -> None:
    """
    Raises:
        ServerNotReady: no requests are taken, or the default model is missing.
    """
    if (reason := server.unready()) is not None:
        raise reason
