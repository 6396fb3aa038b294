"""An owner who loads, unloads, pins, cancels, changes settings and moves folders, at random, while
people are being answered."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from crowd import Told, question
from live import LiveServer, live_server
from prometheus_client.parser import text_string_to_metric_families
from thorough import slow
from tiny_models import make_tiny_model

CHAT, ADMIN = "/v1/chat/completions", "/v1/admin"
DEMO = "mlx-manager/demo"
MODELS = ("a", "b", "c")
PEOPLE, EACH, LENGTHS = 8, 15, (1, 20, 100)
REFUSALS = {
    ("model_not_found", 404),
    ("overloaded", 429),
    ("out_of_memory", 503),
    ("model_load_failed", 400),
    ("request_cancelled", 403),
}
SETTINGS = (
    "",
    'allow = ["a"]\n',
    '[models.a]\npinned = true\nttl = "never"\n[models.b]\ncontext_length = 500\n',
    '[models.c]\naliases = ["see"]\nsampling = { temperature = 0.7 }\npreload = true\n',
    "[models.b\n",
    "[models.a]\nttl = 'soon'\n",
)


class People:
    """Ask one question after the other, and leave some answers early."""

    def __init__(self, http: httpx.AsyncClient, chance: random.Random) -> None:
        self.http = http
        self.chance = chance
        self.right: dict[tuple[str, int], str] = {}
        self.ended: dict[str, str] = {}

    async def learn(self) -> None:
        """What is right, while nobody else is there."""
        for model in (DEMO, *MODELS):
            for length in LENGTHS:
                told = await self.ask(model, length, f"{model} {length}")
                assert told.well
                self.right[model, length] = "".join(told.pieces)

    async def all(self) -> None:
        await asyncio.gather(*(self.one(person) for person in range(PEOPLE)))

    async def one(self, person: int) -> None:
        for number in range(EACH):
            model, length = self.chance.choice((DEMO, *MODELS)), self.chance.choice(LENGTHS)
            named = f"{person}-{number}"
            leaves_after = self.chance.choice((1, 10)) if self.chance.random() < 0.2 else None
            async with asyncio.timeout(100):
                told = await self.ask(model, length, named, leaves_after)
            if told.error is not None:
                self.ended[named] = told.error["code"]
            elif leaves_after is None:
                assert told.well, named
                assert "".join(told.pieces) == self.right[model, length]
                self.ended[named] = "length"

    async def ask(
        self, model: str, length: int, named: str, leaves_after: int | None = None
    ) -> Told:
        told = Told()
        body = question(length, model=model)
        headers = {"x-request-id": named.replace(" ", "-")}
        async with self.http.stream("POST", CHAT, json=body, headers=headers) as response:
            if response.status_code != 200:
                told.error = json.loads(await response.aread())["error"]
                assert (told.error["code"], response.status_code) in REFUSALS
                assert response.status_code != 429 or "retry-after" in response.headers
                return told
            lines = 0
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    told.take(line)
                    lines += 1
                if lines == leaves_after:
                    return told
        if told.error is not None:
            assert told.error["code"] in {code for code, _ in REFUSALS}
        return told


class Owner:
    """Does one thing after the other. Each may be refused by name, and none may fail."""

    def __init__(self, server: LiveServer, http: httpx.AsyncClient, folder: Path) -> None:
        self.process = server.process
        self.http = http
        self.folder = folder
        self.chance = random.Random(1)
        self.done: Counter[str] = Counter()
        self.deeds: tuple[Callable[[], Awaitable[None]], ...] = (
            *(self.load, self.unload, self.pin, self.cancel, self.forget),
            *(self.read_again, self.hang_up, self.take_away, self.exchange),
        )

    async def all(self) -> None:
        while True:
            deed = self.chance.choice(self.deeds)
            await deed()
            self.done[deed.__name__] += 1
            await asyncio.sleep(self.chance.choice((0, 0.02, 0.1)))

    async def post(self, path: str, body: Any, *allowed: int) -> None:
        response = await self.http.post(f"{ADMIN}/{path}", json=body)
        assert response.status_code in {200, *allowed}, response.text

    def model(self) -> dict[str, Any]:
        return {"model": self.chance.choice((DEMO, *MODELS))}

    async def load(self) -> None:
        # Its folder may be taken away meanwhile, which is 400.
        await self.post("models/load", self.model(), 400, 404, 503)

    async def unload(self) -> None:
        await self.post("models/unload", self.model(), 404, 409)

    async def pin(self) -> None:
        pinned = self.chance.random() < 0.3
        await self.post("models/pin", self.model() | {"pinned": pinned}, 404)

    async def cancel(self) -> None:
        for call in (await self.http.get(f"{ADMIN}/requests")).json()["data"][:1]:
            await self.post(f"requests/{call['request_id']}/cancel", None, 404)

    async def forget(self) -> None:
        await self.post("prefix-cache/clear", {})

    async def read_again(self) -> None:
        self.write()
        await self.post("reload", None, 422)

    async def hang_up(self) -> None:
        self.write()
        self.process.send_signal(signal.SIGHUP)

    def write(self) -> None:
        (self.folder / "models.toml").write_text(self.chance.choice(SETTINGS))

    async def take_away(self) -> None:
        shutil.rmtree(self.folder / "models" / "c", ignore_errors=True)

    async def exchange(self) -> None:
        """Another folder with the same files in it."""
        name = self.chance.choice(MODELS)
        await asyncio.to_thread(shutil.copytree, self.folder / name, self.folder / "new")
        shutil.rmtree(self.folder / "models" / name, ignore_errors=True)
        (self.folder / "new").rename(self.folder / "models" / name)


async def at_rest(http: httpx.AsyncClient) -> None:
    """Nothing is left: no call, no lease, no row, and no memory once all models have gone."""
    async with asyncio.timeout(60):
        while (state := (await http.get("/debug/state")).json())["calls"]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert not any(state["leases"].values())
    metrics = text_string_to_metric_families((await http.get("/metrics")).text)
    for sample in (sample for family in metrics for sample in family.samples):
        gauges = ("num_requests_running", "num_requests_waiting", "kv_tokens")
        if sample.name.removeprefix("mlx_manager_") in gauges:
            assert sample.value == 0, sample
        assert sample.labels.get("status") != "500", sample
    async with asyncio.timeout(60):
        while loaded := [
            model["id"]
            for model in (await http.get(f"{ADMIN}/models")).json()["data"]
            if model["state"] != "loadable"
        ]:
            for model in loaded:
                await http.post(f"{ADMIN}/models/unload", json={"model": model})
    ledger = (await http.get("/debug/memory")).json()["ledger"]
    assert set(ledger) == {"available", "buffer_cache", "limit"}


async def audited(http: httpx.AsyncClient) -> dict[str, str]:
    """The outcome of each call, by its id."""
    calls = (await http.get(f"{ADMIN}/audit", params={"limit": 1000})).json()["data"]
    assert len({call["request_id"] for call in calls}) == len(calls)
    return {call["request_id"]: call["outcome"] for call in calls}


@slow
@pytest.mark.parametrize("seed", range(3))
async def test_a_busy_owner_costs_nobody_more_than_a_refusal(tmp_path: Path, seed: int):
    for number, name in enumerate(MODELS):
        make_tiny_model(tmp_path / name, seed=number)
        shutil.copytree(tmp_path / name, tmp_path / "models" / name)
    (tmp_path / "models.toml").touch()
    settings = {
        "models_dir": tmp_path / "models",
        "models_file": tmp_path / "models.toml",
        "max_models": 2,
        "model_ttl_seconds": 0.5,
        "max_waiting": 4,
        "max_rows": 4,
    }
    with live_server(tmp_path / "log", **settings) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=100) as http:
            people = People(http, random.Random(seed))
            await people.learn()
            owner = Owner(server, http, tmp_path)
            async with asyncio.TaskGroup() as group:
                busy = group.create_task(owner.all())
                await people.all()
                busy.cancel()
            (tmp_path / "models.toml").write_text("")
            await owner.post("reload", None)
            for name in (DEMO, "a", "b"):
                await owner.post("models/pin", {"model": name, "pinned": False})
            outcomes = await audited(http)
            assert outcomes | people.ended == outcomes
            await at_rest(http)
    assert len(owner.done) == len(owner.deeds)
    assert "length" in people.ended.values()
    assert "never retrieved" not in (tmp_path / "log").read_text()
