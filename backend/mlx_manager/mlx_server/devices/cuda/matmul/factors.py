"""Operands of a step's products: weights, norms, experts, and the links of a chain."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import mlx.core as mx


class Activation(Enum):
    """Activation of an MLP, applied to a gate and an up; the value is its name in device.cu.

    GELU is the approximation by a tanh, times the up. CLAMPED_SILU is the activation of GPT-OSS:
    `mlx_lm.models.activations.swiglu_oai`.
    """

    SILU = "Silu"
    GELU = "Gelu"
    CLAMPED_SILU = "ClampedSilu"


LEAST = 1e-20
"""Value of `Experts.least` for most models."""


class ExpertScoring(Enum):
    """Function from logits to experts' scores; the value is its name in route.cu."""

    SOFTMAX = "kSoftmax"
    SIGMOID = "kSigmoid"


@dataclass(frozen=True, slots=True)
class RowNorm:
    """An RMS norm of the rows before the product; `weight` is (inputs,)."""

    weight: mx.array
    epsilon: float


@dataclass(frozen=True, slots=True)
class Scaled:
    """Rows for which the product that made them has done part of a norm.

    rows: (rows, inputs), already multiplied by the norm's weights. squares: (rows, blocks) float32,
        the sum of squares of each block's outputs before that multiplication; the number of blocks
        is even.
    """

    rows: mx.array
    squares: mx.array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows.shape

    @property
    def makers(self) -> int:
        """Number of blocks that have made the rows."""
        return self.squares.shape[1]


@dataclass(frozen=True, slots=True)
class Packed:
    """Weight as `mx.quantize` packs it.

    words: (outputs, inputs * bits / 32) uint32. scales, biases: (outputs, inputs / group_size);
    there are biases in the affine mode alone.
    """

    words: mx.array
    scales: mx.array
    biases: mx.array | None
    group_size: int
    bits: int
    mode: str = "affine"

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        outputs, words = self.words.shape
        return outputs, words * 32 // self.bits

    @property
    def dtype(self) -> mx.Dtype:
        """Type of the scales: that of the dense weight, except in modes with scales of 8 bits."""
        return self.scales.dtype

    @property
    def dense(self) -> mx.array:
        """Dequantized weight; not evaluated."""
        return mx.dequantize(
            self.words, self.scales, self.biases, self.group_size, self.bits, mode=self.mode
        )

    def times(self, x: mx.array) -> mx.array:
        """Return MLX's product with rows `x`, (..., rows, inputs): (..., rows, outputs).

        If the arrays are of several matrices, `x` has rows for each.
        """
        return mx.quantized_matmul(
            x,
            self.words,
            scales=self.scales,
            biases=self.biases,
            transpose=True,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
        )


Weight = mx.array | Packed
"""Matrix that rows are multiplied with: half precision, (outputs, inputs), or packed."""


def arrays_of(weight: Weight) -> list[mx.array]:
    if isinstance(weight, Packed):
        may_be = (weight.words, weight.scales, weight.biases)
        return [array for array in may_be if array is not None]
    return [weight]


@dataclass(frozen=True, slots=True)
class Experts:
    """MLPs of one size; each row goes through the `chosen` ones with the largest router scores.

    router: (experts, width); the lines of shared experts may be missing. gate_up: (2 * experts *
        inner, width), the gates of all experts and then the ups. down: (experts * width, inner).
    normalised: the outputs of a row's experts are weighted by their scores divided by the sum of
        these scores (for a softmax: by the softmax of the chosen experts' logits). Otherwise the
        weights are the scores among all experts.
    router_bias: (experts,), bias of the logits. biases: biases of `gate_up` and of `down`, a number
        for each line of the matrix.
    shared: number of shared experts. Every row goes through them; they are the last of the experts,
        and count among the `chosen`. Their outputs are weighted by the sigmoids of their logits, or
        by 1 if the router has no logits for them.
    correction: (experts that are not shared,) float32, added to the scores (then sigmoids) for the
        choice only. scale: factor of the weights of experts that are not shared. least: number
        added to the sum of a row's sigmoid scores, so that the sum is not 0.
    router_norm: (width,), weights of the norm before the router, if they differ from those of the
        norm before the experts. scales: (experts that are not shared,) float32, additional factors
        of the experts' weights.
    """

    router: mx.array
    gate_up: Weight
    down: Weight
    chosen: int
    normalised: bool
    activation: Activation = Activation.SILU
    router_bias: mx.array | None = None
    biases: tuple[mx.array, mx.array] | None = None
    shared: int = 0
    scoring: ExpertScoring = ExpertScoring.SOFTMAX
    correction: mx.array | None = None
    scale: float = 1.0
    least: float = LEAST
    router_norm: mx.array | None = None
    scales: mx.array | None = None

    @property
    def count(self) -> int:
        return self.down.shape[0] // self.width

    @property
    def gated(self) -> bool:
        """Return whether the router has logits of all experts, the shared ones included."""
        return self.router.shape[0] == self.count

    @property
    def width(self) -> int:
        return self.router.shape[1]

    @property
    def inner(self) -> int:
        return self.down.shape[1]


@dataclass(frozen=True, slots=True)
class Link:
    """One product of a chain. `bias`: (outputs,). `activation`: activation of gates and ups."""

    weight: Weight
    bias: mx.array | None = None
    norm: RowNorm | None = None
    activation: Activation = Activation.SILU
