"""The admin API: who may use it, and every route of it against a real server over HTTP."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from here import served_here
from live import live_server
from pydantic import ValidationError
from scripted import ScriptedBackend, ScriptedPool, says
from tiny_models import make_tiny_model

from mlx_manager.mlx_server.config import MLXServerSettings
from mlx_manager.mlx_server.main import create_app
from mlx_manager.mlx_server.services.keys import add_key

TOKEN = "correct horse"
ENDLESS = {
    "model": "a",
    "prompt": "hello",
    "max_tokens": 150_000,
    "ignore_eos": True,
    "stream": True,
}
BEARER = {"authorization": f"Bearer {TOKEN}"}


# -- who may -----------------------------------------------------------------------------------


@asynccontextmanager
async def client_from(
    peer: str = "127.0.0.1", address: str = "http://127.0.0.1:8000", **settings: object
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application with a scripted model, which comes from `peer`."""
    parsed = MLXServerSettings(**settings)
    app = create_app(parsed, ScriptedPool(ScriptedBackend(lambda _: says("Hi"))))
    async with app.router.lifespan_context(app):
        await app.state.server.started.wait()
        transport = httpx.ASGITransport(app, client=(peer, 1))
        async with httpx.AsyncClient(transport=transport, base_url=address) as client:
            yield client


async def status_and_code(client: httpx.AsyncClient, **headers: str) -> tuple[int, str]:
    answer = await client.get("/v1/admin/requests", headers=headers)
    code = "" if answer.is_success else answer.json()["error"]["code"]
    return answer.status_code, code


@pytest.mark.parametrize(
    "authorization", ["", f"Bearer {TOKEN}x", "Bearer ", "Bearer", f"Basic {TOKEN}", "Bearer \xff"]
)
async def test_without_the_token_the_answer_is_401(authorization: str):
    async with client_from(admin_token=TOKEN) as client:
        headers = {"authorization": authorization.encode("latin-1")} if authorization else {}
        answer = await client.get("/v1/admin/models", headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_admin_token"
    assert "MLX_SERVER_ADMIN_TOKEN" in answer.json()["error"]["message"]
    assert TOKEN not in answer.text


async def test_the_token_is_taken_from_anywhere_and_by_any_name():
    async with client_from(
        "10.1.2.3", "http://example.org", admin_token=TOKEN, host="0.0.0.0", open_access=True
    ) as client:
        assert await status_and_code(client, **BEARER) == (200, "")
        assert await status_and_code(client, **BEARER, origin="http://x.org") == (200, "")


async def test_an_api_key_is_no_admin_token_and_the_token_is_no_key():
    async with client_from(admin_token=TOKEN, api_key="a key") as client:
        assert await status_and_code(client, authorization="Bearer a key") == (
            401,
            "invalid_admin_token",
        )
        assert (await client.get("/v1/models", headers=BEARER)).status_code == 401
        assert await status_and_code(client, **BEARER) == (200, "")


@pytest.mark.parametrize(
    ("peer", "address", "headers", "status"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000", {}, 200),
        ("127.0.0.1", "http://localhost:8000", {}, 200),
        ("::1", "http://[::1]:8000", {}, 200),
        ("127.0.0.1", "http://localhost:8000", {"origin": "http://localhost:8000"}, 200),
        ("127.0.0.1", "http://localhost:8000", {"origin": "http://localhost:3000"}, 403),
        ("127.0.0.1", "http://localhost:8000", {"origin": "null"}, 403),
        ("127.0.0.1", "http://localhost:8000", {"sec-fetch-site": "cross-site"}, 403),
        ("127.0.0.1", "http://rebound.example.org:8000", {}, 403),
        ("127.0.0.1", "http://localhost.example.org", {}, 403),
        ("127.0.0.1", "http://localhost:8000", {"host": "[::1"}, 403),
        ("127.0.0.1", "http://localhost:8000", {"x-forwarded-for": "10.0.0.1"}, 403),
        ("10.0.0.1", "http://localhost:8000", {}, 403),
    ],
)
async def test_without_a_token_only_programs_on_this_machine_may(
    peer: str, address: str, headers: dict[str, str], status: int
):
    async with client_from(peer, address) as client:
        code = "" if status == 200 else "permission_denied"
        assert await status_and_code(client, **headers) == (status, code)


async def test_without_a_token_there_is_no_admin_api_on_other_addresses():
    async with client_from(host="0.0.0.0", open_access=True) as client:
        assert await status_and_code(client) == (403, "permission_denied")
        assert await status_and_code(client, **BEARER) == (403, "permission_denied")


async def test_every_route_asks():
    async with client_from(admin_token=TOKEN) as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
        routes = [
            (method, path.replace("{request_id}", "x"))
            for path, methods in paths.items()
            if path.startswith("/v1/admin/")
            for method in methods
        ]
        assert len(routes) >= 10
        for method, path in routes:
            answer = await client.request(method, path, json={"model": "x"})
            assert (answer.status_code, path) == (401, path)


UNKNOWN = [
    ("GET", "/v1/admin/nothing", 404),
    ("POST", "/v1/admin/requests/x", 404),
    ("GET", "/v1/admin/", 404),
    ("GET", "/v1/admin/drain", 405),
    ("PUT", "/v1/admin/models", 405),
    ("GET", "/v1/admin/models/", 307),
    ("GET", "/v1/admin/audit?limit=0", 400),
]
"""Each with what tells of the paths and methods that there are."""


@pytest.mark.parametrize(("method", "path", "status"), UNKNOWN)
async def test_who_has_no_token_learns_nothing_of_what_there_is(
    method: str, path: str, status: int
):
    async with client_from(admin_token=TOKEN) as client:
        known = await client.get("/v1/admin/models")
        asked = await client.request(method, path)
        owners = await client.request(method, path, headers=BEARER)
    assert (asked.status_code, asked.json()) == (401, known.json())
    assert asked.headers["www-authenticate"] == known.headers["www-authenticate"] == "Bearer"
    assert owners.status_code == status
    async with client_from("10.0.0.1") as client:
        known = await client.get("/v1/admin/models")
        asked = await client.request(method, path)
    assert (asked.status_code, asked.json()) == (403, known.json())
    async with client_from() as client:
        assert (await client.request(method, path)).status_code == status


async def test_what_there_is_not_is_told_to_the_owner_in_openais_shape():
    async with client_from(admin_token=TOKEN) as client:
        answer = await client.get("/v1/admin/nothing", headers=BEARER)
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
    assert answer.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize("token", ["", "short"])
def test_a_token_that_can_be_guessed_is_refused(token: str):
    with pytest.raises(ValidationError, match="at least 8"):
        MLXServerSettings(admin_token=token)


# -- what they do ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of a real server, and one of its users."""

    http: httpx.Client
    folder: Path
    process: Any
    log: Path

    def get(self, path: str) -> Any:
        return self.http.get(f"/v1/admin/{path}", headers=BEARER).raise_for_status().json()

    def post(self, path: str, body: Any = None, status: int = 200) -> Any:
        answer = self.http.post(f"/v1/admin/{path}", json=body, headers=BEARER)
        assert answer.status_code == status, answer.text
        return answer.json() if status == 200 else answer.json()["error"]

    def model(self, name: str) -> Any:
        return next(model for model in self.get("models")["data"] if model["id"] == name)

    def write(self, text: str) -> None:
        (self.folder / "models.toml").write_text(text)

    def ask(self, model: str, **fields: Any) -> httpx.Response:
        body = {"model": model, "prompt": "hello", "max_tokens": 4} | fields
        return self.http.post("/v1/completions", json=body)

    def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            assert self.process.poll() is None
            time.sleep(0.01)


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owner]:
    folder = tmp_path_factory.mktemp("admin")
    for seed, name in enumerate(("main", "a", "b")):
        make_tiny_model(folder / "models" / name, seed=seed, max_position_embeddings=200_000)
    (folder / "models.toml").write_text("")
    log = folder / "log"
    with (
        live_server(
            log,
            model=folder / "models" / "main",
            models_dir=folder / "models",
            models_file=folder / "models.toml",
            admin_token=TOKEN,
            drain_seconds=60,
        ) as server,
        httpx.Client(base_url=server.url, timeout=120) as http,
    ):
        yield Owner(http, folder, server.process, log)


def test_load_pin_and_unload(owner: Owner):
    assert owner.model("a")["state"] == "loadable"
    loaded = owner.post("models/load", {"model": "a"})
    assert (loaded["id"], loaded["state"], loaded["pinned"]) == ("a", "loaded", False)
    assert loaded["memory"]["weights"] == loaded["bytes"] > 0
    assert loaded["ttl_seconds"] is None
    assert loaded["idle_seconds"] >= 0
    assert owner.post("models/pin", {"model": "a"})["pinned"]
    assert not owner.post("models/pin", {"model": "a", "pinned": False})["pinned"]
    memory = owner.get("models")["memory"]
    assert memory["limit"] > memory["available"] > 0
    gone = owner.post("models/unload", {"model": "a"})
    assert (gone["unloaded"], gone["bytes"]) == (True, loaded["bytes"])
    assert gone["memory_before"] - gone["memory_after"] >= gone["bytes"]
    assert owner.post("models/unload", {"model": "a"}) == {
        "id": "a",
        "unloaded": False,
        "bytes": 0,
        "memory_before": 0,
        "memory_after": 0,
    }
    assert owner.model("a")["state"] == "loadable"


def test_what_can_not_be_done_is_refused_by_name(owner: Owner):
    for path in ("models/load", "models/unload", "models/pin", "prefix-cache/clear"):
        error = owner.post(path, {"model": "../main"}, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert owner.post("models/load", {}, 400)["param"] == "model"
    assert owner.post("models/pin", {"model": "a", "pinned": "maybe"}, 400)["param"] == "pinned"
    assert owner.post("requests/nope/cancel", status=404)["code"] == "request_not_found"


def test_a_running_request_is_listed_and_cancelled_with_a_clear_error(owner: Owner):
    body = ENDLESS | {"model": "b", "n": 2}
    headers = {"x-request-id": "trace/the-endless-one"}
    with owner.http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        lines = answer.iter_lines()
        next(line for line in lines if line.startswith("data: "))
        (call,) = owner.get("requests")["data"]
        assert (call["request_id"], call["model"], call["protocol"]) == (
            "trace/the-endless-one",
            "b",
            "completions",
        )
        assert (call["state"], call["rows"], call["key"]) == ("running", 2, "")
        assert call["prompt_tokens"] == len("hello") + 1
        assert call["age_seconds"] > 0
        owner.until(lambda: owner.get("requests")["data"][0]["tokens"] > call["tokens"])
        assert owner.post("models/unload", {"model": "b"}, 409)["code"] == "model_in_use"
        assert owner.post("requests/trace/the-endless-one/cancel") == {
            "id": "trace/the-endless-one",
            "cancelled": 1,
        }
        last = [line for line in lines if line.startswith("data: ")][-1]
    assert '"code":"request_cancelled"' in last.replace(" ", "")
    assert "The server's owner has ended this request." in last
    owner.until(lambda: not owner.get("requests")["data"])
    assert owner.post("models/unload", {"model": "b"})["unloaded"]


def test_events_tell_what_runs_and_what_has_ended_once(owner: Owner):
    owner.ask("main")
    stream = owner.http.stream("GET", "/v1/admin/events", params={"interval": 0.2}, headers=BEARER)
    with stream as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        told = (json.loads(line.removeprefix("data: ")) for line in lines)
        first = next(told)
        assert first["calls"][-1]["model"] == "main"
        assert first["memory"]["limit"] > first["memory"]["available"] > 0
        assert not next(told)["calls"]
        body = ENDLESS | {"model": "main"}
        with owner.http.stream("POST", "/v1/completions", json=body) as endless:
            pieces = endless.iter_lines()
            next(pieces)
            running = next(state["requests"] for state in told if state["requests"])
            assert running[0]["model"] == "main"
        ended = next(state["calls"] for state in told if state["calls"])
    assert [call["outcome"] for call in ended] == ["cancelled"]
    assert ended[0]["number"] == first["calls"][-1]["number"] + 1
    assert owner.get("state")["calls"][-1]["number"] == ended[0]["number"]


@pytest.mark.parametrize("interval", ["0", "nan", "61", "soon"])
def test_events_come_neither_too_often_nor_too_seldom(owner: Owner, interval: str):
    path = f"/v1/admin/events?interval={interval}"
    answer = owner.http.get(path, headers=BEARER)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "interval"


def test_settings_of_a_model_are_shown_tried_and_written(owner: Owner):
    owner.write('# mine\n[models.b]\nttl = "1h"  # an hour\n')
    found = owner.get("models/settings?model=b")
    assert found == {
        "file": str(owner.folder / "models.toml"),
        "model": "b",
        "settings": {"ttl": "1h"},
    }
    wanted = {"model": "b", "settings": {"ttl": "1h", "aliases": ["bee"]}}
    tried = owner.post("models/settings", wanted | {"dry_run": True})
    assert (tried["lines"][-1], tried["reload"]) == ('+aliases = ["bee"]', None)
    assert owner.model("b")["aliases"] == []
    written = owner.post("models/settings", wanted)
    assert written["reload"]["changed"] == ["b"]
    assert owner.model("b")["aliases"] == ["bee"]
    text = (owner.folder / "models.toml").read_text()
    assert text == '# mine\n[models.b]\nttl = "1h"  # an hour\naliases = ["bee"]\n'
    assert owner.post("models/settings", wanted)["lines"] == []
    owner.post("models/settings", {"model": "b", "settings": {}})
    assert owner.get("models/settings?model=b")["settings"] == {}


def test_settings_that_are_wrong_are_not_written(owner: Owner):
    before = (owner.folder / "models.toml").read_text()
    for settings in ({"ttl": "soon"}, {"nonsense": 1}, {"sampling": {"top_p": 7}}):
        error = owner.post("models/settings", {"model": "b", "settings": settings}, 422)
        assert error["code"] == "invalid_settings"
        assert next(iter(settings)) in error["message"]
        assert f"{owner.folder}/models.toml" in error["message"]
    assert (owner.folder / "models.toml").read_text() == before
    assert not list(owner.folder.glob(".models.toml*"))


async def test_a_download_that_there_is_not_is_told():
    async with client_from(admin_token=TOKEN) as client:
        answer = await client.get("/v1/admin/downloads", headers=BEARER)
        assert answer.json() == {"data": []}
        answer = await client.post("/v1/admin/downloads/1/pause", headers=BEARER)
        assert answer.json()["error"]["code"] == "request_not_found"


def unread(owner: Owner, body: dict[str, Any]) -> socket.socket:
    """A connection with an answer that nobody reads."""
    content = json.dumps(body).encode()
    connection = socket.socket()
    # Of what is sent the system keeps little on this side.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.settimeout(120)
    connection.connect((owner.http.base_url.host, owner.http.base_url.port))
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(content) + content
    )
    return connection


def test_a_request_whose_client_does_not_read_ends_when_it_is_cancelled(owner: Owner):
    body = ENDLESS | {"n": 8, "logprobs": 20}
    with closing(unread(owner, body)) as connection:
        owner.until(lambda: len(owner.get("requests")["data"]) == 1)
        (call,) = owner.get("requests")["data"]
        # Each is 1 KB or so; a system takes on 4 MB for a reader.
        owner.until(lambda: owner.get("requests")["data"][0]["tokens"] > 6_000)
        owner.post(f"requests/{call['id']}/cancel")
        deadline = time.monotonic() + 60
        owner.until(lambda: not owner.get("requests")["data"] or time.monotonic() > deadline)
        assert not owner.get("requests")["data"]
        record = owner.get("audit?limit=1")["data"][0]
        assert (record["request_id"], record["outcome"]) == (
            call["request_id"],
            "request_cancelled",
        )
        engine = owner.http.get("/debug/memory").json()["engines"]["a"]
        assert (engine["running"], engine["waiting"], engine["pages_held"]) == (0, 0, 0)
        told = b""
        while piece := connection.recv(1 << 20):
            told = told[-1000:] + piece
    assert b'"code":"request_cancelled"' in told.replace(b" ", b"")


def test_prompts_kept_for_reuse_are_forgotten(owner: Owner):
    owner.ask("a", prompt="x" * 200).raise_for_status()
    assert owner.post("prefix-cache/clear", {"model": "a"})["freed"]["a"] > 0
    assert owner.post("prefix-cache/clear")["freed"].keys() >= {"a"}
    assert owner.http.post("/v1/admin/prefix-cache/clear", headers=BEARER).is_success


def test_settings_are_read_again_when_asked_and_on_sighup(owner: Owner):
    owner.write('[models.a]\naliases = ["first"]\nttl = "10m"')
    assert owner.ask("first").status_code == 404
    assert owner.post("reload")["changed"] == ["a"]
    assert owner.ask("first").json()["model"] == "a"
    assert owner.model("a")["ttl_seconds"] == 600

    owner.write('[models.a]\naliases = ["second"]\nttl = "soon"')
    error = owner.post("reload", status=422)
    assert error["code"] == "invalid_settings"
    assert "models.toml: models.a.ttl: must be seconds" in error["message"]
    owner.process.send_signal(signal.SIGHUP)
    owner.until(lambda: "those in force stay" in owner.log.read_text())
    assert owner.ask("second").status_code == 404
    assert owner.ask("first").is_success

    owner.write('allow = ["a"]\n[models.a]\naliases = ["third"]\ncontext_length = 100')
    owner.process.send_signal(signal.SIGHUP)
    # Names are in force at once; a model that is made otherwise goes when nobody uses it.
    owner.until(lambda: owner.ask("third").is_success and owner.model("a")["context_length"] == 100)
    too_long = owner.ask("third", prompt="x" * 200)
    assert too_long.json()["error"]["code"] == "context_length_exceeded"
    assert owner.ask("b").status_code == 404
    assert "b" not in [model["id"] for model in owner.get("models")["data"]]
    owner.write("")
    owner.post("reload")


def test_nothing_is_read_again_while_one_of_the_files_is_broken(tmp_path: Path):
    models, keys = tmp_path / "models.toml", tmp_path / "keys.toml"
    models.write_text("")
    secret = add_key(keys, "alice", {})
    files = {"models_file": models, "api_keys_file": keys}
    with served_here(**files, admin_token=TOKEN) as http:
        models.write_text('[models."mlx-manager/demo"]\npinned = true')
        keys.write_text("[broken")
        refused = http.post("/v1/admin/reload", headers=BEARER)
        assert "keys.toml is not TOML" in refused.json()["error"]["message"]
        demo, *_ = http.get("/v1/admin/models", headers=BEARER).json()["data"]
        assert not demo["pinned"]
        assert http.get("/v1/models", headers={"x-api-key": secret}).is_success
        models.write_text(f"allow = {'[' * 5000}{']' * 5000}")
        add_key(keys.with_name("others"), "bob", {})
        keys.write_text(keys.with_name("others").read_text())
        refused = http.post("/v1/admin/reload", headers=BEARER)
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "invalid_settings")
        assert http.get("/v1/models", headers={"x-api-key": secret}).is_success


def test_draining_refuses_new_requests_until_it_is_revoked(owner: Owner):
    with owner.http.stream("POST", "/v1/completions", json=ENDLESS) as answer:
        lines = answer.iter_lines()
        next(line for line in lines if line.startswith("data: "))
        assert owner.post("drain") == {"draining": True, "running": 1, "seconds": 60}
        refused = owner.ask("a")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_not_ready")
        assert "retry-after" in refused.headers
        assert owner.http.get("/readyz").status_code == 503
        assert owner.http.get("/livez").status_code == 200
        # What runs goes on.
        assert next(line for line in lines if line.startswith("data: "))
        revoked = owner.http.delete("/v1/admin/drain", headers=BEARER)
        assert revoked.json()["draining"] is False
        assert owner.ask("a").is_success
        (call,) = owner.get("requests")["data"]
        owner.post(f"requests/{call['id']}/cancel")
        assert "request_cancelled" in [line for line in lines if line][-1]
