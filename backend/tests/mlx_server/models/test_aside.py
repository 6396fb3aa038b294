from __future__ import annotations

import threading
from typing import Any

import mlx.core as mx
import pytest

from mlx_manager.mlx_server.models.aside import Aside, Steps, on_stream, side_stream
from mlx_manager.mlx_server.utils.steps import Done, advance, finish


def reading(work: Any) -> Steps[str]:
    aside: Aside[str] = Aside(work)
    yield None
    yield aside
    return aside.result()


def test_steps_wait_for_what_another_thread_does():
    doer: list[str] = []
    steps = reading(lambda: doer.append(threading.current_thread().name) or "text")
    assert advance(steps) is None
    aside = advance(steps)
    assert isinstance(aside, Aside)
    other = threading.Thread(target=aside.run, name="other")
    other.start()
    other.join()
    assert advance(steps) == Done("text")
    assert doer == ["other"]


def test_what_nobody_did_is_done_when_it_is_needed():
    assert finish(reading(lambda: "text")) == "text"
    steps = reading(lambda: "text")
    assert [advance(steps) is None, isinstance(advance(steps), Aside)] == [True, True]
    assert advance(steps) == Done("text")


def test_a_failure_is_raised_where_the_result_is_asked_for():
    def fail() -> str:
        raise OSError("no such file")

    steps = reading(fail)
    advance(steps)
    aside = advance(steps)
    assert isinstance(aside, Aside)
    aside.run()
    with pytest.raises(OSError, match="no such file"):
        advance(steps)


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
