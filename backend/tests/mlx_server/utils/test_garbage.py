"""When what only refers to itself is looked for."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mlx_manager.mlx_server.utils.garbage import Garbage

SOON = 0.02
LONG = 60.0


class Collector:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


@contextmanager
def collecting(**how: Any) -> Iterator[tuple[Garbage, Collector]]:
    collector = Collector()
    garbage = Garbage(collector, **how)
    with garbage.collected_here():
        yield garbage, collector


def nobody() -> bool:
    return False


def somebody() -> bool:
    return True


async def test_it_is_looked_for_a_while_after_a_request_has_ended():
    with collecting(rest=SOON) as (garbage, collector):
        garbage.leave(1, nobody)
        garbage.leave(1, nobody)
        assert collector.times == 0
        await asyncio.sleep(3 * SOON)
        assert collector.times == 1


async def test_it_is_not_looked_for_again_while_nothing_is_new():
    with collecting(rest=SOON) as (garbage, collector):
        garbage.leave(1, nobody)
        await asyncio.sleep(6 * SOON)
        assert collector.times == 1


async def test_while_somebody_is_answered_it_waits():
    with collecting(rest=SOON) as (garbage, collector):
        garbage.leave(1, somebody)
        await asyncio.sleep(3 * SOON)
        assert collector.times == 0
        garbage.leave(1, nobody)
        await asyncio.sleep(3 * SOON)
        assert collector.times == 1


async def test_when_it_has_become_much_it_is_looked_for_whoever_is_answered():
    with collecting(rest=LONG, much=10) as (garbage, collector):
        for _ in range(9):
            garbage.leave(1, somebody)
        await asyncio.sleep(0)
        assert collector.times == 0
        garbage.leave(1, somebody)
        await asyncio.sleep(0)
        assert collector.times == 1


async def test_a_long_prompt_counts_as_many():
    with collecting(rest=LONG, much=10) as (garbage, collector):
        garbage.leave(10, somebody)
        await asyncio.sleep(0)
        assert collector.times == 1


async def test_where_python_does_all_by_itself_nothing_is_done():
    collector = Collector()
    Garbage(collector, rest=SOON, much=10).leave(10, nobody)
    await asyncio.sleep(3 * SOON)
    assert collector.times == 0


def test_what_has_been_there_for_a_while_is_left_alone_in_the_meantime():
    usual = gc.get_threshold()
    with Garbage().collected_here():
        kept = [[[]] for _ in range(200_000)]
        before = gc.get_stats()[2]["collections"]
        more = [[[]] for _ in range(200_000)]
        assert gc.get_stats()[2]["collections"] == before
    assert gc.get_threshold() == usual
    assert len(kept) == len(more)
