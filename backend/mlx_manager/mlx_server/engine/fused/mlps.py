"""What a layer does behind its attention, and the norm before it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self

import mlx.core as mx
from mlx import nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from mlx_manager.mlx_server.engine.alike import arrays_of, made_of
from mlx_manager.mlx_server.engine.fused.additions import Addition, NormFor, addition_of
from mlx_manager.mlx_server.engine.fused.anatomy import Gates, Norms, NotFusable, Routes
from mlx_manager.mlx_server.engine.fused.projections import (
    Projection,
    Sum,
    join,
    norm_of,
    packing_of,
)
from mlx_manager.mlx_server.engine.products import ProductKernels
from mlx_manager.mlx_server.engine.products.experts import ExpertKernels
from mlx_manager.mlx_server.engine.products.factors import (
    Activation,
    Experts,
    Link,
    Norm,
    Packed,
    Weight,
)
from mlx_manager.mlx_server.engine.products.forms import PARTS


class Mlp(ABC):
    """`hidden` plus what the layer makes of its norm."""

    __slots__ = ()

    @abstractmethod
    def launches(self, added: Sum, following: Norm | None) -> tuple[list[mx.array], Sum]:
        """What it launches, but for the result; and that. added: what attention gave, added up.
        following: what the next product expects of the result."""

    @property
    @abstractmethod
    def token_numbers(self) -> int:
        """Numbers that are made of a token on the way, without the result."""

    @property
    def unpacked(self) -> Self:
        """The same with dense weights for what is packed, where many rows are multiplied sooner
        so; see `FewOrMany.unpacked`."""
        return self

    @property
    def unpacked_bytes(self) -> int:
        return 0

    def by_groups(self, rows: int) -> bool:
        """Whether it multiplies so many by warpgroups."""
        return False

    def expected(self) -> Norm | None:
        """What who makes few rows may do a part of."""
        return None

    def links(self) -> list[Link | None]:
        """Its products, as parts of a chain, if they may be."""
        return [None]


@dataclass(frozen=True, slots=True)
class GatedMlp(Mlp):
    """`activation` of gate and up, and the way down."""

    norm: nn.RMSNorm
    gate_up: Projection
    activation: Activation
    down: Addition

    def launches(self, added: Sum, following: Norm | None) -> tuple[list[mx.array], Sum]:
        gated = self.gate_up.gated(added.ahead, self.norm, self.activation)
        made, result = self.down.launches(added.rows, gated, following)
        return [gated, *made], result

    @property
    def token_numbers(self) -> int:
        gates: int = self.gate_up.weight.shape[-2]
        return gates + gates // 2 + self.down.token_numbers

    @property
    def unpacked(self) -> Self:
        return replace(self, gate_up=self.gate_up.unpacked, down=self.down.unpacked)

    @property
    def unpacked_bytes(self) -> int:
        return self.gate_up.unpacked_bytes + self.down.unpacked_bytes

    def by_groups(self, rows: int) -> bool:
        return self.gate_up.by_groups(rows)

    def expected(self) -> Norm | None:
        return self.gate_up.expected(self.norm)

    def links(self) -> list[Link | None]:
        return [self.gate_up.link(self.norm, self.activation), self.down.link()]


@dataclass(frozen=True, slots=True)
class RoutedMlp(Mlp):
    """Experts, by kernels of ours."""

    norm: Norm
    experts: Experts
    kernels: ExpertKernels

    def launches(self, added: Sum, following: Norm | None) -> tuple[list[mx.array], Sum]:
        *made, result = self.kernels(added.rows, self.norm, self.experts)
        return made, Sum.alone(result)

    @property
    def token_numbers(self) -> int:
        of = self.experts
        return of.width + of.chosen * (of.inner + of.width)


def mlp_of(
    anatomy: Gates | Routes, norms: Norms, few: ProductKernels | None, norm_for: NormFor
) -> Mlp:
    """Weights are joined, and those of the module become views of them: see `join`.

    norms: around it. few: what multiplies few rows, if anything does.

    Raises:
        NotFusable: there are experts, and nothing multiplies them, or a norm is behind them.
    """
    norm = norms.before
    if isinstance(anatomy, Gates):
        return GatedMlp(
            norm_for(norm),
            join(anatomy.gate_up, few),
            anatomy.activation,
            addition_of(anatomy.down, norms.behind, few, norm_for),
        )
    if norms.behind is not None:
        raise NotFusable("a norm behind experts")
    if few is None:
        raise NotFusable("experts, for which this device has no kernels")
    stored = [stored_in(layer) for layer in anatomy.gate_up]
    parts = [mx.stack(list(pair)) for pair in zip(*map(arrays_of, stored), strict=True)]
    router = stored_in(anatomy.router)
    dtype = norm.weight.dtype
    experts = Experts(
        (router.dense if isinstance(router, Packed) else router).astype(dtype),
        flat(made_of(stored[0], parts)),
        flat(stored_in(anatomy.down)),
        anatomy.chosen,
        anatomy.normalised,
        anatomy.activation,
        anatomy.router.bias.astype(dtype) if "bias" in anatomy.router else None,
        _biases(anatomy, dtype),
    )
    if not few.experts.serves(experts):
        raise NotFusable("experts that the kernels do not serve")
    for number, layer in enumerate(anatomy.gate_up):
        layer.update(dict(zip(PARTS, (part[number] for part in parts), strict=False)))
    return RoutedMlp(norm_of(norm), experts, few.experts)


def _biases(anatomy: Routes, dtype: mx.Dtype) -> tuple[mx.array, mx.array] | None:
    """As `Experts` has them: all three layers have some, or none has."""
    if "bias" not in anatomy.down:
        return None
    gates, ups, downs = (
        layer.bias.astype(dtype).reshape(-1) for layer in (*anatomy.gate_up, anatomy.down)
    )
    return mx.concatenate([gates, ups]), downs


def stored_in(layer: nn.Module) -> Weight:
    """A layer's weight as it is stored: of experts (experts, outputs, ...)."""
    is_packed = isinstance(layer, nn.QuantizedLinear | QuantizedSwitchLinear)
    return packing_of(layer) if is_packed else layer.weight


def flat(weight: Weight) -> Weight:
    """Experts' `weight`, one expert below the other."""
    return made_of(weight, [part.reshape(-1, part.shape[-1]) for part in arrays_of(weight)])
