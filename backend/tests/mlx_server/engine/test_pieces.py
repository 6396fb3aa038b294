"""A pass whose pieces are queued one after another."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_manager.mlx_server.engine.pieces import Pieces


@pytest.mark.parametrize(("ahead", "pieces", "left"), [(1, 2, 0), (1, 3, 1), (0, 4, 3), (9, 4, 0)])
def test_only_so_many_are_queued_ahead(ahead: int, pieces: int, left: int) -> None:
    passing = Pieces(ahead)
    value = mx.array(1.0)
    for number in range(pieces):
        assert passing.unfinished == (number > pieces - left)
        value = value + 1
        passing.add(value)
    assert passing.unfinished == (left > 0)
    passing.finish()
    assert not passing.unfinished
    assert value.item() == pieces + 1
