"""The order of a step's stages, by the device, without a model."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlx_manager.mlx_server.engine.scheduler.load import StepLoad
from mlx_manager.mlx_server.engine.scheduler.schedule import Schedule
from mlx_manager.mlx_server.engine.scores import Scores
from mlx_manager.mlx_server.engine.step.batch import Batch
from mlx_manager.mlx_server.engine.step.host_tokens import HostTokens
from mlx_manager.mlx_server.engine.step.pipeline import InPlace, LookAhead, Pipeline
from mlx_manager.mlx_server.engine.step.runner import LaunchedStep, SampledStep

TOKENS = mx.array([1], mx.uint32)


class Broken(Exception):
    pass


class Journal:
    """Stages that note what is done, with the number of the step that it is done to."""

    def __init__(self, *, first: bool = False) -> None:
        self.must_collect_first = first
        self.prompts_wait = False
        self.unfinished = False
        self.lines: list[str] = []
        self.breaks = False
        self.after: list[int | None] = []
        self._count = 0

    def schedule(self) -> Schedule:
        self._count += 1
        self.lines.append(f"schedule {self._count}")
        return Schedule([])

    def launch(self, schedule: Schedule, last: SampledStep | None) -> LaunchedStep:
        self.lines.append(f"launch {self._count}")
        self.after.append(None if last is None else last.load.rows)
        return LaunchedStep(Batch(()), TOKENS, StepLoad(self._count), Scores())

    def share_prompts(self) -> None:
        self.lines.append("share")

    def finish(self) -> None:
        self.lines.append("finish")

    def sample(self, launched: LaunchedStep) -> SampledStep:
        self.lines.append(f"sample {launched.load.rows}")
        tokens = HostTokens(TOKENS, 1, None)
        return SampledStep(launched.batch, TOKENS, tokens, launched.load, launched.scores)

    def read(self, step: SampledStep) -> tuple[list[int], dict[int, Any], float]:
        self.lines.append(f"collect {step.load.rows}")
        return [1], {}, 0.0

    def take(self, step: SampledStep, tokens: Any, scores: Any, now: float) -> None:
        if self.breaks:
            self.breaks = False
            raise Broken

    def deliver(self) -> None:
        self.lines.append("deliver")

    def second_turn(self, pipeline: Pipeline) -> list[str]:
        pipeline.turn()
        self.lines.clear()
        pipeline.turn()
        return self.lines


def test_a_gpu_is_given_the_next_step_before_the_last_one_is_read() -> None:
    stages = Journal()
    lines = stages.second_turn(LookAhead(stages))
    assert lines == ["schedule 2", "launch 2", "sample 2", "collect 1", "deliver"]
    assert stages.after == [None, 1]


def test_a_cpu_computes_the_next_step_once_the_last_one_is_read_and_delivered() -> None:
    stages = Journal()
    lines = stages.second_turn(InPlace(stages))
    assert lines == ["schedule 2", "launch 2", "collect 1", "deliver", "sample 2"]


@pytest.mark.parametrize("order", [LookAhead, InPlace])
def test_a_step_that_depends_on_the_last_ones_tokens_is_scheduled_after_they_are_read(
    order: type[Pipeline],
) -> None:
    stages = Journal(first=True)
    lines = stages.second_turn(order(stages))
    assert lines.index("collect 1") < lines.index("schedule 2") < lines.index("sample 2")
    # Its tokens are known to the host.
    assert stages.after == [None, None]


def test_what_a_gpu_has_no_room_for_is_queued_after_the_last_step_is_read() -> None:
    stages = Journal()
    stages.unfinished = True
    lines = stages.second_turn(LookAhead(stages))
    assert lines[:2] == ["schedule 2", "launch 2"]
    assert lines[2:] == ["share", "collect 1", "deliver", "finish", "sample 2", "deliver"]


@pytest.mark.parametrize(
    ("order", "rest"),
    [
        (LookAhead, ["schedule 3", "launch 3", "sample 3", "collect 2", "deliver"]),
        (InPlace, ["deliver", "sample 2"]),
    ],
)
def test_after_a_row_has_failed_the_next_turn_goes_on_where_this_one_ended(
    order: type[Pipeline], rest: list[str]
) -> None:
    stages = Journal()
    pipeline = order(stages)
    pipeline.turn()
    stages.breaks = True
    with pytest.raises(Broken):
        pipeline.turn()
    stages.lines.clear()
    assert pipeline.busy
    pipeline.turn()
    assert stages.lines == rest
