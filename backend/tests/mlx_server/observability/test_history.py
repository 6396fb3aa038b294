"""Samples of the last hour and recent calls, from figures and records as they come."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_manager.mlx_server.core import Caller, Finished, GenerationRequest, Started, Text, Usage
from mlx_manager.mlx_server.observability.history import CALLS, History, quantile
from mlx_manager.mlx_server.timeline import RowTimeline, Timeline

BOUNDS = (0.01, 0.02, 0.05)


def engine(generated: int, counts: tuple[int, ...] = (0, 0, 0, 0)) -> dict[str, Any]:
    gaps = {"bounds": BOUNDS, "counts": counts, "total": 0.0}
    return {
        "generated_tokens": generated,
        "prompt_tokens": 2 * generated,
        "prefix_queries": 10,
        "prefix_hits": 5,
        "token_gaps": gaps,
    }


class Told:
    """Stand-in for the figures of the models and for the clock."""

    def __init__(self) -> None:
        self.engines: dict[str, dict[str, Any]] = {}
        self.now = 1000.0
        self.looks = 0

    async def look(self) -> None:
        self.looks += 1

    def history(self) -> History:
        return History(self.look, lambda: {"engines": self.engines}, lambda: self.now)


def count_call(
    history: History,
    model: str = "m",
    first: float = 0.5,
    text: str = "hello",
    failure: str = "",
) -> None:
    caller = Caller("alice", "chat", "req-1")
    started = Started(100, 64, queued=0.1, prefill=0.2)
    row = RowTimeline(None, started, first, Finished("stop", Usage(100, 20, 64)), 1.0, 20)
    timeline = Timeline(model, caller, (row,), arrived=900.0, leased=0.0)
    end = history.begin([GenerationRequest(model, Text(text), caller=caller)], timeline)
    timeline.seconds, timeline.failure = 2.0, failure
    end()


def test_a_sample_has_what_was_added_since_the_last_one() -> None:
    told = Told()
    history = told.history()
    told.engines, told.now = {"a": engine(100), "b": engine(50)}, 1010.0
    history.sample()
    told.engines, told.now = {"a": engine(160), "b": engine(50)}, 1020.0
    history.sample()
    first, second = history.samples
    assert (first.tokens, first.prompt_tokens, first.seconds) == (150, 300, 10.0)
    assert (second.tokens, second.prefix_queries, second.time) == (60, 0, 1020.0)


def test_a_model_that_was_loaded_anew_counts_from_nothing() -> None:
    told = Told()
    history = told.history()
    told.engines = {"a": engine(100, (9, 0, 0, 0))}
    history.sample()
    told.engines = {"a": engine(30, (0, 2, 0, 0))}
    history.sample()
    assert history.samples[1].tokens == 30
    assert history.samples[1].gaps == pytest.approx((0.015, 0.0199))


def test_while_nothing_is_done_no_sample_is_kept() -> None:
    told = Told()
    history = told.history()
    told.engines = {"a": engine(100)}
    history.sample()
    history.sample()
    assert len(history.samples) == 1


def test_first_tokens_and_gaps_are_given_as_percentiles() -> None:
    told = Told()
    history = told.history()
    for place in range(100):
        count_call(history, first=place / 100)
    told.engines = {"a": engine(1, (50, 0, 50, 0))}
    history.sample()
    [sample] = history.samples
    assert sample.first == (0.5, 0.99)
    assert sample.gaps == pytest.approx((0.01, 0.0494))


def test_a_recent_call_has_its_times_and_its_outcome() -> None:
    history = Told().history()
    count_call(history)
    count_call(history, failure="cancelled")
    first, second = history.calls
    assert (first.number, second.number) == (1, 2)
    assert (first.key, first.protocol, first.request_id) == ("alice", "chat", "req-1")
    assert (first.prompt_tokens, first.cached_tokens, first.tokens) == (100, 64, 20)
    assert (first.queued, first.first, first.seconds, first.ended) == (0.1, 0.5, 2.0, 902.0)
    assert (first.outcome, second.outcome) == ("stop", "cancelled")
    assert first.missed == "no prompt was kept before it"


def test_only_the_last_calls_are_kept() -> None:
    history = Told().history()
    for _ in range(CALLS + 10):
        count_call(history)
    assert len(history.calls) == CALLS
    assert history.calls[-1].number == CALLS + 10


async def test_models_are_looked_at_only_while_there_is_work() -> None:
    told, begun = Told(), asyncio.Event()
    keeping = asyncio.create_task(told.history().keep(begun.wait))
    for _ in range(5):
        await asyncio.sleep(0)
    assert told.looks == 0
    keeping.cancel()


@given(st.lists(st.integers(0, 50), min_size=4, max_size=4).filter(any), st.floats(0.01, 0.99))
def test_quantiles_are_within_the_bounds_and_in_order(counts: list[int], share: float) -> None:
    value = quantile(BOUNDS, counts, share)
    assert 0.0 <= value <= BOUNDS[-1]
    assert value <= quantile(BOUNDS, counts, 0.999)
