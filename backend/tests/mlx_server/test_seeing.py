"""Each family that sees, over HTTP: pictures in one batch with texts, streamed, asked about twice."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from here import served_here
from thorough import slow
from tiny_vision import SEEING, make_seeing_model, picture

from mlx_manager.mlx_server.config import DEMO_VISION_MODEL

EVERY_RUN = ("smolvlm", "qwen3_vl", "gemma3")
"""One of tiles, one with positions in three axes and levels, one whose pictures are whole."""
KINDS = [
    pytest.param(kind, marks=[] if kind in EVERY_RUN else [slow])
    for kind in sorted(SEEING.keys() - {"idefics3"})
]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    models = tmp_path_factory.mktemp("models")
    for kind in SEEING:
        make_seeing_model(models / kind, kind)
    with served_here(models_dir=models) as client:
        yield client


def shown(width: int, height: int, seed: int = 0) -> dict[str, Any]:
    encoded = base64.b64encode(picture(width, height, seed).data).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}


def said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def body(kind: str, *content: dict[str, Any], **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": list(content)}]
    return {"model": kind, "messages": messages, "max_tokens": 12, "temperature": 0, **more}


def asked(client: httpx.Client, given: dict[str, Any]) -> dict[str, Any]:
    answer = client.post("/v1/chat/completions", json=given)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def scored(answer: dict[str, Any]) -> list[tuple[str, float]]:
    tokens = answer["choices"][0]["logprobs"]["content"]
    return [(token["token"], token["logprob"]) for token in tokens]


def streamed(client: httpx.Client, given: dict[str, Any]) -> str:
    text = ""
    given = given | {"stream": True}
    with client.stream("POST", "/v1/chat/completions", json=given) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
    return text


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_sees_answers_the_same_in_any_company(kind: str, client: httpx.Client) -> None:
    requests = [
        body(kind, said("word1 "), shown(100, 60), said(" what is it?"), logprobs=True),
        body(kind, said("no picture at all"), logprobs=True),
        body(kind, shown(30, 31, 1), shown(100, 60), said("two"), logprobs=True),
        body(kind, shown(20, 90, 2), said("x " * 300), logprobs=True),
    ]
    alone = [asked(client, each) for each in requests]
    with ThreadPoolExecutor(len(requests)) as several:
        together = list(several.map(lambda each: asked(client, each), requests))
    for one, other in zip(alone, together, strict=True):
        assert one["choices"][0]["message"] == other["choices"][0]["message"]
        assert one["usage"]["prompt_tokens"] == other["usage"]["prompt_tokens"]
        for (token, before), (again, after) in zip(scored(one), scored(other), strict=True):
            assert (token, before) == (again, pytest.approx(after, abs=1e-3))
    assert streamed(client, requests[0]) == alone[0]["choices"][0]["message"]["content"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_question_finds_the_picture_in_the_cache(kind: str, client: httpx.Client) -> None:
    """And another picture of the same size does not pass for it."""

    def then(seed: int) -> dict[str, Any]:
        begun = body(kind, said(f"{kind} "), shown(64, 64, seed), said(" one?"))
        answer = {"role": "assistant", "content": text}
        more = [answer, {"role": "user", "content": "And two?"}]
        return begun | {"messages": begun["messages"] + more}

    first = asked(client, body(kind, said(f"{kind} "), shown(64, 64, 3), said(" one?")))
    text = first["choices"][0]["message"]["content"] or "None."
    counts = [asked(client, then(seed))["usage"] for seed in (3, 4)]
    cached, others = (usage["prompt_tokens_details"]["cached_tokens"] for usage in counts)
    assert cached >= first["usage"]["prompt_tokens"] - 32
    assert others < 32


@pytest.mark.parametrize("kind", KINDS)
def test_other_pictures_have_other_answers(kind: str, client: httpx.Client) -> None:
    answers = [
        scored(
            asked(
                client,
                body(kind, shown(64, 64, seed), said("?"), logprobs=True, min_tokens=4),
            )
        )
        for seed in (5, 6, 5)
    ]
    assert [token for token, _ in answers[0]] == [token for token, _ in answers[2]]
    assert answers[0][0][1] != pytest.approx(answers[1][0][1], abs=1e-4)


def test_cards_tell_that_pictures_are_taken(client: httpx.Client) -> None:
    cards = client.get("/v1/models").json()["data"]
    assert {card["id"] for card in cards if "image" in card["input_modalities"]} == {
        *SEEING,
        DEMO_VISION_MODEL,
    }


def test_a_literal_placeholder_is_text_over_http(client: httpx.Client) -> None:
    plain = asked(client, body("smolvlm", said("<imago>"), max_tokens=1))
    literal = asked(client, body("smolvlm", said("<image>"), max_tokens=1))
    assert literal["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


def test_a_prompt_that_is_too_long_with_its_pictures_is_refused(client: httpx.Client) -> None:
    given = body("smolvlm", *[shown(100, 60)] * 30)
    answer = client.post("/v1/chat/completions", json=given)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
