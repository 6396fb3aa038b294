"""Presets: names that share a model's engine, and lay the owner's defaults over requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from here import served_here

from mlx_manager.mlx_server.config import DEMO_MODEL as DEMO
from mlx_manager.mlx_server.config import EMBEDDED

SETTINGS = f"""
[models.brief]
base = "{DEMO}"
system = "The user's name is Ada."
sampling = {{ temperature = 0 }}
context_length = 200

[models.other]
base = "{DEMO}"
template_args = {{ odd = "x" }}
thinking_budget = 3
"""
STOP = "How do I stop the server?"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    file = tmp_path_factory.mktemp("presets") / "models.toml"
    file.write_text(SETTINGS)
    with served_here(models_file=file) as client:
        yield client


def chat(client: httpx.Client, model: str, text: str = STOP, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    body = {"model": model, "messages": messages, "temperature": 0, **more}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_presets_are_listed_beside_their_base(client: httpx.Client):
    cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
    assert cards.keys() == {*EMBEDDED, "brief", "other"}
    assert {cards[name]["state"] for name in (DEMO, "brief", "other")} == {"loaded"}
    assert cards["brief"]["root"] == cards["other"]["root"] == DEMO
    assert cards["brief"]["context_length"] == 200
    assert cards[DEMO]["context_length"] == 8192


def test_a_preset_is_answered_by_its_bases_engine(client: httpx.Client):
    chat(client, "other")
    admin = client.get("/v1/admin/models").json()["data"]
    memory = {model["id"]: model["memory"] for model in admin}
    assert memory[DEMO]
    assert not memory["other"]
    assert 'model_loads_total{model_name="other"}' not in client.get("/metrics").text


def test_a_preset_shares_its_bases_prefixes(client: httpx.Client):
    text = "Please remember this long beginning of a question, word by word. " * 3 + STOP
    chat(client, DEMO, text)
    usage = chat(client, "other", text)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 16


@pytest.mark.parametrize("name", ["brief", f"{DEMO}:brief"])
def test_its_system_text_comes_before_the_requests(client: httpx.Client, name: str):
    assert chat(client, name, "What is my name?")["choices"][0]["message"]["content"] == (
        "Your name is Ada."
    )
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    shown = client.post("/v1/apply-template", json={"model": name, "messages": messages}).text
    assert shown.index("Ada") < shown.index("Be kind.")
    counted = [
        client.post("/v1/messages/count_tokens", json={"model": each, "messages": messages[1:]})
        for each in (name, DEMO)
    ]
    with_system, without = (answer.json()["input_tokens"] for answer in counted)
    assert with_system > without


def test_its_context_is_the_limit(client: httpx.Client):
    messages = [{"role": "user", "content": "one two three four " * 60}]
    body = {"model": "brief", "messages": messages}
    refused = client.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert "200" in refused.json()["error"]["message"]
    assert client.post("/v1/chat/completions", json={**body, "model": DEMO}).status_code == 200
    long = chat(client, "brief", ignore_eos=True)
    assert long["usage"]["total_tokens"] == 200


def test_a_preset_that_is_not_there_is_not_found(client: httpx.Client):
    body = {"model": f"{DEMO}:none", "messages": [{"role": "user", "content": "x"}]}
    assert client.post("/v1/chat/completions", json=body).status_code == 404


def test_several_answers_share_their_prompt(client: httpx.Client):
    found = chat(client, "brief", n=3)
    assert len({choice["message"]["content"] for choice in found["choices"]}) == 1
