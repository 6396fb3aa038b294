"""For every test: nothing fails because a busy machine is slow, and collections cost little."""

from __future__ import annotations

import gc

from hypothesis import HealthCheck, settings

# `settings()` is the profile so far, which is another one where the variable CI is set.
settings.register_profile(
    "patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")


def pytest_collection_finish() -> None:
    """What has been imported and collected stays to the end: to look through it again takes every
    full collection 0.1 s, a fifth of the run."""
    gc.collect()
    gc.freeze()
