from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import httpx
import pytest
from scripted import Script, ScriptedBackend, ScriptedPool, says

from mlx_manager.mlx_server.config import MLXServerSettings
from mlx_manager.mlx_server.main import create_app

Serve = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@asynccontextmanager
async def serve(
    script: Script = lambda _: says("Hel", "lo"),
    *,
    pool: ScriptedPool | None = None,
    started: bool = True,
    **settings: object,
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application whose model plays `script`."""
    parsed = MLXServerSettings(**settings)
    pool = pool or ScriptedPool(ScriptedBackend(script), default=parsed.model)
    app = create_app(parsed, pool)
    async with app.router.lifespan_context(app):
        if started:
            await app.state.server.started.wait()
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            yield client


@pytest.fixture(name="serve")
def _serve() -> Serve:
    return serve
