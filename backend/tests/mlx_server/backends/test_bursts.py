"""Prompts that arrive together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, ValuesView
from typing import Any

import pytest
from demo import MODEL, Demo, demo

from mlx_manager.mlx_server.core import (
    Conversation,
    GenerationRequest,
    Message,
    Prompt,
    Sampling,
    StopRules,
    Text,
    Tokens,
)

__all__ = ["demo"]

ASKED = (Message("user", "Say something."),)

pytestmark = pytest.mark.asyncio(loop_scope="module")


def waited_for(demo: Demo, rows: int, seconds: float) -> bool:
    """Whether the engine comes to have so many rows, with nobody else at work in this thread."""
    deadline = time.monotonic() + seconds
    while len(demo.backend.rows()) != rows and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(demo.backend.rows()) == rows


async def arrives_at_once(demo: Demo, prompt: Prompt, seconds: float) -> bool:
    """Return whether the request is with the engine within so many seconds, when the event loop of
    the worker's backend has been through what there was once."""
    request = GenerationRequest(MODEL, prompt, max_tokens=200, stop=StopRules(ignore_eos=True))
    async with demo.pool.lease(MODEL):
        assert waited_for(demo, 0, seconds=60)
        begun = asyncio.Event()
        answer = asyncio.create_task(demo.backend.generate(request, lambda *_: begun.set()))
        await asyncio.sleep(0)
        found = waited_for(demo, 1, seconds)
        await begun.wait()
        answer.cancel()
        await asyncio.wait([answer])
    return found


@pytest.mark.parametrize(
    "prompt",
    [
        Text("Say something."),
        Tokens(tuple(range(300, 1300))),
        Conversation((Message("user", "Say something."), Message("assistant", "Something."))),
        Conversation(ASKED, template_args={"enable_thinking": False, "reasoning_effort": "low"}),
    ],
    ids=["text", "tokens", "conversation", "flags"],
)
async def test_a_short_prompt_is_with_the_engine_before_the_event_loop_turns_to_the_next(
    demo: Demo, prompt: Prompt
):
    assert await arrives_at_once(demo, prompt, seconds=60)


@pytest.mark.parametrize(
    "prompt",
    [
        Text("Say something. " * 400),
        Tokens(tuple(range(300, 1300)) * 5),
        Conversation((Message("user", "Say something. " * 400),)),
        Conversation((Message("user", "Hi."), Message("assistant", "Hi.")) * 40),
        Conversation((Message("user", "Hi.", name="Say something. " * 400),)),
        Conversation(ASKED, template_args={"documents": [{"text": "Say something. " * 400}]}),
        Conversation(ASKED, template_args={"document": "Say something. " * 400}),
    ],
    ids=["text", "tokens", "conversation", "messages", "name", "documents", "document"],
)
async def test_a_long_prompt_does_not_hold_up_the_event_loop(demo: Demo, prompt: Prompt):
    assert not await arrives_at_once(demo, prompt, seconds=0.2)


class Counted(Mapping[str, Any]):
    """Variables of a template; their names are looked at when a prompt is rendered.

    Attributes:
        looks: how often they have been looked at.
    """

    looks = 0

    def __getitem__(self, name: str) -> Any:
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        self.looks += 1
        return iter(())

    def __len__(self) -> int:
        return 0

    def values(self) -> ValuesView[Any]:
        return {}.values()


async def looks_for(demo: Demo, rows: int) -> int:
    """Return how often the names of variables are looked at for so many answers to a
    long prompt."""
    found = Counted()
    prompt = Conversation((Message("user", "Say something. " * 400),), template_args=found)
    async with demo.pool.lease(MODEL):
        answers = [
            demo.backend.generate(
                GenerationRequest(MODEL, prompt, Sampling(seed=row), max_tokens=1), lambda *_: None
            )
            for row in range(rows)
        ]
        await asyncio.gather(*answers)
    return found.looks


async def test_the_answers_to_a_prompt_have_it_read_once(demo: Demo):
    assert await looks_for(demo, 1) == await looks_for(demo, 5)


async def test_a_prompt_is_read_for_the_answers_that_are_left_when_one_is_cancelled(demo: Demo):
    prompt = Conversation((Message("user", "Say something. " * 400),))
    request = GenerationRequest(MODEL, prompt, max_tokens=1)
    async with demo.pool.lease(MODEL):
        first, second = (
            asyncio.create_task(demo.backend.generate(request, lambda *_: None)) for _ in range(2)
        )
        await asyncio.sleep(0)
        first.cancel()
        await second
        assert not demo.backend._readings
        alone = asyncio.create_task(demo.backend.generate(request, lambda *_: None))
        await asyncio.sleep(0)
        alone.cancel()
        await demo.backend.generate(request, lambda *_: None)
