from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mlx_manager.mlx_server.utils.slices import SLICE
from mlx_manager.mlx_server.utils.steps import (
    TURN,
    Aside,
    Done,
    Steps,
    advance,
    beside,
    finish,
    in_turns,
    whereabouts,
)

LONG = range(int(2e9 * SLICE))
"""Summed up in many slices of any machine's time."""


def reading(work: Any) -> Steps[str]:
    yield None
    return (yield from beside(work))


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


def test_steps_that_are_closed_wait_for_what_is_under_way():
    begun, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert go_on.wait(30)
        done.set()

    steps = beside(work)
    aside = advance(steps)
    assert isinstance(aside, Aside)
    other = threading.Thread(target=aside.run)
    other.start()
    assert begun.wait(30)
    closer = threading.Thread(target=steps.close)
    closer.start()
    go_on.set()
    closer.join()
    assert done.is_set()
    other.join()


def test_what_has_not_begun_when_its_steps_are_closed_never_does():
    done: list[bool] = []
    steps = beside(lambda: done.append(True))
    aside = advance(steps)
    assert isinstance(aside, Aside)
    steps.close()
    aside.run()
    assert not done


def test_long_work_waits_for_others_to_step():
    asked: list[int] = []

    def after_step(go_on: Callable[[], None]) -> None:
        asked.append(len(asked))
        go_on()

    aside = Aside(lambda: sum(LONG))
    aside.run(after_step)
    assert asked
    assert aside.result() == sum(LONG)


def test_a_step_may_wait_for_a_lock_that_the_work_holds():
    lock = threading.Lock()
    steppers: list[threading.Thread] = []

    def work() -> str:
        with lock:
            sum(LONG)
        return "text"

    def after_step(go_on: Callable[[], None]) -> None:
        def step() -> None:
            with lock:
                go_on()

        steppers.append(threading.Thread(target=step, daemon=True))
        steppers[-1].start()

    aside = Aside(work)
    other = threading.Thread(target=aside.run, args=(after_step,), daemon=True)
    other.start()
    other.join(30)
    assert not other.is_alive()
    assert steppers
    for stepper in steppers:
        stepper.join(30)
    assert aside.result() == "text"


def test_steps_that_are_closed_wait_for_no_step_that_never_comes():
    waiting, done = threading.Event(), threading.Event()

    def work() -> None:
        sum(LONG)
        sum(LONG)
        done.set()

    steps = beside(work)
    aside = advance(steps)
    assert isinstance(aside, Aside)
    other = threading.Thread(target=aside.run, args=(lambda go_on: waiting.set(),))
    other.start()
    assert waiting.wait(30)
    steps.close()
    assert done.is_set()
    other.join()


def test_work_pauses_after_what_takes_long_and_after_as_much_that_does_not():
    now = 0.0
    done: list[float] = []

    def work() -> Iterator[None]:
        nonlocal now
        for seconds in (400 * TURN, 0.3 * TURN, 0.3 * TURN, 0.5 * TURN, 0.3 * TURN):
            now += seconds
            done.append(seconds)
            yield

    steps = in_turns(work(), lambda: now)
    pauses = []
    while advance(steps) is None:
        pauses.append(len(done))
        # What others do meanwhile does not count.
        now += 1000.0
    assert pauses == [1, 4]
    assert len(done) == 5


def test_a_paused_job_tells_where_it_is():
    def outer() -> Steps[str]:
        return (yield from reading(lambda: "text"))

    steps = outer()
    advance(steps)
    assert whereabouts(steps) == "outer > reading"
    advance(steps)
    assert whereabouts(steps) == "outer > reading > beside"
    advance(steps)
    assert whereabouts(steps) == "outer"
