from __future__ import annotations

import time

import pytest

from mlx_manager.mlx_server.utils.clock import SteadyClock, ahead_of


def test_setting_the_machines_clock_makes_nothing_older(monkeypatch: pytest.MonkeyPatch):
    clock = SteadyClock()
    before = clock()
    assert abs(before - time.time()) < 60
    monkeypatch.setattr(time, "time", lambda: before + 1e9)
    assert 0 <= clock() - before < 60


@pytest.mark.parametrize(
    ("now", "newest", "ahead"),
    [
        (1000.0, 990.0, 0.0),
        (1000.0, 1000.0, 0.0),
        # The clock is behind; so long ago that all of it would go.
        (1000.0, 5000.0, 4000.0),
        (1000.0, 100.0, -900.0),
    ],
)
def test_ages_begin_at_what_was_used_last(now: float, newest: float, ahead: float):
    assert ahead_of(now, newest, 500) == ahead
