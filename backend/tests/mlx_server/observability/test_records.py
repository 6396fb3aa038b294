"""What is kept of calls, with the embedded model."""

from __future__ import annotations

import asyncio

import pytest
from demo import MODEL, Demo, demo

from mlx_manager.mlx_server.config import KeyLimits
from mlx_manager.mlx_server.core import Admitted, GenerationRequest, Started, StopRules, Text
from mlx_manager.mlx_server.observability.records import CallRecord, Recorder
from mlx_manager.mlx_server.services.accounts import Account
from mlx_manager.mlx_server.services.inference import Inference
from mlx_manager.mlx_server.services.keys import ApiKey

__all__ = ["demo"]

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_tokens_that_a_caller_left_unread_are_recorded_and_charged(demo: Demo):
    kept: list[CallRecord] = []
    account = Account(ApiKey("a", "", KeyLimits(tokens_per_minute=1000)), lambda: 0.0)
    inference = Inference(demo.pool, [Recorder([kept.append])], account=account)
    request = GenerationRequest(
        MODEL, Text("Hello"), max_tokens=200, stop=StopRules(ignore_eos=True)
    )
    progress = inference.generate([request])
    async for [(_, [event, *_])] in progress:
        if type(event) is not Admitted:
            break
    assert type(event) is Started
    # Nobody reads, and the engine goes on.
    async with asyncio.timeout(60):
        while event.drawn() < 200:  # noqa: ASYNC110 another thread's
            await asyncio.sleep(0.01)
    await progress.aclose()
    [record] = kept
    assert record.usage.completion_tokens == 200
    [row] = record.rows
    # A record that is kept keeps nothing of the engine's alive.
    assert row.started == event
    assert row.started.drawn() == 0
    assert account.rates()[0].left == 1000 - record.usage.prompt_tokens - 200
