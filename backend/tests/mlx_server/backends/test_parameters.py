"""Parameters that only a real model can honour."""

from __future__ import annotations

import pytest
from demo import Demo, demo

from mlx_manager.mlx_server.errors import UnsupportedParameter

__all__ = ["demo"]

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_the_best_of_several_is_among_them(demo: Demo):
    asked = {"max_tokens": 8, "temperature": 1.5, "seed": 2}
    several = await demo.completion("The server", n=4, logprobs=0, **asked)
    best = await demo.completion("The server", best_of=4, **asked)
    means = {
        choice["text"]: sum(scores) / len(scores)
        for choice in several["choices"]
        if (scores := choice["logprobs"]["token_logprobs"])
    }
    assert [choice["text"] for choice in best["choices"]] == [max(means, key=means.__getitem__)]
    assert best["usage"] == several["usage"]


async def test_token_ids_are_those_of_the_text(demo: Demo):
    choice = (await demo.completion([5, 6, 7], max_tokens=4, seed=1, return_token_ids=True))[
        "choices"
    ][0]
    assert choice["prompt_token_ids"] == [5, 6, 7]
    assert len(choice["token_ids"]) == 4
    body = await demo.chat("Hello!", max_tokens=3, seed=1, return_token_ids=True)
    assert len(body["prompt_token_ids"]) == body["usage"]["prompt_tokens"]
    chunks = await demo.stream("Hello!", max_tokens=3, seed=1, return_token_ids=True)
    assert chunks[0]["prompt_token_ids"] == body["prompt_token_ids"]
    assert chunks[-1]["choices"][0]["token_ids"] == body["choices"][0]["token_ids"]


async def test_a_suffix_is_refused_by_a_model_without_the_tokens(demo: Demo):
    with pytest.raises(UnsupportedParameter, match="suffix"):
        await demo.completion("a", suffix="z")


async def test_no_stop_string_ends_an_answer_before_its_least_tokens(demo: Demo):
    asked = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
    whole = (await demo.completion("The server", **asked))["choices"][0]["text"]
    stop = next(char for char in whole if whole.count(char) > 1)
    early = await demo.completion("The server", stop=stop, **asked)
    late = await demo.completion("The server", stop=stop, min_tokens=12, **asked)
    assert early["usage"]["completion_tokens"] < 12 < late["usage"]["completion_tokens"]
    text = late["choices"][0]["text"]
    assert stop in text
    assert whole.startswith(text)
