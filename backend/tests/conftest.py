"""For every test: nothing fails because a busy machine is slow or runs it in the background, and
collections cost little."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# `settings()` is the profile so far, which is another one where the variable CI is set.
settings.register_profile(
    "patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")

# Whoever is started in the background of a script ignores Ctrl-C, and so would the programs that
# tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What has been imported and collected stays to the end: to look through it again takes every
    full collection 0.1 s, a fifth of the run."""
    alike = [name for name, tests in Counter(i.nodeid for i in session.items).items() if tests > 1]
    # Of tests with one name only one would run where they are given out to several processes.
    assert not alike
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What keeps processes that run tests beside each other from meeting, and from their parent's
    terminal, whose size they inherit and a program would take for that of its own.

    On a CPU MLX compiles kernels into a folder among the temporary ones, and takes for whole what
    another process has begun to write there: each has, with the servers that it starts, its own.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))
        patch.delenv("COLUMNS", raising=False)
        patch.delenv("LINES", raising=False)
        yield
