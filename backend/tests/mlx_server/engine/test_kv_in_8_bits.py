"""Keys and values in 8 bits: rows draw the same tokens in any company, and more of them fit."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import mlx.core as mx
import pytest
from engine.rig import Rig, prompt
from engine.seeing_rig import SeeingRig
from seeing import FAMILIES as SEEING
from seeing import scene
from thorough import slow
from tiny_models import make_tiny_model

from mlx_manager.mlx_server.execution.select import choose

EIGHT = partial(choose, kv_bits=8)
LENGTHS = (3, 40, 17, 300, 16, 33)
# A joined decoder, one with windows, a module some of whose layers read the keys of others, and one
# some of whose layers keep a state.
FAMILIES = ("llama", "gemma3_text", "gemma3n", "qwen3_next")
RUN_ALWAYS = ("llama", "qwen3_next")


async def drawn(
    folder: Path, prompts: list[list[int]], limit: int = 16, **how: int
) -> list[list[int]]:
    """Return the tokens that each prompt gets alone, with nothing found in pages."""
    async with Rig(folder, choose=EIGHT, prefix_cache=False, **how) as rig:
        rows = []
        for tokens in prompts:
            row = rig.submit(tokens, limit)
            await row.finished()
            rows.append(row.tokens)
        return rows


@pytest.mark.parametrize(
    "family", [pytest.param(n, marks=[] if n in RUN_ALWAYS else slow) for n in FAMILIES]
)
async def test_a_crowd_in_pieces_draws_what_each_draws_alone_and_whole(
    family: str, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path, family)
    prompts = [prompt(length, i + 1) for i, length in enumerate(LENGTHS)]
    apart = await drawn(folder, prompts, prefill_chunk=512)
    async with Rig(folder, choose=EIGHT, prefill_chunk=48) as rig:
        assert "int8" in rig.engine.stats().kv_format
        rows = [rig.submit(tokens) for tokens in prompts]
        await asyncio.gather(*(row.finished() for row in rows))
    assert [row.tokens for row in rows] == apart


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
async def test_a_prefix_that_is_found_is_as_good_as_one_that_is_computed(
    family: str, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path, family)
    shared = prompt(120)
    (apart,) = await drawn(folder, [shared + prompt(9, 3)])
    async with Rig(folder, choose=EIGHT) as rig:
        for salt in (2, 4):
            await rig.submit(shared + prompt(7, salt)).finished()
        second = rig.submit(shared + prompt(9, 3))
        assert (await second.finished()).usage.cached_tokens >= 96
    assert second.tokens == apart


async def test_rows_that_pause_draw_what_rows_that_do_not_pause_draw(llama: Path) -> None:
    # 14 pages of 16 tokens, 2 layers and 2 heads of keys and of values, each of 16 numbers and a
    # scale: three rows of 4 pages that each grow to 6.
    page = 16 * 2 * 2 * 2 * (16 + 2)
    prompts = [prompt(60, i + 1) for i in range(3)]
    apart = await drawn(llama, prompts, 36)
    async with Rig(llama, choose=EIGHT, memory=14 * page, prefix_cache=False) as rig:
        assert rig.engine.stats().page_bytes == page
        rows = [rig.submit(tokens, 36) for tokens in prompts]
        await asyncio.gather(*(row.finished() for row in rows))
        assert rig.engine.stats().pauses > 0
    assert [row.tokens for row in rows] == apart


@pytest.mark.parametrize("name", ["smolvlm", "qwen3_vl"])
async def test_pictures_in_pieces_and_in_company_are_answered_as_alone_and_whole(
    name: str, tmp_path: Path
) -> None:
    family, grids = SEEING[name], ((4, 6), (3, 5))
    choice = partial(choose, kv_bits=8, vision=family)
    of = scene(family, grids=grids)
    answers = []
    for chunk in (512, 16):
        async with SeeingRig(family, tmp_path, prefill_chunk=chunk, choose=choice) as rig:
            if chunk == 16:
                rig.submit(prompt(33, 5), 9)
                rig.step(3)
            rows = [rig.look(of, grids, (1, 2), 6)]
            rig.run()
            # The second time all but the end is found in pages.
            rows.append(rig.look(of, grids, (1, 2), 6))
            rig.run()
            assert rows[1].sequence.cached > 16
            answers += [row.tokens for row in rows]
    assert answers == answers[:1] * 4


async def test_twice_the_rows_run_at_once_in_the_same_memory(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, head_dim=64, dtype=mx.bfloat16)
    # 100 pages in 16 bits. A row takes 5, and a page for each running row stays free.
    memory = 100 * 16 * 2 * 2 * 2 * 64 * 2
    most, held = {}, {}
    for bits in (16, 8):
        async with Rig(
            folder, choose=partial(choose, kv_bits=bits), memory=memory, prefix_cache=False
        ) as rig:
            rows = [rig.submit(prompt(64, i + 1), 14) for i in range(40)]
            running = []
            while not all(row.sequence.ended for row in rows):
                await asyncio.sleep(0.001)
                running.append(rig.engine.stats().running)
            stats = rig.engine.stats()
            most[bits], held[bits] = max(running), stats.page_bytes // stats.page_size
    # Less scales: 2 bytes for each 64 numbers.
    assert held[8] / held[16] == 66 / 128
    assert most[8] >= 1.7 * most[16] > 0
