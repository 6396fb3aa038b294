"""Observers of calls: spans, metrics, an audit log. Each sees every call from start to end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

from mlx_manager.mlx_server.core import GenerationRequest, Progress


class Observation(Protocol):
    """Observation of one call from its start to the end of its last row."""

    def loading(self) -> None:
        """Note that the call waits for its model to load. Not called if the model is loaded."""
        ...

    def leased(self) -> None:
        """Note that the model is loaded and gets the rows. Not called if the call fails before."""
        ...

    def add(self, step: Progress) -> None: ...


class Observer(Protocol):
    """Observer of all calls.

    The context is left with the exception that ended the call: an MLXManagerError, or GeneratorExit
    or CancelledError when the caller went away.
    """

    def observe(
        self, requests: Sequence[GenerationRequest]
    ) -> AbstractContextManager[Observation]: ...


@contextmanager
def observe_all(
    observers: Sequence[Observer], requests: Sequence[GenerationRequest]
) -> Iterator[list[Observation]]:
    """Yield one observation by each observer. The observations end in reverse order."""
    with ExitStack() as stack:
        yield [stack.enter_context(observer.observe(requests)) for observer in observers]
