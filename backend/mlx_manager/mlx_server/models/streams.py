"""The stream that a load computes on."""

from __future__ import annotations

from typing import TypeVar

import mlx.core as mx

from mlx_manager.mlx_server.utils.steps import Done, Steps, advance

T = TypeVar("T")


def side_stream() -> mx.Stream:
    """Where a load computes: on a CPU beside the steps, which would queue behind it.

    There any thread may evaluate on it, one at a time: the MLX thread, and while that is told that
    something is done aside (`utils.steps`), the thread that does it. A GPU's steps share its time
    anyway, and files are read on no stream of its.
    """
    device = mx.default_device()
    if device == mx.Device(mx.cpu):
        return mx.new_thread_unsafe_stream(device)
    return mx.default_stream(device)


def on_stream(stream: mx.Stream, steps: Steps[T]) -> Steps[T]:
    """The same steps, each with `stream` as the default one."""
    try:
        while True:
            with mx.stream(stream):
                step = advance(steps)
            match step:
                case Done(value):
                    return value
                case _:
                    yield step
    finally:
        steps.close()
