from __future__ import annotations

import threading
from typing import Any

import pytest

from mlx_manager.mlx_server.utils.steps import Aside, Done, Steps, advance, beside, finish


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
