"""Progress of a load, told in the words of a person."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
Doing = Callable[[str], object]
"""Told what a load has begun to do."""


def unheard(doing: str) -> None:
    """Nobody asks."""


def counted(doing: Doing, what: str, parts: Sequence[T]) -> Iterator[T]:
    """Go through the parts of a job, and tell at the beginning of each which it is."""
    for number, part in enumerate(parts, 1):
        doing(f"{what} ({number} of {len(parts)})")
        yield part
