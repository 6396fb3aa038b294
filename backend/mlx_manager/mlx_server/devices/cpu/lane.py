"""A second CPU stream, for operations that can run beside those of the first.

MLX computes a stream's operations on one thread. Within a layer's attention, decode rows and a
prompt's chunk are independent; outside of attention, so are a prompt's tokens. On one core each,
two such parts take as long as the longer one. Switching to the other stream and back takes 10 us.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import mlx.core as mx

from mlx_manager.mlx_server.devices.cpu.blas import available_cores


def lane() -> AbstractContextManager[Any]:
    """Return a context whose operations go to the second stream, if there is a core for it.

    The thread that creates the operations must also evaluate them, because the stream is
    thread-local. So a load's passes, which another thread evaluates, must not use it.
    """
    stream = _stream() if mx.default_device() == mx.cpu else None
    return nullcontext() if stream is None else mx.stream(stream)


def has_lane() -> bool:
    return mx.default_device() == mx.cpu and _stream() is not None


def in_halves(compute: Callable[..., mx.array], *arrays: mx.array) -> mx.array:
    """Return `compute(*arrays)`, with the latter half of the rows computed in the lane.

    Each row of the result must depend only on the same row of `arrays`.
    """
    half = len(arrays[0]) // 2
    with lane():
        # Slice inside the lane: the first stream would slice only after computing its own half.
        latter = compute(*(array[half:] for array in arrays))
    return mx.concatenate([compute(*(array[:half] for array in arrays)), latter])


@cache
def _stream() -> mx.ThreadLocalStream | None:
    return mx.new_thread_local_stream(mx.Device(mx.cpu)) if available_cores() > 1 else None
