from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from linux import skip_without_linux

from mlx_manager.mlx_server.errors import ModelLoadFailed
from mlx_manager.mlx_server.models.checkpoint.files import LARGEST_JSON, read_json
from mlx_manager.mlx_server.models.checkpoint.folder import check_regular
from mlx_manager.mlx_server.models.checkpoint.weight_files import (
    INDEX,
    LARGEST_HEADER,
    StoredTensor,
    headers_of,
    tensors_in,
    weight_files,
)

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def folder_of(place: Path, *names: str, index: Sequence[str] = ()) -> Path:
    """A folder with safetensors files of those names, which hold a byte each named as the file."""
    place.mkdir(exist_ok=True)
    for name in names:
        write(place / name, {name: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, b"x")
    if index:
        named = {"weight_map": {name: name for name in index}}
        (place / INDEX).write_text(json.dumps(named))
    return place


def write(file: Path, header: Any, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


@pytest.mark.parametrize(
    ("present", "index", "found"),
    [
        (["model.safetensors"], [], ["model.safetensors"]),
        (["model.safetensors", "consolidated.safetensors"], [], ["model.safetensors"]),
        (["model.safetensors", *SHARDS], [], ["model.safetensors"]),
        (["model.safetensors", *SHARDS], SHARDS, SHARDS),
        ([*SHARDS, "model-00001-of-00003.safetensors"], SHARDS, SHARDS),
        ([*SHARDS, "model-00001-of-00003.safetensors"], [], SHARDS),
        (SHARDS, [], SHARDS),
        (["model-00000-of-00002.safetensors", SHARDS[0]], [], ["model-00000-of-00002.safetensors", SHARDS[0]]),
        (["model-4bit.safetensors"], [], ["model-4bit.safetensors"]),
        (["model.safetensors", "mtp.safetensors"], ["model.safetensors", "mtp.safetensors"], ["model.safetensors", "mtp.safetensors"]),
        (["model.safetensors", "mtp.safetensors"], ["model.safetensors"], ["model.safetensors"]),
        (["a_vision.safetensors", "b.safetensors"], ["a_vision.safetensors", "b.safetensors"], ["a_vision.safetensors", "b.safetensors"]),
        (["parts/one.safetensors"], ["parts/one.safetensors"], ["parts/one.safetensors"]),
    ],
)  # fmt: skip
def test_only_what_the_index_names_or_one_whole_set_is_the_weights(
    tmp_path: Path, present: Sequence[str], index: Sequence[str], found: Sequence[str]
):
    folder = folder_of(tmp_path / "m", *present, index=index)
    weights = weight_files(folder)
    assert weights.problem == ""
    assert [str(file.relative_to(folder)) for file in weights.files] == list(found)
    assert weights.nbytes == sum((folder / name).stat().st_size for name in found)


@pytest.mark.parametrize(
    ("present", "index", "problem"),
    [
        ([], [], r"There are no weights \(model\*\.safetensors\) in .*m\."),
        (["consolidated.safetensors"], [], "There are no weights"),
        (["model.safetensors"], ["model.safetensors", "mtp.safetensors"], r"missing from .*m: mtp\.safetensors"),
        ([SHARDS[0]], SHARDS, rf"missing from .*m: {SHARDS[1]}"),
        ([SHARDS[1]], [], rf"missing from .*m: {SHARDS[0]}, and there is no model\.safetensors\.index"),
        ([*SHARDS, *(f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3))], [], "more than one complete set"),
        (["model-a.safetensors", "model-b.safetensors"], [], r"can't be told .*: model-a\.safetensors, model-b"),
        (["model-a.safetensors", SHARDS[0]], [], "missing"),
        (["x.safetensors"], ["../x.safetensors"], r"names '\.\./x\.safetensors', which is no"),
        (["x.safetensors"], ["/etc/x.safetensors"], "names '/etc/x.safetensors'"),
        (["x.safetensors"], ["pytorch_model.bin"], r"names 'pytorch_model\.bin'"),
    ],
)  # fmt: skip
def test_why_there_are_none_is_told(
    tmp_path: Path, present: Sequence[str], index: Sequence[str], problem: str
):
    weights = weight_files(folder_of(tmp_path / "m", *present, index=index))
    with pytest.raises(ModelLoadFailed, match=problem):
        raise ModelLoadFailed(weights.problem)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": [1]}'])
def test_an_index_of_nonsense_is_named(tmp_path: Path, text: str):
    folder = folder_of(tmp_path / "m", "model.safetensors")
    (folder / INDEX).write_text(text)
    assert str(folder / INDEX) in weight_files(folder).problem


def test_of_two_files_with_one_tensor_the_index_says_which(tmp_path: Path):
    tensor = {"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    one, other = (write(tmp_path / name, tensor, b"x") for name in SHARDS)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": other.name, "v": one.name}}))
    assert {file: list(found) for file, found in headers_of(weight_files(tmp_path)).items()} == {
        one: [],
        other: ["w"],
    }


def fifo(file: Path) -> None:
    os.mkfifo(file)


def listening(file: Path) -> None:
    skip_without_linux("sockets whose paths may be of any length")
    with tempfile.TemporaryDirectory(dir="/tmp") as short, socket.socket(socket.AF_UNIX) as one:
        one.bind(f"{short}/s")
        os.rename(f"{short}/s", file)


def device(file: Path) -> None:
    file.symlink_to("/dev/zero")


ODD = [(fifo, "FIFO"), (listening, "socket"), (device, "device"), (Path.mkdir, "folder")]


@pytest.mark.parametrize(("make", "kind"), ODD)
def test_only_a_regular_file_is_opened(tmp_path: Path, make: Callable[[Path], None], kind: str):
    make(tmp_path / "x.json")
    make(tmp_path / "model.safetensors")
    make(tmp_path / INDEX)
    for look in (lambda: read_json(tmp_path / "x.json"), lambda: tensors_in(tmp_path / INDEX)):
        with pytest.raises(ModelLoadFailed, match=rf"a {kind}; a regular file is expected"):
            look()
    assert f"a {kind}" in weight_files(tmp_path).problem
    (tmp_path / INDEX).rename(tmp_path / "elsewhere")
    problem = weight_files(tmp_path).problem
    assert f"a {kind}" in problem or problem.startswith("There are no weights")


@pytest.mark.parametrize(("make", "kind"), ODD[:3])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "chat_template.jinja", "1_Pooling/config.json"])  # fmt: skip
def test_what_libraries_would_open_by_name_is_looked_at_first(
    tmp_path: Path, make: Callable[[Path], None], kind: str, name: str
):
    (tmp_path / "1_Pooling").mkdir()
    check_regular(tmp_path)
    make(tmp_path / name)
    with pytest.raises(ModelLoadFailed, match=rf"{name} is a {kind}"):
        check_regular(tmp_path)


def test_what_nobody_reads_may_be_anything(tmp_path: Path):
    folder = folder_of(tmp_path / "m", "model.safetensors", index=["model.safetensors"])
    for name in ("model-00001-of-00009.safetensors", "notes", ".lock"):
        fifo(folder / name)
    (folder / "gone.json").symlink_to(tmp_path / "absent")
    check_regular(folder)
    assert weight_files(folder).problem == ""


def test_a_json_file_too_large_to_be_one_is_not_read(tmp_path: Path):
    for name in ("config.json", "dataset.json", "tokenizer.json"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(LARGEST_JSON + 1)
    with pytest.raises(ModelLoadFailed, match=r"config\.json is too large"):
        read_json(tmp_path / "config.json")
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelLoadFailed, match=r"tokenizer\.json is too large"):
        check_regular(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    check_regular(tmp_path)


def tensor(start: int, end: int, shape: Sequence[int] | None = None, dtype: str = "U8") -> dict:
    return {"dtype": dtype, "shape": shape or [end - start], "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "size", "problem"),
    [
        ({"a": tensor(0, 8), "b": tensor(4, 12)}, 12, "'a' and 'b' overlap"),
        ({"a": tensor(0, 8), "b": tensor(0, 8)}, 8, "overlap"),
        ({"a": tensor(0, 12), "b": tensor(4, 8)}, 12, "overlap"),
        ({"a": tensor(0, 80)}, 8, "truncated or damaged"),
        ({"a": tensor(0, 2**62)}, 8, "truncated or damaged"),
        ({"a": tensor(-4, 4)}, 4, "'a' ends nowhere"),
        ({"a": tensor(4, 0, [4])}, 4, "'a' ends nowhere"),
        ({"a": tensor(0, 4, [-4])}, 4, "'a' ends nowhere"),
        ({"a": tensor(0, 4, [5])}, 4, r"'a' is U8 of shape \[5\] in 4 bytes"),
        ({"a": tensor(0, 4, [2**40, 2**40])}, 4, "'a' is U8 of shape"),
        ({"a": tensor(0, 4, [4], "F32")}, 4, "'a' is F32"),
        ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4.0]}}, 4, "broken"),
        ({"a": {"dtype": "U8", "shape": ["4"], "data_offsets": [0, 4]}}, 4, "broken"),
        ({"a": {"dtype": 8, "shape": [4], "data_offsets": [0, 4]}}, 4, "broken"),
        ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0]}}, 4, "broken"),
        ({"a": {"dtype": "U8", "shape": 4, "data_offsets": [0, 4]}}, 4, "broken"),
        (b'{"a": %s, "a": %s}' % ((json.dumps(tensor(0, 4)).encode(),) * 2), 4, "broken"),
        (b"[" * 200_000, 0, "broken"),
        (b"null", 0, "broken"),
    ],
)  # fmt: skip
def test_a_header_that_contradicts_itself_is_refused_by_name(
    tmp_path: Path, header: Any, size: int, problem: str
):
    file = write(tmp_path / "model.safetensors", header, bytes(size))
    with pytest.raises(ModelLoadFailed, match=rf"model\.safetensors .*{problem}"):
        tensors_in(file)


def test_a_header_too_large_to_be_one_is_not_read(tmp_path: Path):
    file = tmp_path / "model.safetensors"
    with file.open("wb") as stream:
        stream.write((LARGEST_HEADER + 1).to_bytes(8, "little"))
        stream.truncate(LARGEST_HEADER + 100)
    with pytest.raises(
        ModelLoadFailed, match=r"a header of 100,000,001 bytes; at most 100,000,000"
    ):
        tensors_in(file)


def test_what_the_format_allows_is_allowed(tmp_path: Path):
    header = {
        "__metadata__": {"format": "mlx"},
        "none": tensor(0, 0, [0, 4]),
        "scalar": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
        "packed": tensor(4, 8, [8], "F4"),
        "new": tensor(8, 9, [1], "F2_OF_TOMORROW"),
    }
    found = tensors_in(write(tmp_path / "model.safetensors", header, bytes(9)))
    assert list(found) == ["none", "scalar", "packed", "new"]
    assert found["packed"].shape == (8,)


@given(data=st.data())
def test_a_changed_byte_of_a_header_is_refused_or_harmless(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
):
    header = json.dumps({"a": tensor(0, 16), "b": tensor(16, 64)}).encode()
    whole = bytearray(len(header).to_bytes(8, "little") + header + bytes(64))
    place = data.draw(st.integers(0, len(header) + 7))
    whole[place] = data.draw(st.integers(0, 255))
    file = tmp_path_factory.mktemp("t") / "model.safetensors"
    file.write_bytes(whole)
    found: dict[str, StoredTensor] = {}
    with suppress(ModelLoadFailed):
        found = tensors_in(file)
    assert all(8 <= one.start <= one.end <= len(whole) for one in found.values())
