"""Commands that list, move and remove the prefixes on disk."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_manager.demo_model import demo_model_path
from mlx_manager.mlx_server.config import PrefixDisk
from mlx_manager.mlx_server.engine.disk import blocks
from mlx_manager.mlx_server.engine.disk.blocks import PrefixBlock, Tensor
from mlx_manager.mlx_server.engine.disk.folder import Folder
from mlx_manager.mlx_server.engine.disk.machine import machine_facts
from mlx_manager.mlx_server.engine.disk.names import DIGEST, PLAIN, BlockName, Space
from mlx_manager.mlx_server.utils.revisions import revision_of, stamps_of

DEMO = "mlx-manager/demo"
SIZE = 300_000


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A folder with blocks of two models, of 300 kB each."""
    folder = Folder(PrefixDisk(tmp_path / "kept", 1 << 30))
    folder.look()
    for number, model in enumerate(["own/one", "own/one", "own/other"]):
        space = Space(model, {"revision": model})
        name = BlockName(number.to_bytes(DIGEST, "big"), PLAIN, 0, 16)
        folder.add(space, name, SIZE, lambda file: file.write(b"x" * SIZE))
    return tmp_path / "kept"


def test_what_is_kept_is_listed_by_model(run, kept: Path) -> None:
    done = run("cache", "list", "--json", MLX_SERVER_PREFIX_DISK_DIR=str(kept))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {of["model"]: (of["files"], of["bytes"]) for of in found["kept"]} == {
        "own/one": (2, 2 * SIZE),
        "own/other": (1, SIZE),
    }
    assert (found["bytes"], found["limit"]) == (3 * SIZE, None)
    shown = run("cache", "list", "--prefix-disk-dir", str(kept))
    assert "own/one" in shown.stdout


def test_the_list_says_what_the_next_write_removes(run, kept: Path) -> None:
    limit = ("--prefix-disk-gb", "500 kb")
    done = run("cache", "list", "--json", *limit, MLX_SERVER_PREFIX_DISK_DIR=str(kept))
    assert json.loads(done.stdout)["excess"] == {"files": 2, "bytes": 2 * SIZE}
    assert len(list(kept.rglob("*.safetensors"))) == 3


def test_a_dry_run_removes_nothing_and_a_purge_one_model(run, kept: Path) -> None:
    where = {"MLX_SERVER_PREFIX_DISK_DIR": str(kept)}
    said = run("cache", "purge", "--model", "own/one", "--dry-run", **where)
    assert "would be removed" in said.stdout
    assert len(list(kept.rglob("*.safetensors"))) == 3
    done = run("cache", "purge", "--model", "own/one", "--json", **where)
    assert [of["model"] for of in json.loads(done.stdout)["removed"]] == ["own/one"]
    assert len(list(kept.rglob("*.safetensors"))) == 1
    assert run("cache", "purge", **where).returncode == 0
    assert list(kept.rglob("*.safetensors")) == []


def test_a_model_of_which_nothing_is_kept_is_not_found(run, kept: Path) -> None:
    done = run("cache", "purge", "--model", "own/two", MLX_SERVER_PREFIX_DISK_DIR=str(kept))
    assert done.returncode == 4
    assert "own/two" in done.stderr


def test_without_a_folder_nothing_is_kept_and_none_is_made(run, tmp_path: Path) -> None:
    where = {"MLX_SERVER_PREFIX_DISK_DIR": str(tmp_path / "none")}
    assert json.loads(run("cache", "list", "--json", **where).stdout)["kept"] == []
    assert run("cache", "purge", **where).returncode == 0
    assert not (tmp_path / "none").exists()


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder with a block of the embedded model and one of a model that is not here, both as this
    machine computes them."""
    folder = Folder(PrefixDisk(tmp_path / "own", 1 << 30))
    folder.look()
    stamps = stamps_of([demo_model_path()])
    revision = revision_of(stamps, tmp_path / "revisions")
    for model, its in ((DEMO, revision), ("own/absent", "r")):
        add_block(folder, Space(model, {**machine_facts(), "revision": its}))
    return tmp_path / "own"


def add_block(folder: Folder, space: Space) -> None:
    name = BlockName(b"d" * DIGEST, PLAIN, 0, 16)
    data = np.zeros(SIZE, np.uint8)
    block = PrefixBlock(name, {"keys.0": Tensor("uint8", (1, 1, SIZE), data)})
    header = blocks.header_of(space, block)
    nbytes = len(header) + SIZE
    folder.add(space, name, nbytes, partial(blocks.write, header=header, block=block))


@pytest.mark.parametrize("model", [DEMO, "own/absent"])
def test_an_exported_model_is_listed_where_it_was_imported(
    run, own: Path, tmp_path: Path, model: str
) -> None:
    file, there = tmp_path / "kept.tar", {"MLX_SERVER_PREFIX_DISK_DIR": str(tmp_path / "there")}
    done = run("cache", "export", "--model", model, str(file), "--prefix-disk-dir", str(own))
    assert done.returncode == 0, done.stderr
    assert f"1 block (293 kB) of {model}: {file}" in done.stdout
    assert file.stat().st_mode & 0o077 == 0
    done = run("cache", "import", str(file), **there)
    assert done.returncode == 0, done.stderr
    assert f"1 block (293 kB) of {model} came into" in done.stdout
    assert ("is not among the models here" in done.stderr) == (model != DEMO)
    kept = json.loads(run("cache", "list", "--json", **there).stdout)["kept"]
    assert [of["model"] for of in kept] == [model]
    again = run("cache", "import", str(file), **there)
    assert "Here already: 1 block." in again.stderr


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"device": "Apple M9 (metal)"}, r"computed on Apple M9 \(metal\), and this machine has"),
        ({"programs": ["0.1", "0.2", "0.3"]}, r"mlx-manager 0\.1, mlx 0\.2, mlx-lm 0\.3, and here"),
        ({"programs": 3}, "by other programs, and here"),
        ({"device": None}, "the device must be the same"),
        ({"revision": "another"}, "other files than this machine has"),
    ],
)
def test_blocks_of_another_machine_or_model_are_refused_with_the_reason(
    run, tmp_path: Path, facts: dict[str, Any], said: str
) -> None:
    folder = Folder(PrefixDisk(tmp_path / "here", 1 << 30))
    folder.look()
    add_block(folder, Space(DEMO, {**machine_facts(), **facts}))
    file, there = tmp_path / "kept.tar", tmp_path / "there"
    here = ("--prefix-disk-dir", str(tmp_path / "here"))
    assert run("cache", "export", "--model", DEMO, str(file), *here).returncode == 0
    done = run("cache", "import", str(file), "--prefix-disk-dir", str(there))
    assert done.returncode == 5
    assert re.search(said, done.stderr)
    assert DEMO in done.stderr
    assert not there.exists()


def test_what_does_not_fit_or_is_damaged_is_said(run, own: Path, tmp_path: Path) -> None:
    file = tmp_path / "kept.tar"
    run("cache", "export", "--model", DEMO, str(file), "--prefix-disk-dir", str(own))
    there = ("--prefix-disk-dir", str(tmp_path / "there"), "--prefix-disk-gb", "100 kb")
    assert "Left out: 1 block, as the limit" in run("cache", "import", str(file), *there).stderr
    content = bytearray(file.read_bytes())
    content[200_000] ^= 1
    file.write_bytes(bytes(content))
    done = run("cache", "import", str(file), *there[:2])
    assert done.returncode == 1
    assert "Damaged, and left out: 1 block." in done.stderr


def test_an_export_of_nothing_whole_leaves_no_file(run, kept: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    file, where = str(tmp_path / "out" / "kept.tar"), ("--prefix-disk-dir", str(kept))
    assert run("cache", "export", "--model", "own/two", file, *where).returncode == 4
    done = run("cache", "export", "--model", "own/one", file, *where)
    assert done.returncode == 1
    assert "Nothing that is whole" in done.stderr
    assert list((tmp_path / "out").iterdir()) == []
    assert run("cache", "export", "--model", "own/one", str(tmp_path), *where).returncode == 2


def test_a_file_of_something_else_is_not_imported(run, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a text\n" * 100)
    where = ("--prefix-disk-dir", str(tmp_path / "kept"))
    done = run("cache", "import", str(tmp_path / "text"), *where)
    assert done.returncode == 5
    assert "cache export" in done.stderr
    assert run("cache", "import", str(tmp_path / "none"), *where).returncode == 4
    assert not (tmp_path / "kept").exists()
