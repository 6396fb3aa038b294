"""Features of pictures on disk: a picture that was asked about before needs no tower."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from time import perf_counter

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_manager.mlx_server.engine.disk.arrays import Piece, Sheet, on_device
from mlx_manager.mlx_server.engine.disk.blocks import PrefixBlock, Tensor
from mlx_manager.mlx_server.engine.disk.names import BlockName, picture_name
from mlx_manager.mlx_server.engine.disk.prices import LOOKS, LearntRate
from mlx_manager.mlx_server.engine.disk.threads import BlockDisk
from mlx_manager.mlx_server.execution.images import Features

PART = 1 << 20
"""Bytes that one slice of work puts on the device."""
TYPES = ("float32", "float16", "bfloat16")
"""Types of features."""
Find = Callable[[], Features | None]
"""Function that returns a picture's features; None where they are not in memory any more."""


class KeptFeatures:
    """Features of a model's pictures on disk, by digest, as `prompt_images.Picture` has it. On the
    MLX thread, but for `read`.

    Args:
        disk: reads and writes blocks.
        copy: has features copied off the device and written.

    Attributes:
        queries, hits: pictures that were looked up, and those whose features were read.
    """

    def __init__(self, disk: BlockDisk, copy: Callable[[BlockName, Find], None]) -> None:
        self.queries = self.hits = 0
        self._disk = disk
        self._copy = copy
        # Rows of features that the tower makes a second, and bytes of files that are read.
        self._made, self._read = LearntRate(), LearntRate()
        self._refused = 0

    def want(self, digest: str, find: Find) -> None:
        """Have a picture's features written, unless they are on disk."""
        self._copy(picture_name(digest), find)

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from a picture that the tower has made so many rows of."""
        self._made.observe(rows, seconds)

    def has(self, digest: str, rows: int) -> bool:
        """Return whether a picture's features are there, and are read faster than the tower makes
        them."""
        if self._disk.space is None:
            return False
        self.queries += 1
        name = picture_name(digest)
        if not self._disk.has(name):
            return False
        reading = self._read.seconds(self._disk.size(name))
        making = self._made.seconds(rows)
        if not reading or not making or reading < making:
            return True
        self._refused += 1
        return self._refused % LOOKS == 0

    def read(self, digest: str, shape: tuple[int, int], levels: int) -> PrefixBlock | None:
        """Return the block of a picture's features; None if it can't be had. On any thread.

        shape: rows of the features and their width. levels: number of levels besides.
        """
        begun = perf_counter()
        block = self._disk.fetch(picture_name(digest))
        if block is None or not _fits(block, shape, levels):
            return None
        self._read.observe(block.nbytes, perf_counter() - begun)
        return block

    def stages(self, block: PrefixBlock) -> Generator[Sequence[mx.array], None, Features]:
        """Yield the arrays to evaluate before each next slice of work; return the features in a
        block that was read."""
        arrays = []
        for name in _names(len(block.tensors) - 1):
            parts = []
            for part in _parts(block.tensors[name]):
                parts.append(on_device(part))
                yield parts[-1:]
            arrays.append(mx.concatenate(parts))
        self.hits += 1
        return Features(arrays[0], tuple(arrays[1:]))


def tensors_of(features: Features, sheet: Sheet) -> tuple[dict[str, Tensor], list[Piece]]:
    """Return the tensors of a block of features, on `sheet`, nothing copied yet, and each array's
    place there."""
    tensors: dict[str, Tensor] = {}
    places: list[Piece] = []
    arrays = (features.rows, *features.levels)
    for name, array in zip(_names(len(features.levels)), arrays, strict=True):
        tensors[name], data = sheet.tensor(array.dtype, tuple(array.shape))
        places.append((array, data))
    return tensors, places


def _names(levels: int) -> list[str]:
    """Return the names of the tensors of features, the rows' first."""
    return ["rows.0", *(f"level.{number}" for number in range(levels))]


def _fits(block: PrefixBlock, shape: tuple[int, int], levels: int) -> bool:
    """Return whether a block has features of this form, and nothing else."""
    tensors = block.tensors
    return tensors.keys() == set(_names(levels)) and all(
        tensor.shape == shape and tensor.dtype in TYPES for tensor in tensors.values()
    )


def _parts(tensor: Tensor) -> list[Tensor]:
    """Return a tensor of two axes in parts of about `PART` bytes."""
    rows, width = tensor.shape
    data = tensor.data.reshape(rows, -1)
    most = max(1, PART // max(1, data.shape[1]))
    found: list[NDArray[np.uint8]] = [data[at : at + most] for at in range(0, rows, most)]
    return [Tensor(tensor.dtype, (len(part), width), part.reshape(-1)) for part in found]
