"""Revisions of models: their content, and nothing else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from mlx_manager.mlx_server.utils.revisions import revision_of, stamps_of


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "README.md").write_text("about it")
    return folder


def revision(*folders: Path) -> str | None:
    return revision_of(stamps_of(folders), folders[0].parent / "revisions.json")


def test_a_copy_elsewhere_has_the_same_revision(model: Path) -> None:
    shutil.copytree(model, model.with_name("copy"))
    os.utime(model.with_name("copy") / "config.json", (1, 1))
    assert revision(model.with_name("copy")) == revision(model) is not None


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "model.py"])
def test_another_content_of_the_same_size_is_another_revision(model: Path, file: str) -> None:
    before = revision(model)
    old = (model / file).read_bytes() if (model / file).exists() else b"12"
    (model / file).write_bytes(old[::-1] if old[::-1] != old else b"[" + old[1:])
    assert revision(model) != before


def test_what_describes_a_model_to_people_changes_nothing(model: Path) -> None:
    before = revision(model)
    (model / "README.md").write_text("more")
    assert revision(model) == before


def test_an_adapter_is_part_of_it(model: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapters.safetensors").write_bytes(b"low rank")
    assert revision(model, adapter) != revision(model)


def test_files_that_have_changed_since_have_no_revision(model: Path) -> None:
    stamps = stamps_of([model])
    (model / "model.safetensors").write_bytes(b"others")
    assert revision_of(stamps, model.parent / "revisions.json") is None


def test_a_file_is_read_once(model: Path) -> None:
    first = revision(model)
    found = (model / "model.safetensors").stat()
    # The same size, time and inode: a program that undoes the time would be believed.
    (model / "model.safetensors").write_bytes(b"WEIGHTS")
    os.utime(model / "model.safetensors", ns=(found.st_atime_ns, found.st_mtime_ns))
    assert revision(model) == first
    (model.parent / "revisions.json").write_text("damaged")
    assert revision(model) != first


def test_the_hub_s_name_of_a_file_stands_for_its_content(model: Path, tmp_path: Path) -> None:
    digest = "ab" * 32
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (blobs / digest).write_bytes(b"weights")
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to(blobs / digest)
    before = revision(model)
    (blobs / digest).rename(blobs / ("cd" * 32))
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to(blobs / ("cd" * 32))
    assert revision(model) != before
