"""No memory, no disk, no file of weights, beside eight answers."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
from crowd import Crowd, question
from fake_hub import fake_hub
from live import PROGRAM, live_server
from small_disk import small_disk
from thorough import slow

from mlx_manager import demo_model

CHAT = "/v1/chat/completions"
DEMO = Path(demo_model.__file__).parent
WORKING_BYTES = 169_050_112 + 16_919_552
"""What the model and a step of it take before there is any page, with weights in float32."""
FOR_PAGES = 9_000_000
"""Less than 7 000 tokens take, also where the weights and the pages have half the bytes."""


@asynccontextmanager
async def served(
    errors: Path, *limited: str, **settings: object
) -> AsyncIterator[httpx.AsyncClient]:
    with live_server(errors, (*limited, str(PROGRAM), "serve"), **settings) as server:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as http:
            yield http
    assert "Traceback" not in await asyncio.to_thread(errors.read_text)


async def test_what_does_not_fit_is_refused_with_the_numbers_and_the_others_go_on(tmp_path: Path):
    models = tmp_path / "models"
    shutil.copytree(DEMO, models / "other")
    memory = (WORKING_BYTES + FOR_PAGES) / 2**30
    settings = {
        "memory_limit_gb": memory,
        "models_dir": models,
        "prefill_chunk": 32,
        "max_rows": 16,
    }
    async with served(tmp_path / "log", **settings) as http:
        async with Crowd(http, 60) as crowd:
            long = {"prompt": [5 + i % 2000 for i in range(7000)], "max_tokens": 5}
            refused = await http.post("/v1/completions", json=long)
            load = question(1, model="other", stream=False, first_token_timeout=0.3)
            late = await http.post(CHAT, json=load)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "out_of_memory")
        assert "KV pages" in refused.json()["error"]["message"]
        assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
        assert "its model was still being loaded" in late.json()["error"]["message"]
        assert all(told.well for told in crowd.told)
        # Nobody uses the first any more: it makes room.
        loaded = await http.post(CHAT, json=question(1, model="other", stream=False))
        assert loaded.status_code == 200


@slow
async def test_weights_that_are_removed_are_missed_only_at_the_next_load(tmp_path: Path):
    models = tmp_path / "models"
    for name in ("one", "two"):
        shutil.copytree(DEMO, models / name)
    async with served(tmp_path / "log", models_dir=models, max_models=1) as http:
        async with Crowd(http, 30, model="one") as crowd:
            for file in (models / "one").glob("*.safetensors"):
                file.unlink()
            beside = await http.post(CHAT, json=question(3, model="one", stream=False))
        assert beside.status_code == 200
        assert all(told.well for told in crowd.told)
        async with Crowd(http, 30, model="two") as crowd:
            gone = await http.post(CHAT, json=question(1, model="one", stream=False))
        assert (gone.status_code, gone.json()["error"]["code"]) in {
            (400, "model_load_failed"),
            (404, "model_not_found"),
        }
        assert "one" in gone.json()["error"]["message"]
        assert all(told.well for told in crowd.told)


@slow
async def test_a_full_disk_costs_the_keeping_of_answers_and_not_the_answers(tmp_path: Path):
    asked = {"input": "Hello!", "temperature": 0, "max_output_tokens": 2}
    with small_disk(tmp_path / "disk", 256) as disk:
        settings = {"response_store": disk.folder / "responses.db", "log_level": "error"}
        async with served(tmp_path / "log", *disk.command, **settings) as http:
            async with Crowd(http, 30) as crowd:
                saved = await http.post("/v1/responses", json=asked)
                further = asked | {"previous_response_id": saved.json()["id"]}
                with disk.full():
                    lost = await http.post("/v1/responses", json=asked)
                    gone_on = await http.post("/v1/responses", json=further)
                    streamed = await http.post("/v1/responses", json=asked | {"stream": True})
                after = await http.post("/v1/responses", json=asked)
            assert all(told.well for told in crowd.told)
            answers = [saved, lost, gone_on, after]
            assert [answer.status_code for answer in answers] == [200] * 4
            assert [answer.json().get("store") for answer in answers] == [True, False, False, True]
            assert '"store":false' in streamed.text.replace(" ", "")
            for answer, status in zip(answers, (200, 404, 404, 200), strict=True):
                again = await http.get(f"/v1/responses/{answer.json()['id']}")
                assert again.status_code == status
        kept = tmp_path / "responses.db"
        kept.write_bytes((disk.outside / "responses.db").read_bytes())
    with sqlite3.connect(kept) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@slow
async def test_a_download_that_fills_the_disk_is_told_and_the_others_go_on(tmp_path: Path):
    asked = question(1, model="owner/demo", stream=False)
    with fake_hub(DEMO) as hub, small_disk(tmp_path / "disk", 16_000) as disk:
        hub.held = threading.Event()
        settings = {"allow_download": True, "available_models": "owner/demo", "log_level": "error"}
        named = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url, "HF_HOME": disk.folder}
        environment = ("env", *(f"{name}={value}" for name, value in named.items()))
        async with served(tmp_path / "log", *environment, *disk.command, **settings) as http:
            async with Crowd(http, 30) as crowd:
                call = asyncio.create_task(http.post(CHAT, json=asked))
                while "model.safetensors" not in hub.fetched:
                    assert (await http.get("/readyz")).status_code == 200
                with disk.full():
                    hub.held.set()
                    failed = await call
            assert (failed.status_code, failed.json()["error"]["code"]) == (507, "disk_full")
            assert "owner/demo" in failed.json()["error"]["message"]
            assert all(told.well for told in crowd.told)
            hub.held = None
            assert (await http.get("/readyz")).status_code == 200
            assert (await http.post(CHAT, json=asked)).status_code == 200
