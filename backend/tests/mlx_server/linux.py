"""Marks of tests that need what only Linux has, so that the tests say so on another system; and
what Linux says of processes."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

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


def descendants(pid: int) -> set[int]:
    """Return the ids of all processes that `pid` has started, and of theirs, that run."""
    parents = {id: parent for id, (state, parent) in _processes().items() if state not in "ZX"}
    found, last = set[int](), {pid}
    while last:
        last = {id for id, parent in parents.items() if parent in last}
        found |= last
    return found


def running(pids: set[int]) -> set[int]:
    """Return those that run. One that has ended counts no more, also where nobody has waited for
    its end."""
    processes = _processes()
    return {pid for pid in pids if pid in processes and processes[pid][0] not in "ZX"}


def _processes() -> dict[int, tuple[str, int]]:
    """Return each process's state and its parent's id."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = file.read_text().rpartition(")")[2].split()[:2]
            found[int(file.parent.name)] = (state, int(parent))
    return found
