"""The engine by itself; what it makes of real models is in `backends`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import mlx.core as mx
import pytest

from mlx_manager.mlx_server.config import EngineLimits
from mlx_manager.mlx_server.engine import encoder_engine
from mlx_manager.mlx_server.engine.encoder_engine import KEPT, EncoderEngine, Reading
from mlx_manager.mlx_server.engine.pace import STRETCH
from mlx_manager.mlx_server.errors import GenerationFailed, OutOfMemory
from mlx_manager.mlx_server.utils.memory import Ledger, Relief

LONGEST = 2000
FREE = 100
"""Bytes that an engine leaves of its ledger."""


class Zeros:
    """A byte a token."""

    padding = 0

    def working_bytes(self, rows: int, longest: int) -> int:
        return rows * longest

    def __call__(self, ids: mx.array, segments: mx.array, lengths: mx.array) -> mx.array:
        return mx.zeros((ids.shape[0], 2))


def ledger_of(nbytes: int = KEPT + FREE) -> Ledger:
    return Ledger(nbytes, cache_bytes=lambda: 0)


def engine_of(ledger: Ledger, shared: Callable[[], bool] = lambda: False) -> EncoderEngine:
    return EncoderEngine("m", Zeros(), LONGEST, EngineLimits(), ledger=ledger, shared=shared)


def reading_of(*lengths: int, tell: Callable[[], None] = lambda: None) -> Reading:
    rows = [[1] * length for length in lengths]
    return Reading(rows, [None] * len(rows), asyncio.get_running_loop().create_future(), tell)


async def answer(engine: EncoderEngine, reading: Reading) -> list[list[float]]:
    while engine.has_work():
        engine.step()
    async with asyncio.timeout(10):
        return [vector.tolist() for vector in await reading.future]


async def test_short_texts_are_read_whatever_else_takes_the_memory():
    ledger = ledger_of()
    engine = engine_of(ledger, shared=lambda: True)
    ledger.record("pages:other", FREE + 50)
    reading = reading_of(KEPT, KEPT, KEPT)
    engine.submit(reading)
    assert await answer(engine, reading) == [[0, 0]] * 3
    assert ledger.available() == -50


async def test_a_long_text_waits_for_memory_that_others_will_leave():
    ledger = ledger_of()
    engine = engine_of(ledger, shared=lambda: True)
    ledger.record("pages:other", FREE)
    reading = reading_of(KEPT + 10, KEPT + 20)
    engine.submit(reading)
    for _ in range(3):
        engine.step()
    assert engine.has_work()
    ledger.record("pages:other", FREE - 20)
    assert await answer(engine, reading) == [[0, 0]] * 2
    assert ledger.available() == 20


async def test_a_caller_is_told_once_that_its_turn_has_come():
    ledger = ledger_of()
    engine = engine_of(ledger, shared=lambda: True)
    ledger.record("pages:other", FREE)
    told: list[str] = []
    reading = reading_of(KEPT + 10, KEPT + 20, tell=lambda: told.append("begun"))
    engine.submit(reading)
    engine.step()
    await asyncio.sleep(0)
    # It waits for memory.
    assert (told, engine.stats().running, engine.stats().waiting) == ([], 0, 1)
    ledger.record("pages:other", FREE - 20)
    await answer(engine, reading)
    assert told == ["begun"]


async def test_nothing_cached_is_given_up_for_a_text_that_would_not_fit_all_the_same():
    ledger = ledger_of()
    asked: list[int] = []
    ledger.add_relief(Relief.PAGES, asked.append, lambda: 50)
    engine = engine_of(ledger, shared=lambda: True)
    ledger.record("pages:other", FREE)
    engine.submit(reading_of(KEPT + 51))
    engine.step()
    engine.step()
    assert asked == []
    engine.submit(reading_of(KEPT + 50))
    engine.step()
    assert asked == [50]


async def test_a_text_that_waits_for_memory_does_not_keep_shorter_ones():
    ledger = ledger_of()
    engine = engine_of(ledger, shared=lambda: True)
    ledger.record("pages:other", FREE)
    long, short = reading_of(1000), reading_of(KEPT)
    engine.submit(long)
    engine.submit(short)
    for _ in range(3):
        engine.step()
    async with asyncio.timeout(10):
        await short.future
    assert engine.stats().rows_waiting == 1
    engine.cancel(long)
    assert not engine.has_work()


@pytest.mark.parametrize("others_work", [False, True])
async def test_a_long_text_fails_when_nobody_will_leave_memory_or_does_in_time(
    others_work: bool, monkeypatch: pytest.MonkeyPatch
):
    if others_work:
        monkeypatch.setattr(encoder_engine, "PATIENCE", 0)
    ledger = ledger_of()
    engine = engine_of(ledger, shared=lambda: others_work)
    ledger.record("pages:other", FREE)
    reading = reading_of(1000)
    engine.submit(reading)
    message = "A text of 1000 tokens takes 1,000 bytes to read, and 512 can be had."
    with pytest.raises(OutOfMemory, match=message):
        await answer(engine, reading)
    assert not engine.has_work()


def test_a_model_without_room_for_a_short_text_is_not_taken():
    ledger = ledger_of(KEPT - 1)
    with pytest.raises(OutOfMemory, match="To read a text m takes 512 bytes, and 511 of 511"):
        engine_of(ledger)
    assert ledger.available() == KEPT - 1


def test_an_engine_that_is_closed_gives_its_memory_back():
    ledger = ledger_of()
    engine_of(ledger).close()
    assert ledger.available() == ledger.limit


@pytest.mark.parametrize(("others_work", "batches"), [(True, 3), (False, 13)])
async def test_others_have_the_time_back_that_a_text_took_beyond_their_pace(
    others_work: bool, batches: int, monkeypatch: pytest.MonkeyPatch
):
    now = 1000.0

    def reading(model: Zeros, ids: mx.array, segments: mx.array, lengths: mx.array) -> mx.array:
        nonlocal now
        now += 5 * (STRETCH - 1)
        return mx.zeros((ids.shape[0], 2))

    monkeypatch.setattr(encoder_engine, "perf_counter", lambda: now)
    monkeypatch.setattr(Zeros, "__call__", reading)
    engine = engine_of(ledger_of(), shared=lambda: others_work)
    for _ in range(20):
        engine.submit(reading_of(KEPT))
    # A step of the others takes a second, and a text is worth five of them.
    for _ in range(13):
        engine.step()
        now += 1
    assert engine.stats().batches == batches


async def test_whatever_fails_after_a_batch_was_read_fails_its_requests_too():
    engine = engine_of(ledger_of())
    # A text of no tokens, which no cost of a token can be learnt from.
    reading = reading_of(0)
    engine.submit(reading)
    try:
        engine.step()
    except ZeroDivisionError as error:
        engine.fail(error)
    async with asyncio.timeout(10):
        with pytest.raises(GenerationFailed):
            await reading.future
    assert not engine.has_work()
