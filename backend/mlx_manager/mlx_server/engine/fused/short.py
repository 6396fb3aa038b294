"""A layer of a gated short convolution, as LFM 2 has it.

Liquid AI, "LFM2 Technical Report" (2025), section 2.1: C * convolution(B * x), of three parts B, C
and x of one product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import mlx.core as mx

from mlx_manager.mlx_server.engine.fused.layers import Block, Part, Shared, Step
from mlx_manager.mlx_server.engine.kv.attention import StepPlan
from mlx_manager.mlx_server.engine.kv.kernels import KernelSet
from mlx_manager.mlx_server.engine.recurrent.kernels import Texts
from mlx_manager.mlx_server.engine.recurrent.shapes import StateStore
from mlx_manager.mlx_server.engine.recurrent.short import ShortKernels


@dataclass(frozen=True, slots=True)
class ShortPart(Part):
    """weights: of the convolution, (taps, channels)."""

    block: Block
    kernels: ShortKernels
    weights: mx.array

    @property
    def kind(self) -> tuple[Any, ...]:
        return (self.kernels.shape,)

    @property
    def unpacked(self) -> Self:
        return replace(self, block=self.block.unpacked)

    @property
    def _own_numbers(self) -> int:
        return self.kernels.shape.channels

    def store(self, page_size: int, kernels: KernelSet) -> StateStore:
        return StateStore(self.kernels.shape)

    def attend(
        self,
        heads: mx.array,
        shared: Shared,
        rotation: int,
        pool: Sequence[mx.array],
        step: Step,
    ) -> mx.array:
        return self.kernels.step(heads, self.weights, pool, shared.lengths, step.slots[0])

    def _attend_ragged(
        self,
        heads: mx.array,
        rotation: mx.array,
        store: StateStore,
        plan: StepPlan,
        texts: Texts | None,
    ) -> mx.array:
        assert texts is not None
        return self.kernels.chunks(heads, self.weights, store, texts)
