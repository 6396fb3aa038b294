"""Answers of engines with prefixes on disk: those that they give without."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from devices.portable import Portable, PortableWriter, plainly
from engine.rig import HandRig, Rig, Row, alone, prompt
from engine.seeing_rig import SeeingRig
from mlx import nn
from seeing import FAMILIES, scene
from thorough import every_other, slow
from tiny_models import make_tiny_model

from mlx_manager.mlx_server.config import PrefixDisk
from mlx_manager.mlx_server.core import Finished
from mlx_manager.mlx_server.engine.disk.blocks import PrefixBlock, name_of
from mlx_manager.mlx_server.engine.disk.folder import LOCK, Folder
from mlx_manager.mlx_server.engine.disk.names import DIGEST, FORMAT, PLAIN, BlockName
from mlx_manager.mlx_server.engine.disk.room import BLOCKS, LEAST
from mlx_manager.mlx_server.engine.disk.threads import BlockDisk
from mlx_manager.mlx_server.engine.disk.tier import block_bytes, stores_of
from mlx_manager.mlx_server.engine.kv.store import LayerShape, LayerStore
from mlx_manager.mlx_server.execution.forward import Forward
from mlx_manager.mlx_server.execution.group.leader import ToldStore
from mlx_manager.mlx_server.execution.select import choose

LONG = 700
BLOCK = 256


@pytest.fixture
def disk(tmp_path: Path) -> PrefixDisk:
    return PrefixDisk(tmp_path / "kept", 1 << 28)


def files_of(disk: PrefixDisk) -> list[Path]:
    return sorted(disk.folder.rglob("*.safetensors"))


async def cached(row: Row) -> tuple[int, list[int]]:
    finished = await row.finished()
    assert isinstance(finished, Finished)
    return finished.usage.cached_tokens, row.tokens


async def reference(rig: Rig, tokens: list[int], limit: int) -> list[int]:
    return await rig.thread.call(lambda: alone(rig.model, tokens, limit))


def on_kernels(model: nn.Module, size: int) -> Forward:
    """Choose as on a Mac, where kernels write pages in place."""
    return choose(model, size, kernels=Portable, compile=plainly, writers=PortableWriter)


@pytest.mark.parametrize("way", [choose, on_kernels, partial(choose, kv_bits=8)])
async def test_a_prefix_outlives_the_engine(
    llama: Path, disk: PrefixDisk, way: Callable[[nn.Module, int], Forward]
) -> None:
    async with Rig(llama, choose=way, disk=disk) as rig:
        first = await cached(rig.submit(prompt(LONG), 8))
        assert first[0] == 0
        if not isinstance(way, partial):
            assert first[1] == await reference(rig, prompt(LONG), 8)
        assert files_of(disk) == []
    assert len(files_of(disk)) == LONG // BLOCK
    async with Rig(llama, choose=way, disk=disk) as rig:
        found, tokens = await cached(rig.submit(prompt(LONG), 8))
        assert found == LONG // BLOCK * BLOCK
        assert tokens == first[1]
        stats = rig.engine.stats()
        assert stats.prefix_hits == found
        assert stats.disk is not None
        assert stats.disk.hits == found
        assert stats.disk.read_bytes > 0
        # Now it is in memory.
        found, tokens = await cached(rig.submit(prompt(LONG), 8))
        assert found == (LONG - 1) // 16 * 16
        assert tokens == first[1]
        assert rig.engine.stats().pages_held == 0


async def test_what_is_used_a_second_time_is_written_while_others_run(
    llama: Path, disk: PrefixDisk
) -> None:
    async with Rig(llama, disk=disk) as rig:
        other = rig.submit(prompt(20, 9), 200)
        await cached(rig.submit(prompt(LONG), 4))
        await cached(rig.submit(prompt(LONG), 4))
        for _ in range(1000):
            if len(files_of(disk)) == LONG // BLOCK:
                break
            await asyncio.sleep(0.01)
        assert len(files_of(disk)) == LONG // BLOCK
        await other.finished()
        assert other.tokens == await reference(rig, prompt(20, 9), 200)


@pytest.mark.parametrize("looks_ahead", [False, True])
async def test_a_crowd_reads_from_disk_what_each_would_draw_alone(
    llama: Path, disk: PrefixDisk, looks_ahead: bool
) -> None:
    prompts = [prompt(LONG + 10 * i, i + 1) for i in range(4)]
    async with Rig(llama, disk=disk) as rig:
        expected = [(await cached(rig.submit(tokens, 12)))[1] for tokens in prompts]
    # Others begin as they do, and end in another way.
    prompts += [tokens[:-30] + prompt(40, 77) for tokens in prompts]
    async with Rig(llama, disk=disk, prefill_chunk=64, looks_ahead=looks_ahead) as rig:
        runs = [rig.submit(prompt(9, 50 + i), 60) for i in range(3)]
        rows = [rig.submit(tokens, 12) for tokens in prompts]
        answers = await asyncio.gather(*map(cached, rows))
        # The first is read, since nothing is known of prices; others where that has been cheaper.
        assert answers[0][0] >= LONG // BLOCK * BLOCK
        assert [tokens for _, tokens in answers[:4]] == expected
        for tokens, (_, drawn) in zip(prompts[4:], answers[4:], strict=True):
            assert drawn == await reference(rig, tokens, 12)
        for i, run in enumerate(runs):
            await run.finished()
            assert run.tokens == await reference(rig, prompt(9, 50 + i), 60)


@pytest.mark.parametrize(
    "family", every_other(["qwen3_5", "falcon_h1", "deepseek_v2", "gemma3", "lfm2"])
)
async def test_every_kind_of_layer_goes_on_from_disk(
    tmp_path: Path, disk: PrefixDisk, family: str
) -> None:
    model = make_tiny_model(tmp_path / family, family)
    async with Rig(model, disk=disk) as rig:
        _, first = await cached(rig.submit(prompt(LONG), 8))
        followed = prompt(LONG) + first + prompt(30, 5)
        expected = await reference(rig, followed, 8)
    async with Rig(model, disk=disk) as rig:
        found, tokens = await cached(rig.submit(followed, 8))
        assert found >= LONG // BLOCK * BLOCK
        assert tokens == expected
        if rig.forward.prefixes == "snapshot":
            assert found == (LONG - 1) // 16 * 16
        again, tokens = await cached(rig.submit(followed, 8))
        assert again >= found
        assert tokens == expected


@pytest.mark.parametrize(
    ("family", "harmed", "gained"),
    [("llama", False, 768), ("llama", True, 512), ("qwen3_5", False, 832), ("qwen3_5", True, 0)],
)
async def test_the_first_tokens_are_computed_while_the_others_are_read(
    tmp_path: Path, disk: PrefixDisk, family: str, harmed: bool, gained: int
) -> None:
    model, tokens = make_tiny_model(tmp_path / family, family), prompt(1100)
    async with Rig(model, disk=disk) as rig:
        _, expected = await cached(rig.submit(tokens, 8))
    async with Rig(model, disk=disk, prefill_chunk=64) as rig:

        def learn() -> None:
            """Prices by which reading is a little faster than computing."""
            prices = rig.engine._disk.prices  # type: ignore[union-attr]
            prices.prefill.value, prices.read.value = 1000.0, 1200.0 * prices.token_bytes

        await rig.on_thread(learn)
        if harmed:
            last = max(files_of(disk), key=lambda file: name_of(file).end)
            last.write_bytes(last.read_bytes()[:-1])
        row = rig.submit(tokens, 8)
        other = rig.submit(prompt(30, 3), 40)
        assert await cached(row) == (gained, expected)
        await other.finished()
        assert other.tokens == await reference(rig, prompt(30, 3), 40)


@pytest.mark.parametrize("name", ["smolvlm", "qwen3_vl"])
async def test_pictures_are_told_apart_on_disk(tmp_path: Path, disk: PrefixDisk, name: str) -> None:
    family, grids = FAMILIES[name], ((4, 6), (3, 5))
    of = scene(family, grids=grids, before=200, after=60)

    async def answers(*numbers: tuple[int, int], kept: PrefixDisk | None) -> list[str]:
        async with SeeingRig(family, tmp_path / str(kept is None), disk=kept) as rig:
            for pair in numbers:
                row = rig.look(of, grids, pair, 6)
                rig.run(1_000_000)
                found.append((row.sequence.cached, row.tokens))
            return rig.tower.begun

    found: list[tuple[int | None, list[int]]] = []
    await answers((1, 2), (3, 2), kept=None)
    expected = [tokens for _, tokens in found]
    assert expected[0] != expected[1]
    found.clear()
    await answers((5, 9), (1, 2), kept=disk)
    # In the next process other numbers stand for the pictures.
    found.clear()
    begun = await answers((3, 2), (1, 2), kept=disk)
    assert [tokens for _, tokens in found] == [expected[1], expected[0]]
    assert [cached for cached, _ in found] == [0, BLOCK]
    # The tower need not read what lies before the end of what is on disk, nor the second picture.
    assert begun == ["3"]


@pytest.mark.parametrize("harm", ["torn", "flipped", "emptied", "foreign", "renamed", "gone"])
async def test_a_damaged_file_is_removed_and_its_tokens_are_computed(
    llama: Path, disk: PrefixDisk, harm: str
) -> None:
    async with Rig(llama, disk=disk) as rig:
        _, expected = await cached(rig.submit(prompt(LONG), 8))
        await cached(rig.submit(prompt(LONG, 2), 8))
    for file in files_of(disk):
        content = file.read_bytes()
        match harm:
            case "torn":
                file.write_bytes(content[: len(content) // 2])
            case "flipped":
                half = len(content) // 2
                file.write_bytes(content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :])
            case "emptied":
                file.write_bytes(b"")
            case "foreign":
                file.write_bytes(b"\xff" * 8 + b"no header" * 100)
            case "renamed":
                file.rename(file.with_name("a" + file.name))
            case "gone":
                file.unlink()
    if harm == "renamed":
        for file in files_of(disk):
            file.rename(file.with_name(f"{abs(hash(file.name)):040x}"[-40:] + file.name[41:]))
    else:
        damaged = files_of(disk)
    async with Rig(llama, disk=disk) as rig:
        assert await cached(rig.submit(prompt(LONG), 8)) == (0, expected)
        if harm not in {"renamed", "gone"}:
            assert len(files_of(disk)) < len(damaged)


async def test_blocks_of_another_prefix_do_not_pass_for_one(llama: Path, disk: PrefixDisk) -> None:
    """Two whole files that have changed their names are both refused."""
    async with Rig(llama, disk=disk) as rig:
        _, expected = await cached(rig.submit(prompt(LONG), 8))
        await cached(rig.submit(prompt(LONG, 2), 8))
    names = files_of(disk)
    contents = [name.read_bytes() for name in names]
    for name, content in zip(names, [*contents[1:], contents[0]], strict=True):
        name.write_bytes(content)
    async with Rig(llama, disk=disk) as rig:
        assert await cached(rig.submit(prompt(LONG), 8)) == (0, expected)


async def test_pages_about_to_be_given_up_are_written(llama: Path, disk: PrefixDisk) -> None:
    # Memory for some two prompts of this length, and for blocks on their way.
    async with Rig(llama, disk=disk, memory=2_800_000) as rig:
        expected = [(await cached(rig.submit(prompt(LONG, i), 8)))[1] for i in range(1, 9)]
        stats = rig.engine.stats()
        assert stats.pages_attainable < 8 * (LONG // 16), "all of them have room"
        for i in range(1, 9):
            assert (await cached(rig.submit(prompt(LONG, i), 8)))[1] == expected[i - 1]
        assert rig.engine.stats().disk.hits > 0  # type: ignore[union-attr]


async def test_blocks_on_their_way_stand_in_the_ledger(llama: Path, disk: PrefixDisk) -> None:
    async with Rig(llama, disk=disk) as rig:
        assert rig.disk is not None
        one = block_bytes(rig.forward, 16)
        assert rig.disk.writes.limit == rig.disk.reads.limit == BLOCKS * one
        assert rig.ledger.figures()["disk:tiny"] == 2 * BLOCKS * one
        await cached(rig.submit(prompt(LONG), 8))
    assert "disk:tiny" not in rig.ledger.figures()
    # Where there is less memory, fewer may be on their way.
    async with Rig(llama, disk=disk, memory=20 * one) as rig:
        assert rig.ledger.figures()["disk:tiny"] == 2 * LEAST * one
        assert (await cached(rig.submit(prompt(LONG), 8)))[0] == LONG // BLOCK * BLOCK


async def test_without_memory_for_blocks_on_their_way_none_are_kept(
    llama: Path, disk: PrefixDisk
) -> None:
    async with Rig(llama, disk=disk, memory=1_000_000) as rig:
        expected = await reference(rig, prompt(LONG), 8)
        for _ in range(2):
            assert (await cached(rig.submit(prompt(LONG), 8)))[1] == expected
        assert rig.engine.stats().disk is None
        assert "disk:tiny" not in rig.ledger.figures()
    assert files_of(disk) == []


async def test_a_cancelled_prompt_leaves_nothing_behind(llama: Path, disk: PrefixDisk) -> None:
    async with Rig(llama, disk=disk) as rig:
        _, expected = await cached(rig.submit(prompt(LONG), 8))
    async with Rig(llama, disk=disk) as rig:
        for _ in range(20):
            row = rig.submit(prompt(LONG), 8)
            await asyncio.sleep(0)
            rig.cancel(row)
        assert (await cached(rig.submit(prompt(LONG), 8)))[1] == expected
        assert rig.engine.stats().pages_held == 0


async def test_a_prompt_waits_while_blocks_come_for_those_before_it(
    llama: Path, disk: PrefixDisk
) -> None:
    prompts = [prompt(LONG, i + 1) for i in range(3)]
    async with Rig(llama, disk=disk) as rig:
        for tokens in prompts:
            await rig.submit(tokens, 2).finished()
    async with HandRig(llama, disk=disk) as rig:
        rows = [rig.row(tokens, 2) for tokens in prompts]
        rig.submit_together(rows)
        rig.step()
        tier = rig.engine._disk
        assert tier is not None
        last = tier._loads[rows[2].sequence.key]
        # As if the reads before its own had taken long.
        last.due = 0.0
        for _ in range(10_000):
            if not tier._disk.waiting:
                break
            await asyncio.sleep(0.001)
        for _ in range(10_000):
            if not rig.engine.has_work():
                break
            rig.step()
            await asyncio.sleep(0.001)
        assert [row.sequence.cached for row in rows] == 3 * [LONG // BLOCK * BLOCK]
        for row in rows:
            assert row.tokens == alone(rig.model, row.sequence.tokens[:LONG], 2)


async def test_what_has_been_read_is_used_however_late_the_first_tokens_are_computed(
    llama: Path, disk: PrefixDisk
) -> None:
    tokens = prompt(1100)
    async with Rig(llama, disk=disk) as rig:
        await rig.submit(tokens, 2).finished()
    async with HandRig(llama, disk=disk, prefill_chunk=64) as rig:
        tier = rig.engine._disk
        assert tier is not None
        # By which reading is a little faster than computing.
        tier.prices.prefill.value = 1000.0
        tier.prices.read.value = 1200.0 * tier.prices.token_bytes
        row = rig.submit(tokens, 2)
        rig.step()
        load = tier._loads[row.sequence.key]
        assert load.start > 0
        for _ in range(10_000):
            if load.filled == load.end or row.sequence.computed > 200:
                break
            await asyncio.sleep(0.001)
            tier.arrive(False)
        load.due = 0.0
        rig.run()
        assert row.sequence.cached == (load.end - load.start) * 16
        assert row.tokens == alone(rig.model, tokens, 2)


async def test_blocks_that_come_for_nobody_any_more_hold_up_no_thread(
    llama: Path, disk: PrefixDisk
) -> None:
    tokens = prompt(7 * BLOCK + 20)
    async with Rig(llama, disk=disk) as rig:
        await rig.submit(tokens, 2).finished()
    one = max(file.stat().st_size for file in files_of(disk))
    async with HandRig(llama, disk=disk) as rig:
        row = rig.submit(tokens, 2)
        rig.step()
        assert rig.disk is not None
        # As many as may be on their way have come.
        for _ in range(10_000):
            if not rig.disk.reads.has(one):
                break
            await asyncio.sleep(0.001)
        assert not rig.disk.reads.has(one)
        rig.cancel(row)
        reader = rig.disk._reader
    reader.join(10)
    assert not reader.is_alive()


async def test_what_is_forgotten_is_forgotten_on_disk(llama: Path, disk: PrefixDisk) -> None:
    async with Rig(llama, disk=disk) as rig:
        await cached(rig.submit(prompt(LONG), 8))
    assert files_of(disk)
    async with Rig(llama, disk=disk) as rig:
        await rig.on_thread(rig.engine.drop_prefixes)
        assert (await cached(rig.submit(prompt(LONG), 8)))[0] == 0


async def test_a_copy_that_is_given_up_gives_its_room_back_at_once(
    llama: Path, disk: PrefixDisk
) -> None:
    async with HandRig(llama, disk=disk) as rig:
        assert rig.disk is not None
        rig.submit(prompt(LONG), 2)
        rig.run()
        row, tier = rig.submit(prompt(LONG), 200), rig.engine._disk
        assert tier is not None
        gc.disable()
        try:
            while tier._copy is None:
                assert rig.engine.has_work()
                rig.step()
            rig.engine.drop_prefixes()
            # The writer may have another block still.
            rig.disk.close(10)
            assert rig.disk.writes.taken == 0
        finally:
            gc.enable()
        rig.cancel(row)
        rig.run()


def test_blocks_written_between_two_purges_are_removed_by_the_second(disk: PrefixDisk) -> None:
    folder, name = Folder(disk), BlockName(bytes(DIGEST), PLAIN, 0, 16)
    blocks = BlockDisk(folder, "owner/model", {}, (), lambda: None)
    assert blocks.settled.wait(10)
    purged = threading.Event()
    with (disk.folder / f"v{FORMAT}" / LOCK).open("a") as lock:
        # The first purge waits for it.
        fcntl.flock(lock, fcntl.LOCK_EX)
        blocks.purge()
        blocks.write(PrefixBlock(name, {}))
        blocks.purge()
        blocks._writes.put(purged.set)
    assert purged.wait(10)
    assert not files_of(disk)
    blocks.close(10)


async def test_no_more_is_written_a_day_than_allowed(llama: Path, tmp_path: Path) -> None:
    async with Rig(llama, disk=PrefixDisk(tmp_path / "free", 1 << 28)) as rig:
        await cached(rig.submit(prompt(LONG), 8))
    one = files_of(PrefixDisk(tmp_path / "free", 0))[0].stat().st_size
    disk = PrefixDisk(tmp_path / "kept", 1 << 28, one + one // 2)
    for i in range(3):
        async with Rig(llama, disk=disk) as rig:
            await cached(rig.submit(prompt(LONG, i + 1), 8))
    assert len(files_of(disk)) == 1


async def test_a_folder_that_cannot_be_used_costs_no_answer(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    async with Rig(llama, disk=PrefixDisk(tmp_path / "file", 1 << 28)) as rig:
        found, tokens = await cached(rig.submit(prompt(LONG), 8))
        assert (found, tokens) == (0, await reference(rig, prompt(LONG), 8))


async def test_a_folder_that_goes_away_costs_no_answer(llama: Path, disk: PrefixDisk) -> None:
    async with Rig(llama, disk=disk) as rig:
        _, expected = await cached(rig.submit(prompt(LONG), 8))
    async with Rig(llama, disk=disk) as rig:
        os.rename(disk.folder, disk.folder.with_name("elsewhere"))
        assert await cached(rig.submit(prompt(LONG), 8)) == (0, expected)


async def test_prompts_of_another_salt_are_not_found_on_disk(llama: Path, disk: PrefixDisk) -> None:
    def salted(rig: Rig, salt: str) -> Row:
        row = rig.row(prompt(LONG), 8)
        row.sequence.salt = salt
        rig.submit_together([row])
        return row

    async with Rig(llama, disk=disk) as rig:
        _, expected = await cached(salted(rig, "mine"))
    for salt, found in (("", 0), ("yours", 0), ("mine", LONG // BLOCK * BLOCK)):
        async with Rig(llama, disk=disk) as rig:
            assert await cached(salted(rig, salt)) == (found, expected)


async def test_a_draft_model_reads_for_itself_what_has_come_from_disk(
    llama: Path, disk: PrefixDisk
) -> None:
    async with Rig(llama, disk=disk) as rig:
        _, expected = await cached(rig.submit(prompt(LONG), 30))
    async with Rig(llama, disk=disk, draft=llama, speculation="on") as rig:
        for found in (LONG // BLOCK * BLOCK, (LONG - 1) // 16 * 16):
            assert await cached(rig.submit(prompt(LONG), 30)) == (found, expected)


class Told:
    """A crew that does nothing."""

    size = 2

    def tell(self, order: object) -> None:
        pass


def test_pages_that_lie_on_several_devices_are_none_for_a_disk() -> None:
    """This process has a share of their heads, and other ranks would not know of what was read."""
    own = [LayerStore(LayerShape(2, 8, 8, mx.float32), 16) for _ in range(2)]
    alone, shared = SimpleNamespace(stores=own), SimpleNamespace(stores=[*own])
    shared.stores[0] = ToldStore(own[0], Told())  # type: ignore[arg-type]
    assert stores_of(alone) == own  # type: ignore[arg-type]
    assert stores_of(shared) == []  # type: ignore[arg-type]


@slow
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_engines_that_are_killed_leave_prefixes_by_which_others_answer_alike(
    tmp_path: Path, family: str
) -> None:
    model, program = make_tiny_model(tmp_path / "m", family), Path(__file__)
    command = [sys.executable, str(program.with_name("killed_engines.py")), str(model)]
    paths = os.pathsep.join([str(program.parents[2]), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [*command, str(tmp_path / "kept"), "100"],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 0


@slow
async def test_ten_thousand_random_prefixes_stay_within_the_budget(
    llama: Path, tmp_path: Path
) -> None:
    """Each a prompt of its own, of one block: all files together are at most one over."""
    one = BLOCK * 512
    disk = PrefixDisk(tmp_path / "kept", 20 * one)
    async with Rig(llama, disk=disk, memory=12_000_000) as rig:
        for number in range(10_000):
            await rig.submit(random_prompt(number), 1).finished()
            if number % 50 == 0:
                assert taken(disk) <= disk.budget + 2 * one
        stats = rig.engine.stats().disk
    assert stats is not None
    assert stats.files_bytes <= disk.budget
    assert stats.written_bytes > 1000 * one


def taken(disk: PrefixDisk) -> int:
    """Return the bytes of all files; some may go meanwhile."""
    found = 0
    for file in files_of(disk):
        with suppress(FileNotFoundError):
            found += file.stat().st_size
    return found


def random_prompt(number: int) -> list[int]:
    return np.random.default_rng(number).integers(3, 200, BLOCK + 4).tolist()
