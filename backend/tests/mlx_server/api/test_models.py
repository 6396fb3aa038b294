from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from here import served_here
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
    assert set(figures) == {
        *("ledger", "mlx", "engines", "loads", "unloads", "failures", "down", "remotes"),
    }


def shown(**fields: Any) -> dict[str, Any]:
    status = ModelStatus("m", "loaded", "local", "f", "t", 8, 9, **fields)
    found: dict[str, Any] = card(status, {}, 0).model_dump(mode="json", exclude_none=True)
    return found


@pytest.mark.parametrize("thinks", [True, False])
def test_a_model_says_what_clients_decide_by(thinks: bool):
    found = shown(kind="text", thinks=thinks)
    # LM Studio's names.
    assert (found["type"], found["max_context_length"], found["loaded_context_length"]) == (
        *("llm", 8, 8),
    )
    assert found["capabilities"] == ["tool_use"]
    # OpenRouter's.
    assert found["architecture"]["input_modalities"] == found["input_modalities"] == ["text"]
    assert found["top_provider"]["context_length"] == found["context_length"] == 8
    assert "tools" in found["supported_parameters"]
    assert ("reasoning" in found["supported_parameters"]) == thinks
    assert (found["supports_tools"], found["supports_reasoning"]) == (True, thinks)


def test_a_model_that_generates_nothing_says_so():
    found = shown(kind="embedding")
    assert (found["type"], found["supports_tools"]) == ("embeddings", False)
    assert found["supported_parameters"] == []


def test_a_model_that_sees_says_so_by_every_name():
    card = shown(kind="text", input_modalities=("text", "image"))
    assert card["type"] == "vlm"
    assert card["input_modalities"] == ["text", "image"]
    assert card["architecture"]["input_modalities"] == ["text", "image"]
    assert card["architecture"]["modality"] == "text+image->text"
    assert shown(kind="text")["type"] == "llm"


def test_what_is_unknown_is_absent():
    status = ModelStatus("m", "loadable", "local", "f", "t", 0, 0)
    found = card(status, {}, 0).model_dump(mode="json", exclude_none=True)
    assert not {"supports_tools", "supports_reasoning", "type", "max_context_length"} & found.keys()


@pytest.fixture(scope="module")
def named() -> Iterator[httpx.Client]:
    names = ("org/small", "small:7b", "a%b", "org/small:7b@q4")
    with served_here(model_aliases=",".join(f"{name}={MODEL}" for name in names)) as client:
        yield client


@pytest.mark.parametrize(
    "path",
    [
        *(MODEL, MODEL.replace("/", "%2F"), MODEL.replace("/", "%2f"), "org/small", "org%2Fsmall"),
        *("small:7b", "small%3A7b", "a%25b", "org%2Fsmall%3A7b%40q4", "org/small:7b@q4"),
    ],
)
def test_a_model_is_found_by_its_name_however_it_is_encoded(named: httpx.Client, path: str):
    answer = named.get(f"/v1/models/{path}")
    assert answer.status_code == 200, answer.text
    assert answer.json()["id"] == MODEL
    assert isinstance(answer.json()["supports_reasoning"], bool)
