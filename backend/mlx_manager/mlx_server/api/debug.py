"""`GET /debug/memory`: where the memory is, and who was promised it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from mlx_manager.mlx_server.api.state import server_of

router = APIRouter(prefix="/debug", tags=["debug"])


@router.get("/memory")
async def memory(request: Request) -> dict[str, Any]:
    """The ledger's lines and MLX's own figures in bytes, and each engine's rows and pages."""
    return server_of(request).pool.figures()
