"""What `MLX_TEST_ALL=1` runs besides: more of what a case in every run stands for already."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

ALL = os.environ.get("MLX_TEST_ALL") == "1"
slow = pytest.mark.skipif(not ALL, reason="MLX_TEST_ALL=1 runs it")


def one_in_turn(cases: list[Any], ways: list[Any]) -> list[Any]:
    """Parameters: each case in one of the `ways`, which take turns, and as slow ones in the others.
    A case and a way that are tuples are joined."""
    return [
        pytest.param(*_of(case), *_of(way), marks=[slow] if (n + m) % len(ways) else [])
        for n, case in enumerate(cases)
        for m, way in enumerate(ways)
    ]


def every_other(cases: Iterable[Any], first: int = 0) -> list[Any]:
    """Parameters: every other of the cases, the others as slow ones. first: 0 or 1."""
    return [
        pytest.param(*_of(case), marks=[slow] if (n + first) % 2 else [])
        for n, case in enumerate(cases)
    ]


def _of(given: Any) -> tuple[Any, ...]:
    return given if isinstance(given, tuple) else (given,)
