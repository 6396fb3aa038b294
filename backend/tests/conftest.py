"""For every test: nothing fails because a busy machine is slow or runs it in the background, and
collections cost little."""

from __future__ import annotations

import gc
import signal

from hypothesis import HealthCheck, settings

# `settings()` is the profile so far, which is another one where the variable CI is set.
settings.register_profile(
    "patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")

# Whoever is started in the background of a script ignores Ctrl-C, and so would the programs that
# tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What has been imported and collected stays to the end: to look through it again takes every
    full collection 0.1 s, a fifth of the run."""
    gc.collect()
    gc.freeze()
