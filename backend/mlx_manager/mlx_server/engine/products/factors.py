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
class Link:
    """One product of a chain: `weight` is (outputs, inputs), `bias` (outputs,)."""

    weight: mx.array
    bias: mx.array | None = None
    norm: Norm | None = None
