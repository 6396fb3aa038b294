"""Files of blocks: safetensors, with a checksum over all that is in them.

Written and read by hand, since the library's functions hold Python's lock while they copy, and a
step would wait for it.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from mlx_manager.mlx_server.engine.disk.names import FILE, FORMAT, BlockName, Space

CODES = {
    **{"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"},
    **{"int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "bool_": "BOOL"},
    **{"uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64"},
}
"""Types of MLX, and their codes in safetensors."""
DTYPES = {code: name for name, code in CODES.items()}
LARGEST_HEADER = 1 << 24
MOST_PAGES = 1 << 24
"""Most pages of a prefix: far more than any context."""
LONGEST_AXIS = (1 << 31) - 1
TENSOR = re.compile(r"(?!state\.)[a-z_]{1,32}\.\d{1,4}|state\.\d{1,4}\.\d{1,4}(\.none)?", re.ASCII)
"""Names of tensors: a part of a layer's pages, or of its state."""
PAGES = re.compile(r"(\d{1,9}):(\d{1,9})", re.ASCII)


NONE = np.empty(0, np.uint8)


class Damaged(Exception):
    """Error: a file is not the block that it is named after; the message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """An array on the host. dtype: its name in MLX. data: its bytes, (n,) uint8."""

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PrefixBlock:
    """Content of a block, by names of tensors."""

    name: BlockName
    tensors: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.data.nbytes for tensor in self.tensors.values())


def header_of(space: Space, block: PrefixBlock) -> bytes:
    """Return what the block's file begins with. Reads all of the block, for its checksum."""
    metadata = _about(space, block.name)
    described: dict[str, Any] = {}
    offset = 0
    for name, tensor in block.tensors.items():
        end = offset + tensor.data.nbytes
        described[name] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    checksum = zlib.crc32(_said(metadata, described))
    for tensor in block.tensors.values():
        checksum = zlib.crc32(tensor.data.data, checksum)
    metadata["crc32"] = f"{checksum:08x}"
    text = _text(metadata, described)
    return struct.pack("<Q", len(text)) + text


def write(file: BinaryIO, header: bytes, block: PrefixBlock) -> None:
    """Write a block whose header has been made.

    Raises:
        OSError: the disk is full, say.
    """
    file.write(header)
    for tensor in block.tensors.values():
        file.write(tensor.data.data)


def read(
    path: Path, space: Space, name: BlockName, memory: NDArray[np.uint8] = NONE
) -> PrefixBlock:
    """Return the block of this name.

    memory: where it is put if it fits there.

    Raises:
        OSError: the file is not there, or can't be read.
        Damaged: it is not what was written under this name.
    """
    with path.open("rb", buffering=0) as file:
        return read_part(file, os.fstat(file.fileno()).st_size, space, name, memory)


def read_part(
    file: Any, nbytes: int, space: Space, name: BlockName, memory: NDArray[np.uint8] = NONE
) -> PrefixBlock:
    """Return the block of this name in the next `nbytes` bytes of a file that is open. memory: as
    in `read`.

    Raises:
        OSError: the file can't be read.
        Damaged: it is not what was written under this name.
    """
    begin = file.tell()
    described, metadata = _header(file)
    # Before any memory is taken: a damaged header may speak of any size.
    if begin + nbytes - file.tell() != (size := _size(described)):
        raise Damaged("it has not as many bytes as its header says")
    content = memory[:size] if size <= len(memory) else np.empty(size, np.uint8)
    view, got = content.data, 0
    while got < size and (more := file.readinto(view[got:])):
        got += more
    if (checksum := metadata.pop("crc32", "")) != (
        f"{zlib.crc32(content.data, zlib.crc32(_said(metadata, described))):08x}"
    ):
        raise Damaged(f"its checksum is not {checksum or 'there'}")
    if metadata != _about(space, name):
        raise Damaged("it is of another prefix or model")
    return PrefixBlock(name, {key: _tensor(of, content) for key, of in described.items()})


def name_of(path: Path) -> BlockName:
    """Return the name of the block in a file; only `read` tells whether the block is whole.

    Raises:
        OSError: the file is not there, or can't be read.
        Damaged: it is no file of a block.
    """
    with path.open("rb") as file:
        _, metadata = _header(file)
    found = FILE.fullmatch(path.name)
    pages = PAGES.fullmatch(metadata.get("pages", ""))
    if found is None or pages is None:
        raise Damaged("its header does not say which pages it has")
    name = BlockName(bytes.fromhex(found[1]), found[2], int(pages[1]), int(pages[2]))
    if not 0 <= name.first < name.end <= MOST_PAGES:
        raise Damaged("its header does not say which pages it has")
    return name


def _about(space: Space, name: BlockName) -> dict[str, str]:
    """Return the metadata of a block's file, but for the checksum."""
    return {
        "format": f"mlx-manager prefix {FORMAT}",
        "model": space.model,
        "space": space.digest.hex(),
        "digest": name.digest.hex(),
        "kind": name.kind,
        "pages": f"{name.first}:{name.end}",
    }


def _text(metadata: Mapping[str, str], described: Mapping[str, Any]) -> bytes:
    """Return the JSON of a header, filled up to whole words."""
    text = json.dumps({"__metadata__": metadata, **described}).encode()
    return text + b" " * (-len(text) % 8)


def _said(metadata: Mapping[str, str], described: Mapping[str, Any]) -> bytes:
    return json.dumps([metadata, described], sort_keys=True).encode()


def _header(file: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the descriptions of the tensors in a file, and its metadata."""
    start = file.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 0 < length <= LARGEST_HEADER:
        raise Damaged("it has no header of safetensors")
    text = file.read(length)
    try:
        content = json.loads(text)
        metadata = content.pop("__metadata__")
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        raise Damaged("its header can't be read") from None
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise Damaged("its header can't be read")
    if not all(TENSOR.fullmatch(name) and _is_tensor(of) for name, of in content.items()):
        raise Damaged("its header describes what is no tensor of a block")
    if _text(metadata, content) != text:
        raise Damaged("its header can't be read")
    return content, metadata


def _is_tensor(of: Any) -> bool:
    """Return whether JSON describes a tensor."""
    match of:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [start, end]}:
            sizes = all(type(n) is int and 0 <= n <= LONGEST_AXIS for n in shape)
            return len(of) == 3 and code in DTYPES and sizes and type(start) is type(end) is int
    return False


def _size(described: Mapping[str, Any]) -> int:
    """Return the bytes of all tensors, which must follow each other."""
    end = 0
    for of in described.values():
        start, behind = of["data_offsets"]
        nbytes = math.prod(of["shape"]) * WIDTHS[of["dtype"]]
        if start != end or behind - start != nbytes:
            raise Damaged("its tensors do not lie one after another")
        end = behind
    return end


WIDTHS = {
    code: 1 if name == "bool_" else int("".join(filter(str.isdigit, name))) // 8
    for code, name in DTYPES.items()
}
"""Bytes of a number of each type."""


def _tensor(of: Mapping[str, Any], content: NDArray[np.uint8]) -> Tensor:
    start, end = of["data_offsets"]
    return Tensor(DTYPES[of["dtype"]], tuple(of["shape"]), content[start:end])
