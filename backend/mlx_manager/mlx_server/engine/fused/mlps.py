"""What a layer does behind its attention, and the norm before it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import mlx.core as mx
from mlx import nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from mlx_manager.mlx_server.engine.fused.anatomy import Gates, NotFusable, Routes
from mlx_manager.mlx_server.engine.fused.projections import Projection, Sum, join, packing_of
from mlx_manager.mlx_server.engine.products import ProductKernels
from mlx_manager.mlx_server.engine.products.experts import ExpertKernels
from mlx_manager.mlx_server.engine.products.factors import Experts, Link, Norm, Packed, Weight

NormFor = Callable[[nn.RMSNorm], nn.RMSNorm]
"""What stands for a layer's norm."""
_PARTS = ("weight", "scales", "biases")


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
    """`down(silu(gate) * up)`."""

    norm: nn.RMSNorm
    gate_up: Projection
    down: Projection

    def launches(self, added: Sum, following: Norm | None) -> tuple[list[mx.array], Sum]:
        gated = self.gate_up.gated(added.ahead, self.norm)
        return [gated], self.down.added_to(added.rows, gated, following)

    @property
    def token_numbers(self) -> int:
        gates: int = self.gate_up.weight.shape[-2]
        return gates + gates // 2

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
        return [self.gate_up.link(self.norm), self.down.link()]


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
    anatomy: Gates | Routes, norm: nn.RMSNorm, few: ProductKernels | None, norm_for: NormFor
) -> Mlp:
    """Weights are joined, and those of the module become views of them: see `join`.

    few: what multiplies few rows, if anything does.

    Raises:
        NotFusable: there are experts, and nothing multiplies them.
    """
    if isinstance(anatomy, Gates):
        return GatedMlp(norm_for(norm), join(anatomy.gate_up, few), join([anatomy.down], few))
    if few is None:
        raise NotFusable("experts, for which this device has no kernels")
    pairs = zip(*map(parts_of, anatomy.gate_up), strict=True)
    joined = [mx.stack(list(pair)) for pair in pairs]
    experts = _experts(anatomy, joined, norm.weight.dtype)
    if not few.experts.serves(experts):
        raise NotFusable("experts that the kernels do not serve")
    for number, layer in enumerate(anatomy.gate_up):
        layer.update(dict(zip(_PARTS, (part[number] for part in joined), strict=False)))
    return RoutedMlp(Norm(norm.weight, norm.eps), experts, few.experts)


def _experts(anatomy: Routes, gate_up: Sequence[mx.array], dtype: mx.Dtype) -> Experts:
    """gate_up: the parts of both."""
    return Experts(
        dense(anatomy.router).astype(dtype),
        _flat(anatomy.gate_up[0], gate_up),
        experts_of(anatomy.down),
        anatomy.chosen,
        anatomy.normalised,
    )


def dense(layer: nn.Module) -> mx.array:
    """Its weight."""
    if not isinstance(layer, nn.QuantizedLinear):
        weight: mx.array = layer.weight
        return weight
    of = packing_of(layer)
    return mx.dequantize(of.words, of.scales, of.biases, of.group_size, of.bits, mode=of.mode)


def parts_of(layer: nn.Module) -> list[mx.array]:
    """What experts' weights are in memory, (experts, outputs, ...) each."""
    may_be = [layer.get(name) for name in _PARTS]
    return [part for part in may_be if part is not None]


def experts_of(layer: nn.Module) -> Weight:
    """The weight of all experts, one below the other."""
    return _flat(layer, parts_of(layer))


def _flat(layer: nn.Module, parts: Sequence[mx.array]) -> Weight:
    """`parts` of all experts, one below the other."""
    flat = [part.reshape(-1, part.shape[-1]) for part in parts]
    if isinstance(layer, QuantizedSwitchLinear):
        words, scales, *biases = flat
        kind = (layer.group_size, layer.bits, layer.mode)
        return Packed(words, scales, biases[0] if biases else None, *kind)
    return flat[0]
