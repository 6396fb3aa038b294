"""Features of pictures on disk: a picture that was seen before needs no tower."""

from __future__ import annotations

import asyncio
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from engine.seeing_rig import SeeingRig
from seeing import FAMILIES, Scene, scene

from mlx_manager.mlx_server.config import PrefixDisk
from mlx_manager.mlx_server.engine.disk.arrays import Sheet
from mlx_manager.mlx_server.engine.disk.blocks import PrefixBlock
from mlx_manager.mlx_server.engine.disk.names import picture_name
from mlx_manager.mlx_server.engine.disk.pictures import KeptFeatures, tensors_of
from mlx_manager.mlx_server.engine.disk.tier import DiskStats
from mlx_manager.mlx_server.execution.images import Features

GRIDS = ((4, 6), (3, 5))
SMOL = FAMILIES["smolvlm"]
SCENE = scene(SMOL, grids=GRIDS)


@pytest.fixture
def disk(tmp_path: Path) -> PrefixDisk:
    return PrefixDisk(tmp_path / "kept", 1 << 28)


def files_of(disk: PrefixDisk) -> list[Path]:
    return sorted(disk.folder.rglob("*.picture.safetensors"))


def answers(
    rig: SeeingRig, *numbers: tuple[int, int], of: Scene = SCENE, salt: str = ""
) -> list[list[int]]:
    """Return what is drawn for questions about pairs of pictures, one after the other."""
    found = []
    for pair in numbers:
        row = rig.look(of, GRIDS, pair, 6, salt=salt)
        rig.run(1_000_000)
        found.append(row.tokens)
    return found


def stats_of(rig: SeeingRig) -> DiskStats:
    found = rig.engine.stats().disk
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["smolvlm", "qwen3_vl"])
async def test_the_next_process_answers_about_a_picture_without_the_tower(
    name: str, tmp_path: Path, disk: PrefixDisk
) -> None:
    family = FAMILIES[name]
    first, second = (scene(family, grids=GRIDS, before=before) for before in (9, 14))
    async with SeeingRig(family, tmp_path / "plain") as rig:
        expected = answers(rig, (1, 2), of=second)
    async with SeeingRig(family, tmp_path / "first", disk=disk) as rig:
        answers(rig, (1, 2), of=first)
    assert len(files_of(disk)) == 2
    async with SeeingRig(family, tmp_path / "second", disk=disk) as rig:
        assert answers(rig, (1, 2), of=second) == expected
        assert rig.tower.begun == rig.tower.read == []
        assert (stats_of(rig).picture_queries, stats_of(rig).picture_hits) == (2, 2)
        assert rig.ledger.figures()["images:tiny"] > 0


async def test_features_that_memory_gives_up_are_read_again(
    tmp_path: Path, disk: PrefixDisk
) -> None:
    async with SeeingRig(SMOL, tmp_path / "plain") as rig:
        expected = answers(rig, (1, 2), (3, 4), (5, 6))
        one = rig.engine._pictures.cache.nbytes // 3  # type: ignore[union-attr]
    async with SeeingRig(
        SMOL, tmp_path / "small", disk=disk, image_cache=one, prefix_cache=False
    ) as rig:
        assert answers(rig, (1, 2), (3, 4), (5, 6)) == expected
        assert answers(rig, (1, 2)) == expected[:1]
        assert rig.tower.begun == ["1", "2", "3", "4", "5", "6"]


async def test_features_that_are_used_a_second_time_are_written(
    tmp_path: Path, disk: PrefixDisk
) -> None:
    async with SeeingRig(SMOL, tmp_path, disk=disk) as rig:
        answers(rig, (1, 2))
        assert files_of(disk) == []
        answers(rig, (3, 2))
        for _ in range(1000):
            if files_of(disk):
                break
            rig.step()
            await asyncio.sleep(0.005)
        named = picture_name("2")
        assert [file.name for file in files_of(disk)] == [named.file]


@pytest.mark.parametrize("harm", ["torn", "flipped", "exchanged", "gone"])
async def test_a_damaged_file_is_removed_and_the_tower_reads_the_picture(
    harm: str, tmp_path: Path, disk: PrefixDisk
) -> None:
    async with SeeingRig(SMOL, tmp_path / "first", disk=disk) as rig:
        expected = answers(rig, (1, 2))
    files = files_of(disk)
    contents = [file.read_bytes() for file in files]
    for file, content, other in zip(files, contents, reversed(contents), strict=True):
        match harm:
            case "torn":
                file.write_bytes(content[:-1])
            case "flipped":
                file.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
            case "exchanged":
                file.write_bytes(other)
            case "gone":
                file.unlink()
    async with SeeingRig(SMOL, tmp_path / "second", disk=disk) as rig:
        assert answers(rig, (1, 2)) == expected
        assert rig.tower.begun == ["1", "2"]
        assert files_of(disk) == []
        assert stats_of(rig).picture_hits == 0


async def test_features_of_another_form_are_not_taken(tmp_path: Path, disk: PrefixDisk) -> None:
    """Whoever writes a file with a checksum can have written what no tower makes."""
    async with SeeingRig(SMOL, tmp_path, disk=disk) as rig:
        assert rig.disk is not None
        forms = {"a": (24, 8), "b": (24, 16), "c": (23, 8), "d": (24, 8)}
        for digest, shape in forms.items():
            levels = (mx.zeros(shape),) if digest == "d" else ()
            features = Features(mx.ones(shape), levels)
            sheet = Sheet(np.empty(features.nbytes, np.uint8))
            tensors, places = tensors_of(features, sheet)
            for array, place in places:
                place[...] = np.array(array.view(mx.uint8))
            block = PrefixBlock(picture_name(digest), tensors)
            rig.disk.write(block)
        for _ in range(1000):
            if len(files_of(disk)) == len(forms):
                break
            await asyncio.sleep(0.005)
        kept = KeptFeatures(rig.disk, lambda name, find: None)
        found = [digest for digest in forms if kept.read(digest, (24, 8), 0) is not None]
        assert found == ["a"]


async def test_features_are_found_by_rows_of_the_same_salt_alone(
    tmp_path: Path, disk: PrefixDisk
) -> None:
    async with SeeingRig(SMOL, tmp_path / "first", disk=disk) as rig:
        expected = answers(rig, (1, 2), salt="mine")
    for salt, begun in (("", ["1", "2"]), ("yours", ["1", "2"]), ("mine", [])):
        async with SeeingRig(SMOL, tmp_path / f"of-{salt}", disk=disk) as rig:
            assert answers(rig, (1, 2), salt=salt) == expected
            assert rig.tower.begun == begun


async def test_what_is_read_for_nobody_any_more_takes_no_room(
    tmp_path: Path, disk: PrefixDisk
) -> None:
    async with SeeingRig(SMOL, tmp_path / "first", disk=disk) as rig:
        expected = answers(rig, (1, 2))
    async with SeeingRig(SMOL, tmp_path / "second", disk=disk) as rig:
        assert rig.disk is not None
        for _ in range(20):
            row = rig.look(SCENE, GRIDS, (1, 2), 6)
            rig.step()
            await asyncio.sleep(0.002)
            rig.cancel(row)
        assert answers(rig, (1, 2)) == expected
        assert rig.disk.reads.taken == 0
        assert rig.tower.begun == []


async def test_where_the_tower_is_faster_than_the_disk_it_reads_the_picture(
    tmp_path: Path, disk: PrefixDisk
) -> None:
    async with SeeingRig(SMOL, tmp_path / "first", disk=disk) as rig:
        answers(rig, (1, 2))
    async with SeeingRig(SMOL, tmp_path / "second", disk=disk) as rig:
        assert rig.disk is not None
        kept = KeptFeatures(rig.disk, lambda name, find: None)
        # Nothing is known of the disk.
        assert kept.has("1", 24)
        assert kept.read("1", (24, rig.tower.width), 0) is not None
        kept.observe(24, 10.0)
        assert kept.has("1", 24)
        for _ in range(100):
            kept.observe(24, 1e-9)
        # The disk is tried now and then.
        assert sum(kept.has("1", 24) for _ in range(32)) == 2
