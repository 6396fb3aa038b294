"""MLPs of a layer, or their replacements, with the norm before them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self

import mlx.core as mx
from mlx import nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from mlx_manager.mlx_server.devices.cuda.matmul.factors import (
    Activation,
    Experts,
    Link,
    Packed,
    RowNorm,
    Weight,
)
from mlx_manager.mlx_server.devices.cuda.matmul.forms import PARTS
from mlx_manager.mlx_server.devices.cuda.matmul.products import ProductKernels
from mlx_manager.mlx_server.devices.cuda.matmul.sums import SumKernels, Two
from mlx_manager.mlx_server.devices.cuda.moe.experts import ExpertKernels
from mlx_manager.mlx_server.execution.alike import arrays_of, made_of
from mlx_manager.mlx_server.execution.decoder.additions import Addition, NormFor, addition_of
from mlx_manager.mlx_server.execution.decoder.projections import (
    Normed,
    Projection,
    Sum,
    join,
    norm_of,
    packing_of,
)
from mlx_manager.mlx_server.execution.spec.layers import Norms
from mlx_manager.mlx_server.execution.spec.mlps import (
    FeedForwardSpec,
    MLPAndMoESpec,
    MLPSpec,
    MoESpec,
)
from mlx_manager.mlx_server.execution.spec.parts import NotFusable


class Mlp(ABC):
    """MLP of a layer behind its norm, added to the residual."""

    __slots__ = ()

    @abstractmethod
    def launches(self, added: Sum, following: RowNorm | None) -> tuple[list[mx.array], Sum]:
        """Return the intermediate launches and the result, which is not among them.

        added: the residual with attention's result. following: the norm of which the next product
        expects a part to be done.
        """

    @property
    @abstractmethod
    def token_numbers(self) -> int:
        """Count of the numbers that are made of a token on the way, without the result."""

    @property
    def unpacked(self) -> Self:
        """Copy with dense weights in place of packed ones, where that multiplies many rows faster;
        see `FewOrMany.unpacked`."""
        return self

    @property
    def unpacked_bytes(self) -> int:
        return 0

    def by_groups(self, rows: int) -> bool:
        """Return whether so many rows are multiplied by warpgroups."""
        return False

    def compare(self) -> None:  # noqa: B027 most have nothing to find out
        """Find out the fastest way to multiply many rows, where that is not known."""

    def expected(self) -> RowNorm | None:
        """Return the norm of which the maker of few rows may do a part; None if it may not."""
        return None

    def links(self) -> list[Link | None]:
        """Return the MLP's products as parts of a chain; an entry is None where that is
        impossible."""
        return [None]


@dataclass(frozen=True, slots=True)
class GatedMlp(Mlp):
    """MLP of `activation(gate, up)` and a down projection."""

    norm: nn.RMSNorm
    gate_up: Projection
    activation: Activation
    down: Addition

    def launches(self, added: Sum, following: RowNorm | None) -> tuple[list[mx.array], Sum]:
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

    def expected(self) -> RowNorm | None:
        return self.gate_up.expected(self.norm)

    def links(self) -> list[Link | None]:
        return [self.gate_up.link(self.norm, self.activation), self.down.link()]


@dataclass(frozen=True, slots=True)
class RoutedMlp(Mlp):
    """Experts, multiplied by kernels of ours. group: the ranks that have shares of each expert,
    over which results are summed up; None for whole experts."""

    norm: RowNorm
    experts: Experts
    kernels: ExpertKernels
    group: mx.distributed.Group | None = None

    def launches(self, added: Sum, following: RowNorm | None) -> tuple[list[mx.array], Sum]:
        if self.group is not None:
            # Rank 0 adds the residual to its own result, where that costs no launch.
            alone = self.group.rank() > 0
            made = self.kernels(added.rows, self.norm, self.experts, alone=alone)
            return made, Sum.alone(mx.distributed.all_sum(made[-1], group=self.group))
        *made, result = self.kernels(added.rows, self.norm, self.experts)
        return made, Sum.alone(result)

    def alone(self, hidden: mx.array) -> list[mx.array]:
        """Return the launches of the experts alone. The last one is the experts' result for the
        rows of `hidden`, without the residual."""
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
    """Addition of an MLP's result and of experts' result for the residual.

    Each result goes through its own of `norms`; the sum of both is added to the residual behind
    `norm`. scale: as in `NormedAndAdded`.
    """

    routed: RoutedMlp
    norms: tuple[nn.RMSNorm, nn.RMSNorm]
    norm: nn.RMSNorm
    kernels: SumKernels
    scale: mx.array | None

    def launches(
        self, residual: mx.array, x: mx.array, following: RowNorm | None
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
    spec: FeedForwardSpec,
    norms: Norms,
    few: ProductKernels | None,
    norm_for: NormFor,
    scale: mx.array | None = None,
) -> Mlp:
    """Return the MLP that `spec` describes. The module's weights become views of the joined
    ones: see `join`.

    norms: those around the MLP. few: kernels that multiply few rows, if the device has any. scale:
    (1,), the factor of the result.

    Raises:
        NotFusable: no kernels multiply the experts, or a norm is behind experts alone.
    """
    match spec:
        case MLPSpec():
            down = addition_of(spec.down, norms.post, few, norm_for, scale, spec.group)
            return _gated(spec, down, norm_for(norms.pre), few)
        case MLPAndMoESpec():
            down = _beside(spec, norms, few, scale)
            return _gated(spec.mlp, down, norm_for(norms.pre), few)
        case MoESpec():
            if norms.post is not None:
                raise NotFusable("a norm behind experts")
            return _routed(spec, norms.pre, few)


def _gated(spec: MLPSpec, down: Addition, norm: nn.RMSNorm, few: ProductKernels | None) -> GatedMlp:
    return GatedMlp(norm, join(spec.gate_up, few), spec.activation, down)


def _beside(
    spec: MLPAndMoESpec, norms: Norms, few: ProductKernels | None, scale: mx.array | None
) -> AddedBesideExperts:
    norm = norms.post
    if norm is None or any(each.eps != norm.eps for each in spec.post):
        raise NotFusable("norms behind experts and an MLP that differ")
    routed = _routed(spec.moe, spec.pre, few)
    if few is None or not few.sums.serves(norm.weight.size):
        raise NotFusable("experts beside an MLP of a width that the kernels do not serve")
    product = join([spec.mlp.down], few)
    return AddedBesideExperts(product, routed, spec.post, norm, few.sums, scale)


def _routed(spec: MoESpec, norm: nn.RMSNorm, few: ProductKernels | None) -> RoutedMlp:
    if few is None:
        raise NotFusable("experts, for which this device has no kernels")
    joined, routing = _Joined(spec), spec.routing
    dtype, shared = norm.weight.dtype, joined.times
    experts = Experts(
        joined.router.astype(dtype),
        flat(made_of(stored_in(spec.gate_up[0]), joined.gates_and_ups)),
        flat(made_of(stored_in(spec.down), joined.down)),
        routing.chosen + shared,
        routing.normalised,
        spec.activation,
        spec.router.bias.astype(dtype) if "bias" in spec.router else None,
        _biases(spec, dtype),
        shared,
        routing.scoring,
        None if routing.bias is None else routing.bias.astype(mx.float32),
        routing.scale,
        routing.least,
        None if spec.router_norm is None else spec.router_norm.astype(dtype),
        None if routing.expert_scale is None else routing.expert_scale.astype(mx.float32),
    )
    if not few.experts.serves(experts):
        raise NotFusable("experts that the kernels do not serve")
    joined.hand_back()
    return RoutedMlp(norm_of(norm), experts, few.experts, spec.group)


class _Joined:
    """Arrays of a layer's experts, joined lazily, the shared experts behind the others.

    gates_and_ups: (2, experts, inner, ...). down: (experts, width, ...). router: (experts, width),
    without the shared experts if these have no gate. times: the number of shared experts.
    """

    def __init__(self, spec: MoESpec) -> None:
        self._spec = spec
        shared = self._shared = spec.shared
        self.times = 0 if shared is None else shared.times
        pairs = [arrays_of(stored_in(layer)) for layer in spec.gate_up]
        self.down = arrays_of(stored_in(spec.down))
        self.router = _dense(spec.router)
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
        """Make the module's weights views of the joined arrays."""
        of, shared = self._spec, self._shared
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
            # With several shared experts, each line of the view would be in pieces.
            _give(shared.down, [part[-1] for part in self.down])


def _dense(layer: nn.Module) -> mx.array:
    weight = stored_in(layer)
    return weight.dense if isinstance(weight, Packed) else weight


def _give(layer: nn.Module, arrays: list[mx.array]) -> None:
    layer.update(dict(zip(PARTS, arrays, strict=False)))


def _biases(spec: MoESpec, dtype: mx.Dtype) -> tuple[mx.array, mx.array] | None:
    """Return the biases as `Experts` has them, or None: all three layers have biases, or none
    has."""
    if "bias" not in spec.down:
        return None
    gates, ups, downs = (
        layer.bias.astype(dtype).reshape(-1) for layer in (*spec.gate_up, spec.down)
    )
    return mx.concatenate([gates, ups]), downs


def stored_in(layer: nn.Module) -> Weight:
    """Return a layer's weight as it is stored; that of experts is (experts, outputs, ...)."""
    is_packed = isinstance(layer, nn.QuantizedLinear | QuantizedSwitchLinear)
    return packing_of(layer) if is_packed else layer.weight


def flat(weight: Weight) -> Weight:
    """Return the experts' `weight` with one expert below the other."""
    return made_of(weight, [part.reshape(-1, part.shape[-1]) for part in arrays_of(weight)])
