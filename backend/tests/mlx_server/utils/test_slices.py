from __future__ import annotations

import sys

from mlx_manager.mlx_server.utils.slices import SLICE, sliced

LONG = range(int(2e9 * SLICE))
"""Summed up in many slices of any machine's time, by one call that nothing gets in between."""


def test_others_have_their_turn_after_each_long_call():
    turns: list[int] = []
    done: list[int] = []
    with sliced(lambda: turns.append(len(done))):
        for _ in range(3):
            done.append(sum(LONG))
    assert {0, 1, 2} <= set(turns)
    assert len(done) == 3


def test_what_is_done_in_many_short_calls_is_cut_too():
    turns: list[int] = []
    with sliced(lambda: turns.append(len(turns))):
        for number in range(len(LONG) // 50):
            str(number).encode()
    assert turns


def test_short_work_waits_for_nobody():
    turns: list[int] = []
    with sliced(lambda: turns.append(0)):
        pass
    assert not turns


def test_the_thread_is_left_as_it_was_whatever_happens():
    try:
        with sliced(lambda: None):
            raise OSError("no such file")
    except OSError:
        pass
    assert sys.getprofile() is None


def test_a_thread_that_is_profiled_is_not_cut():
    turns: list[int] = []
    seen: list[str] = []
    sys.setprofile(lambda frame, event, argument: seen.append(event))
    try:
        with sliced(lambda: turns.append(0)):
            sum(LONG)
    finally:
        sys.setprofile(None)
    assert not turns
    assert seen
