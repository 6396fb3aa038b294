"""Rotations of heads (RoPE), computed as mlx-lm's modules compute them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.rope_utils import Llama3RoPE, ProportionalRoPE, SuScaledRoPE, YarnRoPE
from numpy.typing import NDArray

from mlx_manager.mlx_server.devices.attention.kernel import Rotary
from mlx_manager.mlx_server.execution.images import MRope
from mlx_manager.mlx_server.execution.spec.parts import expect, is_one_of
from mlx_manager.mlx_server.models.families import MODULES

_ROPES = (nn.RoPE, Llama3RoPE, YarnRoPE, SuScaledRoPE, ProportionalRoPE)
# Rotated elements of a rotation that does nothing, which is taken for one of frequency 0.
_UNTURNED = 16


@dataclass(frozen=True, slots=True)
class Rotation:
    """One kind of rotation of the model: cosines and sines for `PagedKernels.attend_fused`.

    frequencies: (dims / 2,) float32 radians a position. amplitude: the factor of all pairs. axes:
    (dims / 2,), the axis by whose position each pair turns; None where positions have one axis.

    Cosines and sines are computed here, since MLX's own kernel gives wrong rows on CUDA for arrays
    that are not contiguous (mlx-lm pull request 1896), and single-token batches have been wrong
    before (mlx issues 3494, 3949).
    """

    frequencies: mx.array
    amplitude: float
    traditional: bool
    axes: NDArray[np.int32] | None
    # For each number of a rotation: the frequency that it comes from, whether it is a cosine, and
    # its axis, where there are several.
    _turns: mx.array
    _cosine: mx.array
    _axes: mx.array | None

    @staticmethod
    def of(rope: nn.Module, rotary: Rotary, mrope: MRope | None = None) -> Rotation:
        """Return the rotation of a module.

        rotary: the elements that `rope` rotates. mrope: the axes of positions, if there are
        several.

        Raises:
            NotFusable: `rope` turns otherwise.
        """
        match rope:
            case nn.RoPE():
                turns = np.arange(0, rotary.dims, 2) / rotary.dims
                frequencies, amplitude = rope.base**-turns * rope.scale, 1.0
            case _ if is_one_of(rope, MODULES.unrotated):
                frequencies, amplitude = np.zeros(rotary.dims // 2), 1.0
            case SuScaledRoPE():
                frequencies, amplitude = 1 / np.array(rope._freqs, np.float64), rope._scale
            case YarnRoPE():
                frequencies, amplitude = 1 / np.array(rope._freqs, np.float64), rope.mscale
            case _:
                frequencies, amplitude = 1 / np.array(rope._freqs, np.float64), 1.0
        places = np.arange(rotary.dims)
        half = rotary.dims // 2
        pair, cosine = places % half, places < half
        if rotary.traditional:
            pair, cosine = places // 2, places % 2 == 0
        turns = frequencies.astype(np.float32)
        # The result of an operation lies in the device's memory. An array from the host lies in
        # memory that the device has to fetch at each use.
        own, by_number = mx.array(turns) * 1, mx.array(turns[pair]) * 1
        is_cosine = mx.logical_not(mx.array(~cosine))
        axes = None if mrope is None else mrope.axes(half)
        by_axis = None if axes is None else mx.array(axes[pair])
        mx.eval(own, by_number, is_cosine, by_axis)
        rotation = Rotation(own, amplitude, rotary.traditional, axes, by_number, is_cosine, by_axis)
        rotation._expect_as_of(rope)
        return rotation

    def __call__(self, positions: mx.array) -> mx.array:
        """Return the rotation of pairs (1, 0), (rows, dims) float32, for positions (rows,), or
        (3, rows) where axes differ.

        Compiled, the first is one kernel, since each number is computed by itself.
        """
        angles = by_axes(positions, self._axes).astype(mx.float32) * self._turns
        rotation = mx.where(self._cosine, mx.cos(angles), mx.sin(angles))
        return rotation if self.amplitude == 1.0 else rotation * self.amplitude

    def turn(self, x: mx.array, positions: mx.array, *, chunk: bool) -> mx.array:
        """Return `x` rotated as a module rotates it: (tokens, heads, 1, dim), or (1, heads, tokens,
        dim) for a chunk.

        positions: (tokens,) or (3, tokens).
        """
        by = self(positions)
        by = by[None, None] if chunk else by[:, None, None]
        dims = by.shape[-1]
        own, rest = x[..., :dims].astype(mx.float32), x[..., dims:]
        if self.traditional:
            (a, b), (cosines, sines) = ((y[..., ::2], y[..., 1::2]) for y in (own, by))
            pairs = [a * cosines - b * sines, a * sines + b * cosines]
            turned = mx.stack(pairs, axis=-1).reshape(own.shape)
        else:
            (a, b), (cosines, sines) = mx.split(own, 2, axis=-1), mx.split(by, 2, axis=-1)
            turned = mx.concatenate([a * cosines - b * sines, a * sines + b * cosines], axis=-1)
        return mx.concatenate([turned.astype(x.dtype), rest], axis=-1)

    def _expect_as_of(self, rope: nn.Module) -> None:
        """Compare with the module's own rotation of one row.

        Raises:
            NotFusable: the rotations differ.
        """
        basis = self._cosine.astype(mx.float32)[None, None, None]
        for position in (0, 1, 777):
            theirs = np.array(rope(basis, offset=position))[0, 0, 0]
            ours = np.array(self(mx.array([position])))[0]
            expect(bool(np.abs(theirs - ours).max() < 2e-3), "a rotation that turns otherwise")


def by_axes(positions: mx.array, axes: mx.array | None) -> mx.array:
    """Return positions that are to be multiplied by frequencies: (rows, 1) of positions (rows,), or
    (rows, numbers) of positions (3, rows), each number's by its axis of `axes`, (numbers,)."""
    if positions.ndim == 1:
        return positions[:, None]
    assert axes is not None
    return positions[axes].T


def is_known(rope: nn.Module) -> bool:
    return isinstance(rope, _ROPES) or is_one_of(rope, MODULES.unrotated)


def turned(rope: nn.Module) -> tuple[int, bool]:
    """Return the number of elements of a head that `rope` rotates, and whether pairs are
    neighbours."""
    match rope:
        case _ if is_one_of(rope, MODULES.unrotated):
            return _UNTURNED, False
        case SuScaledRoPE():
            return rope.dim, False
        case _:
            return rope.dims, rope.traditional


def kind_of(rope: nn.Module) -> tuple[Any, ...]:
    """Return a key that is equal for rotations that turn alike."""
    numbers = {name: bytes(np.array(array)) for name, array in dict(rope).items()}
    constants = {name: value for name, value in vars(rope).items() if not name.startswith("_no")}
    return (type(rope), repr(sorted(constants.items())), repr(sorted(numbers.items())))
