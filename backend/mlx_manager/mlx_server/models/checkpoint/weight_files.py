"""The files that hold a model's weights, and their headers. No weights are read, nor MLX imported.

The index names the files; without one it is model.safetensors, or one complete set of numbered
shards. Other files in the folder are ignored: a shard of another sharding would mix in, and the
same weights in another format would be loaded a second time.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

from mlx_manager.mlx_server.errors import ModelLoadFailed
from mlx_manager.mlx_server.models.checkpoint.files import read_json, unreadable

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
WEIGHTS = "model*.safetensors"
SHARD = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")
ALONE = re.compile(r"model[^/]*\.safetensors")
METADATA = "__metadata__"
LARGEST_HEADER = 100_000_000

BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Bits of an element, by dtype. Source: safetensors 0.8, `safetensors/src/tensor.rs`."""

MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file, from byte `start` up to `end`, of a shape in elements."""

    start: int
    end: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files of a model's weights, in the order of their names.

    placed: the file that the index names for each tensor; empty without an index. nbytes: the size
    of the files that are there. problem: why the model can't be loaded from them; "" if it can.
    """

    files: tuple[Path, ...] = ()
    placed: Mapping[str, Path] = field(default_factory=dict)
    nbytes: int = 0
    problem: str = ""

    def holds(self, name: str, file: Path) -> bool:
        """Return whether the tensor of that name is to be taken from `file`, which has the
        tensor."""
        return self.placed.get(name, file) == file


def weight_files(folder: Path) -> WeightFiles:
    """Return the files of the weights in `folder`. Errors are in `WeightFiles.problem`."""
    try:
        index = folder / INDEX
        if os.path.lexists(index):
            placed = weight_map(index)
            names = sorted({*placed.values()})
            problem = ""
        else:
            placed = {}
            present = sorted(entry.name for entry in os.scandir(folder) if not entry.is_dir())
            names, problem = chosen(present, str(folder))
        return _measured(folder, names, placed, problem)
    except ModelLoadFailed as error:
        return WeightFiles(problem=error.message)
    except OSError as error:
        return WeightFiles(problem=f"The weights in {folder} can't be read: {error}.")


def _measured(
    folder: Path, names: Iterable[str], placed: Mapping[str, str], problem: str
) -> WeightFiles:
    files, missing, nbytes = [], [], 0
    for name in names:
        file = folder / name
        if not os.path.exists(file):
            missing.append(name)
            continue
        if odd := unreadable(file):
            problem = problem or odd
            continue
        files.append(file)
        nbytes += file.stat().st_size
    if missing and not problem:
        more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
        why = f"{INDEX} names them." if placed else "It is a link to what is not there."
        problem = (
            f"Weights are missing from {folder}: {', '.join(missing[:MOST_NAMED])}{more}. {why}"
        )
    located = {tensor: folder / name for tensor, name in placed.items()}
    return WeightFiles(tuple(files), located, nbytes, problem)


def weight_map(index: Path) -> dict[str, str]:
    """Return the name of each tensor's file, by an index.

    Raises:
        ModelLoadFailed: the index has no map, or names a file that is no .safetensors file in its
            folder; the message names the index.
    """
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise ModelLoadFailed(f"{index} has no weight_map.")
    for name in named.values():
        if not isinstance(name, str):
            raise ModelLoadFailed(f"{index} has a weight_map to other things than file names.")
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or path.suffix != ".safetensors":
            raise ModelLoadFailed(
                f"{index} names {name!r}, which is no .safetensors file in its folder."
            )
    return named


def chosen(names: Iterable[str], where: str) -> tuple[list[str], str]:
    """Return the files of the weights, by the names in a folder without an index, and why there
    are none ("" if there are).

    where: the folder's name in that reason.
    """
    candidates = [name for name in names if ALONE.fullmatch(name)]
    sets: dict[str, dict[int, str]] = {}
    for name in candidates:
        if match := SHARD.fullmatch(name):
            sets.setdefault(match[2], {})[int(match[1])] = name
    whole = [shards for total, shards in sets.items() if _is_whole(shards, int(total))]
    match candidates, whole:
        case _ if SINGLE in candidates:
            return [SINGLE], ""
        case [only], [] if not sets:
            return [only], ""
        case _, [shards]:
            return [name for _, name in sorted(shards.items())], ""
    return [], _why_none(candidates, sets, where, ambiguous=bool(whole))


def _why_none(
    candidates: Sequence[str],
    sets: Mapping[str, Mapping[int, str]],
    where: str,
    *,
    ambiguous: bool,
) -> str:
    if not candidates:
        return f"There are no weights ({WEIGHTS}) in {where}."
    listed = ", ".join(candidates[:MOST_NAMED]) + (", ..." if len(candidates) > MOST_NAMED else "")
    if ambiguous:
        return f"{where} has more than one complete set of weights and no {INDEX}: {listed}."
    if len(sets) == 1:
        [(total, shards)] = sets.items()
        lacking = _lacking(shards, total)
        return f"Weights are missing from {where}: {lacking}, and there is no {INDEX}."
    return (
        f"It can't be told which files in {where} are the weights: {listed}. Expected is an "
        f"{INDEX}, or {SINGLE}, or every one of model-00001-of-N.safetensors."
    )


def _is_whole(shards: Mapping[int, str], total: int) -> bool:
    return sorted(shards) in (list(range(1, total + 1)), list(range(total))) if total else False


def _lacking(shards: Mapping[int, str], total: str) -> str:
    wanted = range(1, min(int(total), 10**5) + 1)
    number = next((number for number in wanted if number not in shards), 1)
    return f"model-{number:0{len(total)}}-of-{total}.safetensors"


# ---------------------------------------------------------------------------------------------
# safetensors
# ---------------------------------------------------------------------------------------------


def tensors_in(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file, by its header.

    The file is 8 bytes with the header's length, the header in JSON, and the data. Source: the
    format's description at https://github.com/huggingface/safetensors.

    Raises:
        ModelLoadFailed: the header is broken, or its tensors don't fill the file or overlap; the
            message names the file.
    """
    header, length = _header(file)
    try:
        tensors = {
            name: _stored(tensor, 8 + length) for name, tensor in header.items() if name != METADATA
        }
    except (ValueError, AttributeError, TypeError, LookupError) as error:
        raise _broken(file) from error
    _check_places(file, tensors, 8 + length, file.stat().st_size)
    return tensors


def format_of(file: Path) -> str:
    """Return the name of the framework that a safetensors file says it was written by: "pt" for
    transformers, "mlx" for mlx-lm and mlx-vlm; "" if it does not say.

    Raises:
        ModelLoadFailed: the header is broken.
    """
    metadata = _header(file)[0].get(METADATA)
    return str(metadata.get("format", "")) if isinstance(metadata, dict) else ""


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """Return a safetensors file's header and its length in bytes.

    Raises:
        ModelLoadFailed: the file can't be read, or its header is no object in JSON.
    """
    try:
        if odd := unreadable(file):
            raise ModelLoadFailed(odd)
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or not 0 < length <= size - 8:
                raise ModelLoadFailed(f"{file} is not a safetensors file, or is truncated.")
            if length > LARGEST_HEADER:
                raise ModelLoadFailed(
                    f"{file} has a header of {length:,} bytes; at most {LARGEST_HEADER:,} are read."
                )
            header = json.loads(stream.read(length), object_pairs_hook=_without_twins)
    except OSError as error:
        raise ModelLoadFailed(f"{file} can't be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise _broken(file) from error
    if not isinstance(header, dict):
        raise _broken(file)
    return header, length


def _broken(file: Path) -> ModelLoadFailed:
    return ModelLoadFailed(f"{file} has a broken safetensors header.")


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands there twice")
    return found


def _stored(tensor: Mapping[str, Any], begin: int) -> StoredTensor:
    start, end = tensor["data_offsets"]
    shape, dtype = tuple(tensor["shape"]), tensor["dtype"]
    if not all(type(number) is int for number in (start, end, *shape)) or type(dtype) is not str:
        raise TypeError("not a number")
    return StoredTensor(begin + start, begin + end, dtype, shape)


def _check_places(file: Path, tensors: Mapping[str, StoredTensor], begin: int, size: int) -> None:
    """Check that each tensor is as long as its shape says, that none overlap, and the file's size.

    Raises:
        ModelLoadFailed: a check failed; the message names the file, and the tensors at fault.
    """
    for name, tensor in tensors.items():
        if not begin <= tensor.start <= tensor.end or min(tensor.shape, default=0) < 0:
            raise ModelLoadFailed(f"{file} has a broken safetensors header: {name!r} ends nowhere.")
        bits = BITS.get(tensor.dtype, 0) * math.prod(tensor.shape)
        if tensor.dtype in BITS and -(-bits // 8) != tensor.end - tensor.start:
            raise ModelLoadFailed(
                f"{file} has a broken safetensors header: {name!r} is {tensor.dtype} of shape "
                f"{list(tensor.shape)} in {tensor.end - tensor.start:,} bytes."
            )
    expected = max((tensor.end for tensor in tensors.values()), default=begin)
    if size != expected:
        raise ModelLoadFailed(
            f"{file} is truncated or damaged: {size:,} bytes, and its header says {expected:,}."
        )
    filled = [(one.start, one.end, name) for name, one in tensors.items() if one.end > one.start]
    for (_, end, one), (start, _, other) in pairwise(sorted(filled)):
        if start < end:
            raise ModelLoadFailed(
                f"{file} has a broken safetensors header: {one!r} and {other!r} overlap."
            )


def check_safetensors(file: Path) -> None:
    """Check that the header is sound and that its tensors fill the file.

    Raises:
        ModelLoadFailed: the header is broken or the file is damaged; the message names the file.
    """
    tensors_in(file)


def headers_of(weights: WeightFiles) -> dict[Path, dict[str, StoredTensor]]:
    """Return each file of a model's weights, with the tensors that are to be taken from it.

    Raises:
        ModelLoadFailed: a header is broken.
    """
    headers: dict[Path, dict[str, StoredTensor]] = {}
    for file in weights.files:
        found = tensors_in(file)
        headers[file] = {name: found[name] for name in found if weights.holds(name, file)}
    return headers
