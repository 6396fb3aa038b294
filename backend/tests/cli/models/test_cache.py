"""What is kept on disk for reuse, listed and removed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlx_manager.mlx_server.config import PrefixDisk
from mlx_manager.mlx_server.engine.disk.folder import Folder
from mlx_manager.mlx_server.engine.disk.names import DIGEST, PLAIN, BlockName, Space

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
