"""Pages, neighbours and figures where rows bring drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine.rig import HandRig, Row, alone, drafting, prompt
from mlx import nn
from tiny_models import make_tiny_model

from mlx_manager.mlx_server.engine.scheduler.step_size import StepSize
from mlx_manager.mlx_server.engine.speculation.proposers import Proposer
from mlx_manager.mlx_server.execution.alone import AloneForward
from mlx_manager.mlx_server.execution.forward import Forward


def guessing(rig: HandRig, given: list[int], limit: int, guess: list[int]) -> Row:
    return drafting(rig, given, limit, guess=Proposer(guess))


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
            row = guessing(rig, given, 30, wrong(answer, every))
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
        row = guessing(rig, given, 46, answer)
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
            row = guessing(rig, prompt(20), limit, answer)
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
            guessing(rig, prompt(30, i + 1), 60, wrong(answer, 5))
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
            gone = guessing(rig, prompt(20, 1), 40, first)
            stays = guessing(rig, prompt(20, 2), 40, wrong(second, 4))
            rig.lose(gone, stays, steps, second)


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("recurrent") / "lfm2", "lfm2")


async def test_states_go_back_wherever_a_draft_is_refused(recurrent: Path) -> None:
    async with HandRig(recurrent, speculation="on", longest_draft=4) as rig:
        assert rig.forward.prefixes == "snapshot"
        answers = [alone(rig.model, prompt(9 + i, i + 1), 24) for i in range(6)]
        # All of a row's drafts are wrong, or one token in two, three, ...; one brings none.
        rows = [
            guessing(rig, prompt(9 + i, i + 1), 24, wrong(answer, i + 1))
            for i, answer in enumerate(answers[:-1])
        ]
        rows.append(rig.row(prompt(14, 6), 24))
        rig.submit_together(rows)
        while rig.engine.has_work():
            rig.step()
            # What a row computes again does not grow.
            running = [row.sequence for row in rows if row.sequence.computed]
            assert all(row.due <= 2 * 4 for row in running if row.drawn)
        assert [row.tokens for row in rows] == answers
        stats = rig.engine.stats()
        assert 0 < stats.accepted_tokens < stats.draft_tokens
        assert stats.pages_held == 0


async def test_states_that_prompts_go_on_from_are_of_no_draft(recurrent: Path) -> None:
    async with HandRig(recurrent, speculation="on", page_size=16) as rig:
        rig.forward.worth = 16
        given = prompt(40)
        answer = alone(rig.model, given, 20)
        first = guessing(rig, given, 20, wrong(answer, 3))
        rig.submit_together([first])
        rig.run()
        # The same prompt, and one that goes on with what has been written.
        for tokens in (given, [*given, *answer, *prompt(5, 3)]):
            guess = alone(rig.model, tokens, 20)
            again = guessing(rig, tokens, 20, wrong(guess, 4))
            rig.submit_together([again])
            rig.run()
            assert again.sequence.cached
            assert again.tokens == guess


async def test_rows_that_leave_while_states_are_kept_for_them_leave_nothing(
    recurrent: Path,
) -> None:
    async with HandRig(recurrent, speculation="on") as rig:
        first, second = (alone(rig.model, prompt(20, i), 24) for i in (1, 2))
        for steps in range(1, 5):
            gone = guessing(rig, prompt(20, 1), 24, wrong(first, 3))
            stays = guessing(rig, prompt(20, 2), 24, wrong(second, 4))
            rig.lose(gone, stays, steps, second)


async def test_rows_over_caches_of_mlx_lm_bring_no_drafts(llama: Path) -> None:
    def by_itself(model: nn.Module, page_size: int) -> Forward:
        return AloneForward(model)

    async with HandRig(llama, choose=by_itself, speculation="on") as rig:
        answer = alone(rig.model, prompt(8), 12)
        row = guessing(rig, prompt(8), 12, answer)
        rig.submit_together([row])
        rig.run()
        assert rig.engine.stats().drafts == 0
        assert row.tokens == answer


async def test_a_row_without_a_proposer_brings_none(llama: Path) -> None:
    async with HandRig(llama, speculation="on") as rig:
        row = rig.submit(prompt(4) * 6, 30)
        rig.run()
        assert len(row.tokens) == 30
        assert rig.engine.stats().drafts == 0
