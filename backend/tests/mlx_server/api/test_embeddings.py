"""/v1/embeddings and /v1/rerank as clients use them: OpenAI's SDK, and plain bodies."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import pytest_asyncio
from here import start_here
from openai_spec import check
from tiny_encoders import (
    ASKED,
    EMBEDDERS,
    JUDGES,
    QUERY,
    RERANKERS,
    SAID,
    make_tiny_encoder,
    make_tiny_judge,
    type_of,
)

from mlx_manager.mlx_server.api.respond import BLOCK
from mlx_manager.mlx_server.config import MLXServerSettings
from mlx_manager.mlx_server.main import create_app

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL, RERANKER = "bert", "judge"
FAMILIES = [name for name in EMBEDDERS if name == type_of(name)]
EXPECTED = json.loads((Path(__file__).parent.parent / "references/tiny_encoders.json").read_text())
TEXTS = ["hello world", "a", "Grüße, 世界!"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    folder = tmp_path_factory.mktemp("models")
    make_tiny_encoder(folder / MODEL)
    make_tiny_encoder(folder / RERANKER, reranker=True)
    for name in FAMILIES:
        make_tiny_encoder(folder / name, type_of(name), **EMBEDDERS[name])
    for name in RERANKERS:
        make_tiny_encoder(folder / f"rank-{name}", name, reranker=True)
    for name, how in JUDGES.items():
        make_tiny_judge(folder / name, **how)
    settings = MLXServerSettings(
        models_dir=folder,
        hf_cache=False,
        model=str(folder / MODEL),
        model_aliases="text-*=bert",
        max_models=40,
    )
    app = create_app(settings, start=start_here)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://server/v1/") as client,
    ):
        await app.state.server.started.wait()
        yield client


@pytest.fixture(name="sdk")
def _sdk(http: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=str(http.base_url), api_key="none", http_client=http, max_retries=0
    )


async def post(http: httpx.AsyncClient, path: str, **body: Any) -> Any:
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def refused(http: httpx.AsyncClient, path: str, **body: Any) -> tuple[int, Any]:
    response = await http.post(path, json=body)
    check("ErrorResponse", response.json())
    return response.status_code, response.json()["error"]


async def test_openais_sdk_gets_the_same_numbers_in_both_formats(sdk: openai.AsyncOpenAI):
    # Its default is base64, which it unpacks itself.
    packed = await sdk.embeddings.create(model="text-embedding-9", input=TEXTS)
    plain = await sdk.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    check("CreateEmbeddingResponse", plain.model_dump())
    assert [item.index for item in packed.data] == [0, 1, 2]
    for one, other in zip(packed.data, plain.data, strict=True):
        assert np.allclose(one.embedding, other.embedding, atol=1e-7)
        assert len(one.embedding) == 32
    assert packed.usage == plain.usage
    assert packed.usage.prompt_tokens == packed.usage.total_tokens == sum(len(text.encode()) + 2 for text in TEXTS)  # fmt: skip


async def test_hundreds_of_vectors_come_in_pieces_and_whole(
    http: httpx.AsyncClient, sdk: openai.AsyncOpenAI
):
    texts = [f"{n} {TEXTS[n % 3]}" for n in range(700)]
    response = await http.post("embeddings", json={"model": MODEL, "input": texts})
    assert "content-length" not in response.headers
    assert len(response.content) > 4 * BLOCK
    check("CreateEmbeddingResponse", response.json())
    packed = await sdk.embeddings.create(model=MODEL, input=texts)
    assert [item.index for item in packed.data] == list(range(700))
    for one, other in zip(packed.data, response.json()["data"], strict=True):
        assert np.allclose(one.embedding, other["embedding"], atol=1e-5)
    few = await http.post("embeddings", json={"model": MODEL, "input": texts[:2]})
    assert few.headers["content-length"] == str(len(few.content))


async def test_base64_is_little_endian_float32(http: httpx.AsyncClient):
    body = await post(http, "embeddings", model=MODEL, input="a", encoding_format="base64")
    plain = await post(http, "embeddings", model=MODEL, input="a")
    unpacked = np.frombuffer(base64.b64decode(body["data"][0]["embedding"]), "<f4")
    assert np.array_equal(unpacked, np.array(plain["data"][0]["embedding"], np.float32))


async def test_texts_and_token_ids_may_be_sent_alone_or_as_lists(http: httpx.AsyncClient):
    ids = (await post(http, "tokenize", model=MODEL, prompt="hello world"))["tokens"]
    vectors = [
        (await post(http, "embeddings", model=MODEL, input=given))["data"][0]["embedding"]
        # LangChain sends lists of token ids.
        for given in ("hello world", ["hello world"], ids, [ids], [ids, "more"])
    ]
    assert all(vector == vectors[0] for vector in vectors)


async def test_the_default_model_may_be_an_embedding_model(http: httpx.AsyncClient):
    assert (await post(http, "embeddings", input="a"))["data"]


async def test_models_say_what_they_are_for(http: httpx.AsyncClient):
    kinds = {card["id"]: card["kind"] for card in (await http.get("models")).json()["data"]}
    assert (kinds[MODEL], kinds[RERANKER]) == ("embedding", "reranker")
    assert kinds["mlx-manager/demo"] == "text"


async def test_what_a_model_can_not_do_is_refused_with_the_way_that_it_can(
    http: httpx.AsyncClient,
):
    hello = [{"role": "user", "content": "hi"}]
    for path, body in (
        ("chat/completions", {"model": MODEL, "messages": hello}),
        ("completions", {"model": MODEL, "prompt": "hi"}),
        ("responses", {"model": MODEL, "input": "hi"}),
        ("rerank", {"model": MODEL, "query": "q", "documents": ["d"]}),
        ("embeddings", {"model": "mlx-manager/demo", "input": "hi"}),
        ("embeddings", {"model": RERANKER, "input": "hi"}),
    ):
        status, error = await refused(http, path, **body)
        assert (status, error["code"], error["param"]) == (400, "wrong_model_kind", "model")
        assert "which answers at /v1/" in error["message"]
    status, error = await refused(http, "apply-template", model=MODEL, messages=hello)
    assert (status, error["code"]) == (400, "wrong_model_kind")


async def test_too_long_an_input_is_told_with_its_place_and_both_numbers(http: httpx.AsyncClient):
    texts = ["a", "b" * 300]
    status, error = await refused(http, "embeddings", model=MODEL, input=texts)
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "input[1]")
    assert "302 tokens" in error["message"]
    assert "128" in error["message"]
    cut = await post(http, "embeddings", model=MODEL, input=texts, truncate_prompt_tokens=-1)
    assert cut["usage"]["prompt_tokens"] == 3 + 128


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [[]]}, "input[0]"),
        ({"input": [[1, -1]]}, "input[0][1]"),
        ({"input": [[1, 10**6]]}, "input[0]"),
        ({"input": {}}, "input"),
        ({}, "input"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x", "dimensions": 8}, "dimensions"),
        ({"input": "x", "prompt_name": "query"}, "prompt_name"),
        ({"input": "x", "truncate_prompt_tokens": 1000}, "truncate_prompt_tokens"),
    ],
)
async def test_a_bad_field_is_named(http: httpx.AsyncClient, body: dict[str, Any], param: str):
    status, error = await refused(http, "embeddings", model=MODEL, **body)
    assert (status, error["param"]) == (400, param)


async def test_documents_come_best_first(http: httpx.AsyncClient):
    asked = {"model": RERANKER, "query": "what is a fox?", "documents": [*TEXTS, {"text": "b"}]}
    body = await post(http, "rerank", **asked)
    scores = [result["relevance_score"] for result in body["results"]]
    assert scores == sorted(scores, reverse=True)
    assert all(0 < score < 1 for score in scores)
    assert sorted(result["index"] for result in body["results"]) == [0, 1, 2, 3]
    for result in body["results"]:
        assert result["document"] == {"text": [*TEXTS, "b"][result["index"]]}
    few = await post(http, "rerank", **asked, top_n=2, return_documents=False)
    assert few["results"] == [
        {"index": result["index"], "relevance_score": result["relevance_score"]}
        for result in body["results"][:2]
    ]
    logits = await post(http, "rerank", **asked, use_activation=False)
    assert [r["index"] for r in logits["results"]] == [r["index"] for r in body["results"]]
    assert body["id"].startswith("rerank-")
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] > 0


async def test_hundreds_of_results_come_in_pieces_and_whole(http: httpx.AsyncClient):
    documents = [f"{n} {'long ' * 100}" for n in range(300)]
    asked = {"model": RERANKER, "query": "q", "documents": documents, "truncate_prompt_tokens": 9}
    response = await http.post("rerank", json=asked)
    assert len(response.content) > 2 * BLOCK
    body = response.json()
    assert sorted(result["index"] for result in body["results"]) == list(range(300))
    assert all(
        result["document"]["text"] == documents[result["index"]] for result in body["results"]
    )
    scores = [result["relevance_score"] for result in body["results"]]
    assert scores == sorted(scores, reverse=True)


async def test_a_text_of_many_token_ids_is_one(http: httpx.AsyncClient):
    status, error = await refused(http, "embeddings", model=MODEL, input=[1] * 20_000)
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "input[0]")


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_rerank_is_where_coheres_and_jinas_clients_look(http: httpx.AsyncClient, path: str):
    body = {"model": RERANKER, "query": "q", "documents": ["d"]}
    response = await http.post(f"http://server{path}", json=body)
    assert [result["index"] for result in response.json()["results"]] == [0]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": []}, "documents"),
        ({"documents": [3]}, "documents[0]"),
        ({"documents": [{"title": "x"}]}, "documents[0].text"),
        ({"documents": ["x"], "top_n": -1}, "top_n"),
        ({"documents": ["x"], "max_tokens_per_doc": 5}, "max_tokens_per_doc"),
    ],
)
async def test_a_bad_field_of_a_ranking_is_named(
    http: httpx.AsyncClient, body: dict[str, Any], param: str
):
    status, error = await refused(http, "rerank", model=RERANKER, query="q", **body)
    assert (status, error["param"]) == (400, param)


async def test_what_encoders_read_is_in_the_metrics(http: httpx.AsyncClient) -> None:
    answer = await post(http, "embeddings", model=MODEL, input=TEXTS)
    tokens = answer["usage"]["prompt_tokens"]
    found = (await http.get("http://server/metrics")).text
    counted = re.findall(rf'mlx_manager_encoder_tokens_total{{model_name="{MODEL}"}} (\S+)', found)
    assert float(counted[0]) >= tokens
    assert f'mlx_manager_num_requests_running{{model_name="{MODEL}"}} 0.0' in found
    assert f'mlx_manager_request_prompt_tokens_count{{model_name="{MODEL}"}}' in found


@pytest.mark.parametrize("name", FAMILIES)
async def test_each_architecture_gives_its_makers_vectors(http: httpx.AsyncClient, name: str):
    body = await post(http, "embeddings", model=name, input=list(SAID))
    found = np.array([item["embedding"] for item in body["data"]])
    assert np.abs(found[:, :8] - np.array(EXPECTED["embed"][name])).max() < 3e-5


def scores_of(body: Any) -> np.ndarray[Any, Any]:
    """Return the scores in the order of the documents."""
    results = sorted(body["results"], key=lambda result: result["index"])
    return np.array([result["relevance_score"] for result in results])


@pytest.mark.parametrize("name", RERANKERS)
async def test_each_architecture_gives_its_makers_scores(http: httpx.AsyncClient, name: str):
    asked = {"query": QUERY, "documents": list(SAID)}
    scores = scores_of(await post(http, "rerank", model=f"rank-{name}", **asked))
    assert np.abs(scores - EXPECTED["rank"][name]["scores"]).max() < 3e-5


@pytest.mark.parametrize("name", JUDGES)
async def test_a_reranker_that_answers_with_a_word_takes_an_instruction(
    http: httpx.AsyncClient, name: str
):
    asked = {"model": name, "query": QUERY, "documents": list(SAID)}
    scores = scores_of(await post(http, "rerank", **asked))
    assert np.abs(scores - EXPECTED["judge"][name]).max() < 3e-5
    instructed = scores_of(await post(http, "rerank", **asked, instruction=ASKED))
    assert np.abs(instructed - scores).max() > 1e-3
    if (expected := EXPECTED["judge"].get(f"{name}, asked")) is not None:
        assert np.abs(instructed - expected).max() < 3e-5


async def test_an_instruction_is_for_rerankers_that_take_one(http: httpx.AsyncClient):
    body = {"model": RERANKER, "query": "q", "documents": ["d"], "instruction": "i"}
    status, error = await refused(http, "rerank", **body)
    assert (status, error["param"]) == (400, "instruction")
    status, error = await refused(http, "rerank", **{**body, "instruction": 5})
    assert (status, error["param"]) == (400, "instruction")
