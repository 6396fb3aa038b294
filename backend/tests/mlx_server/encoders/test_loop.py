"""The engine by itself; what it makes of real models is in `backends`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_manager.mlx_server.config import EngineLimits
from mlx_manager.mlx_server.encoders import loop as encoder_engine
from mlx_manager.mlx_server.encoders.loop import (
    BOLDNESS,
    FIRST,
    KEPT,
    MOST,
    EncoderEngine,
    Request,
)
from mlx_manager.mlx_server.errors import GenerationFailed, OutOfMemory, Overloaded
from mlx_manager.mlx_server.utils.memory import Ledger, Relief

LONGEST = 2000
LAYERS = 8
FREE = 100
"""Bytes that an engine leaves of its ledger."""


class Zeros:
    """A byte a token."""

    padding = 0

    def filled_up(self, rows: int, longest: int) -> tuple[int, int]:
        return rows, longest

    def working_bytes(self, rows: int, longest: int) -> int:
        return rows * longest

    def __call__(self, ids, segments, lengths, made=None) -> mx.array:
        return mx.zeros((ids.shape[0], 2))


class FilledUp(Zeros):
    """Says of each row how many tokens it has, and notes the shapes that it is given."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def filled_up(self, rows: int, longest: int) -> tuple[int, int]:
        return 1 << (rows - 1).bit_length(), -(-longest // 8) * 8

    def __call__(self, ids, segments, lengths, made=None) -> mx.array:
        self.shapes.append(ids.shape)
        return mx.stack([lengths, (ids != self.padding).sum(axis=1)], axis=1)


class Clocked(Zeros):
    """Takes `seconds` of so many tokens, by a clock of its own, and notes how many they were."""

    def __init__(self, seconds: Callable[[int], float], monkeypatch: pytest.MonkeyPatch) -> None:
        self._seconds = seconds
        self.now = 1000.0
        self.shapes: list[tuple[int, ...]] = []
        monkeypatch.setattr(encoder_engine, "perf_counter", lambda: self.now)

    def __call__(self, ids, segments, lengths, made=None) -> mx.array:
        self.shapes.append(ids.shape)
        self.now += self._seconds(ids.size)
        return super().__call__(ids, segments, lengths)


def ledger_of(nbytes: int = KEPT + FREE) -> Ledger:
    return Ledger(nbytes, cache_bytes=lambda: 0)


def engine_of(
    ledger: Ledger,
    model: Zeros | None = None,
    **limits: int,
) -> EncoderEngine:
    model = model or Zeros()
    return EncoderEngine("m", model, LONGEST, EngineLimits(**limits), ledger=ledger)


def reading_of(
    *lengths: int, tell: Callable[[], None] = lambda: None, owner: str = "", priority: int = 0
) -> Request:
    rows = [[1] * length for length in lengths]
    future = asyncio.get_running_loop().create_future()
    return Request(rows, [None] * len(rows), future, tell, owner, priority)


async def answer(engine: EncoderEngine, reading: Request) -> list[list[float]]:
    while engine.has_work():
        engine.step()
    async with asyncio.timeout(10):
        return [vector.tolist() for vector in await reading.future]


async def test_short_texts_are_read_whatever_else_takes_the_memory():
    ledger = ledger_of()
    engine = engine_of(ledger)
    ledger.record("pages:other", FREE + 50)
    reading = reading_of(KEPT, KEPT, KEPT)
    engine.submit(reading)
    assert await answer(engine, reading) == [[0, 0]] * 3
    assert ledger.available() == -50


async def test_a_long_text_waits_for_memory_that_is_on_its_way():
    ledger = ledger_of()
    ledger.more_to_come = lambda: True
    engine = engine_of(ledger)
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
    ledger.more_to_come = lambda: True
    engine = engine_of(ledger)
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
    engine = engine_of(ledger)
    ledger.record("pages:other", FREE)
    engine.submit(reading_of(KEPT + 51))
    engine.step()
    engine.step()
    assert asked == []
    engine.submit(reading_of(KEPT + 50))
    engine.step()
    assert asked == [50]


async def test_a_long_text_fails_when_no_memory_is_on_its_way():
    ledger = ledger_of()
    engine = engine_of(ledger)
    ledger.record("pages:other", FREE)
    reading = reading_of(1000)
    engine.submit(reading)
    message = "A text of 1000 tokens takes 1000 bytes to read, and 512 bytes can be had."
    with pytest.raises(OutOfMemory, match=message):
        await answer(engine, reading)
    assert not engine.has_work()


def test_a_model_without_room_for_a_short_text_is_not_taken():
    ledger = ledger_of(KEPT - 1)
    with pytest.raises(
        OutOfMemory, match="To read a text m takes 512 bytes, and 511 bytes of 511 bytes"
    ):
        engine_of(ledger)
    assert ledger.available() == KEPT - 1


def test_an_engine_that_is_closed_gives_its_memory_back():
    ledger = ledger_of()
    engine_of(ledger).close()
    assert ledger.available() == ledger.limit


async def test_a_batch_is_filled_up_to_the_shape_that_the_model_knows():
    model = FilledUp()
    engine = engine_of(ledger_of(10 * KEPT), model=model)
    reading = reading_of(12, 14, 13)
    engine.submit(reading)
    assert await answer(engine, reading) == [[12, 12], [14, 14], [13, 13]]
    assert model.shapes == [(4, 16)]
    stats = engine.stats()
    assert (stats.rows, stats.tokens, stats.padding) == (3, 39, 4 * 16 - 39)


async def test_what_fills_a_batch_up_is_part_of_its_size():
    model = FilledUp()
    engine = engine_of(ledger_of(10 * FIRST), model=model)
    # 33 would be filled up to 64, more tokens than a first batch may have.
    reading = reading_of(*[16] * 33)
    engine.submit(reading)
    engine.step()
    assert model.shapes == [(FIRST // 16, 16)]


async def test_others_go_with_a_text_that_takes_as_long_by_itself(monkeypatch: pytest.MonkeyPatch):
    model = Clocked(lambda tokens: 0.01 + 1e-6 * tokens, monkeypatch)
    engine = engine_of(ledger_of(100 * KEPT), model=model)
    for length in range(60, 300, 10):
        engine.submit(reading_of(length))
    while engine.has_work():
        engine.step()
        model.now += 0.001
    engine.submit(reading_of(*[256] * 8))
    model.shapes.clear()
    while engine.has_work():
        engine.step()
        model.now += 0.001
    assert [rows for rows, _ in model.shapes] == [8]


async def test_a_batch_is_not_many_times_as_large_as_any_before(monkeypatch: pytest.MonkeyPatch):
    # As far as can be seen tokens cost nothing.
    model = Clocked(lambda _: 0.01, monkeypatch)
    engine = engine_of(ledger_of(1000 * KEPT), model=model)
    engine.submit(reading_of(*[64] * 2000))
    while engine.has_work():
        engine.step()
    sizes = [prod(shape) for shape in model.shapes]
    assert sizes[0] == FIRST
    assert all(after <= BOLDNESS * before for before, after in pairwise(sizes))
    assert max(sizes) == MOST


async def test_what_reading_takes_is_compiled_before_anybody_waits_for_it():
    model = FilledUp()
    engine = engine_of(ledger_of(), model=model)
    engine.warm()
    assert model.shapes == [(1, 8), (1, 72)]
    assert engine.stats().batches == 0


async def test_whatever_fails_after_a_batch_was_read_fails_its_requests_too(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(Zeros, "__call__", lambda *_: mx.zeros((1, 2)))
    engine = engine_of(ledger_of())
    reading = reading_of(1, 1)
    engine.submit(reading)
    try:
        engine.step()
    except ValueError as error:
        engine.fail(error)
    async with asyncio.timeout(10):
        with pytest.raises(GenerationFailed):
            await reading.future
    assert not engine.has_work()


class Layered(Clocked):
    """Of `LAYERS` layers, each of which takes so many seconds to compute."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, layer: float = 0.5) -> None:
        super().__init__(lambda _: 0.0, monkeypatch)
        self.computed = 0
        compute = mx.eval

        def computing(*arrays: mx.array) -> None:
            self.now += layer
            self.computed += 1
            compute(*arrays)

        monkeypatch.setattr(encoder_engine.mx, "eval", computing)

    def __call__(self, ids, segments, lengths, made=None) -> mx.array:
        vectors = super().__call__(ids, segments, lengths)
        for _ in range(LAYERS):
            vectors = vectors + 1
            made.append(vectors)
        return vectors


def by_layers(engine: EncoderEngine) -> EncoderEngine:
    """As on a CPU."""
    engine._by_layers = True
    return engine


async def test_a_long_text_is_computed_some_layers_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
):
    model = Layered(monkeypatch, layer=0.04)
    engine = by_layers(engine_of(ledger_of(), model=model))
    reading = reading_of(3)
    engine.submit(reading)
    computed = []
    while engine.has_work():
        before = model.computed
        engine.step()
        computed.append(model.computed - before)
    # Whoever comes meanwhile waits for a tenth of a second.
    assert computed == [2, 2, 2, 2]
    assert await answer(engine, reading) == [[LAYERS, LAYERS]]


async def test_a_short_batch_is_computed_at_once(monkeypatch: pytest.MonkeyPatch):
    model = Layered(monkeypatch, layer=0.01)
    engine = by_layers(engine_of(ledger_of(), model=model))
    first, second = reading_of(3), reading_of(3)
    engine.submit(first)
    assert await answer(engine, first) == [[LAYERS, LAYERS]]
    engine.submit(second)
    engine.step()
    assert not engine.has_work()
    assert await answer(engine, second) == [[LAYERS, LAYERS]]


@pytest.mark.parametrize("how", ["cancelled", "failed", "closed"])
async def test_a_batch_that_nobody_waits_for_any_more_goes_no_further(
    how: str, monkeypatch: pytest.MonkeyPatch
):
    model, ledger = Layered(monkeypatch), ledger_of()
    engine = by_layers(engine_of(ledger, model=model))
    first, second = reading_of(KEPT + 1), reading_of(KEPT + 2)
    engine.submit(first)
    engine.submit(second)
    engine.step()
    assert ledger.available() < FREE
    match how:
        case "cancelled":
            engine.cancel(first)
        case "failed":
            engine.fail(RuntimeError())
        case "closed":
            engine.close()
            assert ledger.available() == ledger.limit
            return
    assert ledger.available() == FREE
    while engine.has_work():
        model.now += 1
        engine.step()
    assert await answer(engine, second) == [[LAYERS, LAYERS]]


async def test_a_batch_goes_on_while_somebody_waits_for_a_text_in_it(
    monkeypatch: pytest.MonkeyPatch,
):
    model = Layered(monkeypatch)
    engine = by_layers(engine_of(ledger_of(), model=model))
    first, second = reading_of(3, 3), reading_of(3)
    engine.submit(first)
    engine.submit(second)
    engine.step()
    engine.cancel(first)
    while engine.has_work():
        model.now += 1
        engine.step()
    assert await answer(engine, second) == [[LAYERS, LAYERS]]
    assert model.computed == LAYERS
    assert not first.future.done()


class Sums(Clocked):
    """Says of each row how many tokens it has and what their sum is; a batch of a thousand takes as
    long as it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(lambda tokens: 1e-4 * tokens, monkeypatch)

    def __call__(self, ids, segments, lengths, made=None) -> mx.array:
        super().__call__(ids, segments, lengths)
        return mx.stack([lengths, ids.sum(axis=1)], axis=1)


BATCH = 1000
"""Tokens that such a batch has at most, about."""


def crowded(monkeypatch: pytest.MonkeyPatch, **limits: int) -> EncoderEngine:
    """An engine whose batches are no longer than they may be."""
    engine = engine_of(ledger_of(1000 * KEPT), model=Sums(monkeypatch), **limits)
    engine.submit(reading_of(*[64] * 100))
    while engine.has_work():
        engine.step()
    return engine


def step_until(engine: EncoderEngine, done: Callable[[], bool], most: int = 1000) -> int:
    """Tokens that were read meanwhile, padding included."""
    before = engine.stats()
    for _ in range(most):
        if done():
            break
        engine.step()
    after = engine.stats()
    return after.tokens + after.padding - before.tokens - before.padding


def is_read(reading: Request) -> bool:
    return reading.left == 0


async def test_a_key_that_comes_while_another_has_a_huge_request_is_next(
    monkeypatch: pytest.MonkeyPatch,
):
    engine = crowded(monkeypatch)
    huge = reading_of(*[300 + n % 200 for n in range(2048)], owner="alice")
    engine.submit(huge)
    for _ in range(3):
        engine.step()
    small = reading_of(8, owner="bob")
    engine.submit(small)
    engine.step()
    assert is_read(small)
    assert huge.left > 2000


async def test_texts_of_two_keys_are_read_evenly_though_one_asks_for_many_more(
    monkeypatch: pytest.MonkeyPatch,
):
    engine = crowded(monkeypatch)
    alice, bob = reading_of(*[100] * 2000, owner="alice"), reading_of(*[100] * 50, owner="bob")
    engine.submit(alice)
    engine.submit(bob)
    step_until(engine, lambda: is_read(bob))
    # They share each batch, though alice's texts fit it as well.
    assert 40 <= 2000 - alice.left <= 65


async def test_a_key_that_reads_short_texts_does_not_wait_for_one_that_reads_long_ones(
    monkeypatch: pytest.MonkeyPatch,
):
    engine = crowded(monkeypatch)
    long, short = reading_of(*[900] * 50, owner="alice"), reading_of(*[9] * 1000, owner="bob")
    engine.submit(long)
    engine.submit(short)
    step_until(engine, lambda: is_read(short))
    # 9 000 tokens of each.
    assert 50 - long.left in range(9, 13)


async def test_a_small_request_passes_a_huge_one_of_the_same_key(monkeypatch: pytest.MonkeyPatch):
    engine = crowded(monkeypatch)
    huge = reading_of(*[300] * 500)
    engine.submit(huge)
    engine.step()
    small = reading_of(*[300] * 3, 8)
    engine.submit(small)
    assert step_until(engine, lambda: is_read(small)) <= 2 * BATCH
    assert huge.left > 490


async def test_small_requests_without_end_do_not_keep_a_large_one(monkeypatch: pytest.MonkeyPatch):
    engine = crowded(monkeypatch)
    large = reading_of(*[400] * 20)
    engine.submit(large)

    def flood() -> bool:
        while sum(not reading.begun for reading in engine._readings) < 8:
            engine.submit(reading_of(*[50] * 20))
        return is_read(large)

    # What comes when as many tokens as it has have been read goes after it.
    assert step_until(engine, flood) <= 2 * 8000 + 8 * 1000 + 3 * BATCH


async def test_the_more_urgent_request_goes_first(monkeypatch: pytest.MonkeyPatch):
    engine = crowded(monkeypatch)
    later, sooner = reading_of(*[300] * 20, priority=1), reading_of(*[300] * 40)
    engine.submit(later)
    engine.submit(sooner)
    step_until(engine, lambda: is_read(sooner))
    assert later.left >= 18


async def test_a_full_queue_takes_in_a_key_that_has_less_than_its_part(
    monkeypatch: pytest.MonkeyPatch,
):
    engine = crowded(monkeypatch, max_waiting=4)
    for _ in range(5):
        engine.submit(reading_of(300, owner="alice"))
    others, refused = [reading_of(8, owner="bob") for _ in range(2)], []
    for reading in (*others, reading_of(8, owner="bob"), reading_of(8, owner="alice")):
        engine.submit(reading)
        refused.append(reading)
    for reading in others:
        assert await answer(engine, reading) == [[8, 8]]
    for reading in refused[2:]:
        with pytest.raises(Overloaded, match="7 requests are waiting, and at most 4 may"):
            await reading.future


async def test_of_a_batch_that_memory_cuts_short_the_first_in_turn_stay(
    monkeypatch: pytest.MonkeyPatch,
):
    engine = crowded(monkeypatch)
    alice, bob = reading_of(*[500] * 40, owner="alice"), reading_of(*[400] * 2, owner="bob")
    engine.submit(alice)
    engine.step()
    engine.submit(bob)
    ledger = engine._ledger
    ledger.record("pages:other", ledger.limit - KEPT - 300)
    engine.step()
    assert (bob.left, alice.left) == (1, 38)


@dataclass
class Asked:
    """A request of a play: it comes before the step of that number, and may be given up at one."""

    at: int
    owner: str
    priority: int
    lengths: list[int]
    gone: int | None
    reading: Request | None = field(default=None, compare=False)


asked = st.builds(
    Asked,
    st.integers(0, 30),
    st.sampled_from(["", "alice", "bob", "carol"]),
    st.sampled_from([0, 0, 0, -1, 1]),
    st.lists(st.integers(1, 700), min_size=1, max_size=40),
    st.one_of(st.none(), st.integers(0, 60)),
)


def texts_of(one: Asked, serial: int) -> list[list[int]]:
    return [[(serial + n) % 97 + 1] * length for n, length in enumerate(one.lengths)]


@settings(max_examples=60)
@given(st.lists(asked, min_size=1, max_size=12), st.booleans())
def test_whoever_comes_and_goes_all_are_read_and_get_their_own_vectors_in_order(
    play: list[Asked], crowded_memory: bool
):
    async def played() -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            model = Sums(monkeypatch)
            ledger = ledger_of(800 if crowded_memory else 100 * KEPT)
            engine = engine_of(ledger, model=model)
            for number in range(3000):
                for serial, one in enumerate(play):
                    if one.at == number:
                        rows = texts_of(one, serial)
                        future = asyncio.get_running_loop().create_future()
                        one.reading = Request(
                            rows, [None] * len(rows), future, bool, one.owner, one.priority
                        )
                        engine.submit(one.reading)
                    elif one.gone == number and one.reading is not None:
                        engine.cancel(one.reading)
                if number > 30 and not engine.has_work():
                    break
                engine.step()
            await asyncio.sleep(0)
            assert not engine.has_work()
            assert engine._readings == []
            assert (ledger.available(), engine._shares.contested) == (ledger.limit - KEPT, False)
            for serial, one in enumerate(play):
                assert one.reading is not None
                if not one.reading.given_up:
                    found = [vector.tolist() for vector in one.reading.future.result()]
                    rows = texts_of(one, serial)
                    assert found == [[len(row), sum(row)] for row in rows]

    asyncio.run(played())


@settings(max_examples=20)
@given(st.lists(st.lists(st.integers(20, 700), min_size=1, max_size=60), min_size=2, max_size=5))
def test_keys_that_want_as_much_as_they_can_get_are_served_alike(lengths: list[list[int]]):
    async def played() -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            engine = crowded(monkeypatch, max_waiting=10_000)
            tokens = [0 for _ in lengths]
            asked: list[list[Request]] = [[] for _ in lengths]
            for _ in range(40):
                for owner, texts in enumerate(lengths):
                    # There is always enough for a batch.
                    while sum(reading.queued for reading in asked[owner]) < 2 * BATCH:
                        asked[owner].append(reading_of(*texts, owner=str(owner)))
                        engine.submit(asked[owner][-1])
                before = [sum(reading.queued for reading in own) for own in asked]
                engine.step()
                after = [sum(reading.queued for reading in own) for own in asked]
                tokens = [n + b - a for n, b, a in zip(tokens, before, after, strict=True)]
            assert max(tokens) - min(tokens) <= 2 * BATCH

    asyncio.run(played())
