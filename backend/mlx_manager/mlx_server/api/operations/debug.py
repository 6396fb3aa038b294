"""`GET /debug/memory` and `/debug/state`: where the memory is, and what is under way."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request

from mlx_manager.mlx_server.api.state import server_of

OPEN_FILES = Path("/dev/fd")
PAGES = Path("/proc/self/statm")

router = APIRouter(prefix="/debug", tags=["debug"])


@router.get("/memory")
async def memory(request: Request) -> dict[str, Any]:
    """Return the ledger's lines and MLX's figures in bytes, and each engine's rows and pages."""
    pool = server_of(request).pool
    await pool.look()
    return pool.figures()


@router.get("/state")
async def state(request: Request) -> dict[str, Any]:
    """Return the figures that grow in a server that leaks: `benchmarks/soak.py` compares them.

    calls: number under way. leases: number that calls hold, by model. open_files: connections
    included. rss_bytes: null except on Linux. workers: process ids, by model.
    """
    server = server_of(request)
    models = await server.pool.models()
    return {
        "calls": len(server.calls),
        "leases": {model.id: model.leases for model in models if model.state == "loaded"},
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
        "open_files": len(os.listdir(OPEN_FILES)),
        "rss_bytes": resident_bytes(),
        "workers": server.pool.workers(),
    }


def resident_bytes() -> int | None:
    if not PAGES.exists():
        return None
    return int(PAGES.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
