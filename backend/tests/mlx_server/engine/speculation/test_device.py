"""Drafts by a simulated clock, where steps are queued ahead: what they bring in all, and cost."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import ClassVar

import pytest
from engine.rig import HandRig, prompt

from mlx_manager.mlx_server.engine.scheduler.load import StepLoad
from mlx_manager.mlx_server.engine.sequence import Sequence
from mlx_manager.mlx_server.engine.speculation.proposers import Proposer
from mlx_manager.mlx_server.engine.speculation.speculation import FEW, Speculation
from mlx_manager.mlx_server.execution.running import padded_rows

TOKENS, LONGEST = 128, 8
# Milliseconds that a step takes more if it is not queued ahead, and the host each time that it
# searches a text, or asks what a step takes.
LATE, SEARCH, ASK = 0.3, 0.03, 0.01


class Searching(Proposer):
    """A proposer that counts how often texts are searched."""

    searches: ClassVar[int] = 0

    def propose(self, row, most):
        Searching.searches += 1
        return super().propose(row, most)


class Device:
    """A GPU with a 1B model: its steps in milliseconds, as an H200 took for them. A size of step is
    compiled when it comes for the third time."""

    def __init__(self) -> None:
        self._came: Counter[int] = Counter()

    @staticmethod
    def plain(rows: int) -> float:
        return 1.05 + 0.03 * rows

    def run(self, load: StepLoad) -> tuple[float, StepLoad]:
        """Return the milliseconds that a step takes, and its load as it was run."""
        taken = self.plain(load.rows) + (LATE if load.late else 0.0)
        if load.drafts:
            size = padded_rows(load.rows + load.drafts)
            self._came[size] += 1
            taken += 1.35 + 0.018 * load.drafts
            taken += {1: 6.0, 2: 6.0, 3: 40.0}.get(self._came[size], 0.0)
            load = replace(load, fresh=self._came[size] <= 3)
        return taken, load


class Simulated:
    """Requests of an engine whose device is simulated, one crowd after another."""

    def __init__(self, rig: HandRig) -> None:
        self._rig, self._device, self._number = rig, Device(), 0
        self._speculation = Speculation(LONGEST, 512, self._plain, always=False, ahead=True)
        self.tried = self._asked = 0

    def _plain(self, rows: int) -> float:
        self._asked += 1
        return Device.plain(rows)

    def gain(self, rows: int, *, known: bool = True, wrong: int = 0) -> float:
        """Return how many times as fast requests are as without drafts. known: their prompts have
        their answers, but for another token in one place of `wrong`."""
        asked = [self._request(known, wrong) for _ in range(rows)]
        self.tried, taken, drafted = 0, 0.0, False
        while running := [row for row in asked if row.drawn < TOKENS]:
            seconds, drafted = self._step(running, drafted)
            taken += seconds
        # The first token has been drawn by the prompt's step.
        return (TOKENS - 1) * Device.plain(rows) / taken

    def _request(self, known: bool, wrong: int) -> Sequence:
        self._number += 1
        answer = range(1000 * self._number, 1000 * self._number + TOKENS + 20)
        seen = [i % 900 if wrong and n % wrong == wrong - 1 else i for n, i in enumerate(answer)]
        row = self._rig.row([*prompt(8), *(seen if known else []), *answer[:3]], TOKENS).sequence
        row.proposer = Searching()
        row.computed = len(row.tokens)
        row.pending = 1
        return row

    def _step(self, rows: list[Sequence], drafted: bool) -> tuple[float, bool]:
        """Go on by a step; return its milliseconds, and whether it has drafts."""
        searches, asked = Searching.searches, self._asked
        late = drafted or self._speculation.is_likely(rows)
        if late:
            _read(rows)
        load = StepLoad(len(rows), late=late)
        chosen = self._speculation.choose(rows, load, 1 << 20, lambda row, tokens: tokens)
        found = {row.key: proposal for row, proposal in chosen}
        for proposal in found.values():
            load = load.with_draft(len(proposal.tokens))
        taken, load = self._device.run(load)
        self._speculation.observe(taken, load)
        self.tried += load.drafts
        _read(rows)
        for row in rows:
            if proposal := found.get(row.key):
                tokens = proposal.tokens
                right = [row.tokens[-1] + 1 + n == token for n, token in enumerate(tokens)]
                count = [*right, False].index(False)
                row.proposer.acceptance.observe(proposal.method, len(tokens), count)
                row.tokens += tokens[:count]
            row.pending, row.computed = 1, len(row.tokens)
        host = SEARCH * (Searching.searches - searches) + ASK * (self._asked - asked)
        return taken + host, bool(found)


def _read(rows: list[Sequence]) -> None:
    """Have the host read the rows' newest tokens: each is the last one's next number."""
    for row in rows:
        row.tokens += [row.tokens[-1] + 1] * row.pending
        row.pending = 0


@pytest.mark.parametrize(
    ("rows", "how", "least"),
    [
        (1, {}, 1.8),
        (4, {}, 1.3),
        (8, {}, 1.3),
        (64, {}, 0.97),
        (1, {"wrong": 12}, 1.2),
        (4, {"wrong": 12}, 1.2),
        (64, {"wrong": 12}, 0.97),
        # What is found is never drawn.
        (1, {"wrong": 4}, 0.97),
        (4, {"wrong": 4}, 0.97),
        (1, {"known": False}, 0.97),
        (4, {"known": False}, 0.97),
        (64, {"known": False}, 0.97),
    ],
)
async def test_drafts_are_tried_where_they_gain_and_cost_nothing_elsewhere(
    rows: int, how: dict[str, int], least: float, llama: Path
) -> None:
    async with HandRig(llama) as rig:
        simulated = Simulated(rig)
        # While an engine's first requests run, steps are compiled.
        for _ in range(2):
            simulated.gain(rows, **how)
        gains = [simulated.gain(rows, **how) for _ in range(3)]
        assert median(gains) >= least


async def test_a_crowd_tries_nothing_where_steps_are_queued_ahead(llama: Path) -> None:
    async with HandRig(llama) as rig:
        tried = {}
        for rows in (FEW, FEW + 1):
            simulated = Simulated(rig)
            simulated.gain(rows)
            tried[rows] = simulated.tried
        assert tried[FEW] > 0
        assert tried[FEW + 1] == 0
