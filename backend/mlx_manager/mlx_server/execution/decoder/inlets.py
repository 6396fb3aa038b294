"""What a layer takes of its own of each token, behind its MLP: see `anatomy.Inlet`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import mlx.core as mx
from mlx import nn

from mlx_manager.mlx_server.devices.cuda.matmul import ProductKernels
from mlx_manager.mlx_server.devices.cuda.matmul.factors import Norm
from mlx_manager.mlx_server.execution.decoder.additions import Addition, NormFor, addition_of
from mlx_manager.mlx_server.execution.decoder.anatomy import Inlet
from mlx_manager.mlx_server.execution.decoder.projections import Projection, Sum, join


@dataclass(frozen=True, slots=True)
class Intake:
    """A gate, and the way back. `own` of its method is one array, (tokens, the gate's outputs)."""

    gate: Projection
    back: Addition

    @staticmethod
    def of(
        inlet: Inlet, few: ProductKernels | None, norm: NormFor, scale: mx.array | None
    ) -> Intake:
        """Its weights become views, as in `join`. few: what multiplies few rows, if anything does.
        scale: (1,), of the sum."""
        gate = join([inlet.gate], few)
        return Intake(gate, addition_of(inlet.back, inlet.norm, few, norm, scale))

    def launches(
        self, hidden: mx.array, own: Sequence[mx.array], following: Norm | None
    ) -> tuple[list[mx.array], Sum]:
        """What it launches, but for `hidden` and what is added to it; and that. following: what the
        next product expects of it."""
        gate = self.gate.alone(hidden)
        gated = _through_gate(gate, *own)
        made, result = self.back.launches(hidden, gated, following)
        return [gate, gated, *made], result

    @property
    def token_numbers(self) -> int:
        """Numbers that are made of a token on the way, without the result; and of its own input, an
        embedding and a product, and what these make."""
        width: int = self.gate.weight.shape[-2]
        return 5 * width + self.back.width + self.back.token_numbers

    @property
    def unpacked(self) -> Self:
        return replace(self, gate=self.gate.unpacked, back=self.back.unpacked)

    @property
    def unpacked_bytes(self) -> int:
        return self.gate.unpacked_bytes + self.back.unpacked_bytes


@partial(mx.compile, shapeless=True)
def _through_gate(gate: mx.array, own: mx.array) -> mx.array:
    through: mx.array = nn.gelu_approx(gate) * own
    return through
