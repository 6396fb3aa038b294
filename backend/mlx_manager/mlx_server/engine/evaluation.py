"""How what a load has put together is computed, while other models step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import mlx.core as mx

from mlx_manager.mlx_server.utils.steps import Steps, beside, in_turns

AT_ONCE = 2
"""Of the arrays, which are a layer's keys and values. MLX holds up whoever evaluates anything, on
whatever stream, while a hundred operations are under way."""


def computed(arrays: Sequence[mx.array]) -> Steps[None]:
    """Compute what a pass through a model leaves; on a CPU on another thread.

    arrays: each after those that it is made from, so that there are about as many as layers.
    """
    if mx.default_device() == mx.cpu:
        yield from beside(partial(_evaluate, arrays))
    else:
        yield from queued(arrays)


def queued(arrays: Sequence[mx.array]) -> Steps[None]:
    """Queue what `arrays` take, with pauses, and wait for it on another thread.

    A kernel's first launch compiles it, for seconds if it is new to the machine, and on a GPU only
    the MLX thread may launch: others step before the next layer is queued.
    """
    yield from in_turns(_queue(arrays))
    # What is under way needs no stream of the waiting thread's own.
    yield from beside(partial(_evaluate, arrays))


def one_by_one(launches: Iterable[mx.array]) -> Steps[None]:
    """Compute each of `launches` by itself, in their order, and pause after each: no two kernels
    are compiled without a step of other models in between. The next is put together then."""
    for launch in launches:
        yield from computed([launch])


def _queue(arrays: Sequence[mx.array]) -> Iterator[None]:
    for start in range(0, len(arrays), AT_ONCE):
        mx.async_eval(arrays[start : start + AT_ONCE])  # type: ignore[no-untyped-call]
        yield


def _evaluate(arrays: Sequence[mx.array]) -> None:
    for start in range(0, len(arrays), AT_ONCE):
        mx.eval(arrays[start : start + AT_ONCE])
