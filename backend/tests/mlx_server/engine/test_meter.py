from __future__ import annotations

from bisect import bisect_left
from pathlib import Path

import pytest
from engine.rig import Rig
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import make_tiny_model

from mlx_manager.mlx_server.engine.meter import Durations, Meter

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


def test_rows_of_one_step_share_a_gap_and_first_tokens_have_none():
    meter = Meter()
    meter.read(10.0, [0.0, 0.0])
    assert sum(meter.gaps.distribution().counts) == 0
    meter.read(13.0, [10.0, 10.0, 0.0, 12.0])
    found = meter.gaps.distribution()
    assert sum(found.counts) == 3
    assert found.total == 3.0 + 3.0 + 1.0


def prompt(length: int) -> list[int]:
    return [3 + i % 40 for i in range(length)]


async def test_an_engine_counts_tokens_gaps_steps_and_how_long_rows_wait(tmp_path: Path) -> None:
    async with Rig(make_tiny_model(tmp_path / "llama", "llama")) as rig:
        rows = [rig.submit(prompt(20 + n), 5 + n) for n in range(3)]
        started = [await row.started() for row in rows]
        for row in rows:
            await row.finished()
        stats = rig.engine.stats()
    assert stats.prompt_tokens == 20 + 21 + 22
    assert stats.generated_tokens == 5 + 6 + 7
    assert sum(stats.token_gaps.counts) == 4 + 5 + 6
    assert stats.steps <= sum(stats.host_time.counts) <= stats.steps + 3
    assert stats.host_time.total > 0
    assert all(event.queued >= 0 and event.prefill > 0 for event in started)
    assert stats.pages_attainable >= stats.pages_held + stats.pages_cached + stats.pages_free
