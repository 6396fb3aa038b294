from __future__ import annotations

import asyncio
import json

import pytest
from openai_spec import check
from scripted import MODEL, ScriptedBackend, ScriptedPool, says

from mlx_manager.mlx_server.api.v1.models import card
from mlx_manager.mlx_server.models.status import ModelStatus


async def test_models_are_listed_with_how_they_are_served(serve):
    async with serve() as client:
        listed = (await client.get("/v1/models")).json()
        found = (await client.get(f"/v1/models/{MODEL}")).json()
    check("ListModelsResponse", listed)
    check("Model", found)
    assert listed["data"] == [found]
    assert (found["id"], found["owned_by"], found["state"]) == (MODEL, "mlx-manager", "loaded")
    assert (found["family"], found["context_length"], found["bytes"]) == ("llama", 8192, 1000)
    assert found["engine"] == {"running": 0, "waiting": 0}


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6, "top_k": 20}])
def test_a_model_says_what_it_is_drawn_by_if_not_by_the_defaults(sampling: dict[str, float]):
    status = ModelStatus("m", "loaded", "local", "f", "t", 8, 9, sampling=sampling)
    shown = card(status, {}, 0).model_dump(mode="json", exclude_none=True)
    assert json.dumps(shown.get("sampling", {})) == json.dumps(sampling)
    assert ("sampling" in shown) == bool(sampling)


async def test_models_are_listed_under_a_path_with_a_slash_at_its_end(serve):
    async with serve() as client:
        assert (await client.get("/v1/models/")).json() == (await client.get("/v1/models")).json()


async def test_an_unknown_model_is_not_found(serve):
    async with serve() as client:
        response = await client.get("/v1/models/some/other")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_models_are_listed_while_one_loads(serve):
    pool = ScriptedPool(ScriptedBackend(lambda _: says("x")), loading=asyncio.Event())
    async with serve(pool=pool, started=False) as client:
        await asyncio.sleep(0)
        listed = (await client.get("/v1/models")).json()
    assert [model["state"] for model in listed["data"]] == ["loading"]


async def test_memory_is_accounted_for(serve):
    async with serve() as client:
        figures = (await client.get("/debug/memory")).json()
    assert set(figures) == {"ledger", "mlx", "engines", "loads", "unloads"}
