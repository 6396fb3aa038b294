"""Pages, neighbours and figures where rows bring drafts."""

from __future__ import annotations

from pathlib import Path

from engine.rig import HandRig, Row, alone, prompt
from tiny_models import make_tiny_model

from mlx_manager.mlx_server.engine.scheduler.step_size import StepSize
from mlx_manager.mlx_server.engine.speculation.proposers import Proposer


def drafting(rig: HandRig, given: list[int], limit: int, guess: list[int]) -> Row:
    row = rig.row(given, limit)
    row.sequence.proposer = Proposer(guess)
    return row


def wrong(answer: list[int], every: int) -> list[int]:
    """The answer with one token in `every` another."""
    return [
        (token + 1) % 256 if i % every == every - 1 else token for i, token in enumerate(answer)
    ]


async def test_what_is_not_accepted_is_in_no_page_that_others_find(llama: Path) -> None:
    for every in range(1, 7):
        async with HandRig(llama, speculation="on", page_size=4) as rig:
            given = prompt(13, every)
            answer = alone(rig.model, given, 30)
            row = drafting(rig, given, 30, wrong(answer, every))
            rig.submit_together([row])
            while not row.sequence.ended:
                rig.step()
                # What another prompt finds now is of this row's own tokens, whatever was tried.
                known = list(row.sequence.tokens)
                for follower in ([*known, 5], [*known[:-1], (known[-1] + 1) % 256, 5]):
                    found = len(rig.engine._memory.pool.match(follower))
                    assert found * 4 <= min(len(known), row.sequence.computed or len(known))
            assert row.tokens == answer
            turn = rig.submit([*given, *answer, *prompt(3, 9)], 12)
            rig.run()
            assert turn.sequence.cached >= 40
            assert turn.tokens == alone(rig.model, turn.sequence.tokens[:46], 12)


async def test_an_answer_that_was_foreseen_takes_few_steps(llama: Path) -> None:
    async with HandRig(llama, speculation="on", longest_draft=8) as rig:
        given = prompt(20)
        answer = alone(rig.model, given, 46)
        row = drafting(rig, given, 46, answer)
        rig.submit_together([row])
        rig.run()
        stats = rig.engine.stats()
        assert row.tokens == answer
        # The prompt's step gives a token, and each of five more gives nine.
        assert (stats.steps, stats.drafts) == (6, 5)
        assert (stats.draft_tokens, stats.accepted_tokens) == (40, 40)
        assert stats.generated_tokens == 46


async def test_drafts_end_at_the_limit(llama: Path) -> None:
    async with HandRig(llama, speculation="on") as rig:
        answer = alone(rig.model, prompt(20), 40)
        for limit in range(1, 14):
            row = drafting(rig, prompt(20), limit, answer)
            rig.submit_together([row])
            rig.run()
            assert row.tokens == answer[:limit]
            assert row.sequence.outcome == "length"


async def test_rows_with_drafts_are_paused_and_go_on(llama: Path) -> None:
    async with HandRig(llama, max_rows=8) as rig:
        answers = [alone(rig.model, prompt(30, i + 1), 60) for i in range(8)]
        # Pages for three and a half rows: a page has 16 tokens.
        memory = 3 * 6 * rig.engine.stats().page_bytes + 3 * rig.engine.stats().page_bytes
    size = StepSize(64, working_bytes=0)
    async with HandRig(llama, memory=memory, size=size, max_rows=8, speculation="on") as rig:
        rows = [
            drafting(rig, prompt(30, i + 1), 60, wrong(answer, 5))
            for i, answer in enumerate(answers)
        ]
        rig.submit_together(rows)
        rig.run()
        assert rig.engine.stats().pauses > 0
        assert rig.engine.stats().accepted_tokens > 0
        assert [row.tokens for row in rows] == answers
        assert rig.engine.stats().pages_held == 0


async def test_a_row_that_is_cancelled_while_its_draft_is_tried_leaves_nothing(llama: Path) -> None:
    async with HandRig(llama, speculation="on") as rig:
        first, second = (alone(rig.model, prompt(20, i), 40) for i in (1, 2))
        for steps in range(1, 6):
            gone = drafting(rig, prompt(20, 1), 40, first)
            stays = drafting(rig, prompt(20, 2), 40, wrong(second, 4))
            rig.submit_together([gone, stays])
            rig.step(steps)
            rig.cancel(gone)
            rig.run()
            assert stays.tokens == second
            assert rig.engine.stats().pages_held == 0


async def test_recurrent_layers_take_no_drafts(tmp_path: Path) -> None:
    async with HandRig(make_tiny_model(tmp_path / "m", "lfm2"), speculation="on") as rig:
        row = drafting(rig, prompt(8), 12, prompt(12))
        rig.submit_together([row])
        rig.run()
        assert rig.engine.stats().drafts == 0
        assert len(row.tokens) == 12


async def test_a_row_without_a_proposer_brings_none(llama: Path) -> None:
    async with HandRig(llama, speculation="on") as rig:
        row = rig.submit(prompt(4) * 6, 30)
        rig.run()
        assert len(row.tokens) == 30
        assert rig.engine.stats().drafts == 0
