"""A draft model: rows of a batch, pages that are shared, lost and given back, and when it pays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from engine.rig import HandRig, Row, alone, drafting, prompt
from tiny_models import make_tiny_model

from mlx_manager.mlx_server.engine.scheduler.load import StepLoad
from mlx_manager.mlx_server.engine.scheduler.step_size import StepSize
from mlx_manager.mlx_server.engine.speculation.draft_model import DraftModel
from mlx_manager.mlx_server.engine.speculation.speculation import Speculation
from mlx_manager.mlx_server.execution.module.separate import SeparateForward


def model_of(rig: HandRig) -> DraftModel:
    found = rig.engine._draft_model
    assert found is not None
    return found


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A model that differs from `llama` by its weights."""
    return make_tiny_model(tmp_path / "other", "llama", seed=7)


async def test_the_model_as_its_own_draft_has_all_accepted(llama: Path) -> None:
    async with HandRig(llama, draft=llama, speculation="on", longest_draft=4) as rig:
        rows = [drafting(rig, prompt(20 + i, i + 1), 41) for i in range(3)]
        drawn = rig.ran(rows)
        assert drawn == [alone(rig.model, prompt(20 + i, i + 1), 41) for i in range(3)]
        stats = rig.engine.stats()
        # The prompts' step gives a token a row, and each of eight more gives five.
        assert (stats.steps, stats.drafts) == (9, 24)
        assert stats.accepted_tokens == stats.draft_tokens == 96


async def test_rows_are_guessed_for_together_as_alone(llama: Path, other: Path) -> None:
    found = []
    for together in (True, False):
        async with HandRig(llama, draft=other, speculation="on") as rig:
            rows = [drafting(rig, prompt(9 + 5 * i, i + 1), 30) for i in range(4)]
            if together:
                drawn = rig.ran(rows)
            else:
                drawn = [tokens for row in rows for tokens in rig.ran([row])]
            stats = rig.engine.stats()
            found.append((drawn, stats.draft_tokens, stats.accepted_tokens))
    assert found[0] == found[1]


async def test_rows_and_chunks_of_a_draft_model_may_be_run_apart(tmp_path: Path) -> None:
    model, other = (
        make_tiny_model(tmp_path / str(seed), "deepseek_v3", seed=seed) for seed in (0, 7)
    )
    async with HandRig(model, draft=other, speculation="on") as rig:
        assert (rig.forward.kind, rig.forward.prefixes) == ("separate", "pages")
        # Of different lengths: in some steps one row alone is guessed for, and then others again.
        rows = [drafting(rig, prompt(9 + 5 * i, i + 1), 20 + 7 * i) for i in range(4)]
        drawn = rig.ran(rows)
        assert [len(tokens) for tokens in drawn] == [20, 27, 34, 41]
        for i, tokens in enumerate(drawn):
            assert tokens == alone(rig.model, prompt(9 + 5 * i, i + 1), 20 + 7 * i)
        assert rig.engine.stats().draft_tokens > 0
        # Nothing is kept of rows that have ended.
        forward = model_of(rig)._forward
        assert isinstance(forward, SeparateForward)
        assert not forward._own
        assert not forward._rows


async def test_prompts_that_others_had_read_are_not_read_again(llama: Path) -> None:
    async with HandRig(llama, draft=llama, speculation="on", page_size=4) as rig:
        first = drafting(rig, prompt(40), 20)
        (answer,) = rig.ran([first])
        follower = drafting(rig, [*prompt(40), *answer, *prompt(3, 9)], 20)
        rig.submit_together([follower])
        while not follower.tokens:
            rig.step()
        # All pages are found but the last ones, which ended with the row.
        assert follower.sequence.cached >= 56
        assert model_of(rig).behind(follower.sequence) <= 63 + 1 - 44
        rig.run()
        assert follower.tokens == alone(rig.model, follower.sequence.tokens[:63], 20)
        stats = rig.engine.stats()
        assert stats.accepted_tokens == stats.draft_tokens


async def test_what_a_row_without_drafts_has_left_is_read_first(llama: Path) -> None:
    async with HandRig(llama, draft=llama, speculation="on", page_size=4) as rig:
        (answer,) = rig.ran([rig.row(prompt(40), 20)])
        follower = drafting(rig, [*prompt(40), *answer, 5], 20)
        (drawn,) = rig.ran([follower])
        assert follower.sequence.cached >= 56
        assert drawn == alone(rig.model, follower.sequence.tokens[:61], 20)
        stats = rig.engine.stats()
        assert stats.accepted_tokens == stats.draft_tokens > 0


async def test_a_page_that_has_come_to_hold_something_else_is_read_again(llama: Path) -> None:
    limits = {"page_size": 4, "speculation": "on", "max_rows": 2}
    async with HandRig(llama, draft=llama, **limits) as rig:
        page = rig.engine.stats().page_bytes
    size = StepSize(64, working_bytes=0)
    async with HandRig(llama, draft=llama, memory=16 * page, size=size, **limits) as rig:
        for salt in (1, 2, 3, 1, 2, 3):
            row = drafting(rig, prompt(40, salt), 14)
            assert rig.ran([row]) == [alone(rig.model, prompt(40, salt), 14)]
        stats = rig.engine.stats()
        assert stats.accepted_tokens == stats.draft_tokens > 0


async def test_a_long_prompt_is_read_in_several_steps(llama: Path) -> None:
    size = StepSize(32, working_bytes=0)
    async with HandRig(llama, draft=llama, speculation="on", size=size) as rig:
        (drawn,) = rig.ran([drafting(rig, prompt(200), 30)])
        assert drawn == alone(rig.model, prompt(200), 30)
        stats = rig.engine.stats()
        assert stats.accepted_tokens == stats.draft_tokens > 0


async def test_rows_that_are_paused_go_on(llama: Path) -> None:
    answers = []
    async with HandRig(llama, draft=llama, max_rows=8) as rig:
        answers = [alone(rig.model, prompt(30, i + 1), 60) for i in range(8)]
        # Pages for three and a half rows.
        memory = 21 * rig.engine.stats().page_bytes
    size, limits = StepSize(64, working_bytes=0), {"max_rows": 8, "speculation": "on"}
    async with HandRig(llama, draft=llama, memory=memory, size=size, **limits) as rig:
        assert rig.ran([drafting(rig, prompt(30, i + 1), 60) for i in range(8)]) == answers
        stats = rig.engine.stats()
        assert stats.pauses > 0
        assert stats.accepted_tokens == stats.draft_tokens > 0
        assert stats.pages_held == 0


async def test_a_cancelled_row_leaves_nothing(llama: Path, other: Path) -> None:
    async with HandRig(llama, draft=other, speculation="on") as rig:
        second = alone(rig.model, prompt(20, 2), 40)
        for steps in range(1, 6):
            gone, stays = drafting(rig, prompt(20, 1), 40), drafting(rig, prompt(20, 2), 40)
            rig.lose(gone, stays, steps, second)


async def test_its_keys_and_values_are_on_the_same_pages(llama: Path, other: Path) -> None:
    async with HandRig(llama) as rig:
        own = rig.engine.stats().page_bytes
    async with HandRig(llama, draft=other, speculation="on") as rig:
        assert rig.engine.stats().page_bytes == 2 * own
        rig.ran([drafting(rig, prompt(40), 20)])
        stats = rig.engine.stats()
        pages = stats.pages_free + stats.pages_cached
        assert rig.ledger.figures()["pages:tiny"] == pages * 2 * own
        rig.engine.close()
        assert "pages:tiny" not in rig.ledger.figures()


async def test_it_guesses_on_after_a_step_has_failed(llama: Path) -> None:
    async with HandRig(llama, draft=llama, speculation="on") as rig:
        lost = drafting(rig, prompt(20), 40)
        rig.submit_together([lost])
        rig.step(3)
        rig.engine.fail(RuntimeError("as a device may say"))
        assert lost.sequence.ended
        assert rig.ran([drafting(rig, prompt(20), 40)]) == [alone(rig.model, prompt(20), 40)]
        stats = rig.engine.stats()
        assert stats.pages_held == 0


# -- when it pays --------------------------------------------------------------------------------


def lengths(speculation: Speculation, rows: list[Row]) -> list[int]:
    sequences = [row.sequence for row in rows]
    load = StepLoad(len(rows))
    chosen = speculation.choose(sequences, load, 1 << 20, lambda row, tokens: tokens)
    return [len(proposal.tokens) for _, proposal in chosen]


@contextmanager
def running(rig: HandRig, count: int) -> Iterator[list[Row]]:
    """Rows whose prompts have been processed, with pages for some tokens more."""
    rows = [drafting(rig, prompt(9, i + 1), 100) for i in range(count)]
    rig.submit_together(rows)
    while not all(row.sequence.known() for row in rows):
        rig.step()
    for row in rows:
        row.sequence.pending = 0
    yield rows
    for row in rows:
        rig.cancel(row)


def plain_steps(rig: HandRig, plain: float = 1.0) -> Speculation:
    """A chooser that takes a step for so long, whatever it has seen."""
    return Speculation(8, 512, lambda rows: plain, always=False, model=model_of(rig))


@pytest.mark.parametrize(("part", "pays"), [(0.05, True), (0.2, True), (1.0, False)])
async def test_it_guesses_where_it_is_small_enough(part: float, pays: bool, llama: Path) -> None:
    # A clock that stands still: seconds stay as they are guessed at first.
    rig = HandRig(llama, draft=llama, part=part, clock=lambda: 0.0, speculation="off", page_size=64)
    async with rig:
        with running(rig, 1) as rows:
            assert bool(lengths(plain_steps(rig), rows)) == pays


async def test_it_guesses_for_no_crowd(llama: Path) -> None:
    rig = HandRig(llama, draft=llama, part=0.1, clock=lambda: 0.0, speculation="off", page_size=64)
    async with rig:
        with running(rig, 64) as rows:
            assert lengths(plain_steps(rig), rows) == []
            assert 0 < len(lengths(plain_steps(rig), rows[:4])) <= 4


async def test_where_guesses_are_refused_it_stops_for_all_rows_and_tries_again(
    llama: Path,
) -> None:
    rig = HandRig(llama, draft=llama, part=0.1, clock=lambda: 0.0, speculation="off", page_size=64)
    async with rig:
        with running(rig, 2) as rows:
            first, second = rows
            speculation, acceptance = plain_steps(rig), first.sequence.proposer.acceptance
            tried = 0
            while (found := lengths(speculation, [first])) and tried < 100:
                tried += 1
                acceptance.observe("draft_model", found[0], 0)
            assert 2 < tried < 40
            usual = model_of(rig).usual
            assert usual < 0.65
            lengths(speculation, [second])
            begun = second.sequence.proposer.acceptance.modelled
            assert begun is None or begun <= usual
            assert any(lengths(speculation, [first]) for _ in range(200))


async def test_a_draft_model_that_is_always_wrong_is_tried_ever_more_rarely(llama: Path) -> None:
    rig = HandRig(llama, draft=llama, part=0.1, clock=lambda: 0.0, speculation="off", page_size=64)
    async with rig:
        with running(rig, 1) as rows:
            acceptance, speculation = rows[0].sequence.proposer.acceptance, plain_steps(rig)
            tried = []
            for _ in range(2000):
                found = lengths(speculation, rows)
                tried.append(bool(found))
                if found:
                    acceptance.observe("draft_model", found[0], 0)
            assert 0 < sum(tried[:100]) < 20
            assert sum(tried[1000:]) < 10
