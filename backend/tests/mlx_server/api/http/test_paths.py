from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from scripted import ScriptedBackend, ScriptedPool, says

from mlx_manager.mlx_server.config import MLXServerSettings
from mlx_manager.mlx_server.main import create_app

KEY = {"authorization": "Bearer secret"}
TOKEN = {"authorization": "Bearer the-owners-own"}


@asynccontextmanager
async def under(prefix: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application behind a prefix, as uvicorn's `--root-path` has it."""
    settings = MLXServerSettings(api_key="secret", admin_token=TOKEN["authorization"][7:])
    app = create_app(settings, ScriptedPool(ScriptedBackend(lambda _: says("Hello"))))
    async with app.router.lifespan_context(app):
        await app.state.server.started.wait()
        transport = httpx.ASGITransport(app, root_path=prefix)
        async with httpx.AsyncClient(
            transport=transport, base_url=f"http://server{prefix}"
        ) as client:
            yield client


async def test_behind_a_prefix_the_same_paths_ask_for_the_same():
    async with under("/llm") as client:
        for method, path in (("GET", "/v1/admin/models"), ("POST", "/v1/admin/drain")):
            refused = await client.request(method, path, headers=KEY)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_admin_token"
        assert (await client.get("/v1/admin/audit", headers=TOKEN)).status_code == 200
        assert (await client.get("/readyz")).status_code == 200
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/v1/models", headers=KEY)).status_code == 200


async def test_behind_a_prefix_each_protocol_is_itself():
    hello = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    async with under("/llm") as client:
        closed = await client.post("/v1/messages", json=hello)
        assert closed.json()["type"] == "error"
        for path in ("/v1/messages", "/v1/chat/completions"):
            assert (await client.post(path, json=hello, headers=KEY)).status_code == 200
        calls = (await client.get("/v1/admin/audit", headers=TOKEN)).json()["data"]
        assert [call["protocol"] for call in calls] == ["chat", "messages"]
        counted = (await client.get("/metrics", headers=KEY)).text
        assert 'handler="/v1/messages",method="POST",status="200"' in counted
