"""Files of blocks: safetensors, with a checksum over all that is in them.

Written and read by hand, since the library's functions hold Python's lock while they copy, and a
step would wait for it.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from mlx_manager.mlx_server.engine.disk.names import FORMAT, BlockName, Space

CODES = {
    **{"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"},
    **{"int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "bool_": "BOOL"},
    **{"uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64"},
}
"""Types of MLX, and their codes in safetensors."""
DTYPES = {code: name for name, code in CODES.items()}
LARGEST_HEADER = 1 << 24


class Damaged(Exception):
    """Error: a file is not the block that it is named after; the message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """An array on the host. dtype: its name in MLX. data: its bytes, (n,) uint8."""

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class PrefixBlock:
    """Content of a block, by names of tensors."""

    name: BlockName
    tensors: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.data.nbytes for tensor in self.tensors.values())


def header_of(space: Space, block: PrefixBlock) -> bytes:
    """Return what the block's file begins with. Reads all of the block, for its checksum."""
    metadata = {
        "format": f"mlx-manager prefix {FORMAT}",
        "model": space.model,
        "space": space.digest.hex(),
        "digest": block.name.digest.hex(),
        "kind": block.name.kind,
        "pages": f"{block.name.first}:{block.name.end}",
    }
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


def read(path: Path, space: Space, name: BlockName) -> PrefixBlock:
    """Return the block of this name.

    Raises:
        OSError: the file is not there, or can't be read.
        Damaged: it is not what was written under this name.
    """
    with path.open("rb", buffering=0) as file:
        described, metadata = _header(file)
        # Before any memory is taken: a damaged header may speak of any size.
        if os.fstat(file.fileno()).st_size - file.tell() != (size := _size(described)):
            raise Damaged("it has not as many bytes as its header says")
        content = np.empty(size, np.uint8)
        view, got = content.data, 0
        while got < size and (more := file.readinto(view[got:])):
            got += more
    if (checksum := metadata.pop("crc32", "")) != (
        f"{zlib.crc32(content.data, zlib.crc32(_said(metadata, described))):08x}"
    ):
        raise Damaged(f"its checksum is not {checksum or 'there'}")
    wanted = {
        "format": f"mlx-manager prefix {FORMAT}",
        "space": space.digest.hex(),
        "digest": name.digest.hex(),
        "kind": name.kind,
        "pages": f"{name.first}:{name.end}",
    }
    if any(metadata.get(key) != value for key, value in wanted.items()):
        raise Damaged("it is of another prefix or model")
    return PrefixBlock(name, {key: _tensor(of, content) for key, of in described.items()})


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
    if not isinstance(metadata, dict) or _text(metadata, content) != text:
        raise Damaged("its header can't be read")
    return content, metadata


def _size(described: Mapping[str, Any]) -> int:
    """Return the bytes of all tensors, which must follow each other."""
    end = 0
    try:
        for of in described.values():
            start, behind = of["data_offsets"]
            nbytes = np.prod(of["shape"], dtype=np.int64) * WIDTHS[of["dtype"]]
            if start != end or behind - start != nbytes or min(of["shape"], default=1) < 0:
                raise Damaged("its tensors do not lie one after another")
            end = int(behind)
    except (KeyError, TypeError, ValueError):
        raise Damaged("its header can't be read") from None
    return end


WIDTHS = {
    code: 1 if name == "bool_" else int("".join(filter(str.isdigit, name))) // 8
    for code, name in DTYPES.items()
}
"""Bytes of a number of each type."""


def _tensor(of: Mapping[str, Any], content: NDArray[np.uint8]) -> Tensor:
    start, end = of["data_offsets"]
    return Tensor(DTYPES[of["dtype"]], tuple(of["shape"]), content[start:end])
