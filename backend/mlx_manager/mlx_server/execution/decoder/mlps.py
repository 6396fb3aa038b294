"""What a layer does behind its attention, and the norm before it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self

import mlx.core as mx
from mlx import nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from mlx_manager.mlx_server.devices.cuda.matmul import ProductKernels
from mlx_manager.mlx_server.devices.cuda.matmul.factors import (
    Activation,
    Experts,
    Link,
    Norm,
    Packed,
    Weight,
)
from mlx_manager.mlx_server.devices.cuda.matmul.forms import PARTS
from mlx_manager.mlx_server.devices.cuda.matmul.sums import SumKernels, Two
from mlx_manager.mlx_server.devices.cuda.moe.experts import ExpertKernels
from mlx_manager.mlx_server.execution.alike import arrays_of, made_of
from mlx_manager.mlx_server.execution.decoder.additions import Addition, NormFor, addition_of
from mlx_manager.mlx_server.execution.decoder.anatomy import (
    AnyMlp,
    Gates,
    GatesAndRoutes,
    Norms,
    NotFusable,
    Routes,
)
from mlx_manager.mlx_server.execution.decoder.projections import (
    Normed,
    Projection,
    Sum,
    join,
    norm_of,
    packing_of,
)


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

    def compare(self) -> None:  # noqa: B027 most have nothing to find out
        """Find out what multiplies many rows soonest, where that is not known."""

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

    def alone(self, hidden: mx.array) -> list[mx.array]:
        """What the experts make of `hidden`'s rows, which are not added, behind what it launches
        for that."""
        return self.kernels(hidden, self.norm, self.experts, alone=True)

    def compare(self) -> None:
        self.kernels.check(self.experts)
        self.kernels.compare(self.experts)

    @property
    def token_numbers(self) -> int:
        of = self.experts
        return of.width + of.chosen * (of.inner + of.width)


@dataclass(frozen=True, slots=True)
class AddedBesideExperts(Addition):
    """What the product gives, and what experts make of the residual: each behind its own of
    `norms`, added up, and added behind a norm of the sum. scale: as in `NormedAndAdded`."""

    routed: RoutedMlp
    norms: tuple[nn.RMSNorm, nn.RMSNorm]
    norm: nn.RMSNorm
    kernels: SumKernels
    scale: mx.array | None

    def launches(
        self, residual: mx.array, x: mx.array, following: Norm | None
    ) -> tuple[list[mx.array], Sum]:
        made = [self.product.alone(x), *self.routed.alone(residual)]
        two = Two(made[0], made[-1], *(norm.weight for norm in self.norms))
        rows, *ahead = self.kernels(residual, two, norm_of(self.norm), following, self.scale)
        return [*made, *ahead], Sum(rows, Normed(ahead[0]) if ahead else rows)

    def compare(self) -> None:
        self.routed.compare()

    @property
    def token_numbers(self) -> int:
        return 2 * self.width + self.routed.token_numbers


def mlp_of(
    anatomy: AnyMlp,
    norms: Norms,
    few: ProductKernels | None,
    norm_for: NormFor,
    scale: mx.array | None = None,
) -> Mlp:
    """Weights are joined, and those of the module become views of them: see `join`.

    norms: around it. few: what multiplies few rows, if anything does. scale: (1,), of the result.

    Raises:
        NotFusable: there are experts, and nothing multiplies them, or a norm is behind them alone.
    """
    match anatomy:
        case Gates():
            down = addition_of(anatomy.down, norms.behind, few, norm_for, scale)
            return _gated(anatomy, down, norm_for(norms.before), few)
        case GatesAndRoutes():
            down = _beside(anatomy, norms, few, scale)
            return _gated(anatomy.gates, down, norm_for(norms.before), few)
        case Routes():
            if norms.behind is not None:
                raise NotFusable("a norm behind experts")
            return _routed(anatomy, norms.before, few)


def _gated(
    anatomy: Gates, down: Addition, norm: nn.RMSNorm, few: ProductKernels | None
) -> GatedMlp:
    return GatedMlp(norm, join(anatomy.gate_up, few), anatomy.activation, down)


def _beside(
    anatomy: GatesAndRoutes, norms: Norms, few: ProductKernels | None, scale: mx.array | None
) -> AddedBesideExperts:
    norm = norms.behind
    if norm is None or any(each.eps != norm.eps for each in anatomy.behind):
        raise NotFusable("norms behind experts and an MLP that differ")
    routed = _routed(anatomy.routes, anatomy.before, few)
    if few is None or not few.sums.serves(norm.weight.size):
        raise NotFusable("experts beside an MLP of a width that the kernels do not serve")
    product = join([anatomy.gates.down], few)
    return AddedBesideExperts(product, routed, anatomy.behind, norm, few.sums, scale)


def _routed(anatomy: Routes, norm: nn.RMSNorm, few: ProductKernels | None) -> RoutedMlp:
    if few is None:
        raise NotFusable("experts, for which this device has no kernels")
    joined, choice = _Joined(anatomy), anatomy.choice
    dtype, shared = norm.weight.dtype, joined.times
    experts = Experts(
        joined.router.astype(dtype),
        flat(made_of(stored_in(anatomy.gate_up[0]), joined.gates_and_ups)),
        flat(made_of(stored_in(anatomy.down), joined.down)),
        choice.chosen + shared,
        choice.normalised,
        anatomy.activation,
        anatomy.router.bias.astype(dtype) if "bias" in anatomy.router else None,
        _biases(anatomy, dtype),
        shared,
        choice.scoring,
        None if choice.correction is None else choice.correction.astype(mx.float32),
        choice.scale,
        choice.least,
        None if anatomy.router_norm is None else anatomy.router_norm.astype(dtype),
        None if choice.scales is None else choice.scales.astype(mx.float32),
    )
    if not few.experts.serves(experts):
        raise NotFusable("experts that the kernels do not serve")
    joined.hand_back()
    return RoutedMlp(norm_of(norm), experts, few.experts)


class _Joined:
    """Arrays of a layer's experts, lazily, those that all rows share behind the others.

    gates_and_ups: (2, experts, inner, ...). down: (experts, width, ...). router: (experts, width),
    without the shared if these have no gate. times: how many are shared.
    """

    def __init__(self, anatomy: Routes) -> None:
        self._anatomy = anatomy
        shared = self._shared = anatomy.shared
        self.times = 0 if shared is None else shared.times
        pairs = [arrays_of(stored_in(layer)) for layer in anatomy.gate_up]
        self.down = arrays_of(stored_in(anatomy.down))
        self.router = _dense(anatomy.router)
        if shared is not None:
            for layer, arrays in zip(shared.gate_up, pairs, strict=True):
                arrays[:] = map(self._behind, arrays, arrays_of(stored_in(layer)))
            own = arrays_of(stored_in(shared.down))
            parts = [each.reshape(each.shape[0], self.times, -1).swapaxes(0, 1) for each in own]
            self.down = [mx.concatenate(list(both)) for both in zip(self.down, parts, strict=True)]
            if shared.gate is not None:
                gates = mx.repeat(_dense(shared.gate), self.times, axis=0)
                self.router = mx.concatenate([self.router, gates.astype(self.router.dtype)])
        self.gates_and_ups = [mx.stack(list(pair)) for pair in zip(*pairs, strict=True)]

    def _behind(self, experts: mx.array, shared: mx.array) -> mx.array:
        return mx.concatenate([experts, shared.reshape(self.times, *experts.shape[1:])])

    def hand_back(self) -> None:
        """The module's weights become views of these."""
        of, shared = self._anatomy, self._shared
        for number, layer in enumerate(of.gate_up):
            _give(
                layer, [part[number, : part.shape[1] - self.times] for part in self.gates_and_ups]
            )
        if shared is None:
            return
        _give(of.down, [part[: -self.times] for part in self.down])
        for number, layer in enumerate(shared.gate_up):
            last = [part[number, -self.times :] for part in self.gates_and_ups]
            _give(layer, [part.reshape(-1, part.shape[-1]) for part in last])
        if self.times == 1:
            # Of others lines would be in pieces.
            _give(shared.down, [part[-1] for part in self.down])


def _dense(layer: nn.Module) -> mx.array:
    weight = stored_in(layer)
    return weight.dense if isinstance(weight, Packed) else weight


def _give(layer: nn.Module, arrays: list[mx.array]) -> None:
    layer.update(dict(zip(PARTS, arrays, strict=False)))


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
