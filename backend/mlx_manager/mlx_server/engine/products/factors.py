"""What rows are multiplied with."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx


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
class Link:
    """One product of a chain: `weight` is (outputs, inputs), `bias` (outputs,)."""

    weight: mx.array
    bias: mx.array | None = None
    norm: Norm | None = None
