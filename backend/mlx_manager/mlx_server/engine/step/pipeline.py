"""The pipeline: the order of a step's stages, which is all that devices differ in.

A step goes through five stages. It is *scheduled* (which rows, which chunks of prompts), *launched*
(its logits are described), *sampled* (it is queued on the device whole, its tokens included) and
*collected* (the host reads its tokens, ends rows and parses). Then what it tells is *delivered*.

* `LookAhead`, for GPUs: a step is sampled before the last one is collected, and takes the last
  one's tokens from the device. So the device computes while the host parses and delivers. A row
  that the last step ended has then gone one step too far, whose token is dropped.
* `InPlace`, for CPUs: a step is launched before the last one is collected, and sampled after. Pages
  are written in place only if nothing under way holds them. MLX blocks while it queues work on a
  CPU, so everything is delivered before that.

Either way the last step is collected first where the next schedule depends on its tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import Protocol

from mlx_manager.mlx_server.core import TokenLogprob
from mlx_manager.mlx_server.engine.scheduler.schedule import Schedule
from mlx_manager.mlx_server.engine.step.runner import LaunchedStep, SampledStep


class Stages(Protocol):
    """Stages of a step, and what their order depends on."""

    @property
    def must_collect_first(self) -> bool:
        """Return whether the next schedule depends on tokens that the host has not read."""
        ...

    @property
    def prompts_wait(self) -> bool:
        """Return whether there are prompts to be processed."""
        ...

    def schedule(self) -> Schedule: ...

    def launch(self, schedule: Schedule, last: SampledStep | None) -> LaunchedStep | None:
        """Describe the logits of a step; None if it has no work. last: a step whose tokens are on
        the device only."""
        ...

    @property
    def unfinished(self) -> bool:
        """Return whether the device has been given only a part of what was launched."""
        ...

    def share_prompts(self) -> None:
        """Do what the next `schedule` need not do then."""
        ...

    def finish(self) -> None:
        """Give the device the rest of what was launched."""
        ...

    def queue(self, launched: LaunchedStep) -> None:
        """Have the device compute a step's logits already."""
        ...

    def sample(self, launched: LaunchedStep) -> SampledStep: ...

    def read(self, step: SampledStep) -> tuple[list[int], dict[int, TokenLogprob], float]:
        """Wait for a step; return its tokens, their scores by number, and the time after the
        wait."""
        ...

    def take(
        self, step: SampledStep, tokens: list[int], scores: dict[int, TokenLogprob], now: float
    ) -> None:
        """Give the rows their tokens; rows that they end give up their pages."""
        ...

    def deliver(self) -> None: ...


class Pipeline(ABC):
    """Steps under way, and the order in which they move on.

    An error of one row may end a turn at any stage; the next turn goes on from there.

    Attributes:
        launched: the step that is to be sampled next, if there is one.
        in_flight: steps that have been sampled and not collected, oldest first.
    """

    in_place: bool

    def __init__(self, stages: Stages) -> None:
        self.launched: LaunchedStep | None = None
        self.in_flight: deque[SampledStep] = deque()
        self._stages = stages

    @property
    def busy(self) -> bool:
        return bool(self.launched or self.in_flight)

    @property
    def last(self) -> SampledStep | None:
        """Return the newest step in flight."""
        return self.in_flight[-1] if self.in_flight else None

    @property
    def under_way(self) -> list[LaunchedStep | SampledStep]:
        return [*self.in_flight, *([self.launched] if self.launched else [])]

    @abstractmethod
    def turn(self) -> None:
        """Take the next step as far as it goes, and deliver what the last one tells."""

    def _sample(self) -> None:
        if self.launched is not None:
            self.in_flight.append(self._stages.sample(self.launched))
            self.launched = None

    def _collect(self, step: SampledStep | None) -> bool:
        """Collect a step unless that has been done; return whether it was done now."""
        if step is None or step not in self.in_flight:
            return False
        results = self._stages.read(step)
        self.in_flight.remove(step)
        self._stages.take(step, *results)
        return True


class LookAhead(Pipeline):
    """Order for GPUs: sample the next step, then collect the last one."""

    in_place = False

    def turn(self) -> None:
        last = self.last
        if self.launched is None:
            if last is not None and last.begins_rows and not self._stages.prompts_wait:
                # To launch the next step first would delay first tokens by more than the device's
                # pause costs.
                self._collect(last)
                self._stages.deliver()
            elif self._stages.must_collect_first:
                self._collect(last)
            plan = self._stages.schedule()
            self.launched = self._stages.launch(plan, self.last)
        if self._stages.unfinished:
            self._finish(last)
        if self.launched is not None and self.launched.batch.needs_host and last in self.in_flight:
            # Masks and penalties are found while the device computes the logits they apply to.
            self._stages.queue(self.launched)
            self._collect(last)
        self._sample()
        self._collect(last)
        self._stages.deliver()

    def _finish(self, last: SampledStep | None) -> None:
        self._stages.share_prompts()
        # The last step's tokens have come when the device is at what it has been given of this one.
        if self._collect(last):
            self._stages.deliver()
        self._stages.finish()


class InPlace(Pipeline):
    """Order for CPUs: launch the next step, collect the last one, then sample the next."""

    in_place = True

    def turn(self) -> None:
        last = self.last
        if self.launched is None:
            if self._stages.must_collect_first and self._collect(last):
                self._stages.deliver()
            plan = self._stages.schedule()
            self.launched = self._stages.launch(plan, self.last)
        self._collect(last)
        self._stages.deliver()
        self._sample()
