from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from scripted import MODEL, ScriptedBackend, ScriptedPool, says

from mlx_manager.mlx_server.api.state import Server
from mlx_manager.mlx_server.config import MLXServerSettings
from mlx_manager.mlx_server.core import Started
from mlx_manager.mlx_server.main import create_app

ASK = {"messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


class Probed:
    """An application whose server state a test changes as `main` does."""

    def __init__(self, pool: ScriptedPool) -> None:
        self.pool = pool
        self.app = create_app(MLXServerSettings(model=MODEL, drain_seconds=30), pool)
        self.server: Server = self.app.state.server

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://server")

    @asynccontextmanager
    async def answering(
        self,
    ) -> AsyncIterator[tuple[httpx.AsyncClient, asyncio.Task[httpx.Response]]]:
        """A client whose call runs on a server that has started, and the call."""
        async with self.app.router.lifespan_context(self.app):
            await self.server.started.wait()
            async with self.client() as client:
                call = asyncio.create_task(client.post(CHAT, json=ASK))
                await self.pool.backend.until(lambda backend: backend.running == 1)
                yield client, call

    async def statuses(self) -> dict[str, int]:
        async with self.client() as client:
            paths = ("/livez", "/readyz", "/health")
            found = {path: (await client.get(path)).status_code for path in paths}
            heads = {path: (await client.head(path)).status_code for path in paths}
            assert heads == found
            metrics = (await client.get("/metrics")).text
            assert f"mlx_manager_ready {float(found['/readyz'] == 200)}" in metrics
            return found | {CHAT: (await client.post(CHAT, json=ASK)).status_code}


ALIVE_ONLY = {"/livez": 200, "/readyz": 503, "/health": 503, CHAT: 503}
ALL_WELL = dict.fromkeys(ALIVE_ONLY, 200)


async def test_a_server_that_starts_is_alive_and_not_ready():
    pool = ScriptedPool(ScriptedBackend(lambda _: says("x")), asyncio.Event())
    probed = Probed(pool)
    async with probed.app.router.lifespan_context(probed.app):
        assert await probed.statuses() == ALIVE_ONLY
        assert pool.loading is not None
        pool.loading.set()
        await probed.server.started.wait()
        assert await probed.statuses() == ALL_WELL


async def test_a_draining_server_is_alive_and_says_when_to_come_back():
    probed = Probed(ScriptedPool(ScriptedBackend(lambda _: [[Started(1)], asyncio.Event()])))
    async with probed.answering() as (client, running):
        probed.server.drain.begin()
        refused = await client.get("/readyz")
        assert await probed.statuses() == ALIVE_ONLY
        assert 25 < int(refused.headers["retry-after"]) <= 30
        assert refused.headers["connection"] == "close"
        assert "going out of service" in refused.text
        assert not running.done()
        probed.server.drain.revoke()
        assert (await client.get("/readyz")).status_code == 200
        running.cancel()


async def test_a_server_whose_default_model_is_down_is_alive_and_says_why():
    probed = Probed(ScriptedPool(ScriptedBackend(lambda _: says("x"))))
    async with probed.app.router.lifespan_context(probed.app):
        await probed.server.started.wait()
        probed.pool.down = "its process has failed 3 times in a row"
        async with probed.client() as client:
            refused = await client.get("/readyz")
            assert refused.status_code == 503
            assert "failed 3 times in a row" in refused.text
            assert (await client.get("/livez")).status_code == 200
            assert "mlx_manager_ready 0.0" in (await client.get("/metrics")).text
            # Other models answer.
            assert (await client.post(CHAT, json=ASK)).status_code == 200
        probed.pool.down = None
        assert await probed.statuses() == ALL_WELL
