from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_manager.mlx_server.engine.scheduler.cost import Cost

PRICES = (0.010, 0.003, 0.0005)
AMOUNTS = st.lists(st.floats(0, 100), min_size=3, max_size=3)


def seen(cost: Cost, times: int, noise: float = 0.0, prices: tuple[float, ...] = PRICES) -> None:
    """Work of all sorts, each time a little more or less than it should take."""
    rng = random.Random(times)
    for _ in range(times):
        amounts = [rng.uniform(0, 4), rng.uniform(0, 2), 1.0]
        exact = sum(p * a for p, a in zip(prices, amounts, strict=True))
        cost.learn(amounts, exact * rng.uniform(1 - noise, 1 + noise))


def test_nothing_is_known_at_first_and_costs_nothing() -> None:
    cost = Cost(3)
    assert not cost.known
    assert cost.of([1, 2, 3]) == 0


def test_prices_are_found_from_sums() -> None:
    cost = Cost(3)
    seen(cost, 200)
    assert cost.prices == pytest.approx(PRICES, rel=0.01)


def test_noise_is_averaged() -> None:
    cost = Cost(3)
    seen(cost, 300, noise=0.3)
    for amounts in ([2, 1, 1], [4, 0, 1], [1, 2, 1]):
        exact = sum(p * a for p, a in zip(PRICES, amounts, strict=True))
        assert cost.of(amounts) == pytest.approx(exact, rel=0.1)


def test_one_odd_time_is_soon_made_good() -> None:
    cost = Cost(3)
    seen(cost, 200)
    before = cost.of([2, 1, 1])
    cost.learn([2, 1, 1], 100 * before)
    assert cost.of([2, 1, 1]) < 1.3 * before
    seen(cost, 50)
    assert cost.of([2, 1, 1]) == pytest.approx(before, rel=0.05)


def test_it_follows_work_that_becomes_dearer_and_cheaper() -> None:
    cost = Cost(3)
    seen(cost, 100)
    for factor in (5.0, 0.2):
        seen(cost, 200, prices=tuple(price * factor for price in PRICES))
        assert cost.of([2, 1, 1]) == pytest.approx(factor * 0.0235, rel=0.15)


def test_what_is_not_seen_for_long_keeps_its_price() -> None:
    cost = Cost(2)
    for n in range(100):
        cost.learn([1.0, float(n % 3)], 0.01 + 0.002 * (n % 3))
    for _ in range(60_000):
        cost.learn([1.0, 0.0], 0.01)
    assert cost.prices[1] == pytest.approx(0.002, rel=0.01)


def test_many_times_at_once_tell_what_they_tell_one_by_one() -> None:
    rng = random.Random(3)
    loads = [(1.0, float(rng.choice([1, 4, 8]))) for _ in range(64)]
    seen = [(load, (0.004 + 0.001 * load[1]) * rng.uniform(0.9, 1.1)) for load in loads]
    single, together = Cost(2), Cost(2)
    for amounts, seconds in seen:
        single.learn(amounts, seconds)
    together.learn_all([*seen[:32], ((1.0, 1.0), 0.0), *seen[32:]])
    for rows in (1.0, 4.0, 8.0, 16.0):
        assert together.of((1.0, rows)) == pytest.approx(single.of((1.0, rows)), rel=0.05)


@settings(max_examples=200)
@given(
    steps=st.lists(st.tuples(AMOUNTS, st.one_of(st.just(0.0), st.floats(1e-9, 1e4))), max_size=60),
    asked=AMOUNTS,
)
def test_whatever_is_seen_no_cost_is_below_zero_or_no_number(
    steps: list[tuple[list[float], float]], asked: list[float]
) -> None:
    one_by_one, together = Cost(3), Cost(3)
    for amounts, seconds in steps:
        one_by_one.learn(amounts, seconds)
    together.learn_all(steps)
    for cost in (one_by_one, together):
        assert cost.of(asked) >= 0
        assert math.isfinite(cost.of(asked))
