from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from scripted import MODEL, Script, ScriptedBackend, ScriptedPool, says

from mlx_manager.mlx_server.core import (
    GenerationRequest,
    Progress,
    Sampling,
    Started,
    Text,
    TextDelta,
)
from mlx_manager.mlx_server.engine.stream import steps
from mlx_manager.mlx_server.errors import GenerationFailed, ModelNotFound
from mlx_manager.mlx_server.schemas.openai import ChatCompletionRequest
from mlx_manager.mlx_server.services.inference import (
    Inference,
    generate_chat_completion,
    generate_completion,
)

MESSAGES = [{"role": "user", "content": "hi"}]


def pool_of(script: Script) -> ScriptedPool:
    return ScriptedPool(ScriptedBackend(script))


def row(prompt: str, seed: int = 0) -> GenerationRequest:
    return GenerationRequest(MODEL, Text(prompt), Sampling(seed=seed))


async def texts(progress: AsyncIterator[Progress]) -> dict[int, str]:
    found: dict[int, str] = {}
    async for step in progress:
        for index, events in step:
            for event in events:
                if isinstance(event, TextDelta):
                    found[index] = found.get(index, "") + event.text
    return found


async def test_one_row_comes_as_it_is():
    pool = pool_of(lambda _: says("a", "b"))
    found = [step async for step in steps(Inference(pool).generate([row("x")]).run)]
    assert found[:2] == [[(0, [Started(3)])], [(0, [TextDelta("a")])]]
    assert pool.leases == 0


async def test_rows_are_told_apart_by_their_index():
    pool = pool_of(lambda request: says(*request.prompt.text))
    found = await texts(steps(Inference(pool).generate([row("abc"), row("de"), row("f")]).run))
    assert found == {0: "abc", 1: "de", 2: "f"}
    assert pool.leases == 0


async def test_a_slow_row_does_not_hold_the_others_back():
    gate = asyncio.Event()

    def script(request: GenerationRequest) -> Any:
        return [gate, *says("late")] if request.prompt.text == "slow" else says("now")

    progress = steps(Inference(pool_of(script)).generate([row("slow"), row("fast")]).run)
    async for step in progress:
        if any(index == 0 for index, _ in step):
            break
        if (1, [TextDelta("now")]) in step:
            gate.set()
    else:
        pytest.fail("the slow row never came")
    await progress.aclose()


async def test_closing_cancels_every_row_and_gives_the_lease_back():
    never = asyncio.Event()
    pool = pool_of(lambda _: [[Started(1)], never])
    progress = steps(Inference(pool).generate([row("a"), row("b"), row("c")]).run)
    await anext(progress)
    assert (pool.backend.running, pool.leases) == (3, 1)
    await progress.aclose()
    assert (pool.backend.running, pool.backend.cancelled, pool.leases) == (0, 3, 0)


async def test_closing_a_single_row_cancels_it():
    pool = pool_of(lambda _: [[Started(1)], asyncio.Event()])
    progress = steps(Inference(pool).generate([row("a")]).run)
    await anext(progress)
    await progress.aclose()
    assert (pool.backend.running, pool.backend.cancelled, pool.leases) == (0, 1, 0)


async def test_one_rows_failure_ends_them_all():
    def script(request: GenerationRequest) -> Any:
        if request.prompt.text == "bad":
            return [[Started(1)], GenerationFailed("broken")]
        return [[Started(1)], asyncio.Event()]

    pool = pool_of(script)
    with pytest.raises(GenerationFailed, match="broken"):
        await texts(steps(Inference(pool).generate([row("good"), row("bad")]).run))
    assert (pool.backend.running, pool.leases) == (0, 0)


async def test_an_unknown_model_is_reported_at_the_first_step():
    pool = pool_of(lambda _: says("a"))
    with pytest.raises(ModelNotFound):
        await texts(steps(Inference(pool).generate([GenerationRequest("other", Text("x"))]).run))


async def test_scripts_get_the_same_answer_whole_or_in_chunks():
    pool = pool_of(lambda _: says("Hel", "lo"))
    whole = await generate_chat_completion(MODEL, MESSAGES, pool=pool, max_tokens=9)
    assert isinstance(whole, dict)
    chunks = await generate_chat_completion(MODEL, MESSAGES, pool=pool, max_tokens=9, stream=True)
    assert not isinstance(chunks, dict)
    deltas = [chunk["choices"][0]["delta"].get("content", "") async for chunk in chunks]
    assert whole["choices"][0]["message"]["content"] == "".join(deltas) == "Hello"
    assert whole["usage"]["completion_tokens"] == 2
    assert pool.backend.requests[0].max_tokens == 9


async def test_scripts_may_hand_in_a_whole_request():
    pool = pool_of(lambda _: says("Hello"))
    request = ChatCompletionRequest(messages=MESSAGES, temperature=0)
    whole = await generate_chat_completion(request, pool=pool)
    assert isinstance(whole, dict)
    assert whole["model"] == MODEL
    assert pool.backend.requests[0].sampling.temperature == 0


async def test_scripts_complete_texts_too():
    pool = pool_of(lambda _: says("on", "ce"))
    whole = await generate_completion(MODEL, "a", pool=pool)
    assert isinstance(whole, dict)
    assert whole["choices"][0]["text"] == "once"
    chunks = await generate_completion(MODEL, [1, 2], pool=pool, stream=True)
    assert not isinstance(chunks, dict)
    assert "".join([chunk["choices"][0]["text"] async for chunk in chunks]) == "once"
