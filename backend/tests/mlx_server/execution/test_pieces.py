"""A pass whose pieces are queued one after another."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

from mlx_manager.mlx_server.execution import pieces
from mlx_manager.mlx_server.execution.pieces import Pieces


def chain(length: int) -> Iterator[mx.array]:
    """Numbers from 1 on, each made from the one before."""
    value = mx.array(0.0)
    for _ in range(length):
        value = value + 1
        yield value


@pytest.fixture
def under_way(monkeypatch) -> list[mx.array]:
    """What has been queued and not been waited for."""
    queued: list[mx.array] = []

    def wait(piece: mx.array) -> None:
        assert piece is queued.pop(0)

    monkeypatch.setattr(pieces.mx, "async_eval", queued.append)
    monkeypatch.setattr(pieces.mx, "eval", wait)
    return queued


@pytest.mark.parametrize("most", [3, 4, 5, 8])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 9])
def test_no_more_are_queued_than_may_be_with_what_the_last_pass_left(most, count, under_way):
    passing = None
    for _ in range(3):
        passing = Pieces(most, passing)
        for piece in chain(count):
            passing.add(piece)
            assert len(under_way) <= most
        # The last pass has run before this one is finished.
        del under_way[: len(passing._before)]
        passing.finish()
        assert len(under_way) <= most
        assert not passing.unfinished


@pytest.mark.parametrize(("most", "left"), [(3, 2), (4, 3), (8, 7)])
def test_the_device_has_something_to_do_while_the_next_pass_begins(most, left, under_way):
    passing = Pieces(most)
    for piece in chain(9):
        passing.add(piece)
    assert len(under_way) == most
    passing.finish()
    assert len(under_way) == left


def test_a_pass_begins_as_the_last_one_makes_room_and_does_not_wait_for_its_end(under_way):
    last, *pieces = Pieces(3), *chain(9)
    for piece in pieces:
        last.add(piece)
    last.finish()
    passing, (first, second, third) = Pieces(3, last), chain(3)
    end = under_way[-1]
    for piece in (first, second, third):
        passing.add(piece)
    assert all(a is b for a, b in zip(under_way, (end, first, second), strict=True))
    assert passing.unfinished


@pytest.mark.parametrize("most", [3, 4, 9, None])
def test_a_pass_is_finished_when_all_of_it_has_been_queued(most):
    passing, made = Pieces(most), list(chain(7))
    for piece in made:
        passing.add(piece)
    assert passing.unfinished == (most in (3, 4))
    passing.finish()
    assert not passing.unfinished
    assert [piece.item() for piece in made] == [1, 2, 3, 4, 5, 6, 7]


def test_a_pass_that_may_be_queued_whole_is(under_way):
    passing = Pieces()
    for piece in chain(5):
        passing.add(piece)
    assert len(under_way) == 5
    assert not passing.unfinished
