"""No memory, no disk, no file of weights, beside eight answers."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
from crowd import Crowd, question, slow
from fake_hub import fake_hub
from live import PROGRAM, live_server

from mlx_manager import demo_model

CHAT = "/v1/chat/completions"
DEMO = Path(demo_model.__file__).parent
WORKING_BYTES = 169_050_112 + 16_919_552
"""What the model and a step of it take before there is any page."""


@asynccontextmanager
async def served(
    errors: Path, *limited: str, **settings: object
) -> AsyncIterator[httpx.AsyncClient]:
    with live_server(errors, (*limited, str(PROGRAM), "serve"), **settings) as server:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as http:
            yield http
    assert "Traceback" not in await asyncio.to_thread(errors.read_text)


def no_larger_file_than(kilobytes: int) -> tuple[str, ...]:
    """What a full disk is to whoever writes: the write fails."""
    return ("bash", "-c", f'ulimit -f {kilobytes}; exec "$@"', "limited")


async def test_what_does_not_fit_is_refused_with_the_numbers_and_the_others_go_on(tmp_path: Path):
    models = tmp_path / "models"
    shutil.copytree(DEMO, models / "other")
    memory = (WORKING_BYTES + 20_000_000) / 2**30
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
            (503, "model_load_failed"),
            (404, "model_not_found"),
        }
        assert "one" in gone.json()["error"]["message"]
        assert all(told.well for told in crowd.told)


@slow
async def test_a_full_disk_costs_the_keeping_of_answers_and_not_the_answers(tmp_path: Path):
    kept = tmp_path / "responses.db"
    asked = {"input": "Hello! " * 800, "temperature": 0, "max_output_tokens": 2}
    small = no_larger_file_than(60)
    async with served(tmp_path / "log", *small, response_store=kept, log_level="error") as http:
        async with Crowd(http, 30) as crowd:
            answers = [(await http.post("/v1/responses", json=asked)) for _ in range(12)]
            streamed = await http.post("/v1/responses", json=asked | {"stream": True})
        assert all(answer.status_code == 200 for answer in answers)
        lost = [answer.json() for answer in answers if answer.json().get("store") is False]
        saved = [answer.json() for answer in answers if "store" not in answer.json()]
        assert lost
        assert saved
        assert '"store":false' in streamed.text.replace(" ", "")
        assert all(told.well for told in crowd.told)
        again = await http.get(f"/v1/responses/{saved[0]['id']}")
        assert again.json()["output"] == saved[0]["output"]
        missing = await http.get(f"/v1/responses/{lost[0]['id']}")
        assert missing.status_code == 404
    with sqlite3.connect(kept) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@slow
async def test_a_download_that_fills_the_disk_is_told_and_the_others_go_on(tmp_path: Path):
    with fake_hub(DEMO) as hub:
        settings = {"allow_download": True, "available_models": "owner/demo", "log_level": "error"}
        environment = ("env", "HF_HUB_OFFLINE=0", f"HF_ENDPOINT={hub.url}", f"HF_HOME={tmp_path}")
        small = no_larger_file_than(2000)
        async with served(tmp_path / "log", *environment, *small, **settings) as http:
            async with Crowd(http, 30) as crowd:
                asked = question(1, model="owner/demo", stream=False)
                failed = await http.post(CHAT, json=asked)
            assert failed.status_code in (503, 507)
            assert failed.json()["error"]["code"] in ("model_load_failed", "disk_full")
            assert "owner/demo" in failed.json()["error"]["message"]
            assert all(told.well for told in crowd.told)
            await asyncio.sleep(0)
            assert (await http.get("/readyz")).status_code == 200
