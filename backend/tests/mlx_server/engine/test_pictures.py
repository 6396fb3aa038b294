"""Prompts with pictures through the engine: what is drawn, what the tower does, who shares what."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from engine.rig import Row, alone, prompt
from engine.seeing_rig import STAGES, SeeingRig, ThreadedSeeingRig, picture
from seeing import FAMILIES, Scene, SeeingFamily, reference_logits, scene

from mlx_manager.mlx_server.core import Finished
from mlx_manager.mlx_server.engine.kv.contents import ContentNumbers
from mlx_manager.mlx_server.errors import GenerationFailed, InvalidRequest, OutOfMemory

GRIDS = ((4, 6), (3, 5))
QWEN, SMOL = FAMILIES["qwen3_vl"], FAMILIES["smolvlm"]


def of_numbers(rig: SeeingRig, of: Scene, numbers: tuple[int, ...]) -> Scene:
    """The scene with the features of the tower's pictures."""
    images = [rig.seen(of, GRIDS, numbers).sequence.images.pictures]
    return replace(of, features=[rig.tower.features(p.image) for p in images[0]])


def drawn(family: SeeingFamily, model, of: Scene, limit: int) -> list[int]:
    """Return the tokens that mlx-vlm's language model draws greedily after the prompt."""
    found: list[int] = []
    for _ in range(limit):
        now = replace(of, tokens=[*of.tokens[: of.prompt], *found])
        found.append(int(mx.argmax(reference_logits(family, model, now)[-1]).item()))
    return found


async def finished(row: Row) -> Finished:
    return await asyncio.wait_for(row.finished(), 20)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("looks_ahead", [False, True])
async def test_what_is_drawn_is_the_reference_s_beside_texts(
    name: str, looks_ahead: bool, tmp_path: Path
) -> None:
    family = FAMILIES[name]
    async with SeeingRig(family, tmp_path, prefill_chunk=16, looks_ahead=looks_ahead) as rig:
        first = rig.submit(prompt(20), 30)
        rig.step(4)
        of = scene(family, grids=GRIDS)
        row = rig.look(of, GRIDS, (1, 2), 6)
        rig.step(3)
        second = rig.submit(prompt(33, 5), 9)
        rig.run()
        model = family.model()
        assert row.tokens == drawn(family, model, of_numbers(rig, of, (1, 2)), 6)
        for text, of_text, limit in ((first, prompt(20), 30), (second, prompt(33, 5), 9)):
            assert text.tokens == alone(model, of_text, limit, text.tokens)
        assert rig.tower.begun == ["1", "2"]


@pytest.mark.parametrize("name", ["smolvlm", "qwen3_vl", "qwen3_5"])
async def test_a_second_question_about_a_picture_runs_no_tower(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    async with SeeingRig(family, tmp_path) as rig:
        of = scene(family, grids=GRIDS)
        rig.look(of, GRIDS, (1, 2))
        rig.run()
        slices = rig.tower.slices
        longer = scene(family, grids=GRIDS, after=23)
        longer = replace(longer, tokens=[*of.tokens[: of.prompt], *longer.tokens[of.prompt :]])
        row = rig.look(longer, GRIDS, (1, 2), 5)
        rig.run()
        assert rig.tower.slices == slices
        assert row.tokens == drawn(family, family.model(), of_numbers(rig, longer, (1, 2)), 5)
        assert row.sequence.cached >= 48


async def test_a_picture_that_was_forgotten_is_found_in_pages_where_they_hold_all_of_it(
    tmp_path: Path,
) -> None:
    async with SeeingRig(SMOL, tmp_path, image_cache=0) as rig:
        of = scene(SMOL, grids=GRIDS, after=20)
        rig.look(of, GRIDS, (1, 2))
        rig.run()
        assert "images:tiny" not in rig.ledger.figures()
        rig.look(of, GRIDS, (1, 2))
        rig.run()
        assert rig.tower.begun == ["1", "2"]


async def test_a_picture_at_the_end_of_what_is_cached_is_read_again_if_it_was_forgotten(
    tmp_path: Path,
) -> None:
    async with SeeingRig(SMOL, tmp_path, image_cache=0) as rig:
        # The second picture reaches into a page that is not full.
        of = scene(SMOL, grids=GRIDS, after=1)
        row = rig.look(of, GRIDS, (1, 2))
        rig.run()
        again = rig.look(of, GRIDS, (1, 2))
        rig.run()
        assert rig.tower.begun == ["1", "2", "2"]
        assert again.tokens == row.tokens


async def test_different_pictures_never_share_pages(tmp_path: Path) -> None:
    async with SeeingRig(SMOL, tmp_path) as rig:
        of = scene(SMOL, grids=GRIDS, before=20)
        rig.look(of, GRIDS, (1, 2))
        rig.run()
        row = rig.look(of, GRIDS, (3, 2), 5)
        rig.run()
        # The text before the pictures is the same.
        assert row.sequence.cached == 16
        assert row.tokens == drawn(SMOL, SMOL.model(), of_numbers(rig, of, (3, 2)), 5)


@pytest.mark.parametrize("before", [0, 20])
async def test_pictures_and_pages_are_found_by_rows_of_the_same_salt_alone(
    before: int, tmp_path: Path
) -> None:
    async with SeeingRig(SMOL, tmp_path) as rig:
        of = scene(SMOL, grids=GRIDS, before=before, after=20)
        rows = []
        for salt in ("a", "b", "", "a"):
            rows.append(rig.look(of, GRIDS, (1, 2), salt=salt))
            rig.run()
        assert rig.tower.begun == ["1", "2"] * 3
        *others, again = [row.sequence.cached for row in rows]
        assert others == [0, 0, 0]
        assert again >= 48
        assert len({tuple(row.tokens) for row in rows}) == 1


async def test_rows_of_two_salts_wait_for_no_page_of_each_other_s(tmp_path: Path) -> None:
    async with SeeingRig(SMOL, tmp_path, prefill_chunk=16) as rig:
        of = scene(SMOL, grids=GRIDS, after=20)
        rows = [rig.seen(of, GRIDS, (1, 2), salt=salt) for salt in ("a", "b", "a")]
        rig.submit_together(rows)
        rig.run()
        first, other, again = (row.sequence.cached for row in rows)
        assert (first, other) == (0, 0)
        assert again >= 48
        assert sorted(rig.tower.begun) == ["1", "1", "2", "2"]


async def test_a_text_of_placeholders_shares_no_pages_with_a_picture(tmp_path: Path) -> None:
    async with SeeingRig(SMOL, tmp_path) as rig:
        of = scene(SMOL, grids=GRIDS, before=16)
        rig.look(of, GRIDS, (1, 2))
        rig.run()
        row = rig.submit(of.tokens[: of.prompt], 5)
        rig.run()
        assert row.sequence.cached == 16
        assert row.tokens == alone(SMOL.model(), of.tokens[: of.prompt], 5, row.tokens)


def test_a_number_is_never_given_to_another_digest() -> None:
    numbers = ContentNumbers(most=2)
    seen = [numbers.of(digest) for digest in "abca"]
    assert len(set(seen)) == 4
    assert max(seen) < 0
    assert numbers.of("a") == seen[-1]


async def test_rows_that_wait_for_one_picture_have_one_job(tmp_path: Path) -> None:
    async with SeeingRig(QWEN, tmp_path) as rig:
        scenes = [scene(QWEN, grids=GRIDS, seed=seed) for seed in (1, 2, 3)]
        rows = [rig.look(of, GRIDS, (1, 2), 4) for of in scenes]
        rig.run()
        assert rig.tower.begun == ["1", "2"]
        for row, of in zip(rows, scenes, strict=True):
            assert row.tokens == drawn(QWEN, QWEN.model(), of_numbers(rig, of, (1, 2)), 4)


async def test_a_picture_that_is_shown_twice_is_read_once(tmp_path: Path) -> None:
    grids = ((3, 4), (3, 4))
    async with SeeingRig(QWEN, tmp_path, prefill_chunk=16) as rig:
        of = scene(QWEN, grids=grids, after=0)
        row = rig.look(of, grids, (1, 1))
        rig.run()
        assert rig.tower.begun == ["1"]
        images = [p.image for p in row.sequence.images.pictures]
        now = replace(of, features=[rig.tower.features(image) for image in images])
        assert row.tokens == drawn(QWEN, QWEN.model(), now, 4)
        assert rig.engine._pictures.cache.spare == rig.engine._pictures.cache.nbytes > 0


async def test_the_text_before_a_picture_is_computed_while_the_tower_works(tmp_path: Path) -> None:
    async with SeeingRig(QWEN, tmp_path, prefill_chunk=16) as rig:
        of = scene(QWEN, grids=GRIDS, before=40)
        with rig.tower.held():
            row = rig.look(of, GRIDS, (1, 2))
            rig.step(6)
            assert row.sequence.computed == 40
        rig.run()
        assert row.tokens == drawn(QWEN, QWEN.model(), of_numbers(rig, of, (1, 2)), 4)


async def test_streams_go_on_while_pixels_are_awaited(tmp_path: Path) -> None:
    async with SeeingRig(QWEN, tmp_path) as rig:
        text = rig.submit(prompt(20), 60)
        rig.step(3)
        with rig.tower.held():
            row = rig.look(scene(QWEN, grids=GRIDS), GRIDS, (1, 2))
            rig.step(20)
            assert len(text.tokens) >= 20
            assert not row.tokens
        rig.run()
        assert len(row.tokens) == 4


async def test_a_thread_without_other_work_sleeps_until_pixels_come(tmp_path: Path) -> None:
    async with ThreadedSeeingRig(QWEN, tmp_path) as rig:
        of = scene(QWEN, grids=GRIDS, before=1)
        with rig.tower.held():
            row = rig.look(of, GRIDS, (1, 2))
            while await rig.on_thread(rig.engine.has_work):
                pass
        assert (await finished(row)).usage.prompt_tokens == of.prompt


async def test_slices_of_the_tower_count_as_progress(tmp_path: Path) -> None:
    """The watchdog ends a worker whose thread has work and does no step."""
    async with SeeingRig(QWEN, tmp_path) as rig:
        rig.look(scene(QWEN, grids=GRIDS, before=0), GRIDS, (1, 2), 1)
        rig.run()
        assert rig.engine.steps == rig.engine.stats().steps + 2 * (STAGES + 1)


@pytest.mark.parametrize("error", [RuntimeError("no kernel"), InvalidRequest("not a picture")])
@pytest.mark.parametrize("place", ["pixels", "stages"])
async def test_a_tower_that_fails_fails_its_rows_alone(
    error: Exception, place: str, tmp_path: Path
) -> None:
    async with SeeingRig(QWEN, tmp_path) as rig:
        (rig.tower.unreadable if place == "pixels" else rig.tower.broken)["1"] = error
        text = rig.submit(prompt(20), 40)
        rig.step(3)
        rows = [rig.look(scene(QWEN, grids=GRIDS, seed=s), GRIDS, (1, 2)) for s in (1, 2)]
        of = scene(QWEN, grids=GRIDS)
        sound = rig.look(of, GRIDS, (3, 2))
        rig.run()
        expected = InvalidRequest if isinstance(error, InvalidRequest) else GenerationFailed
        for row in rows:
            with pytest.raises(expected, match="picture"):
                await finished(row)
        assert text.tokens == alone(QWEN.model(), prompt(20), 40, text.tokens)
        assert sound.tokens == drawn(QWEN, QWEN.model(), of_numbers(rig, of, (3, 2)), 4)
        assert rig.engine.stats().pages_held == 0


async def test_a_picture_that_fails_does_no_harm_to_one_that_was_read_before(
    tmp_path: Path,
) -> None:
    async with SeeingRig(QWEN, tmp_path) as rig:
        rig.tower.broken["2"] = RuntimeError("no kernel")
        rig.submit(prompt(20), 40)
        rig.step(3)
        grids = ((3, 4),)
        first = scene(QWEN, grids=grids, seed=1)
        rows = [rig.look(first, grids, (1,)), rig.look(scene(QWEN, grids=grids), grids, (2,))]
        rig.run()
        now = replace(
            first, features=[rig.tower.features(picture(1, *first.places, grids[0]).image)]
        )
        assert rows[0].tokens == drawn(QWEN, QWEN.model(), now, 4)
        with pytest.raises(GenerationFailed, match="picture"):
            await finished(rows[1])


async def test_a_job_ends_with_the_last_row_that_wants_it(tmp_path: Path) -> None:
    async with SeeingRig(QWEN, tmp_path) as rig:
        text = rig.submit(prompt(20), 40)
        rig.step(3)
        with rig.tower.held():
            rows = [rig.look(scene(QWEN, grids=GRIDS, seed=s), GRIDS, (1, 2)) for s in (1, 2)]
            rig.step(3)
            rig.cancel(rows[0])
            rig.step()
            # The other one still wants it.
            assert rig.engine._pictures.busy
            rig.cancel(rows[1])
            assert not rig.engine._pictures.busy
        rig.run()
        assert not rig.tower.slices
        assert len(text.tokens) == 40
        assert "images:tiny" not in rig.ledger.figures()


async def test_a_paused_row_draws_what_it_would_have_drawn(tmp_path: Path) -> None:
    async with SeeingRig(QWEN, tmp_path, image_cache=0, prefix_cache=False) as rig:
        scenes = [scene(QWEN, grids=GRIDS, seed=seed) for seed in (1, 2, 3)]
        rows = [rig.look(of, GRIDS, (1, 2), 60) for of in scenes]
        while not all(row.tokens for row in rows):
            rig.step()
        # Nothing is left for the pages that the rows grow into.
        pool = rig.engine._memory.pool
        pool.allocate(pool.free - 3)
        held = rig.ledger.available()
        rig.ledger.reserve("others", held)
        rig.step(40)
        assert rig.engine.stats().pauses > 0
        assert rig.tower.begun == ["1", "2"]
        rig.ledger.release("others", held)
        rig.run()
        assert rig.tower.begun[2:4] == ["1", "2"]
        for row, of in zip(rows, scenes, strict=True):
            now = of_numbers(rig, of, (1, 2))
            assert row.tokens[:8] == drawn(QWEN, QWEN.model(), now, 8)
            assert len(row.tokens) == 60


async def test_features_stand_in_the_ledger_and_are_given_up_when_memory_is_short(
    tmp_path: Path,
) -> None:
    async with SeeingRig(QWEN, tmp_path) as rig:
        rig.look(scene(QWEN, grids=GRIDS), GRIDS, (1, 2))
        rig.run()
        rows = sum(a * b for a, b in GRIDS)
        assert rig.ledger.figures()["images:tiny"] == rows * 64 * 4 * (1 + QWEN.levels)
        assert rig.ledger.reserve("others", rig.ledger.available() + rows * 64 * 4 * 2)
        assert "images:tiny" not in rig.ledger.figures()


async def test_a_picture_that_there_is_no_memory_for_is_refused(tmp_path: Path) -> None:
    async with SeeingRig(QWEN, tmp_path) as rig:
        rig.ledger.reserve("others", rig.ledger.available() - 300_000)
        row = rig.look(scene(QWEN, grids=((2, 2),), after=2), ((2, 2),), (1,))
        rig.run()
        with pytest.raises(OutOfMemory, match="picture"):
            await finished(row)


async def test_the_least_recently_used_features_go_first(tmp_path: Path) -> None:
    size = 4 * 64 * 4
    async with SeeingRig(SMOL, tmp_path, image_cache=2 * size, prefix_cache=False) as rig:
        for number in (1, 2, 1, 3, 1, 2):
            rig.look(scene(SMOL, grids=((2, 2),)), ((2, 2),), (number,), 1)
            rig.run()
        assert rig.tower.begun == ["1", "2", "3", "2"]


async def test_more_urgent_rows_pictures_come_first(tmp_path: Path) -> None:
    async with SeeingRig(SMOL, tmp_path) as rig:
        rows = [
            rig.seen(scene(SMOL, grids=((2, 2),), seed=n), ((2, 2),), (n,), priority=priority)
            for n, priority in ((1, 5), (2, 5), (3, 5), (4, 0))
        ]
        rig.submit_together(rows)
        rig.run()
        assert rig.tower.begun.index("4") < 2


async def test_a_model_without_a_tower_refuses_pictures(tmp_path: Path) -> None:
    async with SeeingRig(SMOL, tmp_path) as rig:
        rig.engine._pictures = None
        row = rig.look(scene(SMOL, grids=GRIDS), GRIDS, (1, 2))
        with pytest.raises(InvalidRequest, match="does not see"):
            await finished(row)


async def test_no_chunk_ends_inside_a_picture_that_is_seen_whole(tmp_path: Path) -> None:
    async with SeeingRig(SMOL, tmp_path, prefill_chunk=16, page_size=4) as rig:
        of = scene(SMOL, grids=GRIDS)
        runs = [(int(p[0]), int(p[-1]) + 1) for p in of.places]
        row = rig.look(of, GRIDS, (1, 2), whole=True)
        ends = set()
        while rig.engine.has_work():
            ends.add(row.sequence.computed)
            rig.step()
        assert all(not start < end < behind for end in ends for start, behind in runs)
        assert len(row.tokens) == 4
        assert np.all(np.diff(sorted(ends)) > 0)
