"""Reading of a module: whether it is a common decoder, and its parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models import (
    deepseek,
    deepseek_v2,
    deepseek_v3,
    dots1,
    ernie4_5_moe,
    exaone_moe,
    gemma2,
    gemma3_text,
    gemma4_text,
    glm4_moe,
    glm4_moe_lite,
    lfm2,
    lfm2_moe,
    ministral3,
    qwen2_moe,
    qwen3_5,
    qwen3_next,
)
from mlx_lm.models.activations import SwigluOAI
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.rope_utils import Llama3RoPE, ProportionalRoPE, SuScaledRoPE, YarnRoPE
from mlx_lm.models.smollm3 import NoPE
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwiGLU, SwitchLinear

from mlx_manager.mlx_server.devices.attention import AttentionShape, Rotary
from mlx_manager.mlx_server.devices.cuda.matmul.factors import LEAST, Activation, Scoring
from mlx_manager.mlx_server.devices.cuda.mla.shape import LatentShape
from mlx_manager.mlx_server.devices.states import DeltaShape, DeltaWeights, ShortShape


class NotFusable(Exception):
    """Error: the module is no common decoder; the message says what is different."""


_ROPES = (nn.RoPE, Llama3RoPE, YarnRoPE, SuScaledRoPE, ProportionalRoPE, NoPE)
# Rotated elements of a rotation that does nothing, which is taken for one of frequency 0.
_UNTURNED = 16
_ATTENTIONS = (
    {"q_proj", "k_proj", "v_proj", "o_proj", "rope"},
    {"q_proj", "k_proj", "v_proj", "o_proj", "rope", "q_norm", "k_norm"},
    {"q_proj", "k_proj", "v_proj", "o_proj", "rope", "q_norm", "k_norm", "v_norm"},
    {"q_proj", "k_proj", "o_proj", "rope", "q_norm", "k_norm", "v_norm"},
    {"q_proj", "o_proj", "rope", "q_norm"},
    {"qkv_proj", "o_proj", "rope"},
    {"q_proj", "k_proj", "v_proj", "out_proj", "rope", "q_layernorm", "k_layernorm"},
)
_OUTPUTS = ("o_proj", "out_proj")
_HEAD_NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))
# Parts of latent attention, besides those that make the queries.
_LATENT = {"kv_a_proj_with_mqa", "kv_a_layernorm", "embed_q", "unembed_out", "o_proj", "rope"}
_LATENT_QUERIES = ({"q_proj"}, {"q_a_proj", "q_a_layernorm", "q_b_proj"})
_BY_HEAD = (MultiLinear, QuantizedMultiLinear)
_HEADS = ("n_heads", "num_heads", "num_attention_heads")
_KV_HEADS = ("n_kv_heads", "num_key_value_heads", "num_kv_heads")
_SCALES = ("scale", "sm_scale")
_GIVEN = {"self", "x", "mask", "cache"}
# Names of the layers of an MLP with gates: those of gates and ups, and the down projection.
_GATES = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("w1", "w3"), "w2"),
)
# Names of a router and its experts.
_ROUTES = (("gate", "switch_mlp"), ("router", "experts"), ("gate", "experts"))
_EXPERT = {"gate_proj", "up_proj", "down_proj"}
_EXPERTS = {*_EXPERT, "activation"}
# Parts of layers whose experts lie beside their MLP: router and experts, the norms before and
# behind the experts, and the norm behind the MLP.
_BESIDE = {
    "router",
    "experts",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_1",
    "post_feedforward_layernorm_2",
}
# Parts of a shared expert and its gate, or of several shared experts without a gate.
_SHARED = {"shared_expert", "shared_expert_gate"}
_SHARED_WHOLLY = {"shared_experts"}
# Blocks whose router takes the softmax over all experts, which nothing in them tells.
_OVER_ALL = (qwen2_moe.Qwen2MoeSparseMoeBlock,)
# Routers that are modules of their own, by their scores, and modules by which layers say their
# scores.
_GATES_BY_SIGMOID = (
    deepseek_v3.MoEGate,
    dots1.Dots1TopkRouter,
    exaone_moe.MoEGate,
    glm4_moe.MoEGate,
    glm4_moe_lite.MoEGate,
)
_GATES_BY_SOFTMAX = (deepseek.MoEGate, deepseek_v2.MoEGate)
_SCORINGS = {nn.Softmax: Scoring.SOFTMAX, nn.Sigmoid: Scoring.SIGMOID}
# Names of a layer's norms before and behind attention, of those before and behind the MLP, and of
# the MLP.
_MLPS = ("mlp", "block_sparse_moe")
_BLOCKS = (
    (("input_layernorm", None), ("post_attention_layernorm", None), _MLPS),
    (
        ("input_layernorm", "post_attention_layernorm"),
        ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
        _MLPS,
    ),
    (
        ("input_layernorm", "post_self_attn_layernorm"),
        ("post_attention_layernorm", "post_mlp_layernorm"),
        _MLPS,
    ),
    (("operator_norm", None), ("ffn_norm", None), ("feed_forward",)),
)
_BODY = {"embed_tokens", "layers"}
# Parts for a layer's own input of each token: its gate, the product back, and the norm behind; and
# the parts of the body that make the inputs.
_INLET = ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")
_INLETS = (
    "embed_tokens_per_layer",
    "per_layer_model_projection",
    "per_layer_projection_norm",
)
# Names of the body's last norm.
_LAST_NORMS = ("norm", "embedding_norm")
# Facts that modules' parts do not tell: norms that multiply by 1 + weight, MLPs with another
# activation, layers that clip their sums to the range of float16. For bodies that scale their
# embeddings, see `_scale`.
_NORMS_BY_MORE = (gemma2.RMSNorm, gemma3_text.RMSNorm)
_GELU_MLPS = (gemma2.MLP, gemma3_text.MLP, gemma4_text.MLP)
_CLIPPED = (gemma3_text.TransformerBlock,)
# Attention whose q_proj makes a gate behind each head of q. The head's result is multiplied by the
# gate's sigmoid.
_GATED = (qwen3_next.Qwen3NextAttention,)
# Attention that may be given the keys and values of another layer.
_SHARING = (gemma4_text.Attention,)
# Layers that multiply their results by a number.
_SCALED = (gemma4_text.DecoderLayer,)
# Attention whose queries are multiplied by a factor for each position, the argument `attn_scale`.
_TEMPERED = (ministral3.Attention,)
# Layers of the gated delta rule, with the names of the projections that their first product joins.
_DELTAS = {
    qwen3_5.GatedDeltaNet: ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    qwen3_next.Qwen3NextGatedDeltaNet: ("in_proj_qkvz", "in_proj_ba"),
}
_SHORTS = (lfm2.ShortConv, lfm2_moe.ShortConv)


@dataclass(frozen=True, slots=True)
class Norms:
    """Norms around attention or an MLP.

    before: that of the input. behind: that of the result, before it is added to the residual.
    """

    before: nn.RMSNorm
    behind: nn.RMSNorm | None

    @property
    def all(self) -> tuple[nn.RMSNorm, ...]:
        return (self.before,) if self.behind is None else (self.before, self.behind)


@dataclass(frozen=True, slots=True)
class Gates:
    """MLP of `down(activation(gate, up))`."""

    gate_up: tuple[nn.Module, ...]
    down: nn.Module
    activation: Activation

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        return (*self.gate_up, self.down)


@dataclass(frozen=True, slots=True)
class Shared:
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
    def of(mlp: nn.Module, experts: Sequence[nn.Module]) -> Shared | None:
        """Return the shared experts of `mlp`, or None for experts of another kind, or stored
        otherwise than the layers in `experts`."""
        wholly = _parts(mlp) >= _SHARED_WHOLLY
        own = mlp.shared_experts if wholly else mlp.shared_expert
        gate = None if wholly else mlp.shared_expert_gate
        if _parts(own) != _EXPERT:
            return None
        layers = (own.gate_proj, own.up_proj, own.down_proj)
        linears = (nn.Linear, nn.QuantizedLinear)
        all_linears = layers if gate is None else (gate, *layers)
        known = all(type(each) in linears and "bias" not in each for each in all_linears)
        alike = {_stored(layer)[1:] for layer in (*layers, *experts)}
        times, rest = divmod(layers[0].weight.shape[0], experts[0].weight.shape[1])
        if not known or len(alike) > 1 or rest or "bias" in experts[0]:
            return None
        return Shared(gate, layers[:2], layers[2], times)


@dataclass(frozen=True, slots=True)
class Choice:
    """Rule by which a router's scores choose a row's `chosen` experts and weight them: see
    `Experts`."""

    chosen: int
    normalised: bool
    scoring: Scoring = Scoring.SOFTMAX
    correction: mx.array | None = None
    scale: float = 1.0
    least: float = LEAST
    scales: mx.array | None = None

    @staticmethod
    def of(mlp: nn.Module, router: nn.Module) -> Choice | None:
        """Return the rule of `mlp` with `router`, or None for a router of another kind.

        Raises:
            NotFusable: experts are chosen in groups.
        """
        if isinstance(router, (*_GATES_BY_SIGMOID, *_GATES_BY_SOFTMAX)):
            return Choice._of_gate(router)
        if isinstance(mlp, lfm2_moe.Lfm2MoeSparseMoeBlock):
            correction, scale = mlp.get("expert_bias"), float(mlp.routed_scaling_factor)
            how = (bool(mlp.norm_topk_prob), Scoring.SIGMOID, correction, scale)
            return Choice(mlp.top_k, *how, least=1e-6)
        # Arrays beside the modules are corrections, of routers that are not known.
        corrected = any(isinstance(part, mx.array) for part in mlp.values())
        if type(router) not in (nn.Linear, nn.QuantizedLinear) or corrected:
            return None
        if isinstance(mlp, ernie4_5_moe.Ernie4_5_MoeMLP):
            scoring = _SCORINGS.get(type(mlp.gate_act))
            return scoring and Choice(mlp.k, normalised=True, scoring=scoring)
        chosen = getattr(mlp, "top_k", getattr(mlp, "num_experts_per_tok", None))
        if not isinstance(chosen, int) or _parts(mlp) & {"gate_act", *_SHARED_WHOLLY}:
            return None
        over_all = isinstance(mlp, _OVER_ALL) or not getattr(mlp, "norm_topk_prob", True)
        return Choice(chosen, normalised=not over_all)

    @staticmethod
    def _of_gate(gate: nn.Module) -> Choice:
        groups = getattr(gate, "n_group", None) or 1
        in_groups = getattr(gate, "topk_method", "group_limited_greedy") == "group_limited_greedy"
        grouped = in_groups and groups > 1 and gate.topk_group != groups
        _expect(not grouped, "experts that are chosen in groups")
        scale = float(getattr(gate, "routed_scaling_factor", 1.0))
        if isinstance(gate, _GATES_BY_SOFTMAX):
            return Choice(gate.top_k, normalised=False, scale=scale)
        normalised = gate.top_k > 1 and gate.norm_topk_prob
        correction = gate.e_score_correction_bias
        return Choice(gate.top_k, normalised, Scoring.SIGMOID, correction, scale)


@dataclass(frozen=True, slots=True)
class Routes:
    """Experts, each an MLP with gates. A row goes through those with the router's largest scores.

    gate_up: two layers of all experts, as `down` is one. shared: the shared experts, if there are
    any. router_norm: (width,), the weights of the norm before the router, if it differs from that
    before the experts.
    """

    router: nn.Module
    gate_up: tuple[nn.Module, nn.Module]
    down: nn.Module
    choice: Choice
    activation: Activation
    shared: Shared | None = None
    router_norm: mx.array | None = None

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        shared = () if self.shared is None else self.shared.layers
        return (self.router, *self.gate_up, self.down, *shared)

    @staticmethod
    def of(mlp: nn.Module) -> Routes | None:
        """Return the experts of `mlp`, or None for an MLP of another kind.

        Raises:
            NotFusable: experts are chosen in groups.
        """
        parts = _parts(mlp)
        shares = parts >= _SHARED or parts >= _SHARED_WHOLLY
        own = parts - (_SHARED if parts >= _SHARED else _SHARED_WHOLLY) - {"gate_act"}
        named = next((names for names in _ROUTES if own == set(names)), None)
        if named is None or _parts(mlp[named[1]]) != _EXPERTS:
            return None
        router, experts = (mlp[name] for name in named)
        choice = Choice.of(mlp, router)
        routes = None if choice is None else Routes._through(router, experts, choice)
        if routes is None or not shares:
            return routes
        shared = Shared.of(mlp, (*routes.gate_up, routes.down))
        return None if shared is None else replace(routes, shared=shared)

    @staticmethod
    def _through(router: nn.Module, experts: nn.Module, choice: Choice) -> Routes | None:
        """Return these experts, or None for experts of another kind."""
        layers = (experts.gate_proj, experts.up_proj, experts.down_proj)
        known = all(
            type(layer) in (SwitchLinear, QuantizedSwitchLinear)
            and layer.get("global_scale") is None
            for layer in layers
        )
        alike = len(set(map(_stored, layers))) == len({"bias" in layer for layer in layers}) == 1
        activation = _activation(experts.activation)
        if not (known and alike) or activation is None:
            return None
        return Routes(router, layers[:2], layers[2], choice, activation)

    @staticmethod
    def beside(block: nn.Module, norm: nn.RMSNorm) -> Routes:
        """Return the experts of a block in which they lie beside the MLP.

        norm: that before the experts.

        Raises:
            NotFusable: the experts are of another kind, or the router's norm has another epsilon.
        """
        router, experts = block.router, block.experts
        known = isinstance(router, gemma4_text.Router) and isinstance(experts, gemma4_text.Experts)
        _expect(known, "experts beside an MLP, of another kind")
        _expect(router.eps == norm.eps, "norms that differ")
        of = Choice(router.config.top_k_experts, normalised=True, scales=router.per_expert_scale)
        routes = Routes._through(router.proj, experts.switch_glu, of)
        if routes is None:
            raise NotFusable("experts beside an MLP, of other parts")
        return replace(routes, router_norm=router.scale * router._root_size)


@dataclass(frozen=True, slots=True)
class GatesAndRoutes:
    """MLP and experts beside each other, whose results are added up.

    before: the norm before the experts. behind: the norms behind the MLP's result and behind the
    experts'. The layer's own norms are before the MLP and behind the sum.
    """

    gates: Gates
    routes: Routes
    before: nn.RMSNorm
    behind: tuple[nn.RMSNorm, nn.RMSNorm]

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        return (*self.gates.layers, *self.routes.layers, self.before, *self.behind)

    @staticmethod
    def of(block: nn.Module, mlp: Gates | Routes) -> GatesAndRoutes:
        """Return the MLP and experts of a block. mlp: the block's MLP.

        Raises:
            NotFusable: the MLP or the experts are of another kind.
        """
        if not isinstance(mlp, Gates):
            raise NotFusable("experts beside an MLP of other parts")
        before = _norm(block.pre_feedforward_layernorm_2)
        behind = [_norm(block[f"post_feedforward_layernorm_{number}"]) for number in (1, 2)]
        return GatesAndRoutes(mlp, Routes.beside(block, before), before, (behind[0], behind[1]))


AnyMlp = Gates | Routes | GatesAndRoutes


@dataclass(frozen=True, slots=True)
class Inlet:
    """Product of a layer's own input of a token (per-layer embeddings of Gemma 3n and 4):
    `norm(back(gelu(gate(hidden)) * own))`, which is added behind the MLP."""

    gate: nn.Module
    back: nn.Module
    norm: nn.RMSNorm

    @staticmethod
    def of(block: nn.Module) -> Inlet | None:
        """Return the inlet of a block, or None if the block has no own input."""
        if not _parts(block) >= set(_INLET):
            return None
        gate, back = (_linears(block, (name,))[0] for name in _INLET[:2])
        return Inlet(gate, back, _norm(block[_INLET[2]]))


@dataclass(frozen=True, slots=True)
class Surroundings(ABC):
    """Parts of one layer around the operation in which its tokens meet, before anything is joined.

    qkv: the projections that make that operation's input. output: the projection of its result.
    inlet: the layer's own input of each token, if it has one. scale_of_sum: (1,), the factor of the
    layer's result, if it has one.
    """

    qkv: tuple[nn.Module, ...]
    output: nn.Module
    mlp: AnyMlp
    attention_norms: Norms
    mlp_norms: Norms
    inlet: Inlet | None = field(default=None, kw_only=True)
    scale_of_sum: mx.array | None = field(default=None, kw_only=True)

    def weights(self) -> list[mx.array]:
        """Return the arrays of the layer's parts, and those made of them. All must be evaluated
        before steps are compiled, or each kind of step would make them anew."""
        layers = (*self.qkv, self.output, *self.mlp.layers)
        parts = (*layers, *self.attention_norms.all, *self.mlp_norms.all)
        if self.inlet is not None:
            parts = (*parts, self.inlet.gate, self.inlet.back, self.inlet.norm)
        found = [array for part in parts for _, array in tree_flatten(part.parameters())]
        scales = [] if self.scale_of_sum is None else [self.scale_of_sum]
        return [*found, *scales, *self._own_weights()]

    @abstractmethod
    def _own_weights(self) -> list[mx.array]: ...


@dataclass(frozen=True, slots=True)
class Temper:
    """Factor of queries far into a text, as in Llama 4 and Ministral 3.

    The factor is 1 + beta * log(1 + floor(position / tokens)), which is 1 for the first `tokens`.
    """

    beta: float
    tokens: int

    def __call__(self, positions: mx.array) -> mx.array:
        """Return the factors, float32, of the shape of `positions`."""
        times = mx.floor(positions.astype(mx.float32) / self.tokens)
        return 1 + self.beta * mx.log(1 + times)


@dataclass(frozen=True, slots=True)
class Anatomy(Surroundings):
    """Layer whose tokens meet in attention."""

    head_norms: tuple[nn.RMSNorm, nn.RMSNorm] | None
    rope: nn.Module
    rotary: Rotary
    shape: AttentionShape
    scale: float
    softcap: float | None
    window: int | None
    sinks: mx.array | None
    temper: Temper | None

    @staticmethod
    def of(block: nn.Module, window: int | None, page_size: int) -> Anatomy:
        inlet = Inlet.of(block)
        besides = () if inlet is None else _INLET
        mlp, attention_norms, mlp_norms = _around(block, "self_attn", besides)
        attention = block.self_attn
        _expect(_parts(attention) in _ATTENTIONS, "attention of other parts")
        temper = _temper(attention)
        shares = isinstance(attention, _SHARING)
        known = {"attn_scale"} if temper else {"shared_kv", "offset"} if shares else set()
        _expect_given(attention, known)
        qkv = _linears(attention, _of_heads(attention), "qkv_proj")
        head_norms = _head_norms(attention)
        alone = shares and not attention.has_kv
        dtype = attention_norms.before.weight.dtype
        clipped = isinstance(block, _CLIPPED) and dtype == mx.float16
        _expect(not clipped, "sums that are clipped to what float16 has")
        heads, kv_heads = (int(_first_of(attention, names)) for names in (_HEADS, _KV_HEADS))
        rows = sum(linear.weight.shape[0] for linear in qkv)
        gated = isinstance(attention, _GATED)
        dim = rows // (heads * (2 if gated else 1) + (0 if alone else 2 * kv_heads))
        if head_norms is not None:
            sizes = {norm.weight.size for norm in head_norms}
            epsilons = {norm.eps for norm in head_norms}
            _expect(sizes == {dim} and len(epsilons) == 1, "norms over all heads at once")
        dims, traditional = _turned(attention.rope)
        _expect(traditional or dims % 16 == 0, f"rotation of {dims} elements")
        return Anatomy(
            qkv=qkv,
            output=_linears(attention, [name for name in _OUTPUTS if name in attention])[0],
            mlp=mlp,
            attention_norms=attention_norms,
            mlp_norms=mlp_norms,
            head_norms=head_norms,
            rope=attention.rope,
            rotary=Rotary(
                dims,
                traditional,
                head_norms[0].eps if head_norms else None,
                gated,
                _norms_values(attention, head_norms),
                alone,
            ),
            shape=AttentionShape(heads, kv_heads, dim, page_size, dtype),
            scale=_first_of(attention, _SCALES),
            softcap=getattr(attention, "attn_logit_softcapping", None),
            window=window,
            # float32, as the kernels take sinks.
            sinks=attention.sinks.astype(mx.float32) if "sinks" in attention else None,
            temper=temper,
            inlet=inlet,
            scale_of_sum=block.layer_scalar.astype(dtype) if isinstance(block, _SCALED) else None,
        )

    @property
    def head_weights(self) -> tuple[mx.array, mx.array] | None:
        """Weights of the norms of q and k, or None if there are no norms."""
        return self.head_norms and (self.head_norms[0].weight, self.head_norms[1].weight)

    def _own_weights(self) -> list[mx.array]:
        weights = list(self.head_weights or ())
        return weights if self.sinks is None else [*weights, self.sinks]


@dataclass(frozen=True, slots=True)
class Latents(Surroundings):
    """Layer whose tokens meet in attention to latents: see `decoder.latent`.

    query_norm: the norm of query latents, or None. queries: the projection that makes queries of
    query latents, behind `query_norm`; None if `qkv` makes the queries. absorb: the heads' matrices
    that take queries to the latents' space. expand: those that take results out of it.
    """

    query_norm: nn.RMSNorm | None
    queries: nn.Module | None
    latent_norm: nn.RMSNorm
    absorb: nn.Module
    expand: nn.Module
    rope: nn.Module
    rotary: Rotary
    shape: LatentShape
    scale: float

    @staticmethod
    def of(block: nn.Module, page_size: int) -> Latents:
        mlp, attention_norms, mlp_norms = _around(block, "self_attn")
        own = block.self_attn
        _expect(_parts(own) - _LATENT in _LATENT_QUERIES, "latent attention of other parts")
        _expect_given(own)
        absorb, expand = own.embed_q, own.unembed_out
        _expect(type(absorb) in _BY_HEAD and type(expand) in _BY_HEAD, "heads' matrices of a kind")
        ranked = "q_a_proj" in own
        first = "q_a_proj" if ranked else "q_proj"
        norms = [_norm(own.kv_a_layernorm), *([_norm(own.q_a_layernorm)] if ranked else [])]
        _expect(len({norm.eps for norm in norms}) == 1, "norms that differ")
        heads, rank = absorb.weight.shape[:2]
        qkv = _linears(own, (first, "kv_a_proj_with_mqa"))
        queries = _linears(own, ("q_b_proj",))[0] if ranked else None
        dims = qkv[1].weight.shape[0] - rank
        made = qkv[0] if queries is None else queries
        shape = LatentShape(
            q_heads=heads,
            rank=rank,
            dims=dims,
            plain=made.weight.shape[0] // heads - dims,
            queried=qkv[0].weight.shape[0],
            page_size=page_size,
            dtype=attention_norms.before.weight.dtype,
            values=expand.weight.shape[1],
        )
        _, traditional = _turned(own.rope)
        return Latents(
            qkv=qkv,
            output=_linears(own, ("o_proj",))[0],
            mlp=mlp,
            attention_norms=attention_norms,
            mlp_norms=mlp_norms,
            query_norm=norms[1] if ranked else None,
            queries=queries,
            latent_norm=norms[0],
            absorb=absorb,
            expand=expand,
            rope=own.rope,
            rotary=Rotary(dims, traditional, None),
            shape=shape,
            scale=own.scale,
        )

    def _own_weights(self) -> list[mx.array]:
        parts = (self.query_norm, self.queries, self.latent_norm, self.absorb, self.expand)
        there = [part for part in parts if part is not None]
        return [array for part in there for _, array in tree_flatten(part.parameters())]


@dataclass(frozen=True, slots=True)
class Recurrence(Surroundings):
    """Layer whose tokens meet in a state, which each token changes by the gated delta rule."""

    shape: DeltaShape
    given: DeltaWeights

    @staticmethod
    def of(block: nn.Module) -> Recurrence:
        mlp, norms, mlp_norms = _around(block, "linear_attn")
        own = block.linear_attn
        names = _DELTAS.get(type(own))
        if names is None:
            raise NotFusable(f"a layer of the kind {type(own).__name__}")
        dtype = norms.before.weight.dtype
        convolution = own.conv1d.weight.reshape(own.conv1d.weight.shape[:2])
        given = DeltaWeights(
            convolution.astype(dtype),
            -mx.exp(own.A_log.astype(mx.float32)),
            own.dt_bias.astype(mx.float32),
            own.norm.weight.astype(dtype),
        )
        shape = DeltaShape(
            key_heads=own.num_k_heads,
            value_heads=own.num_v_heads,
            key_dim=own.head_k_dim,
            value_dim=own.head_v_dim,
            taps=convolution.shape[1],
            dtype=dtype,
            grouped=len(names) == 2,
            rounded=own.dt_bias.dtype == dtype,
            epsilon=own.norm.eps,
        )
        linears = _linears(own, names)
        _expect("bias" not in own.conv1d, "a convolution with a bias")
        _expect(
            sum(linear.weight.shape[0] for linear in linears) == shape.columns,
            "projections of other sizes",
        )
        return Recurrence(
            linears, _linears(own, ("out_proj",))[0], mlp, norms, mlp_norms, shape, given
        )

    def _own_weights(self) -> list[mx.array]:
        given = self.given
        return [given.convolution, given.rates, given.offsets, given.norm]


@dataclass(frozen=True, slots=True)
class Convolution(Surroundings):
    """Layer whose tokens meet in a gated short convolution: C * convolution(B * x), where B, C and
    x are parts of one product (Liquid AI, "LFM2 Technical Report", 2025, section 2.1).

    given: the convolution's weights, (taps, channels).
    """

    shape: ShortShape
    given: mx.array

    @staticmethod
    def of(block: nn.Module) -> Convolution:
        mlp, norms, mlp_norms = _around(block, "conv")
        own = block.conv
        _expect(isinstance(own, _SHORTS), f"a layer of the kind {type(own).__name__}")
        _expect("bias" not in own.conv, "a convolution with a bias")
        dtype = norms.before.weight.dtype
        channels, taps = own.conv.weight.shape[:2]
        given = mx.contiguous(own.conv.weight[:, :, 0].T.astype(dtype))
        shape = ShortShape(channels, taps, dtype)
        linears = _linears(own, ("in_proj",))
        _expect(linears[0].weight.shape[0] == shape.columns, "projections of other sizes")
        return Convolution(
            linears, _linears(own, ("out_proj",))[0], mlp, norms, mlp_norms, shape, given
        )

    def _own_weights(self) -> list[mx.array]:
        return [self.given]


@dataclass(frozen=True, slots=True)
class Rotation:
    """One kind of rotation of the model: cosines and sines for `PagedKernels.attend_fused`.

    frequencies: (dims / 2,) float32 radians a position. amplitude: the factor of all pairs.

    Cosines and sines are computed here, since MLX's own kernel gives wrong rows on CUDA for arrays
    that are not contiguous (mlx-lm pull request 1896), and single-token batches have been wrong
    before (mlx issues 3494, 3949).
    """

    frequencies: mx.array
    amplitude: float
    traditional: bool
    # For each number of a rotation: the frequency that it comes from, and whether it is a cosine.
    _turns: mx.array
    _cosine: mx.array

    @staticmethod
    def of(rope: nn.Module, rotary: Rotary) -> Rotation:
        match rope:
            case nn.RoPE():
                turns = np.arange(0, rotary.dims, 2) / rotary.dims
                frequencies, amplitude = rope.base**-turns * rope.scale, 1.0
            case NoPE():
                frequencies, amplitude = np.zeros(rotary.dims // 2), 1.0
            case SuScaledRoPE():
                frequencies, amplitude = 1 / np.array(rope._freqs, np.float64), rope._scale
            case YarnRoPE():
                frequencies, amplitude = 1 / np.array(rope._freqs, np.float64), rope.mscale
            case _:
                frequencies, amplitude = 1 / np.array(rope._freqs, np.float64), 1.0
        places = np.arange(rotary.dims)
        half = rotary.dims // 2
        pair, cosine = places % half, places < half
        if rotary.traditional:
            pair, cosine = places // 2, places % 2 == 0
        turns = frequencies.astype(np.float32)
        # The result of an operation lies in the device's memory. An array from the host lies in
        # memory that the device has to fetch at each use.
        arrays = [
            mx.array(turns) * 1,
            mx.array(turns[pair]) * 1,
            mx.logical_not(mx.array(~cosine)),
        ]
        mx.eval(arrays)
        rotation = Rotation(arrays[0], amplitude, rotary.traditional, *arrays[1:])
        rotation._expect_as_of(rope)
        return rotation

    def __call__(self, positions: mx.array) -> mx.array:
        """Return the rotation of pairs (1, 0), (rows, dims) float32, for positions (rows,).

        Compiled, this is one kernel, since each number is computed by itself.
        """
        angles = positions[:, None].astype(mx.float32) * self._turns
        rotation = mx.where(self._cosine, mx.cos(angles), mx.sin(angles))
        return rotation if self.amplitude == 1.0 else rotation * self.amplitude

    def _expect_as_of(self, rope: nn.Module) -> None:
        """Compare with the module's own rotation of one row.

        Raises:
            NotFusable: the rotations differ.
        """
        basis = self._cosine.astype(mx.float32)[None, None, None]
        for position in (0, 1, 777):
            theirs = np.array(rope(basis, offset=position))[0, 0, 0]
            ours = np.array(self(mx.array([position])))[0]
            _expect(bool(np.abs(theirs - ours).max() < 2e-3), "a rotation that turns otherwise")


@dataclass(frozen=True, slots=True)
class Inlets:
    """Maker of the layers' own inputs for each token, from an embedding for each layer and from the
    first layer's input.

    The scales multiply as in the module.
    """

    embed: nn.Module
    scale: float
    projection: nn.Module
    projection_scale: float
    norm: nn.RMSNorm
    layers: int
    sum_scale: float

    @staticmethod
    def of(body: nn.Module) -> Inlets | None:
        """Return the inlets of a body, or None if it has none."""
        if not isinstance(body, gemma4_text.Gemma4TextModel):
            return None
        embed, projection, norm = (body.get(name) for name in _INLETS)
        if embed is None:
            return None
        return Inlets(
            embed,
            body.embed_tokens_per_layer_scale,
            projection,
            body.per_layer_projection_scale,
            _norm(norm),
            len(body.layers),
            body.per_layer_input_scale,
        )

    def __call__(self, tokens: mx.array, hidden: mx.array) -> mx.array:
        """Return the own inputs, (tokens, layers, width). hidden: the first layer's input for
        `tokens`."""
        shape = (tokens.shape[0], self.layers, -1)
        own = (self.embed(tokens) * self.scale).reshape(shape)
        projected = self.norm((self.projection(hidden) * self.projection_scale).reshape(shape))
        inlets: mx.array = (projected + own) * self.sum_scale
        return inlets


AnyLayer = Anatomy | Latents | Recurrence | Convolution


@dataclass(frozen=True, slots=True)
class Common:
    """A common decoder, before anything is joined.

    sources: for each layer, the number of the layer whose keys and values, or state, it uses: its
    own, except for the last layers of some models. rotations: the model's kinds of rotation. kinds:
    for each layer, the number of its kind among them; 0 for a layer without rotation. scale: the
    factor of embeddings, a number of the layers' type, if there is one. head: the module with the
    vocabulary's weights, `embed` or a layer of its own. softcap: that of logits, if there is one.
    inlets: the maker of the layers' own inputs, if there are any.
    """

    layers: list[AnyLayer]
    sources: list[int]
    rotations: list[Rotation]
    kinds: list[int]
    embed: nn.Module
    scale: float | None
    norm: nn.RMSNorm
    head: nn.Module
    softcap: float | None
    inlets: Inlets | None

    @staticmethod
    def of(model: nn.Module, page_size: int) -> Common:
        """Return the parts of `model`.

        Raises:
            NotFusable: `model` is no common decoder.
        """
        text = model.language_model if _parts(model) == {"language_model"} else model
        _expect("model" in text and _parts(text) <= {"model", "lm_head"}, "a head")
        body = text.model
        inlets = Inlets.of(body)
        own = _parts(body) - (set() if inlets is None else set(_INLETS))
        last = [body[name] for name in _LAST_NORMS if own == {*_BODY, name}]
        _expect(len(last) == 1 and _is_norm(last[0]), "a body of other parts")
        windows, sources = _windows(model), _sources(body)
        _expect(len(windows) == len(set(sources)), "layers without a cache, or with several")
        layers = [
            _layer(block, windows[source], page_size)
            for block, source in zip(body.layers, sources, strict=True)
        ]
        _expect_sources(layers, sources)
        rotations: dict[tuple[Any, ...], Rotation] = {}
        kinds = []
        for layer in layers:
            if isinstance(layer, Recurrence | Convolution):
                kinds.append(0)
                continue
            kind = _kind(layer.rope)
            if kind not in rotations:
                rotations[kind] = Rotation.of(layer.rope, layer.rotary)
            kinds.append(list(rotations).index(kind))
        _expect(bool(rotations), "no layer with attention")
        return Common(
            layers,
            sources,
            list(rotations.values()),
            kinds,
            body.embed_tokens,
            _scale(body, layers[0].shape.dtype),
            _norm(last[0]),
            text.get("lm_head", body.embed_tokens),
            getattr(text, "final_logit_softcapping", None),
            inlets,
        )

    def embedded(self, tokens: mx.array) -> mx.array:
        """Return the first layer's input, (tokens, width)."""
        embeddings: mx.array = self.embed(tokens)
        return embeddings if self.scale is None else embeddings * self.scale

    def vocabulary(self, hidden: mx.array) -> mx.array:
        """Return the logits, (rows, vocabulary), of rows behind the last norm."""
        return self.capped((self.embed.as_linear if self.head is self.embed else self.head)(hidden))

    def capped(self, logits: mx.array) -> mx.array:
        """Return `logits` behind their soft cap, if they have one."""
        return logits if self.softcap is None else _capped(logits, self.softcap)


@partial(mx.compile, shapeless=True)
def _capped(logits: mx.array, most: float) -> mx.array:
    return mx.tanh(logits / most) * most


def _expect_given(attention: nn.Module, known: Set[str] = frozenset()) -> None:
    """Check the arguments and the rotation of `attention`.

    Raises:
        NotFusable: the module takes an argument that is not `known`, or rotates heads in an unknown
            way.
    """
    # Other arguments may depend on the position, and make a difference only far into a text.
    given = signature(type(attention).__call__).parameters.keys() - _GIVEN - known
    _expect(not given, f"attention that takes {', '.join(sorted(given))}")
    _expect(isinstance(attention.rope, _ROPES), f"{type(attention.rope).__name__}")


def _temper(attention: nn.Module) -> Temper | None:
    if not isinstance(attention, _TEMPERED):
        return None
    return Temper(attention.scaling_beta, attention.original_max_position_embeddings)


def _turned(rope: nn.Module) -> tuple[int, bool]:
    """Return the number of elements of a head that `rope` rotates, and whether pairs are
    neighbours."""
    match rope:
        case NoPE():
            return _UNTURNED, False
        case SuScaledRoPE():
            return rope.dim, False
        case _:
            return rope.dims, rope.traditional


def _layer(block: nn.Module, window: int | None, page_size: int) -> AnyLayer:
    if "linear_attn" in block:
        return Recurrence.of(block)
    if "conv" in block:
        return Convolution.of(block)
    if "self_attn" in block and "embed_q" in block.self_attn:
        return Latents.of(block, page_size)
    return Anatomy.of(block, window, page_size)


def attention_shapes(model: nn.Module, page_size: int) -> set[AttentionShape]:
    """Return the attention shapes of a common decoder's layers; an empty set for another model."""
    try:
        layers = Common.of(model, page_size).layers
    except NotFusable:
        return set()
    return {layer.shape for layer in layers if isinstance(layer, Anatomy)}


def _parts(module: nn.Module) -> set[str]:
    """Return the names of the modules, and of the lists of modules, that `module` consists of."""
    return {
        name
        for name, part in module.items()
        if isinstance(part[0] if isinstance(part, list) and part else part, nn.Module)
    }


def _is_norm(module: nn.Module) -> bool:
    return type(module) in (nn.RMSNorm, *_NORMS_BY_MORE)


def _norm(module: nn.Module) -> nn.RMSNorm:
    """Return `module` as one of MLX's own, with the effective weight; not evaluated.

    Raises:
        NotFusable: the norm is of another kind.
    """
    _expect(_is_norm(module), "norms of another kind")
    if type(module) is nn.RMSNorm:
        return module
    norm = nn.RMSNorm(module.weight.size, module.eps)
    norm.weight = 1.0 + module.weight
    return norm


def _around(
    block: nn.Module, name: str, besides: Sequence[str] = ()
) -> tuple[AnyMlp, Norms, Norms]:
    """Return a block's MLP, the norms around its part `name`, and the norms around the MLP.

    besides: names of further parts that the block has.

    Raises:
        NotFusable: the block has other parts.
    """
    beside = _BESIDE if _parts(block) >= _BESIDE else set()
    for first, second, mlps in _BLOCKS:
        own = [mlp for mlp in mlps if mlp in block]
        norms = {norm for norm in (*first, *second) if norm is not None}
        if _parts(block) == {name, *own, *norms, *besides, *beside} and len(own) == 1:
            mlp = _mlp(block[own[0]])
            whole = GatesAndRoutes.of(block, mlp) if beside else mlp
            return whole, _norms(block, *first), _norms(block, *second)
    raise NotFusable("a block of other parts")


def _norms(block: nn.Module, before: str, behind: str | None) -> Norms:
    return Norms(_norm(block[before]), None if behind is None else _norm(block[behind]))


def _head_norms(attention: nn.Module) -> tuple[nn.RMSNorm, nn.RMSNorm] | None:
    """Return the norms of q and k, or None if there are none. Where there are queries alone, the
    norm of q stands for both."""
    for of_q, of_k in _HEAD_NORMS:
        if of_q in attention:
            return _norm(attention[of_q]), _norm(attention[of_k if of_k in attention else of_q])
    return None


def _norms_values(attention: nn.Module, others: tuple[nn.RMSNorm, nn.RMSNorm] | None) -> bool:
    """Return whether heads of v are normed as those of q and k are, but without weights.

    Raises:
        NotFusable: heads of v are normed in another way.
    """
    if "v_norm" not in attention:
        return False
    norm = attention.v_norm
    known = isinstance(norm, gemma4_text.RMSNormNoScale)
    alike = known and others is not None and norm.eps == others[0].eps
    _expect(alike, "norms of values of another kind")
    return True


def _of_heads(attention: nn.Module) -> tuple[str, ...]:
    """Return the names of the projections that make q, k and v, or q alone. Values may be keys that
    are not rotated."""
    there = tuple(name for name in ("q_proj", "k_proj", "v_proj") if name in attention)
    is_short = isinstance(attention, _SHARING) and there == ("q_proj", "k_proj")
    return (*there, "k_proj") if is_short else there


def _sources(body: nn.Module) -> list[int]:
    """Return `Common.sources` of a body."""
    if isinstance(body, gemma4_text.Gemma4TextModel):
        return list(body.previous_kvs)
    return list(range(len(body.layers)))


def _expect_sources(layers: Sequence[AnyLayer], sources: Sequence[int]) -> None:
    """Check the layers' sources.

    Raises:
        NotFusable: layers without keys and values of their own are not the last, or attend
            otherwise than their source.
    """
    count = len(set(sources))
    _expect(sources[:count] == list(range(count)), "layers that share what comes later")
    for layer, source in zip(layers, sources, strict=True):
        alone = isinstance(layer, Anatomy) and layer.rotary.alone
        _expect(alone == (layers[source] is not layer), "keys and values that are shared")
        _expect(not alone or layer.shape == layers[source].shape, "keys of another shape")


def _scale(body: nn.Module, dtype: mx.Dtype) -> float | None:
    """Return the factor of embeddings of `dtype`, or None if there is none."""
    match body:
        case gemma2.GemmaModel() | gemma4_text.Gemma4TextModel():
            first = dtype
        case gemma3_text.Gemma3Model():
            # bfloat16, whatever the type of the embeddings.
            first = mx.bfloat16
        case _:
            return None
    scale = mx.array(body.norm.weight.size**0.5, first).astype(dtype)
    return float(np.array(scale.astype(mx.float32)))


def _mlp(mlp: nn.Module) -> Gates | Routes:
    for gate_up, down in _GATES:
        if _parts(mlp) == {*gate_up, down}:
            activation = Activation.GELU if isinstance(mlp, _GELU_MLPS) else Activation.SILU
            return Gates(_linears(mlp, gate_up), _linears(mlp, (down,))[0], activation)
    routes = Routes.of(mlp)
    if routes is None:
        raise NotFusable("an MLP of other parts")
    return routes


def _linears(
    parent: nn.Module, apart: Sequence[str], together: str | None = None
) -> tuple[nn.Module, ...]:
    names = apart if together is None or together not in parent else (together,)
    linears = tuple(parent[name] for name in names)
    kinds = set(map(_stored, linears))
    known = all(isinstance(x, nn.Linear) or type(x) is nn.QuantizedLinear for x in linears)
    _expect(known and len(kinds) == 1, "projections of other kinds, or of several")
    _expect(len({frozenset(dict(x)) for x in linears}) == 1, "a bias on some projections only")
    return linears


def _stored(layer: nn.Module) -> tuple[Any, ...]:
    """Return a key that is equal for layers of one kind whose weights are stored alike."""
    is_packed = type(layer) in (nn.QuantizedLinear, QuantizedSwitchLinear)
    return (type(layer), *((layer.group_size, layer.bits, layer.mode) if is_packed else ()))


def _first_of(attention: nn.Module, names: tuple[str, ...]) -> float:
    """Return the number that the module has under the first of `names` that it has.

    Raises:
        NotFusable: the module has none of these names.
    """
    found = [getattr(attention, name) for name in names if hasattr(attention, name)]
    _expect(bool(found), f"attention without {' or '.join(names)}")
    number: float = found[0]
    return number


def _activation(module: nn.Module) -> Activation | None:
    """Return the activation of experts, or None for an unknown one."""
    match module:
        case SwiGLU():
            return Activation.SILU
        case SwigluOAI(_alpha=1.702, _limit=7.0):
            return Activation.CLAMPED_SILU
        case gemma4_text.GeGLU():
            return Activation.GELU
    return None


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise NotFusable(what)


def _windows(model: nn.Module) -> list[int | None]:
    windows: list[int | None] = []
    for cache in make_prompt_cache(model):
        match cache:
            case KVCache() | ArraysCache():
                windows.append(None)
            case RotatingKVCache(keep=0):
                windows.append(cache.max_size)
            case _:
                raise NotFusable(f"a cache of type {type(cache).__name__}")
    return windows


def _kind(rope: nn.Module) -> tuple[Any, ...]:
    """Return a key that is equal for rotations that turn alike."""
    numbers = {name: bytes(np.array(array)) for name, array in dict(rope).items()}
    constants = {name: value for name, value in vars(rope).items() if not name.startswith("_no")}
    return (type(rope), repr(sorted(constants.items())), repr(sorted(numbers.items())))
