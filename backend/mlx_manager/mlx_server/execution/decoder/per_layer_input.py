"""Addition of a layer's own input for each token, behind its MLP: see `PerLayerInputSpec`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import mlx.core as mx
from mlx import nn

from mlx_manager.mlx_server.devices.cuda.matmul.factors import RowNorm
from mlx_manager.mlx_server.devices.cuda.matmul.products import ProductKernels
from mlx_manager.mlx_server.execution.decoder.additions import Addition, NormFor, addition_of
from mlx_manager.mlx_server.execution.decoder.projections import Projection, Sum, join
from mlx_manager.mlx_server.execution.spec.layers import PerLayerInputSpec


@dataclass(frozen=True, slots=True)
class PerLayerInput:
    """Gate for a layer's own input, and the product back to the residual. The argument `own` of
    `launches` holds one array, the own input, (tokens, the gate's outputs)."""

    gate: Projection
    back: Addition

    @staticmethod
    def of(
        spec: PerLayerInputSpec, few: ProductKernels | None, norm: NormFor, scale: mx.array | None
    ) -> PerLayerInput:
        """Return the products that `spec` describes. The module's weights become views, as in
        `join`.

        few: kernels that multiply few rows, if the device has any. scale: (1,), the factor of the
        sum.
        """
        gate = join([spec.gate], few)
        return PerLayerInput(gate, addition_of(spec.projection, spec.norm, few, norm, scale))

    def launches(
        self, hidden: mx.array, own: Sequence[mx.array], following: RowNorm | None
    ) -> tuple[list[mx.array], Sum]:
        """Return the intermediate launches and the sum, which is not among them.

        following: the next product's norm, if a part of it is to be done on the way.
        """
        gate = self.gate.alone(hidden)
        gated = _through_gate(gate, *own)
        made, result = self.back.launches(hidden, gated, following)
        return [gate, gated, *made], result

    @property
    def token_numbers(self) -> int:
        """Count of the numbers that are made of a token on the way, without the result, and of the
        numbers of its own input: an embedding and a product, and the results made of these."""
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
