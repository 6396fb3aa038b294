from __future__ import annotations

import mlx.core as mx

from mlx_manager.mlx_server.models.streams import on_stream, side_stream
from mlx_manager.mlx_server.utils.steps import Steps, advance, finish


def test_a_side_stream_is_the_default_within_a_step_and_not_between_two():
    device = mx.default_device()
    plain, side = mx.default_stream(device), side_stream()
    seen: list[mx.Stream] = []

    def steps() -> Steps[int]:
        for _ in range(2):
            seen.append(mx.default_stream(device))
            yield None
        return 7

    running = on_stream(side, steps())
    assert advance(running) is None
    assert mx.default_stream(device) == plain
    assert finish(running) == 7
    assert seen == [side, side]


def test_steps_on_a_stream_that_are_closed_close_their_own():
    closed: list[bool] = []

    def steps() -> Steps[None]:
        try:
            yield None
        finally:
            closed.append(True)

    running = on_stream(side_stream(), steps())
    advance(running)
    running.close()
    assert closed == [True]
