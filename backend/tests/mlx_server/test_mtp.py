"""MTP heads over HTTP: in the model's folder or named by the owner, tried, counted and unloaded."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import mlx.core as mx
import pytest
from engine.speculation.test_head import right_head
from here import check_refusal
from live import PROGRAM, LiveServer, live_server
from test_speculation import said
from thorough import one_in_turn, slow
from tiny_models import add_mtp_head, make_tiny_model, replace_weights

SETTINGS = """
[models.beside]
base = "./models/glm"
mtp = "./models/head"

[models.without]
base = "./models/deepseek"
mtp = "off"

[models.another]
base = "./models/deepseek"
mtp = "glm"

[models.named]
base = "./models/deepseek"
mtp = "./models/broken"

[models.missing]
base = "./models/deepseek"
mtp = "owner/not-here"
"""
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 5, "top_p": 0.9},
    "penalised": {"temperature": 0.7, "seed": 6, "frequency_penalty": 0.5},
    "scored": {"temperature": 0, "logprobs": True, "top_logprobs": 2},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("mtp")
    models = folder / "models"
    right_head(models / "right", by_states=True)
    add_mtp_head(make_tiny_model(models / "deepseek", "deepseek_v3"))
    add_mtp_head(make_tiny_model(models / "glm", "glm4_moe_lite"), beside=models / "head")
    add_mtp_head(make_tiny_model(models / "qwen", "qwen3_5"))
    # Its product gives no numbers.
    broken = make_tiny_model(models / "broken", "deepseek_v3")
    add_mtp_head(broken)
    tensors = mx.load(str(broken / "model.safetensors"))
    tensors["model.layers.2.eh_proj.weight"] *= mx.nan
    replace_weights(broken, tensors)
    file = folder / "models.toml"
    file.write_text(SETTINGS)
    with live_server(
        folder / "log", models_file=file, models_dir=models, speculation="on", max_models=5
    ) as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def ask(client: httpx.Client, model: str, text: str = "hello", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    body = {"model": model, "messages": messages, "max_tokens": 16, **fields}
    answer = client.post("/v1/chat/completions", json=body)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def described(client: httpx.Client, name: str) -> dict[str, Any]:
    models = client.get("/v1/admin/models").json()["data"]
    found: dict[str, Any] = next(model for model in models if model["id"] == name)
    return found


@pytest.mark.parametrize(("way", "model"), one_in_turn([*WAYS], ["deepseek", "beside", "qwen"]))
def test_an_answer_is_the_same_with_a_head(client: httpx.Client, way: str, model: str) -> None:
    plain = ask(client, model, **WAYS[way], speculation="off")
    assert said(ask(client, model, **WAYS[way])) == said(plain)
    assert described(client, model)["drafts"]["mtp"]["tried"] > 0


def test_streams_beside_each_other_get_the_answers_that_they_get_alone(
    client: httpx.Client,
) -> None:
    texts = [f"{i} " * (3 * i + 1) for i in range(4)]
    ways = [list(WAYS.values())[i % 3] for i in range(4)]

    def answers(**fields: Any) -> Iterator[Any]:
        with ThreadPoolExecutor(4) as threads:
            jobs = [
                threads.submit(ask, client, "deepseek", text, **way, **fields)
                for text, way in zip(texts, ways, strict=True)
            ]
            yield from (said(job.result()) for job in jobs)

    assert list(answers()) == list(answers(speculation="off"))


def test_all_that_a_right_head_guesses_is_accepted(
    server: LiveServer, client: httpx.Client
) -> None:
    ask(client, "right", temperature=0, max_tokens=40)
    model = described(client, "right")
    assert model["mtp"] == "right"
    assert model["draft_model"] is None
    assert model["memory"]["draft"] > 0
    tried = model["drafts"]["mtp"]
    assert tried["accepted"] == tried["tried"] > 8
    for what, counted in (("draft", "tried"), ("accepted", "accepted")):
        line = f'mlx_manager_{what}_tokens_by_method_total{{method="mtp",model_name="right"}}'
        assert f"{line} {float(tried[counted])}" in client.get("/metrics").text
    shown = subprocess.run(
        [PROGRAM, "ps", "--url", server.url], capture_output=True, text=True, check=True
    ).stdout
    assert any(
        line.split()[:1] == ["right"] and "its MTP head" in line for line in shown.splitlines()
    )


def test_a_head_of_another_folder_is_shown_by_its_name(client: httpx.Client) -> None:
    ask(client, "beside", max_tokens=2)
    assert described(client, "beside")["mtp"].endswith("models/head")
    gone = client.post("/v1/admin/models/unload", json={"model": "beside"}).json()
    assert gone["memory_after"] < gone["memory_before"]
    assert described(client, "beside")["memory"] == {}


@slow
def test_a_model_may_do_without_its_head(client: httpx.Client) -> None:
    ask(client, "without", temperature=0)
    model = described(client, "without")
    assert (model["mtp"], "draft" in model["memory"]) == (None, False)


def test_a_model_whose_head_can_not_be_run_is_loaded_without(client: httpx.Client) -> None:
    ask(client, "broken", max_tokens=2)
    model = described(client, "broken")
    assert (model["mtp"], "draft" in model["memory"]) == (None, False)


@pytest.mark.parametrize(
    ("model", "status", "words"),
    [
        ("another", 400, ["glm has no MTP head that drafts for another", "mtp"]),
        pytest.param("named", 400, ["has no MTP head that drafts for named", "mtp"], marks=slow),
        ("missing", 404, ["owner/not-here", "has not been downloaded"]),
    ],
)
def test_what_has_no_head_for_the_model_is_refused_by_name(
    client: httpx.Client, model: str, status: int, words: list[str]
) -> None:
    check_refusal(client, model, status, words)
