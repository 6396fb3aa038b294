"""What rows are multiplied with."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import mlx.core as mx


class Activation(Enum):
    """What an MLP makes of a gate and an up; the value is its name in device.cu.

    GELU is the approximation by a tanh, times the up. CLAMPED_SILU is that of GPT-OSS:
    `mlx_lm.models.activations.swiglu_oai`.
    """

    SILU = "Silu"
    GELU = "Gelu"
    CLAMPED_SILU = "ClampedSilu"


LEAST = 1e-20
"""See `Experts.least`: that of most models."""


class Scoring(Enum):
    """What experts' scores are of their logits; the value is its name in route.cu."""

    SOFTMAX = "kSoftmax"
    SIGMOID = "kSigmoid"


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm of the rows before the product; `weight` is (inputs,)."""

    weight: mx.array
    epsilon: float


@dataclass(frozen=True, slots=True)
class Scaled:
    """Rows for which the product that made them did a norm's part.

    rows: (rows, inputs), times the norm's weights. squares: (rows, blocks) float32, sums of squares
        before that, of what each of the product's blocks gave; an even number of blocks.
    """

    rows: mx.array
    squares: mx.array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows.shape

    @property
    def makers(self) -> int:
        """Blocks that have made the rows."""
        return self.squares.shape[1]


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight as `mx.quantize` packs it.

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
        """Of the scales, hence of what it stands for, but for modes that have scales of 8 bits."""
        return self.scales.dtype

    @property
    def dense(self) -> mx.array:
        """What it stands for; not evaluated."""
        return mx.dequantize(
            self.words, self.scales, self.biases, self.group_size, self.bits, mode=self.mode
        )

    def times(self, x: mx.array) -> mx.array:
        """The product with rows `x`, (..., rows, inputs), by MLX: (..., rows, outputs). Where the
        arrays are of several matrices, so is `x`."""
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
"""What rows are multiplied with: numbers of half precision, (outputs, inputs), or packed ones."""


def arrays_of(weight: Weight) -> list[mx.array]:
    if isinstance(weight, Packed):
        may_be = (weight.words, weight.scales, weight.biases)
        return [array for array in may_be if array is not None]
    return [weight]


@dataclass(frozen=True, slots=True)
class Experts:
    """MLPs of one size, of which each row goes through the `chosen` that its router gives the
    largest scores.

    router: (experts, width), or without those that are shared. gate_up: (2 * experts * inner,
        width), the gates of all experts and then the ups. down: (experts * width, inner).
    normalised: what a row's experts give is weighted by their scores over the sum of these: of a
        softmax, that of their logits alone; otherwise by the scores as they are among all experts'.
    router_bias: (experts,), of logits. biases: of `gate_up` and of `down`, a number for each of
        their lines.
    shared: so many of the experts, the last, are every row's, and are among the `chosen`; what they
        give is weighted by the sigmoids of their logits, or by 1 where the router has none.
    correction: (experts that are not shared,) float32, added to scores, which are sigmoids then,
        for the choice alone. scale: of the weights of experts that are not shared. least: what is
        added to the sum of a row's scores where these are sigmoids, so that it is not 0.
    router_norm: (width,), the weights of the norm before the router where they are others than
        those before the experts. scales: (experts that are not shared,) float32, what their weights
        are multiplied by besides.
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
    scoring: Scoring = Scoring.SOFTMAX
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
        """Whether the router has logits of all experts."""
        return self.router.shape[0] == self.count

    @property
    def width(self) -> int:
        return self.router.shape[1]

    @property
    def inner(self) -> int:
        return self.down.shape[1]


@dataclass(frozen=True, slots=True)
class Link:
    """One product of a chain: `bias` is (outputs,). activation: of gates and ups."""

    weight: Weight
    bias: mx.array | None = None
    norm: Norm | None = None
    activation: Activation = Activation.SILU
