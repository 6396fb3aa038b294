"""Marks of tests that need what only Linux has, so that the tests say so on another system."""

from __future__ import annotations

import os
import sys

import pytest

# MLX_TEST_SYSTEM=darwin shows on Linux what a Mac skips.
ELSEWHERE = os.environ.get("MLX_TEST_SYSTEM", sys.platform) != "linux"


def needs_linux(what: str) -> pytest.MarkDecorator:
    """A mark for tests that use `what`, which other systems lack."""
    return pytest.mark.skipif(ELSEWHERE, reason=_reason(what))


def skip_without_linux(what: str) -> None:
    """The same within a fixture."""
    if ELSEWHERE:
        pytest.skip(_reason(what))


def _reason(what: str) -> str:
    return f"needs Linux: {what}"
