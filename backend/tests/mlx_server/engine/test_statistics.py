from __future__ import annotations

from pathlib import Path

from engine.rig import Rig
from tiny_models import make_tiny_model

from mlx_manager.mlx_server.engine.statistics import Statistics


def test_rows_of_one_step_share_a_gap_and_first_tokens_have_none():
    statistics = Statistics()
    statistics.count_tokens(10.0, [0.0, 0.0])
    assert sum(statistics.gaps.distribution().counts) == 0
    statistics.count_tokens(13.0, [10.0, 10.0, 0.0, 12.0])
    found = statistics.gaps.distribution()
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
