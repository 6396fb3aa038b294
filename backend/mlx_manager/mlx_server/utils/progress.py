"""Progress of a load, in words for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
Doing = Callable[[str], object]
"""Callback with the work that a load has begun."""


def unheard(doing: str) -> None:
    """Ignore the progress of a load: the default where nobody asks for it."""


def counted(doing: Doing, what: str, parts: Sequence[T]) -> Iterator[T]:
    """Yield the parts of a job, and report the number of each as it begins."""
    for number, part in enumerate(parts, 1):
        doing(f"{what} ({number} of {len(parts)})")
        yield part
