"""Files of blocks: read as they were written, or refused."""

from __future__ import annotations

import io
import json
import zlib
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_manager.mlx_server.devices.dtypes import dtype_name
from mlx_manager.mlx_server.engine.disk import blocks
from mlx_manager.mlx_server.engine.disk.blocks import Damaged, PrefixBlock, Tensor
from mlx_manager.mlx_server.engine.disk.names import DIGEST, PLAIN, STATE, BlockName, Space
from mlx_manager.mlx_server.engine.disk.tier import on_device, on_host

SPACE = Space("owner/model", {"revision": "r"})
NAME = BlockName(b"d" * DIGEST, PLAIN, 16, 32)
DTYPES = (mx.float32, mx.bfloat16, mx.float16, mx.int32, mx.uint8, mx.bool_)


def block(*arrays: mx.array) -> PrefixBlock:
    tensors = {
        f"keys.{i}": Tensor(dtype_name(array.dtype), tuple(array.shape), on_host(array).reshape(-1))
        for i, array in enumerate(arrays)
    }
    return PrefixBlock(NAME, tensors)


def written(of: PrefixBlock) -> bytes:
    file = io.BytesIO()
    blocks.write(file, blocks.header_of(SPACE, of), of)
    return file.getvalue()


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_every_type_come_back(tmp_path: Path, dtype: mx.Dtype) -> None:
    arrays = [mx.random.normal((2, 16, 8)).astype(dtype), mx.zeros((2, 16, 0), dtype)]
    (tmp_path / "block").write_bytes(written(block(*arrays)))
    found = blocks.read(tmp_path / "block", SPACE, NAME)
    for i, array in enumerate(arrays):
        back = on_device(found.tensors[f"keys.{i}"])
        assert back.dtype == array.dtype
        assert back.shape == array.shape
        assert mx.array_equal(back, array)


def test_other_programs_can_read_a_block(tmp_path: Path) -> None:
    array = mx.random.normal((2, 16, 8)).astype(mx.bfloat16)
    (tmp_path / "block.safetensors").write_bytes(written(block(array)))
    assert mx.array_equal(mx.load(str(tmp_path / "block.safetensors"))["keys.0"], array)


def refused(content: bytes) -> None:
    with NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        with pytest.raises(Damaged):
            blocks.read(Path(file.name), SPACE, NAME)


CONTENT = written(block(mx.arange(64).reshape(2, 4, 8)))


@given(st.integers(0, len(CONTENT) - 1), st.integers(1, 255))
def test_a_byte_that_has_changed_is_noticed(place: int, change: int) -> None:
    harmed = bytearray(CONTENT)
    harmed[place] ^= change
    refused(bytes(harmed))


@given(st.integers(0, len(CONTENT) - 1))
def test_a_file_that_was_cut_off_is_noticed(length: int) -> None:
    refused(CONTENT[:length])


@pytest.mark.parametrize(
    ("space", "name"),
    [
        (Space("owner/model", {"revision": "another"}), NAME),
        (SPACE, BlockName(b"e" * DIGEST, PLAIN, 16, 32)),
        (SPACE, BlockName(b"d" * DIGEST, STATE, 16, 32)),
        (SPACE, BlockName(b"d" * DIGEST, PLAIN, 0, 32)),
    ],
)
def test_a_block_of_another_model_or_prefix_is_refused(
    tmp_path: Path, space: Space, name: BlockName
) -> None:
    (tmp_path / "block").write_bytes(CONTENT)
    with pytest.raises(Damaged, match="another prefix or model"):
        blocks.read(tmp_path / "block", space, name)


def with_header(change: dict[str, Any], name: str = "keys.0") -> bytes:
    """Return a block whose header, checksum included, says something else of its tensor."""
    length = int.from_bytes(CONTENT[:8], "little")
    header = json.loads(CONTENT[8 : 8 + length])
    metadata, of = header["__metadata__"], {**header["keys.0"], **change}
    del metadata["crc32"]
    said = json.dumps([metadata, {name: of}], sort_keys=True).encode()
    metadata["crc32"] = f"{zlib.crc32(CONTENT[8 + length :], zlib.crc32(said)):08x}"
    text = json.dumps({"__metadata__": metadata, name: of}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + CONTENT[8 + length :]


def test_a_header_that_is_written_again_is_that_of_the_block() -> None:
    assert with_header({}) == CONTENT


@pytest.mark.parametrize("name", ["keys", "keys.a", "state.0", "state.0.x", "state.0.0.0", "../x"])
def test_tensors_of_other_names_are_refused_though_the_checksum_is_right(name: str) -> None:
    refused(with_header({}, name))


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [1 << 30, 1 << 30, 1 << 6], "data_offsets": [0, 0]},
        {"shape": [-2, -4, 8]},
        {"shape": [2.0, 4, 8]},
        {"shape": "248"},
        {"shape": [True, 8, 8]},
        {"dtype": "I9"},
        {"dtype": ["I32"]},
        {"data_offsets": [0]},
        {"data_offsets": [0, None]},
        {"more": 1},
    ],
)
def test_what_describes_no_tensor_is_refused_though_the_checksum_is_right(
    change: dict[str, Any],
) -> None:
    refused(with_header(change))


def test_a_header_that_speaks_of_too_much_takes_no_memory(tmp_path: Path) -> None:
    length = int.from_bytes(CONTENT[:8], "little")
    header = json.loads(CONTENT[8 : 8 + length])
    header["keys.0"] |= {"shape": [1 << 20, 1 << 20], "data_offsets": [0, 1 << 42]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (tmp_path / "block").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(Damaged, match="as many bytes"):
        blocks.read(tmp_path / "block", SPACE, NAME)
