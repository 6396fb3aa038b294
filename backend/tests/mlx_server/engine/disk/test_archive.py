"""Archives of blocks: they come whole, in order and within limits, or are refused."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_manager.mlx_server.config import PrefixDisk
from mlx_manager.mlx_server.engine.disk import blocks
from mlx_manager.mlx_server.engine.disk.archive import (
    MANIFEST,
    Archive,
    ArchiveRefused,
    Moved,
    export,
)
from mlx_manager.mlx_server.engine.disk.blocks import PrefixBlock, Tensor
from mlx_manager.mlx_server.engine.disk.folder import Folder
from mlx_manager.mlx_server.engine.disk.names import DIGEST, PICTURE, PLAIN, STATE, BlockName, Space

MODEL = "owner/model"
SPACES = tuple(Space(MODEL, {"revision": "r", "pages": [size, 16]}) for size in (16, 32))
COUNT = 4


def folder_of(path: Path, budget: int = 1 << 30, daily: int | None = None) -> Folder:
    times = iter(range(1_800_000_000, 1_900_000_000))
    folder = Folder(PrefixDisk(path, budget, daily), lambda: float(next(times)))
    folder.look()
    return folder


def add(folder: Folder, space: Space, number: int, kind: str = PLAIN) -> BlockName:
    """Add a block that only its number determines."""
    name = BlockName(number.to_bytes(DIGEST, "big"), kind, 0, 16)
    data = np.full(4096, number, np.uint8)
    block = PrefixBlock(name, {"keys.0": Tensor("uint8", (1, 16, 256), data)})
    header = blocks.header_of(space, block)
    nbytes = len(header) + block.nbytes
    folder.add(space, name, nbytes, partial(blocks.write, header=header, block=block))
    return name


def filled(path: Path) -> Folder:
    folder = folder_of(path)
    for number in range(COUNT):
        add(folder, SPACES[number % 2], number, STATE if number == 3 else PLAIN)
    add(folder, Space("owner/other", {}), 9)
    return folder


def exported(folder: Folder) -> tuple[bytes, Moved]:
    file = io.BytesIO()
    moved = export(folder, MODEL, file)
    return file.getvalue(), moved


def imported(folder: Folder, content: bytes) -> Moved:
    return Archive.read(io.BytesIO(content)).move_into(folder, lambda space: True)


def kept_in(folder: Folder) -> dict[str, bytes]:
    """Return all files of blocks with their content."""
    return {
        str(file.relative_to(folder.root)): file.read_bytes()
        for file in folder.root.rglob("*.safetensors")
    }


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return exported(filled(tmp_path_factory.mktemp("kept")))[0]


def changed(content: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """Return an archive with a change of its list, whose length stays."""
    length = tarfile.TarInfo.frombuf(content[:512], "utf-8", "strict").size
    listed = json.loads(content[512 : 512 + length])
    change(listed)
    text = json.dumps(listed).encode()
    head = tarfile.TarInfo(MANIFEST)
    head.size = len(text)
    whole = text + bytes(-len(text) % 512)
    return head.tobuf(tarfile.USTAR_FORMAT) + whole + content[512 + length + -length % 512 :]


def repacked(content: bytes, change: Callable[[tarfile.TarInfo], object]) -> bytes:
    """Return an archive whose second member has been changed."""
    made = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(content)) as old,
        tarfile.open(fileobj=made, mode="w", format=tarfile.USTAR_FORMAT) as new,
    ):
        for number, member in enumerate(old.getmembers()):
            data = old.extractfile(member)
            if number == 1:
                change(member)
            new.addfile(member, data)
    return made.getvalue()


def test_all_forms_of_one_model_come_whole(tmp_path: Path) -> None:
    here, there = filled(tmp_path / "here"), folder_of(tmp_path / "there")
    content, moved = exported(here)
    assert (moved.blocks, moved.damaged) == (COUNT, 0)
    came = imported(there, content)
    assert (came.blocks, came.nbytes, came.there) == (COUNT, moved.nbytes, 0)
    others = {n: c for n, c in kept_in(here).items() if not n.startswith("owner-other")}
    assert kept_in(there) == others
    assert [of.model for of in folder_of(tmp_path / "there").kept()] == [MODEL, MODEL]


def test_other_programs_can_read_an_archive(content: bytes) -> None:
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        names = tar.getnames()
        assert names[0] == MANIFEST
        assert json.load(tar.extractfile(MANIFEST))["model"] == MODEL  # type: ignore[arg-type]
    assert len(names) == COUNT + 1


def test_what_is_there_already_is_not_written_again(tmp_path: Path, content: bytes) -> None:
    folder = folder_of(tmp_path)
    add(folder, SPACES[0], 0)
    came = imported(folder, content)
    assert (came.blocks, came.there) == (COUNT - 1, 1)
    assert imported(folder, content).there == COUNT


def test_of_more_than_there_is_room_for_those_used_last_come(
    tmp_path: Path, content: bytes
) -> None:
    size = blocks_size(content)
    folder = folder_of(tmp_path, size * 11 // 5)
    old = add(folder, Space("owner/other", {}), 7)
    came = imported(folder, content)
    assert (came.blocks, came.unfit) == (2, 2)
    assert sorted(int(Path(name).name[:40], 16) for name in kept_in(folder)) == [2, 3]
    assert not folder.has(Space("owner/other", {}), old)


def test_no_more_comes_than_may_be_written_in_a_day(tmp_path: Path, content: bytes) -> None:
    came = imported(folder_of(tmp_path, daily=blocks_size(content) * 3 // 2), content)
    assert (came.blocks, came.unfit) == (1, 3)


def blocks_size(content: bytes) -> int:
    """Return the size of the largest block."""
    found = Archive.read(io.BytesIO(content))
    return max(entry.nbytes for entry, _ in found.entries)


def test_a_form_that_is_of_no_use_stays_out(tmp_path: Path, content: bytes) -> None:
    folder = folder_of(tmp_path)
    archive = Archive.read(io.BytesIO(content))
    assert archive.move_into(folder, lambda space: space == SPACES[1]).blocks == 2
    assert {Path(name).parent.name for name in kept_in(folder)} == {SPACES[1].folder}


def test_damaged_blocks_are_not_exported(tmp_path: Path) -> None:
    folder = filled(tmp_path / "here")
    file = folder.path(SPACES[1], BlockName((1).to_bytes(DIGEST, "big"), PLAIN, 0, 16))
    harmed = bytearray(file.read_bytes())
    harmed[-1] ^= 1
    file.write_bytes(bytes(harmed))
    content, moved = exported(folder)
    assert (moved.blocks, moved.damaged) == (COUNT - 1, 1)
    assert imported(folder_of(tmp_path / "there"), content).blocks == COUNT - 1


def test_features_of_pictures_come_with_the_pages(tmp_path: Path) -> None:
    folder = filled(tmp_path / "here")
    name = add(folder, SPACES[0], 7, PICTURE)
    there = folder_of(tmp_path / "there")
    assert imported(there, exported(folder)[0]).blocks == COUNT + 1
    assert there.path(SPACES[0], name).read_bytes() == folder.path(SPACES[0], name).read_bytes()


def test_blocks_that_go_meanwhile_are_left_out(tmp_path: Path) -> None:
    folder = filled(tmp_path)
    folder.path(SPACES[0], BlockName((2).to_bytes(DIGEST, "big"), PLAIN, 0, 16)).unlink()
    content, moved = exported(folder)
    assert (moved.blocks, moved.gone) == (COUNT - 1, 1)
    assert len(Archive.read(io.BytesIO(content)).entries) == COUNT - 1


def test_a_damaged_block_does_not_come_and_others_do(tmp_path: Path, content: bytes) -> None:
    _, place = Archive.read(io.BytesIO(content)).entries[1]
    harmed = bytearray(content)
    harmed[place + 2000] ^= 1
    came = imported(folder := folder_of(tmp_path), bytes(harmed))
    assert (came.blocks, came.damaged) == (COUNT - 1, 1)
    assert len(kept_in(folder)) == COUNT - 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(data=st.data())
def test_whatever_byte_has_changed_no_false_block_comes(
    tmp_path: Path, content: bytes, data: st.DataObject
) -> None:
    harmed = bytearray(content)
    harmed[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    folder = folder_of(tmp_path / "there")
    folder.purge()
    try:
        imported(folder, bytes(harmed))
    except ArchiveRefused:
        assert kept_in(folder) == {}
    for space in SPACES:
        for name in [n for n in kept_in(folder) if n.startswith(space.folder)]:
            path = folder.root / name
            blocks.read(path, space, blocks.name_of(path))


@pytest.mark.parametrize("part", [0, 100, 512, 700, 0.5, -512, -1500])
def test_an_archive_that_is_cut_off_is_refused(content: bytes, part: float) -> None:
    length = int(part * len(content)) if isinstance(part, float) else part
    with pytest.raises(ArchiveRefused, match=r"cut off|can't be read|lists"):
        Archive.read(io.BytesIO(content[:length] if length != -512 else content[:-1024]))


def set_name(name: str) -> Callable[[tarfile.TarInfo], object]:
    return lambda member: setattr(member, "name", name)


def link(kind: bytes) -> Callable[[tarfile.TarInfo], object]:
    def change(member: tarfile.TarInfo) -> None:
        member.type, member.linkname, member.size = kind, "/etc/passwd", 0

    return change


@pytest.mark.parametrize(
    "change",
    [
        *map(set_name, ("../outside.safetensors", "/tmp/outside", "a/../../b", MANIFEST)),
        *map(link, (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE)),
    ],
)
def test_a_member_that_is_not_listed_as_it_is_has_all_refused(
    content: bytes, change: Callable[[tarfile.TarInfo], object]
) -> None:
    with pytest.raises(ArchiveRefused, match=r"lists|plain file"):
        Archive.read(io.BytesIO(repacked(content, change)))


def first(key: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda listed: listed["blocks"][0].update({key: value})


@pytest.mark.parametrize(
    "change",
    [
        *(first("digest", of) for of in ("../" * 14, "/etc/passwd", "0" * 38, "G" * 40, 5, None)),
        *(first("kind", of) for of in ("../x", "", 3)),
        *(first("pages", of) for of in ([0, 0], [-1, 4], [0, 1 << 60], [0, True], "0:16", None)),
        *(first("bytes", of) for of in (-1, 0, 1 << 60, 1.5, "many", None)),
        first("space", "another"),
        lambda listed: listed["blocks"].append(listed["blocks"][0]),
        lambda listed: listed["blocks"].pop(),
        lambda listed: listed.update(model="../../elsewhere\x1b[2J"),
        lambda listed: listed.update(model=""),
        lambda listed: listed.update(blocks=3),
        lambda listed: listed.update(forms=[]),
        lambda listed: next(iter(listed["forms"].values())).update(revision="another"),
        lambda listed: listed.clear(),
    ],
)
def test_a_list_that_was_tampered_with_brings_no_block(
    tmp_path: Path, content: bytes, change: Callable[[dict[str, Any]], object]
) -> None:
    folder = folder_of(tmp_path / "in" / "kept")
    try:
        came = imported(folder, changed(content, change))
    except ArchiveRefused:
        pass
    else:
        # Blocks say themselves whose they are.
        assert (came.blocks, came.damaged) == (0, COUNT)
    assert kept_in(folder) == {}
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["kept"]


@pytest.mark.parametrize("key", ["version", "blocks_version"])
def test_another_format_is_refused_by_its_number(content: bytes, key: str) -> None:
    newer = changed(content, lambda listed: listed.update({key: 7}))
    with pytest.raises(ArchiveRefused, match=r"format.* 7.*this program reads format 1"):
        Archive.read(io.BytesIO(newer))


def test_facts_that_are_nested_without_end_are_refused(content: bytes) -> None:
    def nest(listed: dict[str, Any]) -> None:
        facts: dict[str, Any] = {}
        for _ in range(500):
            facts = {"a": facts}
        listed["forms"] = {Space(MODEL, facts).digest.hex(): facts}

    with pytest.raises(ArchiveRefused, match="can't be read"):
        Archive.read(io.BytesIO(changed(content, nest)))


@pytest.mark.parametrize("foreign", [b"", b"text" * 1000, bytes(10_240)])
def test_files_of_other_programs_are_refused(foreign: bytes) -> None:
    with pytest.raises(ArchiveRefused, match="cache export"):
        Archive.read(io.BytesIO(foreign))
