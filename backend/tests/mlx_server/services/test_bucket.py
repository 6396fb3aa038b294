from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlx_manager.mlx_server.services.bucket import Bucket


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_minutes_worth_can_be_taken_at_once_and_flows_back_evenly():
    clock = Clock()
    bucket = Bucket(60, clock)
    bucket.take(60)
    assert bucket.left == 0
    assert bucket.wait == 1
    assert bucket.reset == 60
    clock.now = 10
    assert bucket.left == 10
    clock.now = 1000
    assert bucket.left == 60


def test_a_debt_is_waited_for():
    clock = Clock()
    bucket = Bucket(600, clock)
    bucket.take(1600)
    assert bucket.left == 0
    assert round(bucket.wait, 3) == 100.1
    clock.now = 100.2
    assert bucket.left == 2


@given(st.integers(1, 10_000), st.lists(st.tuples(st.floats(0, 100), st.integers(0, 50))))
def test_nobody_who_waits_for_each_unit_gets_more_than_the_rate(
    per_minute: int, moves: list[tuple[float, int]]
):
    clock = Clock()
    bucket = Bucket(per_minute, clock)
    taken = 0
    for pause, wanted in moves:
        clock.now += pause
        for _ in range(wanted):
            if bucket.left >= 1:
                bucket.take(1)
                taken += 1
    assert taken <= per_minute + per_minute * clock.now / 60 + 1e-6
    assert 0 <= bucket.left <= per_minute
