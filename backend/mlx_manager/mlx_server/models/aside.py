"""A load in pieces: what it does between other models' steps, and what it does beside them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

import mlx.core as mx

from mlx_manager.mlx_server.utils.steps import Done, advance

T = TypeVar("T")

# What mlx-lm, transformers and MLX raise over files that are not as they expect.
BROKEN = (
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


class Aside(Generic[T]):
    """Work for any thread but the MLX thread, which steps other models meanwhile.

    Yielded by the steps of a load; they go on when it has been done, and do it if nobody has.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._outcome: Done[T] | Exception | None = None

    def run(self) -> None:
        """Do it. A failure is kept for who asks for the result."""
        try:
            self._outcome = Done(self._work())
        except BROKEN as error:
            self._outcome = error

    def result(self) -> T:
        if self._outcome is None:
            self.run()
        match self._outcome:
            case Done(value):
                return value
            case error:
                assert error is not None
                raise error


Steps = Generator[Aside[Any] | None, None, T]
"""A long job on the MLX thread; it pauses often, so that other models can step."""


def side_stream() -> mx.Stream:
    """Where a load computes: on a CPU beside the steps, which would queue behind it.

    A GPU's steps share its time anyway, and files are read on no stream of its.
    """
    device = mx.default_device()
    beside = device == mx.Device(mx.cpu)
    return mx.new_stream(device) if beside else mx.default_stream(device)


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
