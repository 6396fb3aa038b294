"""Keys and values in 8 bits: over HTTP, as the setting of single models, and on real weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest
from here import served_here
from mlx_lm.utils import load_model, load_tokenizer
from thorough import slow
from tiny_models import make_tiny_model

from mlx_manager.mlx_server.devices.cpu.blas import load_fast_blas
from mlx_manager.mlx_server.engine.kv.pages import PageTable
from mlx_manager.mlx_server.execution.attention.paged import KeyAccess, Span
from mlx_manager.mlx_server.execution.forward import Chunk, Forward
from mlx_manager.mlx_server.execution.module.ragged import RaggedForward

DEMO = "mlx-manager/demo"
SETTINGS = f"""
[models.eight]
base = "{DEMO}"
kv_bits = 8

[models.drafted]
base = "{DEMO}"
kv_bits = 8
draft_model = "{DEMO}"

[models.latent]
kv_bits = 8
"""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 5, "top_p": 0.9},
    "penalised": {"temperature": 0.7, "seed": 6, "frequency_penalty": 0.5},
    "schema": {
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    },
    "several": {"temperature": 1.0, "seed": 7, "n": 2},
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("kv_bits")
    (folder / "models.toml").write_text(SETTINGS)
    make_tiny_model(folder / "models" / "latent", "deepseek_v3")
    settings = {"models_file": folder / "models.toml", "models_dir": folder / "models"}
    with served_here(speculation="on", **settings) as client:
        yield client


def chat(client: httpx.Client, model: str, content: Any, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    body = {"model": model, "messages": messages, "max_tokens": 24} | more
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["message"]["content"] for choice in answer["choices"]]


def shown(client: httpx.Client, model: str) -> dict[str, Any]:
    models: list[dict[str, Any]] = client.get("/v1/admin/models").json()["data"]
    return next(each for each in models if each["id"] == model)


def test_the_bytes_of_a_token_are_shown_beside_those_of_the_same_model_in_16_bits(
    client: httpx.Client,
) -> None:
    for model in (DEMO, "eight"):
        chat(client, model, "Hello!")
    plain, eight = shown(client, DEMO), shown(client, "eight")
    numbers = 2 * 2 * 64 * 5
    # A CPU has 32 bits where others have 16.
    assert (plain["kv_format"], plain["kv_token_bytes"]) == ("float32", 4 * numbers)
    assert (eight["kv_format"], eight["kv_token_bytes"]) == ("int8/64", numbers + 2 * numbers // 64)


@pytest.mark.parametrize("way", WAYS)
def test_answers_in_company_are_those_that_come_alone(client: httpx.Client, way: str) -> None:
    questions = ["How do I stop the server?", "What is a KV page?", "Name a port."]
    apart = [texts(chat(client, "eight", question, **WAYS[way])) for question in questions]
    with ThreadPoolExecutor() as threads:
        together = threads.map(
            lambda question: chat(client, "eight", question, **WAYS[way]), questions * 2
        )
        # The second time, a prompt's beginning is found in pages.
        assert [texts(answer) for answer in together] == apart * 2


def test_a_long_prompt_is_found_in_pages_and_answered_alike(client: httpx.Client) -> None:
    question = "Which of these is a port? " + " ".join(map(str, range(300)))
    first, second = (chat(client, "eight", question, temperature=0) for _ in range(2))
    assert texts(first) == texts(second)
    assert first["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0) < 64
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 500


def test_a_draft_model_whose_pages_are_not_in_8_bits_changes_no_answer(
    client: httpx.Client,
) -> None:
    question = "How do I stop the server?"
    apart = chat(client, "eight", question, temperature=0)
    drafted = chat(client, "drafted", question, temperature=0)
    assert texts(drafted) == texts(apart)
    found = shown(client, "drafted")
    assert (found["draft_model"], found["kv_format"]) == (DEMO, "int8/64")
    assert found["acceptance"] > 0


def test_a_model_that_keeps_latent_vectors_is_refused_by_name(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Hello!"}]
    answer = client.post("/v1/chat/completions", json={"model": "latent", "messages": messages})
    assert answer.status_code >= 400
    message = answer.json()["error"]["message"]
    assert "8 bits: what its layers keep is latent vectors" in message
    assert "kv_bits = 16" in message


def perplexity(forward: Forward, tokens: list[list[int]]) -> float:
    """Perplexity of all tokens but the first of each text, the texts processed in one step."""
    size = max(map(len, tokens))
    pages = -(-size // 16)
    for store in forward.stores:
        store.resize(pages * len(tokens))
    tables = [PageTable(range(i * pages, (i + 1) * pages)) for i in range(len(tokens))]
    chunks = [
        Chunk(i, Span(table, len(text), len(text)), text, final=True, every=True)
        for i, (table, text) in enumerate(zip(tables, tokens, strict=True))
    ]
    logits = forward.run(None, chunks).astype(mx.float32)
    mx.eval([*forward.state(), logits])
    chances = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    lost, first = [], 0
    for text in tokens:
        own = chances[first : first + len(text) - 1]
        lost += mx.take_along_axis(own, mx.array(text[1:])[:, None], axis=1)[:, 0].tolist()
        first += len(text)
    for store in forward.stores:
        store.resize(0)
    return math.exp(-sum(lost) / len(lost))


DOCS = Path(__file__).parents[3] / "docs"


# A longer text, of which later tokens read many keys.
@pytest.mark.parametrize("length", [128, pytest.param(768, marks=slow)])
def test_perplexity_of_a_real_model_stays_within_half_a_percent(smollm2: Path, length: int) -> None:
    load_fast_blas()
    model, _ = load_model(smollm2)
    model.set_dtype(mx.float32)
    tokenizer = load_tokenizer(smollm2)
    texts = [(DOCS / name).read_text() for name in ("operations.md", "security.md")]
    tokens = [tokenizer.encode(text[: 10 * length])[:length] for text in texts]
    assert [len(text) for text in tokens] == [length] * 2
    forward = RaggedForward(model, 16, KeyAccess.PAGES)
    plain = perplexity(forward, tokens)
    forward.keep_in_8_bits()
    assert perplexity(forward, tokens) == pytest.approx(plain, rel=0.005)
    assert 5 < plain < 100
