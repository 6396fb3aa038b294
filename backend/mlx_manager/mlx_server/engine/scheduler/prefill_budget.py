"""The prefill budget of the next step: what the pace allows, more where steps are short, and less
after a step that failed."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Protocol

from mlx_manager.mlx_server.devices import table as devices
from mlx_manager.mlx_server.engine.scheduler.load import Budget, StepLoad
from mlx_manager.mlx_server.engine.scheduler.pace import FEWEST, Pace
from mlx_manager.mlx_server.engine.scheduler.scheduler import Scheduler
from mlx_manager.mlx_server.engine.scheduler.step_size import StepSize
from mlx_manager.mlx_server.execution.forward import Forward

log = logging.getLogger(__name__)


class Ample(Protocol):
    """Memory of larger steps."""

    @property
    def has_ample(self) -> bool: ...

    def weigh_ample(self, short: bool | None) -> None:
        """Take the memory of larger steps, or give it up, by whether they are short."""
        ...


class PrefillBudget:
    """Prompt tokens of an engine's steps.

    Args:
        size: what a step may take on.
        forward: how the model is run.
        ample: memory of larger steps.
    """

    def __init__(self, size: StepSize, forward: Forward, ample: Ample) -> None:
        self._size = size
        self._ample = ample
        self._grain = forward.grain
        self._halves_failed = devices.current().halves_failed
        self._least = (devices.current() if forward.looks_ahead else devices.CPU).least_chunk
        # Most prompt tokens of a step, since larger ones have failed.
        self._most = size.tokens
        self.start_over()

    def start_over(self) -> None:
        """Forget what steps have taken so far."""
        least = min(self._least, self._most)
        self.pace = Pace(self._most, least, self._grain, self._size.limits)

    def plain_time(self, rows: int) -> float:
        """Return the seconds of a step of so many rows and nothing else; 0: unknown."""
        return self.pace.plain_time(rows)

    def next(self, scheduler: Scheduler) -> Budget:
        """Return the next step's budget: more than usual where a step is short all the same."""
        size, wanted = self._size, 0
        if size.ample > size.tokens:
            wanted = min(size.wanted(*scheduler.queues.ahead), size.ample)
        if wanted > size.tokens:
            self._ample.weigh_ample(self.pace.is_short(2 * size.tokens))
        return self.pace.budget(scheduler.beginning, wanted if self._ample.has_ample else 0)

    def take_smaller_steps(self, failed: Iterable[StepLoad]) -> None:
        """Halve the most tokens of a step after a step that took too long has failed. A failed step
        teaches the pace nothing, so the same prompt would fail again.

        failed: the steps that were under way.
        """
        if not self._halves_failed:
            return
        tokens = min(max((load.tokens for load in failed), default=0), self._most)
        if tokens > FEWEST:
            self._most = max(tokens // 2, FEWEST)
            log.warning(
                "a step with %d prompt tokens failed; from now on one has %d at most",
                tokens,
                self._most,
            )
