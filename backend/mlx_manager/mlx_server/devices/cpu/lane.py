"""A second CPU stream, for half of a prompt's tokens.

MLX computes a stream's operations on one thread. Outside of attention a prompt's tokens are
independent: on one core each, two halves take as long as the longer one. Switching to the other
stream and back takes 10 us.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import mlx.core as mx

from mlx_manager.mlx_server.devices.cpu.blas import available_cores


def has_lane() -> bool:
    """Return whether the device is a CPU, and there is a core for a second stream."""
    return mx.default_device() == mx.cpu and _cores() > 1


def in_halves(compute: Callable[..., mx.array], *arrays: mx.array) -> mx.array:
    """Return `compute(*arrays)`, with the latter half of the rows computed in the lane.

    Each row of the result must depend only on the same row of `arrays`. The thread that calls this
    must also evaluate the result, because the stream is thread-local. So a load's passes, which
    another thread evaluates, must not use it.
    """
    half = len(arrays[0]) // 2
    with mx.stream(_stream()):
        # Slice inside the lane: the first stream would slice only after computing its own half.
        latter = compute(*(array[half:] for array in arrays))
    return mx.concatenate([compute(*(array[:half] for array in arrays)), latter])


@cache
def _stream() -> mx.ThreadLocalStream:
    return mx.new_thread_local_stream(mx.Device(mx.cpu))


@cache
def _cores() -> int:
    return available_cores()
