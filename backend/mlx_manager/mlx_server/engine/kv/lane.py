"""A second stream of the CPU, for attention that others need not wait for.

MLX computes a stream's operations on one thread, and rows and a prompt's chunk have nothing to do
with each other within a layer's attention: on one core each it takes as long as the longer of the
two. To go over to the other stream and back takes some 10 us.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import mlx.core as mx

from mlx_manager.mlx_server.utils.blas import available_cores


def lane() -> AbstractContextManager[Any]:
    """What is put together within is computed while the rest goes on, where a core is there for it.

    By the thread that puts it together alone: a load's passes, which another thread evaluates, must
    have nothing of it.
    """
    stream = _stream() if mx.default_device() == mx.cpu else None
    return nullcontext() if stream is None else mx.stream(stream)


@cache
def _stream() -> mx.ThreadLocalStream | None:
    return mx.new_thread_local_stream(mx.Device(mx.cpu)) if available_cores() > 1 else None
