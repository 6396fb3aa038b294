"""First attempts of a person with a new server, with real models.

The models are the embedded one, and SmolLM2-135M where its package is installed.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import live_server

pytest.importorskip("logfire", reason="the logfire extra is not installed")

from observability.collector import Collector, collecting

from mlx_manager import demo_model

CHAT = "/v1/chat/completions"
DEFAULT = "mlx-manager/demo"
ENOUGH, ENDLESS = 100, 8000
"""Tokens that no answer here needs, and that take a while."""
RUNNING = re.compile(r"^mlx_manager_num_requests_running\S* (\S+)", re.MULTILINE)
MEMORY = r"memory: \d+\.\d\d GB active, \d+\.\d\d GB peak, \d+\.\d\d GB cache"


@dataclass(frozen=True, slots=True)
class Real:
    """A model that no server has loaded when it starts, and a question that it can answer."""

    name: str
    question: str
    answer: str


EMBEDDED = Real("a-copy", "How do I start the server?", "serve")
SMOLLM2 = Real("smollm2", "What is the capital of France?", "Paris")


@dataclass(frozen=True, slots=True)
class Story:
    """Record of a server from its start to its end. before, after: of the model in `/v1/models`."""

    real: Real
    health: httpx.Response
    before: dict[str, Any]
    answer: dict[str, Any]
    after: dict[str, Any]
    pieces: list[str]
    running_at_first_piece: float
    log: str
    collector: Collector


def card(client: httpx.Client, name: str) -> dict[str, Any]:
    [found] = [card for card in client.get("/v1/models").json()["data"] if card["id"] == name]
    return found


def asked(real: Real, **fields: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": real.question}]
    return {"model": real.name, "messages": said, "temperature": 0, **fields}


def streamed(client: httpx.Client, real: Real, whole: str) -> tuple[list[str], float]:
    """The texts of a stream's chunks until they are `whole` and more than two, and how many
    requests ran when the first had come. The client hangs up long before the stream would end."""
    body = asked(real, max_tokens=ENDLESS, ignore_eos=True, stream=True)
    pieces: list[str] = []
    running = 0.0
    with client.stream("POST", CHAT, json=body) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                if text := choice["delta"].get("content"):
                    if not pieces:
                        running = sum(map(float, RUNNING.findall(client.get("/metrics").text)))
                    pieces.append(text)
            if len(pieces) > 2 and len("".join(pieces)) >= len(whole):
                break
    return pieces, running


@pytest.fixture(scope="module", params=[EMBEDDED, SMOLLM2], ids=["embedded", "smollm2"])
def story(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Story:
    real: Real = request.param
    models = tmp_path_factory.mktemp("models")
    if real is SMOLLM2:
        (models / real.name).symlink_to(request.getfixturevalue("smollm2"))
    else:
        shutil.copytree(Path(demo_model.__file__).parent, models / real.name)
    log = models / "log.txt"
    traced = {"logfire_enabled": "true"}
    with (
        collecting() as collector,
        live_server(log, models_dir=models, otlp_endpoint=collector.url, **traced) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        health = client.get("/health")
        before = card(client, real.name)
        answer = client.post(CHAT, json=asked(real, max_tokens=ENOUGH)).raise_for_status().json()
        after = card(client, real.name)
        pieces, running = streamed(client, real, answer["choices"][0]["message"]["content"])
    text = log.read_text()
    return Story(real, health, before, answer, after, pieces, running, text, collector)


def test_the_server_starts_and_is_healthy(story: Story):
    assert story.health.status_code == 200
    assert story.health.json()["status"] == "healthy"


def test_a_model_is_loaded_by_the_first_request_for_it(story: Story):
    assert story.before["state"] == "loadable"
    assert story.after["state"] == "loaded"
    assert story.answer["model"] == story.real.name


def test_the_list_of_models_shows_what_a_load_has_changed(story: Story):
    assert story.before["id"] == story.after["id"] == story.real.name
    assert "engine" not in story.before
    assert story.after["engine"]["forward"]
    assert story.after["weights"]["dtype"] == "float32"
    assert story.after["bytes"] > 0
    assert story.before["context_length"] == story.after["context_length"] > ENOUGH


def test_the_answer_is_the_models_and_a_stop_token_ends_it(story: Story):
    [choice] = story.answer["choices"]
    assert story.real.answer in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"
    assert story.answer["usage"]["completion_tokens"] < ENOUGH


def test_chunks_arrive_one_by_one_while_the_answer_is_made(story: Story):
    assert story.running_at_first_piece == 1
    text = story.answer["choices"][0]["message"]["content"]
    assert "".join(story.pieces).startswith(text)
    assert len(story.pieces) > 2


def test_logfire_gets_a_span_of_each_call_and_of_the_load_that_it_waited_for(story: Story):
    calls = story.collector.named(f"chat {story.real.name}")
    assert len(calls) == 2
    phases = [
        [
            span.name
            for span in sorted(story.collector.spans, key=lambda span: span.start_time_unix_nano)
            if span.parent_span_id == call.span_id
        ]
        for call in sorted(calls, key=lambda call: call.start_time_unix_nano)
    ]
    rest = ["queue", "prefill", "decode"]
    assert phases == [["queue", "load", *rest], rest]


def test_the_log_tells_memory_at_the_start_and_each_load_in_words(story: Story):
    assert "Traceback" not in story.log
    [start] = [line for line in story.log.splitlines() if "ready to load models" in line]
    assert re.search(MEMORY, start)
    for name in (DEFAULT, story.real.name):
        [load] = [line for line in story.log.splitlines() if f"{name} is loaded" in line]
        assert re.search(rf"in \d+\.\d s: \d+\.\d\d GB of weights, .*{MEMORY}", load)
