"""Prompts that others must not find: a request's `cache_salt`, and keys with prefixes of their own.

Each test has a prompt of its own, so that nothing is found that another test has kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from here import served_here

from mlx_manager.mlx_server.services.keys import add_key

DEMO = "mlx-manager/demo"


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with served_here() as client:
        yield client


def text_of(name: str) -> str:
    return f"Of {name}. " + "What is to be told of it, and of what is beside it? " * 12


def asked(client: httpx.Client, path: str, body: dict[str, Any], **how: Any) -> dict[str, Any]:
    answer = client.post(path, json={"model": DEMO, "stream": False} | body, **how)
    assert answer.status_code == 200, answer.text
    assert "x-unknown-fields" not in answer.headers
    found: dict[str, Any] = answer.json()
    return found


def chat(client: httpx.Client, text: str, how: dict[str, Any], **more: Any) -> int:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1, **how}
    usage = asked(client, "/v1/chat/completions", body, **more)["usage"]
    cached: int = usage["prompt_tokens_details"]["cached_tokens"]
    return cached


def completion(client: httpx.Client, text: str, how: dict[str, Any]) -> int:
    usage = asked(client, "/v1/completions", {"prompt": text, "max_tokens": 1, **how})["usage"]
    cached: int = usage["prompt_tokens_details"]["cached_tokens"]
    return cached


def response(client: httpx.Client, text: str, how: dict[str, Any]) -> int:
    body = {"input": text, "max_output_tokens": 1, "store": False, **how}
    cached: int = asked(client, "/v1/responses", body)["usage"]["input_tokens_details"][
        "cached_tokens"
    ]
    return cached


def message(client: httpx.Client, text: str, how: dict[str, Any]) -> int:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1, **how}
    cached: int = asked(client, "/v1/messages", body)["usage"]["cache_read_input_tokens"]
    return cached


def ollama(client: httpx.Client, text: str, how: dict[str, Any]) -> int:
    """Return the cached tokens by what the metrics count, as Ollama's answers do not tell them."""
    before = hits(client)
    body = {"prompt": text, "options": {"num_predict": 1, **how}}
    asked(client, "/api/generate", body)
    return hits(client) - before


def hits(client: httpx.Client) -> int:
    lines = client.get("/metrics").text.splitlines()
    (line,) = (each for each in lines if each.startswith("mlx_manager_prefix_cache_hits_total{"))
    return int(float(line.rpartition(" ")[2]))


@pytest.mark.parametrize("cached", [chat, completion, response, message, ollama])
def test_a_prompt_is_found_by_those_with_its_salt_alone(
    client: httpx.Client, cached: Callable[..., int]
) -> None:
    text = text_of(cached.__name__)
    assert cached(client, text, {"cache_salt": "a"}) < 16
    assert cached(client, text, {"cache_salt": "a"}) > 100
    assert cached(client, text, {"cache_salt": "b"}) == 0
    assert cached(client, text, {}) < 16
    assert cached(client, text, {}) > 100
    assert cached(client, text, {"cache_salt": "b"}) > 100


def test_answers_to_one_prompt_share_it_whatever_its_salt(client: httpx.Client) -> None:
    before = hits(client)
    body = {"prompt": text_of("several"), "max_tokens": 1, "n": 3, "cache_salt": "n"}
    asked(client, "/v1/completions", body)
    # All but the first find the pages that it fills.
    assert hits(client) - before > 2 * 100


def test_the_owner_is_told_that_the_salt_was_another(client: httpx.Client) -> None:
    text = text_of("why")
    chat(client, text, {"cache_salt": "one"})
    chat(client, text, {"cache_salt": "another"})
    with client.stream("GET", "/v1/admin/events") as events:
        state = next(line for line in events.iter_lines() if line.startswith("data: {"))
    assert "cache_salt is another than in every prompt that was kept" in state
    assert '"one"' not in state


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": "x", "cache_salt": ""}, "cache_salt"),
        ("/v1/chat/completions", {"messages": [], "cache_salt": 5}, "cache_salt"),
        ("/v1/responses", {"input": "x", "cache_salt": "x" * 1025}, "cache_salt"),
        ("/api/generate", {"prompt": "x", "options": {"cache_salt": ""}}, "options.cache_salt"),
    ],
)
def test_a_salt_that_is_none_is_refused(
    client: httpx.Client, path: str, body: dict[str, Any], field: str
) -> None:
    answer = client.post(path, json={"model": DEMO} | body)
    assert answer.status_code in (400, 422)
    assert f"`{field}`" in answer.text


def test_a_key_with_own_prefixes_finds_its_own_and_nobody_else_does(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    limits: dict[str, dict[str, Any]] = {
        **{"alice": {"own_prefixes": True}, "bob": {"own_prefixes": True}},
        **{"carol": {}, "dave": {"own_prefixes": False}},
    }
    headers = {
        name: {"authorization": f"Bearer {add_key(file, name, of)}"} for name, of in limits.items()
    }
    with served_here(api_keys_file=file) as client:

        def cached(name: str, **how: Any) -> int:
            return chat(client, text_of("keys"), how, headers=headers[name])

        assert cached("alice") == 0
        assert cached("alice") > 100
        assert cached("bob") == 0
        assert cached("carol") == 0
        assert cached("dave") > 100
        # A salt that is made up to be another key's is no such thing.
        assert cached("carol", cache_salt="alice\0") == 0
        assert cached("alice", cache_salt="x") == 0
        assert cached("alice", cache_salt="x") > 100
        assert cached("bob", cache_salt="x") == 0


def test_the_setting_holds_for_keys_that_say_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    limits: dict[str, dict[str, Any]] = {
        **{"alice": {}, "bob": {}},
        **{"carol": {"own_prefixes": False}, "dave": {"own_prefixes": False}},
    }
    headers = {
        name: {"authorization": f"Bearer {add_key(file, name, of)}"} for name, of in limits.items()
    }
    with served_here(api_keys_file=file, key_own_prefixes=True) as client:

        def cached(name: str) -> int:
            return chat(client, text_of("keys"), {}, headers=headers[name])

        assert cached("alice") == 0
        assert cached("bob") == 0
        assert cached("alice") > 100
        assert cached("carol") == 0
        assert cached("dave") > 100
