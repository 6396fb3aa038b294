"""Specs of MLPs, and of experts in their place or beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.activations import SwigluOAI
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwiGLU, SwitchLinear

from mlx_manager.mlx_server.devices.cuda.matmul.factors import LEAST, Activation, ExpertScoring
from mlx_manager.mlx_server.execution.spec.parts import (
    NotFusable,
    declared,
    expect,
    group_of,
    is_one_of,
    linears_in,
    norm_in,
    parts_of,
    stored,
)
from mlx_manager.mlx_server.models.families import MODULES
from mlx_manager.mlx_server.models.module_facts import Routing, SharedNames

_EXPERT = {"gate_proj", "up_proj", "down_proj"}
_EXPERTS = {*_EXPERT, "activation"}
_UNWEIGHTED = {names.experts for names in MODULES.shared_experts if names.gate is None}
"""Names of shared experts in blocks whose routers are known by their classes alone."""
# Parts of layers whose experts lie beside their MLP: router and experts, the norms before and
# behind the experts, and the norm behind the MLP.
BESIDE = {
    "router",
    "experts",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_1",
    "post_feedforward_layernorm_2",
}
_SCORES = {"softmax": ExpertScoring.SOFTMAX, "sigmoid": ExpertScoring.SIGMOID}


@dataclass(frozen=True, slots=True)
class MLPSpec:
    """MLP of `down(activation(gate, up))`. group: as in `LayerSpec`."""

    gate_up: tuple[nn.Module, ...]
    down: nn.Module
    activation: Activation
    group: mx.distributed.Group | None = None

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        return (*self.gate_up, self.down)


@dataclass(frozen=True, slots=True)
class SharedExpertsSpec:
    """Shared experts, which every row goes through, as one MLP as large as `times` experts.

    gate: the layer whose sigmoid weights the result, if there is one.
    """

    gate: nn.Module | None
    gate_up: tuple[nn.Module, nn.Module]
    down: nn.Module
    times: int

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        return (*([] if self.gate is None else [self.gate]), *self.gate_up, self.down)

    @staticmethod
    def of(
        mlp: nn.Module, names: SharedNames, experts: Sequence[nn.Module]
    ) -> SharedExpertsSpec | None:
        """Return the shared experts of `mlp`, or None for experts of another kind, or stored
        otherwise than the layers in `experts`."""
        own = mlp[names.experts]
        gate = None if names.gate is None else mlp[names.gate]
        if parts_of(own) != _EXPERT:
            return None
        layers = (own.gate_proj, own.up_proj, own.down_proj)
        linears = (nn.Linear, nn.QuantizedLinear)
        all_linears = layers if gate is None else (gate, *layers)
        known = all(type(each) in linears and "bias" not in each for each in all_linears)
        alike = {stored(layer)[1:] for layer in (*layers, *experts)}
        times, rest = divmod(layers[0].weight.shape[0], experts[0].weight.shape[1])
        if not known or len(alike) > 1 or rest or "bias" in experts[0]:
            return None
        return SharedExpertsSpec(gate, layers[:2], layers[2], times)


@dataclass(frozen=True, slots=True)
class RoutingSpec:
    """Rule by which a router's scores choose a row's `chosen` experts and weight them: see
    `Experts`."""

    chosen: int
    normalised: bool
    scoring: ExpertScoring = ExpertScoring.SOFTMAX
    bias: mx.array | None = None
    scale: float = 1.0
    least: float = LEAST
    expert_scale: mx.array | None = None

    @staticmethod
    def of(mlp: nn.Module, router: nn.Module) -> RoutingSpec | None:
        """Return the rule of `mlp` with `router`, or None for a router of another kind.

        Raises:
            NotFusable: experts are chosen in groups.
        """
        if own := declared(router, MODULES.routings):
            return RoutingSpec._declared(router, own)
        facts = declared(mlp, MODULES.routings)
        # Arrays beside the modules are corrections, of routers that are not known.
        arrays = {name for name, part in mlp.items() if isinstance(part, mx.array)}
        corrected = arrays - ({facts.bias} if facts else set())
        if type(router) not in (nn.Linear, nn.QuantizedLinear) or corrected:
            return None
        if facts:
            return RoutingSpec._declared(mlp, facts)
        chosen = getattr(mlp, "top_k", getattr(mlp, "num_experts_per_tok", None))
        if not isinstance(chosen, int) or parts_of(mlp) & {"gate_act", *_UNWEIGHTED}:
            return None
        return RoutingSpec(chosen, normalised=bool(getattr(mlp, "norm_topk_prob", True)))

    @staticmethod
    def _declared(module: nn.Module, facts: Routing) -> RoutingSpec | None:
        groups = getattr(module, "n_group", None) or 1
        in_groups = getattr(module, "topk_method", "group_limited_greedy") == "group_limited_greedy"
        grouped = in_groups and groups > 1 and module.topk_group != groups
        expect(not grouped, "experts that are chosen in groups")

        def value(name: str | None, default: Any = None) -> Any:
            return default if name is None else attrgetter(name)(module)

        scores = facts.scores if facts.scores in _SCORES else _kind(value(facts.scores))
        if scores not in _SCORES:
            return None
        chosen, normalised = value(facts.chosen), facts.normalised
        if isinstance(normalised, str):
            normalised = bool(value(normalised))
        return RoutingSpec(
            chosen,
            normalised and (facts.alone or chosen > 1),
            _SCORES[scores],
            None if facts.bias is None else module.get(facts.bias),
            float(getattr(module, facts.scale or "", 1.0)),
            LEAST if facts.least is None else facts.least,
            value(facts.expert_scale),
        )


@dataclass(frozen=True, slots=True)
class MoESpec:
    """Experts, each an MLP with a gate. A row goes through those with the router's largest scores.

    gate_up: two layers of all experts, as `down` is one. shared: the shared experts, if there are
    any. router_norm: (width,), the weights of the norm before the router, if it differs from that
    before the experts. group: as in `LayerSpec`; the router is on every rank.
    """

    router: nn.Module
    gate_up: tuple[nn.Module, nn.Module]
    down: nn.Module
    routing: RoutingSpec
    activation: Activation
    shared: SharedExpertsSpec | None = None
    router_norm: mx.array | None = None
    group: mx.distributed.Group | None = None

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        shared = () if self.shared is None else self.shared.layers
        return (self.router, *self.gate_up, self.down, *shared)

    @staticmethod
    def of(mlp: nn.Module) -> MoESpec | None:
        """Return the experts of `mlp`, or None for an MLP of another kind.

        Raises:
            NotFusable: experts are chosen in groups.
        """
        parts = parts_of(mlp) - {"gate_act"}
        ways = product(MODULES.experts, (None, *MODULES.shared_experts))
        told = (way for way in ways if parts == _parts_named(*way))
        named, sharing = next(told, (None, None))
        if named is None or parts_of(mlp[named[1]]) != _EXPERTS:
            return None
        router, experts = (mlp[name] for name in named)
        routing = RoutingSpec.of(mlp, router)
        found = None if routing is None else MoESpec._through(router, experts, routing)
        if found is not None:
            found = replace(found, group=getattr(mlp, "sharding_group", None))
        if found is None or sharing is None:
            return found
        shared = SharedExpertsSpec.of(mlp, sharing, (*found.gate_up, found.down))
        return None if shared is None else replace(found, shared=shared)

    @staticmethod
    def _through(router: nn.Module, experts: nn.Module, routing: RoutingSpec) -> MoESpec | None:
        """Return these experts, or None for experts of another kind."""
        layers = (experts.gate_proj, experts.up_proj, experts.down_proj)
        known = all(
            type(layer) in (SwitchLinear, QuantizedSwitchLinear)
            and layer.get("global_scale") is None
            for layer in layers
        )
        alike = len(set(map(stored, layers))) == len({"bias" in layer for layer in layers}) == 1
        activation = _activation(experts.activation)
        if not (known and alike) or activation is None:
            return None
        return MoESpec(router, layers[:2], layers[2], routing, activation)

    @staticmethod
    def beside(block: nn.Module, norm: nn.RMSNorm) -> MoESpec:
        """Return the experts of a block in which they lie beside the MLP.

        norm: that before the experts.

        Raises:
            NotFusable: the experts are of another kind, or the router's norm has another epsilon.
        """
        router, experts = block.router, block.experts
        facts = declared(router, MODULES.routings)
        known = is_one_of(experts, MODULES.beside)
        if not (known and facts and facts.norm and facts.linear):
            raise NotFusable("experts beside an MLP, of another kind")
        expect(router.eps == norm.eps, "norms that differ")
        routing = RoutingSpec._declared(router, facts)
        linear = router[facts.linear]
        found = None if routing is None else MoESpec._through(linear, experts.switch_glu, routing)
        if found is None:
            raise NotFusable("experts beside an MLP, of other parts")
        return replace(found, router_norm=facts.norm(router))


@dataclass(frozen=True, slots=True)
class MLPAndMoESpec:
    """MLP and experts beside each other, whose results are added up.

    pre: the norm before the experts. post: the norms behind the MLP's result and behind the
    experts'. The layer's own norms are before the MLP and behind the sum.
    """

    mlp: MLPSpec
    moe: MoESpec
    pre: nn.RMSNorm
    post: tuple[nn.RMSNorm, nn.RMSNorm]

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        return (*self.mlp.layers, *self.moe.layers, self.pre, *self.post)

    @staticmethod
    def of(block: nn.Module, mlp: MLPSpec | MoESpec) -> MLPAndMoESpec:
        """Return the MLP and experts of a block. mlp: the block's MLP.

        Raises:
            NotFusable: the MLP or the experts are of another kind.
        """
        if not isinstance(mlp, MLPSpec):
            raise NotFusable("experts beside an MLP of other parts")
        expect(mlp.group is None, "experts beside an MLP, in shares")
        pre = norm_in(block.pre_feedforward_layernorm_2)
        post = [norm_in(block[f"post_feedforward_layernorm_{number}"]) for number in (1, 2)]
        return MLPAndMoESpec(mlp, MoESpec.beside(block, pre), pre, (post[0], post[1]))


FeedForwardSpec = MLPSpec | MoESpec | MLPAndMoESpec


def mlp_in(mlp: nn.Module) -> MLPSpec | MoESpec:
    """Return the spec of an MLP.

    Raises:
        NotFusable: the MLP has other parts.
    """
    for names in MODULES.mlps:
        if parts_of(mlp) == {*names.gate_up, names.down}:
            activation = Activation.GELU if is_one_of(mlp, MODULES.gelu) else Activation.SILU
            down = linears_in(mlp, (names.down,))[0]
            return MLPSpec(linears_in(mlp, names.gate_up), down, activation, group_of(down))
    found = MoESpec.of(mlp)
    if found is None:
        raise NotFusable("an MLP of other parts")
    return found


def _parts_named(experts: tuple[str, str], shared: SharedNames | None) -> set[str]:
    return {*experts, *(() if shared is None else shared.parts)}


def _kind(module: nn.Module) -> str:
    return type(module).__name__.lower()


def _activation(module: nn.Module) -> Activation | None:
    """Return the activation of experts, or None for an unknown one."""
    match module:
        case SwiGLU():
            return Activation.SILU
        case SwigluOAI(_alpha=1.702, _limit=7.0):
            return Activation.CLAMPED_SILU
    return Activation.GELU if is_one_of(module, MODULES.gelu) else None
