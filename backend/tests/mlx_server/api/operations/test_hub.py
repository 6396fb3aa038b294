"""Models of the hub, for the owner: searched, planned, pulled with a pause, and deleted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from fake_hub import FakeHub, fake_hub
from live import live_server

from mlx_manager.demo_model import demo_model_path


@dataclass(frozen=True, slots=True)
class Owner:
    http: httpx.Client
    hub: FakeHub

    def get(self, path: str, **asked: str) -> Any:
        answer = self.http.get(f"/v1/admin/{path}", params=asked)
        assert answer.is_success, answer.text
        return answer.json()

    def post(self, path: str, **body: object) -> Any:
        answer = self.http.post(f"/v1/admin/{path}", json=body)
        assert answer.is_success, answer.text
        return answer.json()

    def download(self, number: int) -> Any:
        return next(each for each in self.get("downloads")["data"] if each["id"] == number)

    def until(self, number: int, condition: Callable[[Any], bool]) -> None:
        while not condition(self.download(number)):
            time.sleep(0.01)


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owner]:
    folder = tmp_path_factory.mktemp("hub")
    with fake_hub(demo_model_path()) as hub, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.url)
        patch.setenv("HF_HOME", str(folder / "hf"))
        with (
            live_server(folder / "log", offline=False, hf_cache=True) as server,
            httpx.Client(base_url=server.url, timeout=60) as http,
        ):
            yield Owner(http, hub)


def test_models_are_found_by_words_of_their_names(owner: Owner) -> None:
    found = owner.get("hub/search", words="demo 4bit")["data"]
    assert [model["id"] for model in found] == ["one/demo-4bit", "other/demo-4bit"]
    assert found[0] == {
        **{"id": "one/demo-4bit", "downloads": 1234, "likes": 3, "licence": "apache-2.0"},
        **{"gated": False, "updated": "2026-01-02", "here": False},
    }


def test_a_plan_says_what_a_model_takes_and_how_much_fits(owner: Owner) -> None:
    plan = owner.get("hub/plan", model="own/demo")
    assert (plan["fits"], plan["supported"], plan["licence"]) == (True, True, "apache-2.0")
    assert plan["weights"] == (demo_model_path() / "model.safetensors").stat().st_size
    assert plan["to_download"] == plan["bytes"] > plan["weights"]
    assert plan["tokens"] == (plan["limit"] - plan["weights"]) // plan["token_bytes"]
    assert plan["rows_at_context"] == plan["tokens"] // plan["context_length"]
    missing = owner.http.get("/v1/admin/hub/plan", params={"model": "own/missing"})
    assert missing.status_code == 404


def test_a_download_is_paused_goes_on_and_is_served(owner: Owner) -> None:
    owner.hub.held = threading.Event()
    begun = owner.post("hub/pull", model="a/b")
    assert owner.post("hub/pull", model="a/b")["id"] == begun["id"]
    owner.until(begun["id"], lambda told: told["there"] > 0)
    assert owner.post(f"downloads/{begun['id']}/pause")["state"] == "paused"
    owner.hub.held.set()
    assert owner.download(begun["id"])["there"] < owner.download(begun["id"])["total"]
    assert owner.post(f"downloads/{begun['id']}/resume")["state"] == "running"
    owner.until(begun["id"], lambda told: told["state"] == "done")
    offered = [model["id"] for model in owner.http.get("/v1/models").json()["data"]]
    assert "a/b" in offered
    assert owner.http.request("DELETE", "/api/delete", json={"model": "a/b"}).is_success


def test_a_download_is_cancelled_and_another_one_fails(owner: Owner) -> None:
    owner.hub.held = threading.Event()
    begun = owner.post("hub/pull", model="c/d")
    owner.until(begun["id"], lambda told: told["there"] > 0)
    assert owner.post(f"downloads/{begun['id']}/cancel")["state"] == "cancelled"
    owner.hub.held.set()
    failed = owner.post("hub/pull", model="own/missing")
    owner.until(failed["id"], lambda told: told["state"] == "failed")
    assert "own/missing" in owner.download(failed["id"])["error"]


@pytest.mark.parametrize("path", ["hub/search?words=", "hub/search?words=x&limit=0", "hub/plan"])
def test_what_is_asked_for_wrongly_is_refused(owner: Owner, path: str) -> None:
    assert owner.http.get(f"/v1/admin/{path}").status_code == 400


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://127.0.0.1:9"},
        {"sec-fetch-site": "cross-site"},
        {"host": "rebound.example.org"},
    ],
)
def test_no_other_site_can_have_a_model_pulled(owner: Owner, headers: dict[str, str]) -> None:
    answer = owner.http.post("/v1/admin/hub/pull", json={"model": "x/y"}, headers=headers)
    assert answer.status_code == 403
    assert "x/y" not in [each["model"] for each in owner.get("downloads")["data"]]
