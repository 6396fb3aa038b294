from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted import says

from mlx_manager.mlx_server.api.auth import check_bind, duration
from mlx_manager.mlx_server.config import MLXServerSettings
from mlx_manager.mlx_server.errors import MLXManagerError
from mlx_manager.mlx_server.services.keys import add_key

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
MESSAGE = CHAT | {"max_tokens": 9}


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


@pytest.mark.parametrize("headers", [bearer("secret"), {"x-api-key": "secret"}])
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/messages", MESSAGE)]
)
async def test_both_headers_open_both_protocols(
    serve: Any, headers: dict[str, str], path: str, body: dict[str, Any]
):
    async with serve(api_key="secret") as client:
        assert (await client.post(path, json=body, headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [{}, bearer("wrong"), {"x-api-key": "secre"}, {"authorization": "Basic secret"}, bearer("")],
)
async def test_without_the_key_the_answer_is_401_in_the_protocols_shape(
    serve: Any, headers: dict[str, str]
):
    async with serve(api_key="secret") as client:
        openai = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
        anthropic = await client.post("/v1/messages", json=MESSAGE, headers=headers)
    assert (openai.status_code, anthropic.status_code) == (401, 401)
    assert openai.json()["error"]["code"] == "invalid_api_key"
    assert openai.json()["error"]["type"] == "authentication_error"
    assert anthropic.json()["type"] == "error"
    assert anthropic.json()["error"]["type"] == "authentication_error"
    assert openai.headers["www-authenticate"] == "Bearer"
    assert openai.headers["x-request-id"]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models",
        "/v1/responses/x",
        "/debug/memory",
        "/docs",
        "/openapi.json",
        "/metrics",
        "/tokenize",
        "/nothing",
        "//health",
        "/health/",
        "/v1/admin",
        "/v1/admin/../models",
        "/v1/admin/%2e%2e/models",
    ],
)
async def test_everything_but_health_is_closed(serve: Any, path: str):
    async with serve(api_key="secret") as client:
        answer = await client.get(httpx.URL("http://server", raw_path=path.encode()))
        assert (await client.get("/health")).status_code == 200
    # The admin paths have a token of their own: here there is none, and this is no loopback address.
    assert answer.status_code in ({401, 403} if path.startswith("/v1/admin/") else {401})


async def test_metrics_can_be_opened(serve: Any):
    async with serve(api_key="secret", open_metrics=True) as client:
        assert (await client.get("/metrics")).status_code != 401
        assert (await client.get("/v1/models")).status_code == 401


async def test_rates_are_told_in_headers_and_enforced(serve: Any, tmp_path: Path):
    file = tmp_path / "keys.toml"
    alice = bearer(add_key(file, "alice", {"requests_per_minute": 2, "tokens_per_minute": 100}))
    bob = bearer(add_key(file, "bob", {}))

    def script(_: object) -> Any:
        return says("a", "b", prompt_tokens=10)

    async with serve(script, api_keys_file=file) as client:
        first = await client.post("/v1/chat/completions", json=CHAT, headers=alice)
        second = await client.post("/v1/messages", json=MESSAGE, headers=alice)
        third = await client.post("/v1/chat/completions", json=CHAT, headers=alice)
        other = await client.post("/v1/chat/completions", json=CHAT, headers=bob)
        listed = await client.get("/v1/models", headers=alice)
    assert [first.status_code, second.status_code, third.status_code] == [200, 200, 429]
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-reset-requests"] == "30s"
    assert first.headers["x-ratelimit-remaining-tokens"] == "88"
    assert second.headers["anthropic-ratelimit-requests-remaining"] == "0"
    assert second.headers["anthropic-ratelimit-tokens-reset"].endswith("Z")
    assert third.json()["error"]["code"] == "rate_limit_exceeded"
    assert int(third.headers["retry-after"]) in (29, 30)
    assert third.headers["x-ratelimit-remaining-requests"] == "0"
    assert other.status_code == 200
    assert not [name for name in other.headers if "ratelimit" in name]
    assert listed.status_code == 200


async def test_a_stored_response_is_its_keys_own(serve: Any, tmp_path: Path):
    file = tmp_path / "keys.toml"
    alice, bob = (bearer(add_key(file, name, {})) for name in ("alice", "bob"))
    async with serve(api_keys_file=file) as client:
        made = await client.post("/v1/responses", json={"input": "hi"}, headers=alice)
        path = f"/v1/responses/{made.json()['id']}"
        again = {"input": "and?", "previous_response_id": made.json()["id"]}
        [item] = made.json()["output"]
        referring = {"input": [{"type": "item_reference", "id": item["id"]}]}
        for request in (
            client.get(path, headers=bob),
            client.get(f"{path}/input_items", headers=bob),
            client.delete(path, headers=bob),
            client.post("/v1/responses", json=again, headers=bob),
            client.post("/v1/responses", json=referring, headers=bob),
        ):
            assert (await request).status_code == 404
        for body in (again, referring):
            assert (await client.post("/v1/responses", json=body, headers=alice)).status_code == 200
        assert (await client.delete(path, headers=alice)).status_code == 200


async def test_a_priority_beyond_the_keys_is_refused_by_name(serve: Any, tmp_path: Path):
    file = tmp_path / "keys.toml"
    alice = bearer(add_key(file, "alice", {"priority": 0}))
    async with serve(api_keys_file=file) as client:
        path = "/v1/chat/completions"
        refused = await client.post(path, json=CHAT | {"priority": -1}, headers=alice)
        taken = await client.post(path, json=CHAT | {"priority": 1}, headers=alice)
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, "priority")
    assert taken.status_code == 200


async def test_a_key_that_comes_later_needs_no_priority_in_its_requests(serve: Any, tmp_path: Path):
    file = tmp_path / "keys.toml"
    later = bearer(add_key(file, "later", {"priority": 5}))
    async with serve(api_keys_file=file) as client:
        for path in ("/v1/chat/completions", "/v1/messages"):
            assert (await client.post(path, json=MESSAGE, headers=later)).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example"])
async def test_a_site_whose_name_leads_here_gets_nothing_without_a_key(serve: Any, host: str):
    async with serve() as client:
        refused = await client.get("/v1/models", headers={"host": host})
        assert refused.status_code == 403
        assert "MLX_SERVER_ALLOWED_HOSTS" in refused.json()["error"]["message"]
    for settings in ({"allowed_hosts": host.partition(":")[0]}, {"open_access": True}):
        async with serve(**settings) as client:
            answer = await client.get("/v1/models", headers={"host": host})
            assert answer.status_code == 200


@pytest.mark.parametrize(
    ("listed", "host"),
    [
        ("LLM.Example.com", "llm.example.com"),
        ("llm.example.com.", "LLM.example.com:8000"),
        ("bücher.example", "xn--bcher-kva.example"),
    ],
)
async def test_a_name_is_listed_however_it_is_written(serve: Any, listed: str, host: str):
    async with serve(allowed_hosts=f"other.example, {listed}") as client:
        assert (await client.get("/v1/models", headers={"host": host})).status_code == 200


@pytest.mark.parametrize("hosts", ["*", "*.example.com", "a.example:8000", "http://a.example", "."])
def test_what_is_no_name_of_a_host_is_refused(hosts: str):
    with pytest.raises(ValueError, match="no name of a host"):
        MLXServerSettings(allowed_hosts=hosts)


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8000", "localhost", "[::1]:80", "[::1]", "llm", "a.localhost"]
)
async def test_addresses_and_local_names_are_answered(serve: Any, host: str):
    async with serve() as client:
        assert (await client.get("/v1/models", headers={"host": host})).status_code == 200


async def test_pages_of_other_sites_read_nothing_unless_they_are_listed(serve: Any):
    asks = {
        "origin": "https://app.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }
    async with serve() as client:
        answer = await client.get("/v1/models", headers={"origin": "https://app.example"})
        assert "access-control-allow-origin" not in answer.headers
        assert (await client.options("/v1/chat/completions", headers=asks)).status_code == 405
    async with serve(cors_origins="https://app.example", api_key="secret") as client:
        allowed = await client.options("/v1/chat/completions", headers=asks)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://app.example"
        assert "x-stainless-os" in allowed.headers["access-control-allow-headers"]
        refused = await client.options(
            "/v1/chat/completions", headers=asks | {"origin": "https://b.example"}
        )
        assert refused.status_code == 400
        # A page must be able to read why it is refused.
        closed = await client.get("/v1/models", headers={"origin": "https://app.example"})
        assert closed.status_code == 401
        assert closed.headers["access-control-allow-origin"] == "https://app.example"


@pytest.mark.parametrize(
    ("listed", "origin"),
    [
        ("https://App.Example", "https://app.example"),
        ("HTTPS://app.example:443", "https://app.example"),
        ("http://app.example:80", "http://app.example"),
        ("http://app.example:443", "http://app.example:443"),
        ("https://bücher.example:8443", "https://xn--bcher-kva.example:8443"),
        ("http://[::1]:8080", "http://[::1]:8080"),
        ("chrome-extension://AbC", "chrome-extension://AbC"),
        ("*", "https://any.example"),
    ],
)
async def test_an_origin_is_listed_however_it_is_written(serve: Any, listed: str, origin: str):
    async with serve(cors_origins=listed) as client:
        answer = await client.get("/v1/models", headers={"origin": origin})
        assert answer.headers["access-control-allow-origin"] in ("*", origin)


@pytest.mark.parametrize("origins", ["example.com", "https://a.example/", "https://"])
def test_what_is_no_origin_is_refused(origins: str):
    with pytest.raises(ValueError, match="no origin"):
        MLXServerSettings(cors_origins=origins)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "myhost"])
def test_others_can_be_let_in_only_with_a_key_or_by_intent(host: str):
    with pytest.raises(MLXManagerError, match="MLX_SERVER_API_KEY") as refused:
        check_bind(MLXServerSettings(host=host).access)
    assert "MLX_SERVER_OPEN_ACCESS" in refused.value.message
    check_bind(MLXServerSettings(host=host, api_key="secret").access)
    check_bind(MLXServerSettings(host=host, open_access=True).access)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_this_machine_alone_needs_no_key(host: str):
    check_bind(MLXServerSettings(host=host).access)


def test_durations_are_written_as_openai_does():
    assert [duration(s) for s in (0, 0.25, 1, 12.2, 60, 375)] == [
        "0s",
        "250ms",
        "1s",
        "13s",
        "1m0s",
        "6m15s",
    ]
