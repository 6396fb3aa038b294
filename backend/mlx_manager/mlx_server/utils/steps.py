"""Long jobs as generators: they pause, so that others' work fits in between."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
Y = TypeVar("Y")

Pauses = Generator[None, None, T]
"""A job that asks for nothing but that others get their turn."""


@dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """What the job has come to."""

    value: T


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
