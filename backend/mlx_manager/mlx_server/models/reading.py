"""How a model's weights come from their files into an NVIDIA GPU's memory, while others step.

Elsewhere MLX reads files on a thread of its own.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from mlx_manager.mlx_server.models.weight_files import StoredTensor, WeightFiles, headers_of
from mlx_manager.mlx_server.models.weights import default_device, in_groups
from mlx_manager.mlx_server.utils.steps import Steps, beside, in_turns
from mlx_manager.mlx_server.utils.transfer import Stretch, Transfer

log = logging.getLogger(__name__)
Headers = Mapping[Path, Mapping[str, StoredTensor]]

AT_ONCE = 2**29
"""Bytes that are brought in one go: what the end of the program waits for."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A parameter as it lies in a file, from byte `start` on. paths: where the model has it."""

    array: mx.array
    file: Path
    start: int
    paths: tuple[str, ...]


def read(model: nn.Module, found: Mapping[str, mx.array], weights: WeightFiles) -> Steps[None]:
    """Give `model` those of its parameters that are as in the files, past MLX; it reads the others.

    found: the files' arrays by name, not evaluated.

    Raises:
        OSError, RuntimeError: a file can't be read, or the driver refuses.
    """
    if default_device() != "cuda":
        return
    transfer = yield from _opened()
    if transfer is None:
        return
    try:
        headers = yield from beside(partial(headers_of, weights))
        stored = as_stored(model, found, headers)
        rooms = [room(one.array.nbytes) for one in stored]
        yield from in_turns(map(_queue, rooms))
        places = addresses([place for _, place in rooms])
        stretches = [
            Stretch(one.file, one.start, one.array.nbytes, place)
            for one, place in zip(stored, places, strict=True)
        ]
        for some in in_groups(stretches, AT_ONCE):
            yield from beside(partial(transfer.copy, some))
    finally:
        transfer.close()
    fresh = [
        (path, space.view(one.array.dtype).reshape(one.array.shape))
        for one, (space, _) in zip(stored, rooms, strict=True)
        for path in one.paths
    ]
    model.update(tree_unflatten(fresh))


def _opened() -> Steps[Transfer | None]:
    """None where MLX has to read; the log says why."""
    transfer = None
    try:
        transfer = Transfer()
        yield from beside(transfer.open)
    except (AttributeError, OSError, RuntimeError) as error:
        log.info("MLX reads the weights, and nobody steps meanwhile: %s", error)
        if transfer is not None:
            transfer.close()
        return None
    return transfer


def as_stored(model: nn.Module, found: Mapping[str, mx.array], headers: Headers) -> list[Stored]:
    """The parameters that are arrays of the files, in the order that they lie in there."""
    names = Counter(name for tensors in headers.values() for name in tensors)
    places: dict[int, tuple[Path, int]] = {}
    for file, tensors in headers.items():
        for name, tensor in tensors.items():
            array, nbytes = found.get(name), tensor.end - tensor.start
            # Of two files' tensors of one name, one has been taken.
            if array is not None and array.nbytes == nbytes > 0 and names[name] == 1:
                places[id(array)] = (file, tensor.start)
    paths: dict[int, list[str]] = {}
    for path, array in tree_flatten(model.parameters()):
        paths.setdefault(id(array), []).append(path)
    stored = [
        Stored(array, *places[id(array)], tuple(paths[id(array)]))
        for array in found.values()
        if id(array) in places and id(array) in paths
    ]
    return sorted(stored, key=lambda one: (one.file, one.start))


def room(nbytes: int) -> tuple[mx.array, mx.array]:
    """Memory of the GPU's, and an array that tells where it is: (2,) uint32, its address's halves.
    Neither is evaluated."""
    word = mx.uint32 if nbytes % 4 == 0 else mx.uint8
    space, place = _room_kernel()(
        inputs=[mx.zeros((1,), mx.uint32)],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[(nbytes // word.size,), (2,)],
        output_dtypes=[word, mx.uint32],
    )
    return space, place


def _queue(arrays: tuple[mx.array, ...]) -> None:
    mx.async_eval(*arrays)  # type: ignore[no-untyped-call]


@cache
def _room_kernel() -> Callable[..., list[mx.array]]:
    kernel: Callable[..., list[mx.array]] = mx.fast.cuda_kernel(  # type: ignore[assignment]
        name="room_for_a_tensor",
        input_names=["unused"],
        output_names=["space", "place"],
        source=(
            "const unsigned long long at = reinterpret_cast<unsigned long long>(space);\n"
            "place[0] = static_cast<unsigned>(at);\n"
            "place[1] = static_cast<unsigned>(at >> 32);"
        ),
    )
    return kernel


def addresses(places: Sequence[mx.array]) -> list[int]:
    """What arrays of `room` tell."""
    if not places:
        return []
    halves: list[int] = mx.concatenate(list(places)).tolist()  # type: ignore[assignment]
    return [low | high << 32 for low, high in zip(halves[::2], halves[1::2], strict=True)]
