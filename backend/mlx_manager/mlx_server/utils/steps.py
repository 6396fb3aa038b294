"""Long jobs as generators: they pause, so that others' work fits in between or goes on beside."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from threading import Lock
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Y = TypeVar("Y")

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


@dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """What the job has come to."""

    value: T


class Aside(Generic[T]):
    """Work for any thread but the MLX thread, which steps other models meanwhile.

    Yielded by steps; they go on when it has been done, and do it if nobody has.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._outcome: Done[T] | Exception | None = None
        self._working = Lock()

    def run(self) -> None:
        """Do it, once. A failure is kept for who asks for the result."""
        with self._working:
            if self._outcome is None:
                try:
                    self._outcome = Done(self._work())
                except BROKEN as error:
                    self._outcome = error

    def result(self) -> T:
        self.run()
        match self._outcome:
            case Done(value):
                return value
            case error:
                assert error is not None
                raise error

    def abandon(self) -> None:
        """Wait for it if it is under way, and otherwise see to it that it never is."""
        with self._working:
            self._outcome = self._outcome or RuntimeError("nobody waits for it any more")


Steps = Generator[Aside[Any] | None, None, T]
"""A long job on the MLX thread; it pauses often, so that models can step."""


def beside(work: Callable[[], T]) -> Steps[T]:
    """What `work` returns, done on another thread."""
    aside = Aside(work)
    try:
        yield aside
    except GeneratorExit:
        aside.abandon()
        raise
    return aside.result()


def advance(steps: Generator[Y, None, T]) -> Done[T] | Y:
    """The next piece."""
    try:
        return next(steps)
    except StopIteration as end:
        return Done(end.value)


def finish(steps: Generator[object, None, T]) -> T:
    """All pieces in one go."""
    while True:
        match advance(steps):
            case Done(value):
                result: T = value
                return result
