"""Rotary embedding on a CPU, with the part that all layers share computed once a step.

MLX has no CPU kernel for it: each call computes frequencies, sines and cosines anew, some twenty
operations, twice a layer. A rotation is linear, and for pairs (i, j) of elements it is

    y = x * cos + (x @ turn) * sin        where `turn` takes x_j to -y_i and x_i to y_j

so with `cos` and `sin` at hand, which depend on the positions alone, it is four operations. Both
are read off the model's own rotation, whatever scaling of frequencies or amplitudes it does.
"""

from __future__ import annotations

import logging
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

log = logging.getLogger(__name__)


class SharedRotation:
    """One kind of rotation of a model, for vectors of `dim` elements.

    Raises:
        ValueError: `rope` mixes more elements than pairs.
    """

    def __init__(self, rope: nn.Module, dim: int) -> None:
        self._rope = rope
        # The image of each unit vector, at a position where every pair has visibly turned.
        turned = np.array(rope(mx.eye(dim)[None, :, None, :], offset=7))[0, :, 0, :]
        off_diagonal = turned * (1 - np.eye(dim))
        if (np.count_nonzero(off_diagonal, axis=1) > 1).any():
            raise ValueError("this rotation mixes more than pairs")
        partner = np.where(off_diagonal.any(axis=1), np.abs(off_diagonal).argmax(1), np.arange(dim))
        first = np.minimum(np.arange(dim), partner)
        second = np.maximum(np.arange(dim), partner)
        paired = first != second
        turn = np.zeros((dim, dim), np.float32)
        turn[second[paired], first[paired]] = -1
        turn[first[paired], second[paired]] = 1
        self._turn = mx.array(turn)
        self._basis = mx.array((np.arange(dim) == first).astype(np.float32))
        self._cosines = mx.array(first.astype(np.int32))
        self._sines = mx.array(second.astype(np.int32))
        self._paired = mx.array(paired.astype(np.float32))
        self._positions: mx.array | None = None
        self._tables: tuple[mx.array, mx.array] | None = None

    def __call__(self, x: mx.array, positions: mx.array) -> mx.array:
        """Rotate (rows, heads, 1, dim) by positions (rows,)."""
        if self._tables is None or self._positions is not positions:
            every = mx.broadcast_to(self._basis, (positions.size, 1, 1, self._basis.size))
            out = self._rope(every, offset=positions)
            self._tables = out[..., self._cosines], out[..., self._sines] * self._paired
            self._positions = positions
        cosines, sines = self._tables
        return x * cosines + (x @ self._turn) * sines


class StepRope(nn.Module):  # type: ignore[misc] # mlx is not typed
    """Replacement of a module's `rope`, which uses the shared tables in ragged steps."""

    def __init__(self, rope: nn.Module, shared: SharedRotation, dim: int) -> None:
        super().__init__()
        self._own = rope
        self._shared = shared
        self._dim = dim

    def __call__(self, x: mx.array, offset: mx.array | int = 0) -> mx.array:
        ours = x.dtype == mx.float32 and x.shape[2:] == (1, self._dim)
        if ours and isinstance(offset, mx.array):
            return self._shared(x, offset)
        out: mx.array = self._own(x, offset=offset)
        return out


def share_rotations(model: nn.Module, dim: int) -> None:
    """Make all layers of `model` with the same rotation share it. `dim` is that of their keys."""
    kinds: dict[tuple[Any, ...], SharedRotation] = {}
    for module in model.modules():
        rope = module.get("rope")
        if not isinstance(rope, nn.Module) or isinstance(rope, StepRope):
            continue
        kind = _kind(rope)
        try:
            if kind not in kinds:
                kinds[kind] = SharedRotation(rope, dim)
        except ValueError as reason:
            log.debug("a rotation is not shared: %s", reason)
            continue
        module.rope = StepRope(rope, kinds[kind], dim)


def _kind(rope: nn.Module) -> tuple[Any, ...]:
    """Return a key that is equal for rotations that turn alike."""
    numbers = {
        name: np.array(value).tobytes() if isinstance(value, mx.array) else value
        for name, value in {**vars(rope), **rope}.items()
        if name not in ("_no_grad", "_training")
    }
    return (type(rope), repr(sorted(numbers.items())))
