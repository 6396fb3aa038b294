"""The folder of all models' blocks: its limits, whoever writes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import pytest
from thorough import slow

from mlx_manager.mlx_server.config import PrefixDisk
from mlx_manager.mlx_server.engine.disk.folder import Folder, WriteRefused
from mlx_manager.mlx_server.engine.disk.names import DIGEST, PLAIN, BlockName, Space

ONE, OTHER = (Space(model, {"revision": model}) for model in ("owner/one", "owner/other"))


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def name(number: int, end: int = 16) -> BlockName:
    return BlockName(number.to_bytes(DIGEST, "big"), PLAIN, end - 16, end)


def folder_of(path: Path, budget: int, daily: int | None = None) -> Folder:
    folder = Folder(PrefixDisk(path, budget, daily), Clock())
    folder.look()
    return folder


def add(folder: Folder, space: Space, block: BlockName, nbytes: int) -> None:
    def write(file: BinaryIO) -> None:
        file.write(b"x" * nbytes)

    folder.add(space, block, nbytes, write)


def taken(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*.safetensors"))


@pytest.mark.parametrize("blocks", [1000, pytest.param(10_000, marks=slow)])
def test_thousands_of_blocks_of_two_workers_stay_within_the_budget(
    tmp_path: Path, blocks: int
) -> None:
    budget, chosen = 50_000, random.Random(1)
    workers = [folder_of(tmp_path, budget) for _ in range(2)]
    for number in range(blocks):
        worker, space = chosen.choice(workers), chosen.choice((ONE, OTHER))
        add(worker, space, name(number), chosen.randrange(1, 3000))
        if number % 20 == 0:
            assert taken(tmp_path) <= budget
    assert taken(tmp_path) > budget // 2
    assert folder_of(tmp_path, budget).nbytes == taken(tmp_path)


def test_what_was_used_least_recently_goes_first_whoever_used_it(tmp_path: Path) -> None:
    mine, theirs = folder_of(tmp_path, 1000), folder_of(tmp_path, 1000)
    theirs._clock = mine._clock
    for number in range(3):
        add(mine, ONE, name(number), 300)
    theirs.look()
    theirs.touch(ONE, name(0))
    add(mine, OTHER, name(3), 300)
    fresh = folder_of(tmp_path, 1000)
    assert [fresh.has(ONE, name(n)) for n in range(3)] == [True, False, True]
    assert fresh.has(OTHER, name(3))


def test_of_one_prefix_the_end_goes_first(tmp_path: Path) -> None:
    folder = Folder(PrefixDisk(tmp_path, 1000), lambda: 1_800_000_000.0)
    folder.look()
    for number in range(3):
        add(folder, ONE, name(number, 16 * number + 16), 300)
    add(folder, OTHER, name(9), 300)
    assert [folder.has(ONE, name(n, 16 * n + 16)) for n in range(3)] == [True, True, False]


def test_a_lower_budget_removes_nothing_before_the_next_write(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 1000)
    for number in range(3):
        add(folder, ONE, name(number), 300)
    lower = folder_of(tmp_path, 500)
    assert taken(tmp_path) == 900
    assert lower.excess() == (2, 600)
    add(lower, ONE, name(3), 100)
    assert taken(tmp_path) <= 500


def test_a_block_larger_than_the_budget_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 1000)
    add(folder, ONE, name(0), 900)
    with pytest.raises(WriteRefused):
        add(folder, ONE, name(1), 1100)
    assert taken(tmp_path) == 900


def test_all_workers_together_write_no_more_a_day_than_allowed(tmp_path: Path) -> None:
    workers = [folder_of(tmp_path, 10_000, 1000) for _ in range(2)]
    add(workers[0], ONE, name(0), 600)
    with pytest.raises(WriteRefused):
        add(workers[1], ONE, name(1), 600)
    assert workers[1].written_today == 600
    tomorrow = Clock()
    tomorrow.now += 86_400
    later = Folder(PrefixDisk(tmp_path, 10_000, 1000), tomorrow)
    later.look()
    add(later, ONE, name(1), 600)


def test_nothing_is_removed_for_a_block_that_the_day_has_no_bytes_for(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 1000, 1000)
    for number in range(3):
        add(folder, ONE, name(number), 300)
    with pytest.raises(WriteRefused, match="today"):
        add(folder, ONE, name(3), 300)
    assert taken(tmp_path) == 900
    assert all(folder.has(ONE, name(number)) for number in range(3))


def test_one_model_is_purged_and_the_other_stays(tmp_path: Path) -> None:
    folder, worker = folder_of(tmp_path, 10_000), folder_of(tmp_path, 10_000)
    add(folder, ONE, name(0), 100)
    add(folder, OTHER, name(1), 100)
    folder.purge("owner/one")
    assert [kept.model for kept in folder.kept()] == ["owner/other"]
    assert taken(tmp_path) == 100
    # A worker that knew it before learns of it, and of what has come since.
    add(folder, ONE, name(2), 100)
    add(worker, OTHER, name(3), 100)
    assert not worker.has(ONE, name(0))
    assert worker.has(ONE, name(2))


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 1000)
    add(folder, ONE, name(0), 300)
    own = folder.root / ONE.folder / "notes.txt"
    own.write_text("mine")
    for number in range(1, 9):
        add(folder, ONE, name(number), 300)
    assert own.read_text() == "mine"
    assert folder_of(tmp_path, 1000).nbytes == taken(tmp_path)


def test_a_full_disk_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 10_000)

    def fail(file: BinaryIO) -> None:
        file.write(b"x" * 100)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        folder.add(ONE, name(0), 1000, fail)
    assert not folder.has(ONE, name(0))
    assert os.listdir(folder.root / ONE.folder) == ["space.json"]


def test_a_damaged_state_is_made_anew(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 10_000)
    add(folder, ONE, name(0), 100)
    for content in ("", "[]", '{"day": 1}', '{"changes": {"a": []}, "written": "x"}'):
        (folder.root / "state.json").write_text(content)
        again = folder_of(tmp_path, 10_000)
        assert again.has(ONE, name(0))
        add(again, ONE, name(1), 100)
        again.purge(folder=None, model="nobody")


@pytest.mark.parametrize("kills", [20, pytest.param(100, marks=slow)])
def test_killed_writers_leave_whole_blocks_within_the_budget(tmp_path: Path, kills: int) -> None:
    program = Path(__file__).with_name("killed_writers.py")
    command = [sys.executable, str(program), str(tmp_path), str(kills)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 0
