"""For every test: nothing fails because a busy machine is slow."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# `settings()` is the profile so far, which is another one where the variable CI is set.
settings.register_profile(
    "patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")
