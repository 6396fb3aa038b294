"""Arrays of the device as tensors of blocks, and back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_manager.mlx_server.devices.dtypes import dtype_name, dtype_named
from mlx_manager.mlx_server.engine.disk.blocks import Tensor
from mlx_manager.mlx_server.execution.forward import Snapshot

Piece = tuple[mx.array, NDArray[np.uint8]]
"""An array on the device, and the place on the host that it is copied to."""


def on_host(array: mx.array) -> NDArray[np.uint8]:
    """Return an array's bytes, the last axis longer by the size of its numbers."""
    if not array.size:
        return np.empty((*array.shape[:-1], array.shape[-1] * array.dtype.size), np.uint8)
    return np.array(array.view(mx.uint8))


def on_device(tensor: Tensor) -> mx.array:
    """Return a tensor as an array, not evaluated."""
    dtype = dtype_named(tensor.dtype)
    if not tensor.data.nbytes:
        return mx.zeros(tensor.shape, dtype)
    return mx.array(tensor.data).view(dtype).reshape(tensor.shape)


def part_of(tensor: Tensor, slots: slice) -> Tensor:
    """Return a part of the second of three axes."""
    heads, length, dim = tensor.shape
    shape = (heads, slots.stop - slots.start, dim)
    if not tensor.data.nbytes:
        return Tensor(tensor.dtype, shape, tensor.data)
    data = tensor.data.reshape(heads, length, -1)[:, slots]
    return Tensor(tensor.dtype, shape, np.ascontiguousarray(data).reshape(-1))


class Sheet:
    """Memory of a block, of which each tensor gets the next part.

    memory: as large as all tensors together, or larger.
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory
        self._used = 0

    def tensor(self, dtype: mx.Dtype, shape: tuple[int, ...]) -> tuple[Tensor, NDArray[np.uint8]]:
        """Return a tensor with nothing copied yet, and its bytes by rows: the last axis is longer
        by the size of a number."""
        rows = (*shape[:-1], shape[-1] * dtype.size)
        first, self._used = self._used, self._used + math.prod(rows)
        data = self._memory[first : self._used]
        return Tensor(dtype_name(dtype), shape, data), data.reshape(rows)


def state_tensors(snapshot: Snapshot, tensors: dict[str, Tensor], sheet: Sheet) -> Iterator[Piece]:
    """Add a snapshot's arrays to `tensors`, on `sheet`, and yield each with its place there."""
    for layer, leaf in enumerate(snapshot.leaves):
        for part, array in enumerate(leaf):
            name = f"state.{layer}.{part}"
            if array is None:
                tensors[f"{name}.none"] = Tensor("uint8", (0,), np.empty(0, np.uint8))
                continue
            rows = array.reshape(1) if not array.shape else array
            tensor, data = sheet.tensor(rows.dtype, tuple(rows.shape))
            tensors[name] = replace(tensor, shape=tuple(array.shape))
            yield rows, data


def leaves_of(tensors: Mapping[str, Tensor]) -> list[list[mx.array | None]]:
    """Return the arrays of a snapshot that `state_tensors` has added."""
    leaves: list[list[mx.array | None]] = []
    named: dict[tuple[int, int], Any] = {}
    for name, tensor in tensors.items():
        kind, *numbers = name.split(".")
        if kind == "state":
            array = None if numbers[2:] else on_device(tensor)
            named[int(numbers[0]), int(numbers[1])] = array
    for (layer, _), array in sorted(named.items(), key=lambda item: item[0]):
        while len(leaves) <= layer:
            leaves.append([])
        leaves[layer].append(array)
    return leaves
