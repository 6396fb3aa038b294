"""Timelines of calls whose events a test makes up."""

from __future__ import annotations

from mlx_manager.mlx_server.core import Caller, Event, TextDelta
from mlx_manager.mlx_server.timeline import RowTimeline, Timeline


def timeline(rows: int = 1) -> Timeline:
    """Return the timeline of a call of which nothing has been heard."""
    return Timeline("m", Caller(), tuple(RowTimeline() for _ in range(rows)))


def heard(events: list[Event]) -> Timeline:
    """Return the timeline of a call of one row that has told `events`, each text a token."""
    call = timeline()
    call.follow(0, events, sum(isinstance(event, TextDelta) for event in events))
    return call
