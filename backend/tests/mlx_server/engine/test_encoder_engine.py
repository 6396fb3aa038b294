"""The engine by itself; what it makes of real models is in `backends`."""

from __future__ import annotations

import asyncio

import mlx.core as mx
import pytest

from mlx_manager.mlx_server.config import EngineLimits
from mlx_manager.mlx_server.engine.encoder_engine import EncoderEngine, Reading
from mlx_manager.mlx_server.errors import GenerationFailed
from mlx_manager.mlx_server.utils.memory import Ledger


class Zeros:
    padding = 0

    def working_bytes(self, rows: int, longest: int) -> int:
        return 1

    def __call__(self, ids: mx.array, segments: mx.array, lengths: mx.array) -> mx.array:
        return mx.zeros((ids.shape[0], 2))


async def test_whatever_fails_after_a_batch_was_read_fails_its_requests_too():
    engine = EncoderEngine(
        "m", Zeros(), EngineLimits(), Ledger(100, cache_bytes=lambda: 0), lambda: False
    )
    # A text of no tokens, which no cost of a token can be learnt from.
    reading = Reading([[]], [None], asyncio.get_running_loop().create_future())
    engine.submit(reading)
    try:
        engine.step()
    except ZeroDivisionError as error:
        engine.fail(error)
    async with asyncio.timeout(10):
        with pytest.raises(GenerationFailed):
            await reading.future
    assert not engine.has_work()
