"""Observers of calls, which read the timeline of each: spans (`tracing`), metrics (`metrics`), and
in `services/` the audit log (`audit`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

from mlx_manager.mlx_server.core import GenerationRequest
from mlx_manager.mlx_server.errors import MLXManagerError
from mlx_manager.mlx_server.timeline import CANCELLED, Timeline


class Observer(Protocol):
    """Observer of all calls."""

    def begin(
        self, requests: Sequence[GenerationRequest], timeline: Timeline
    ) -> Callable[[], object]:
        """Note that a call begins. Return the function to call once its timeline is complete."""
        ...


@dataclass(frozen=True, slots=True)
class Recorder:
    """An observer that hands the timeline of each call to `sinks` when the call ends."""

    sinks: Sequence[Callable[[Timeline], object]]

    def begin(
        self, requests: Sequence[GenerationRequest], timeline: Timeline
    ) -> Callable[[], object]:
        return lambda: [sink(timeline) for sink in self.sinks]


@contextmanager
def observed(
    observers: Sequence[Observer], requests: Sequence[GenerationRequest], timeline: Timeline
) -> Iterator[None]:
    """Complete the timeline when the context is left, and tell the observers, in reverse order."""
    with ExitStack() as ends:
        for observer in observers:
            ends.callback(observer.begin(requests, timeline))
        failure, message = MLXManagerError.code, ""
        try:
            yield
            failure = ""
        except MLXManagerError as error:
            failure, message = error.code, error.message
            raise
        except asyncio.CancelledError:
            failure = CANCELLED
            raise
        finally:
            timeline.close(failure, message)
