"""Which rows bring drafts, and how long ones, by what they have brought and what steps take."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine.rig import HandRig, Row, prompt

from mlx_manager.mlx_server.engine.scheduler.load import StepLoad
from mlx_manager.mlx_server.engine.speculation.acceptance import EXPECTED
from mlx_manager.mlx_server.engine.speculation.proposers import Proposer
from mlx_manager.mlx_server.engine.speculation.speculation import (
    LIKE_ROWS,
    PLAIN,
    SLOWER,
    Speculation,
)


def rows_of(rig: HandRig, count: int) -> list[Row]:
    """Rows whose predictions begin with the tokens 1, 2, 3, ..."""
    rows = [rig.row(prompt(9, i + 1), 100) for i in range(count)]
    for row in rows:
        row.sequence.proposer = Proposer(range(1, 90))
        row.sequence.computed = 8
    return rows


def lengths(speculation: Speculation, rows: list[Row], most: int = 1 << 20) -> list[int]:
    sequences = [row.sequence for row in rows]
    chosen = speculation.choose(sequences, StepLoad(len(rows)), most, lambda row, tokens: tokens)
    return [len(proposal.tokens) for _, proposal in chosen]


def of(plain: float, longest: int = 8) -> Speculation:
    return Speculation(longest, 512, lambda rows: plain, always=False)


async def test_nothing_is_tried_before_it_is_known_what_steps_take(llama: Path) -> None:
    async with HandRig(llama) as rig:
        rows = rows_of(rig, 1)
        assert lengths(of(0.0), rows) == []
        assert not of(0.0).is_likely([row.sequence for row in rows])
        assert sum(lengths(of(1.0), rows)) > 3
        assert of(1.0).is_likely([row.sequence for row in rows])


async def test_a_crowd_tries_nothing(llama: Path) -> None:
    async with HandRig(llama) as rig:
        found = {count: lengths(of(1.0), rows_of(rig, count)) for count in (1, 4, 64)}
        assert sum(found[1]) > 3
        assert 0 < len(found[4]) <= 4
        assert found[64] == []
        assert not of(1.0).is_likely([row.sequence for row in rows_of(rig, 64)])


async def test_a_row_whose_drafts_are_refused_stops_and_tries_again_later(llama: Path) -> None:
    async with HandRig(llama) as rig:
        (row,) = rows_of(rig, 1)
        acceptance, speculation = row.sequence.proposer.acceptance, of(1.0)
        tried = 0
        while (found := lengths(speculation, [row])) and tried < 100:
            tried += 1
            acceptance.observe("prediction", found[0], 0)
        assert 5 < tried < 40
        for _ in range(100):
            found = lengths(speculation, [row])
            if found:
                break
        assert found
        assert acceptance.rates["prediction"] < EXPECTED["prediction"]


async def test_dear_drafts_are_shorter(llama: Path) -> None:
    async with HandRig(llama) as rig:
        (row,) = rows_of(rig, 1)
        cheap, dear = of(1.0), of(1.0)
        for count in (1, 2, 4, 8) * 8:
            load = StepLoad(1).with_draft(count)
            cheap.observe(1.0 + 0.01 * count, load)
            dear.observe(1.0 + 0.6 * count, load)
        [many], [few] = lengths(cheap, [row]), lengths(dear, [row])
        assert few <= 4 < many


async def test_what_has_to_be_seen_again_is_a_part_of_the_price(llama: Path) -> None:
    async with HandRig(llama) as rig:
        (row,) = rows_of(rig, 1)
        again = Speculation(8, 512, lambda rows: 1.0, always=False, sees_again=True)
        plain = of(1.0)
        for speculation in (again, plain):
            for count in (1, 2, 4, 8) * 8:
                speculation.observe(1.0 + 0.1 * count, StepLoad(1).with_draft(count))
        found = {}
        for rate in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
            row.sequence.proposer.acceptance.rates["prediction"] = rate
            found[rate] = sum(lengths(plain, [row])), sum(lengths(again, [row]))
        assert found[1.0] == (8, 8)
        assert all(few <= many for many, few in found.values())
        assert any(few < many for many, few in found.values())


async def test_drafts_make_a_step_no_longer_than_prompts_may(llama: Path) -> None:
    async with HandRig(llama) as rig:
        rows = rows_of(rig, 2)
        speculation = of(1.0, longest=64)
        for row in rows:
            row.sequence.proposer.acceptance.rates["prediction"] = 1.0
        assert 0 < sum(lengths(speculation, rows)) / (2 + LIKE_ROWS) <= SLOWER - 1


async def test_a_step_without_drafts_comes_now_and_then(llama: Path) -> None:
    async with HandRig(llama) as rig:
        rows, speculation = rows_of(rig, 1), of(1.0)
        found = [len(lengths(speculation, rows)) for _ in range(3 * (PLAIN + 1))]
        assert found.count(0) == 3


@pytest.mark.parametrize("most", [0, 1, 3])
async def test_no_more_tokens_are_tried_than_a_step_has_room_for(most: int, llama: Path) -> None:
    async with HandRig(llama) as rig:
        assert sum(lengths(of(1.0), rows_of(rig, 1), most)) == most


async def test_with_auto_an_answer_that_repeats_itself_takes_fewer_steps(llama: Path) -> None:
    async with HandRig(llama, speculation="auto") as rig:
        row = rig.row(prompt(8) * 6, 300)
        row.sequence.proposer = Proposer()
        rig.submit_together([row])
        rig.run()
        stats = rig.engine.stats()
        assert len(row.tokens) == 300
        assert stats.generated_tokens == 300
        assert stats.steps <= 301


async def test_one_slow_step_does_not_end_all_trying(llama: Path) -> None:
    async with HandRig(llama) as rig:
        rows, speculation = rows_of(rig, 1), of(1.0)
        speculation.observe(30.0, StepLoad(1).with_draft(2))
        found = [len(lengths(speculation, rows)) for _ in range(200)]
        assert 1 in found


async def test_where_nothing_is_found_it_is_looked_for_in_few_steps_together(llama: Path) -> None:
    async with HandRig(llama) as rig:
        rows = [rig.row(list(range(3 + i, 60)), 100) for i in range(3)]
        speculation = of(1.0)
        looks = []
        for step in range(60):
            # They come one after another.
            here = rows[: step + 1]
            if step < 3:
                here[-1].sequence.proposer = Proposer()
            looks.append(speculation.is_likely([row.sequence for row in here]))
            assert lengths(speculation, here) == []
        assert all(looks[:6])
        assert looks[12:].count(True) == 6
