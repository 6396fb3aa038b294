"""Beginnings that two sequences share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def alike(a: Sequence[T], b: Sequence[T]) -> int:
    """Return how many elements `a` and `b` both begin with. Both are of one type."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
