"""How a load computes: what is queued by the MLX thread is waited for by another."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx

from mlx_manager.mlx_server.engine.evaluation import one_by_one, queued
from mlx_manager.mlx_server.utils.steps import Aside, Done, advance


def chain(length: int) -> list[mx.array]:
    """Each is made from the one before."""
    found = [mx.full((64, 64), 1 / 64)]
    for _ in range(length - 1):
        found.append(found[-1] @ mx.ones((64, 64)))
    return found


def test_what_is_queued_here_is_waited_for_elsewhere() -> None:
    arrays = chain(9)
    steps = queued(arrays)
    asides = 0
    with ThreadPoolExecutor(1) as other:
        while not isinstance(piece := advance(steps), Done):
            if isinstance(piece, Aside):
                asides += 1
                other.submit(piece.run).result()
    assert asides == 1
    assert all(mx.all(array == 64.0**i / 64).item() for i, array in enumerate(arrays))


def test_what_is_given_up_while_it_is_queued_can_be_begun_anew() -> None:
    arrays = chain(9)
    steps = queued(arrays)
    advance(steps)
    steps.close()
    assert mx.all(arrays[-1] == 64.0**8 / 64).item()


def test_launches_are_computed_with_a_pause_after_each() -> None:
    launches = chain(5)
    steps = one_by_one(launches)
    pauses = 0
    while not isinstance(piece := advance(steps), Done):
        assert isinstance(piece, Aside)
        piece.run()
        pauses += 1
    assert pauses == len(launches)
