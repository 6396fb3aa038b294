"""A second stream of the CPU, for what others need not wait for.

MLX computes a stream's operations on one thread. Rows and a prompt's chunk have nothing to do with
each other within a layer's attention, nor have a prompt's tokens outside of it: on one core each
they take as long as the longer of the two. To go over to the other stream and back takes 10 us.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import mlx.core as mx

from mlx_manager.mlx_server.devices.cpu.blas import available_cores


def lane() -> AbstractContextManager[Any]:
    """What is put together within is computed while the rest goes on, where a core is there for it.

    By the thread that puts it together alone: a load's passes, which another thread evaluates, must
    have nothing of it.
    """
    stream = _stream() if mx.default_device() == mx.cpu else None
    return nullcontext() if stream is None else mx.stream(stream)


def has_lane() -> bool:
    return mx.default_device() == mx.cpu and _stream() is not None


def in_halves(compute: Callable[..., mx.array], *arrays: mx.array) -> mx.array:
    """`compute(*arrays)`, of which every row comes from the same row of `arrays`; in the lane for
    the latter half of them."""
    half = len(arrays[0]) // 2
    with lane():
        # Slices of the first stream would be made there after all that its own half takes.
        latter = compute(*(array[half:] for array in arrays))
    return mx.concatenate([compute(*(array[:half] for array in arrays)), latter])


@cache
def _stream() -> mx.ThreadLocalStream | None:
    return mx.new_thread_local_stream(mx.Device(mx.cpu)) if available_cores() > 1 else None
