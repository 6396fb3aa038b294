"""Timelines of calls, with the embedded model."""

from __future__ import annotations

import asyncio

import pytest
from demo import MODEL, Demo, demo

from mlx_manager.mlx_server.config import KeyLimits
from mlx_manager.mlx_server.core import GenerationRequest, StopRules, Text
from mlx_manager.mlx_server.engine.stream import steps
from mlx_manager.mlx_server.observability.observer import Recorder
from mlx_manager.mlx_server.services.accounts import Account
from mlx_manager.mlx_server.services.inference import Inference
from mlx_manager.mlx_server.services.keys import ApiKey
from mlx_manager.mlx_server.timeline import Timeline

__all__ = ["demo"]

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_tokens_that_a_caller_left_unread_are_recorded_and_charged(demo: Demo):
    kept: list[Timeline] = []
    account = Account(ApiKey("a", "", KeyLimits(tokens_per_minute=1000)), lambda: 0.0)
    inference = Inference(demo.pool, [Recorder([kept.append])], account=account)
    request = GenerationRequest(
        MODEL, Text("Hello"), max_tokens=200, stop=StopRules(ignore_eos=True)
    )
    call = inference.generate([request])
    progress, [row] = steps(call.run), call.timeline.rows
    await anext(progress)
    # Nobody reads, and the engine goes on.
    async with asyncio.timeout(60):
        while row.tokens < 200:  # noqa: ASYNC110 another thread's
            await asyncio.sleep(0.01)
    await progress.aclose()
    assert kept == [call.timeline]
    assert call.timeline.usage.completion_tokens == 200
    assert row.started is not None
    assert account.rates()[0].left == 1000 - row.started.prompt_tokens - 200
