from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from demo import Demo, demo
from mlx_lm.utils import load_model, load_tokenizer
from openai_spec import check

import mlx_manager.demo_model

__all__ = ["demo"]

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "The server answers questions about itself. How do I stop it?"
LONG = "The server answers. " * 200


def reference(text: str) -> list[float]:
    """The log probabilities of a text's tokens but the first, from one plain forward pass."""
    folder = Path(mlx_manager.demo_model.__file__).parent
    ids = load_tokenizer(folder).encode(text)
    model, _ = load_model(folder)
    logits = model(mx.array([ids]))[0].astype(mx.float32)
    logs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return [logs[i, token].item() for i, token in enumerate(ids[1:])]


async def scored(demo: Demo, prompt: Any, **fields: Any) -> dict[str, Any]:
    asked = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0} | fields
    return (await demo.completion(prompt, **asked))["choices"][0]["logprobs"]


@pytest.mark.parametrize("text", [TEXT, LONG])
async def test_a_prompts_probabilities_are_the_models_own(demo: Demo, text: str):
    expected = await asyncio.to_thread(reference, text)
    first, again, short = await asyncio.gather(
        scored(demo, text), scored(demo, text), scored(demo, text, max_tokens=0)
    )
    for given in (
        first["token_logprobs"][:-1],
        again["token_logprobs"][:-1],
        short["token_logprobs"],
    ):
        assert given[0] is None
        # The model computes in half precision, and chunks round differently.
        assert sum(given[1:]) == pytest.approx(sum(expected), rel=2e-2)
        assert len(given) == len(expected) + 1


async def test_each_prompt_token_and_each_drawn_one_is_scored(demo: Demo):
    logprobs = await scored(demo, [5, 6, 7])
    assert len(logprobs["tokens"]) == len(logprobs["top_logprobs"]) == 4
    assert logprobs["text_offset"][0] == 0
    assert logprobs["token_logprobs"][-1] == max(logprobs["top_logprobs"][-1].values())


async def test_the_end_of_a_scored_text_is_scored_too(demo: Demo):
    prompt = "<|start_header_id|>user<|end_header_id|>\n\nHello!<|eot_id|>"
    body = await demo.completion(prompt, echo=True, logprobs=1, max_tokens=64, temperature=0)
    choice = body["choices"][0]
    drawn = body["usage"]["completion_tokens"]
    tokens = choice["logprobs"]["tokens"]
    assert len(tokens) == body["usage"]["prompt_tokens"] + drawn
    if choice["finish_reason"] == "stop":
        assert tokens[-1].startswith("<|")


async def test_scoring_disturbs_nobody(demo: Demo):
    asked: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 30}
    alone = await demo.choice("Hello!", **asked)
    together = await asyncio.gather(demo.choice("Hello!", **asked), scored(demo, LONG))
    assert together[0] == alone


async def test_chat_scores_its_tokens_before_temperature(demo: Demo):
    asked: dict[str, Any] = {"logprobs": True, "max_tokens": 8, "seed": 1}
    body = await demo.chat("Hello!", top_logprobs=5, temperature=2.0, **asked)
    check("CreateChatCompletionResponse", body)
    content = body["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == body["choices"][0]["message"]["content"]
    for entry in content:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        values = [each["logprob"] for each in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        assert len(values) == 5
        assert sum(map(math.exp, values)) < 1.0001
    cold = await demo.chat("Hello!", top_logprobs=0, temperature=0, **asked)
    assert cold["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_streamed_scores_are_those_of_the_whole(demo: Demo):
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 1, "max_tokens": 8, "seed": 1}
    whole = (await demo.choice("Hello!", **asked))["logprobs"]["content"]
    chunks = await demo.stream("Hello!", **asked)
    for chunk in chunks:
        check("CreateChatCompletionStreamResponse", chunk)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for part in parts if part for entry in part["content"]] == whole


async def test_nothing_is_scored_unless_asked(demo: Demo):
    assert (await demo.choice("Hello!", max_tokens=2))["logprobs"] is None
