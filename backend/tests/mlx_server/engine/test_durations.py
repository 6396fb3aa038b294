from __future__ import annotations

from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_manager.mlx_server.engine.durations import Durations

BOUNDS = (0.5, 1.0, 2.0)


@given(st.lists(st.floats(0, 4), max_size=30))
def test_every_duration_is_counted_under_the_first_bound_that_holds_it(seconds: list[float]):
    durations = Durations(BOUNDS)
    for value in seconds:
        durations.add(value)
    found = durations.distribution()
    expected = [0, 0, 0, 0]
    for value in seconds:
        expected[bisect_left(BOUNDS, value)] += 1
    assert list(found.counts) == expected
    assert found.total == pytest.approx(sum(seconds))
