"""A pass whose pieces are queued one after another."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_manager.mlx_server.engine.pieces import Pieces


@pytest.mark.parametrize(("ahead", "pieces"), [(1, 1), (1, 2), (1, 3), (0, 4), (9, 4)])
def test_a_pass_is_finished_when_only_so_many_can_be_under_way(ahead: int, pieces: int) -> None:
    passing = Pieces(ahead)
    value = mx.array(1.0)
    for number in range(pieces):
        assert passing.unfinished == (number > ahead)
        value = value + 1
        passing.add(value)
    assert passing.unfinished == (pieces > ahead)
    passing.finish()
    assert not passing.unfinished
    assert value.item() == pieces + 1
