"""Specs of layers: attention, latent attention, the gated delta rule, short convolutions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from inspect import signature

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear

from mlx_manager.mlx_server.devices.attention.kernel import AttentionShape, Rotary
from mlx_manager.mlx_server.devices.cuda.mla.shape import LatentShape
from mlx_manager.mlx_server.devices.states import DeltaShape, DeltaWeights, ShortShape
from mlx_manager.mlx_server.execution.spec.mlps import (
    BESIDE,
    FeedForwardSpec,
    MLPAndMoESpec,
    mlp_in,
)
from mlx_manager.mlx_server.execution.spec.parts import (
    NotFusable,
    declared,
    expect,
    first_of,
    group_of,
    is_one_of,
    linears_in,
    norm_in,
    parts_of,
)
from mlx_manager.mlx_server.execution.spec.rotation import is_known, turned
from mlx_manager.mlx_server.models.families import MODULES
from mlx_manager.mlx_server.models.module_facts import AttentionNames

# Parts of latent attention, besides those that make the queries.
_LATENT = {"kv_a_proj_with_mqa", "kv_a_layernorm", "embed_q", "unembed_out", "o_proj", "rope"}
_LATENT_QUERIES = ({"q_proj"}, {"q_a_proj", "q_a_layernorm", "q_b_proj"})
_BY_HEAD = (MultiLinear, QuantizedMultiLinear)
_GIVEN = {"self", "x", "mask", "cache"}
# Parts for a layer's own input of each token: its gate, the product back, and the norm behind.
_PER_LAYER_INPUT = ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")


@dataclass(frozen=True, slots=True)
class Norms:
    """Norms around attention or an MLP.

    pre: that of the input. post: that of the result, before it is added to the residual.
    """

    pre: nn.RMSNorm
    post: nn.RMSNorm | None

    @property
    def all(self) -> tuple[nn.RMSNorm, ...]:
        return (self.pre,) if self.post is None else (self.pre, self.post)

    @staticmethod
    def of(block: nn.Module, names: tuple[str, str | None]) -> Norms:
        pre, post = names
        return Norms(norm_in(block[pre]), None if post is None else norm_in(block[post]))


@dataclass(frozen=True, slots=True)
class PerLayerInputSpec:
    """Product of a layer's own input of a token (per-layer embeddings of Gemma 3n and 4):
    `norm(projection(gelu(gate(hidden)) * own))`, which is added behind the MLP."""

    gate: nn.Module
    projection: nn.Module
    norm: nn.RMSNorm

    @staticmethod
    def of(block: nn.Module) -> PerLayerInputSpec | None:
        """Return the product of a block, or None if the block has no own input."""
        if not parts_of(block) >= set(_PER_LAYER_INPUT):
            return None
        gate, projection = (linears_in(block, (name,))[0] for name in _PER_LAYER_INPUT[:2])
        return PerLayerInputSpec(gate, projection, norm_in(block[_PER_LAYER_INPUT[2]]))


@dataclass(frozen=True, slots=True)
class LayerSpec(ABC):
    """Parts of one layer around the operation in which its tokens meet, before anything is joined.

    qkv: the projections that make that operation's input. output: the projection of its result.
    per_layer_input: the product of the layer's own input of each token, if it has one.
    layer_scale: (1,), the factor of the layer's result, if it has one. group: the ranks that have
    shares of the heads, over which results of `output` are summed up; None for whole layers.
    """

    qkv: tuple[nn.Module, ...]
    output: nn.Module
    mlp: FeedForwardSpec
    attention_norms: Norms
    mlp_norms: Norms
    per_layer_input: PerLayerInputSpec | None = field(default=None, kw_only=True)
    layer_scale: mx.array | None = field(default=None, kw_only=True)
    group: mx.distributed.Group | None = field(default=None, kw_only=True)

    def weights(self) -> list[mx.array]:
        """Return the arrays of the layer's parts, and those made of them. All must be evaluated
        before steps are compiled, or each kind of step would make them anew."""
        layers = (*self.qkv, self.output, *self.mlp.layers)
        parts = (*layers, *self.attention_norms.all, *self.mlp_norms.all)
        if (own := self.per_layer_input) is not None:
            parts = (*parts, own.gate, own.projection, own.norm)
        found = [array for part in parts for _, array in tree_flatten(part.parameters())]
        scales = [] if self.layer_scale is None else [self.layer_scale]
        return [*found, *scales, *self._own_weights()]

    @abstractmethod
    def _own_weights(self) -> list[mx.array]: ...


@dataclass(frozen=True, slots=True)
class QueryScaling:
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
class AttentionSpec(LayerSpec):
    """Layer whose tokens meet in attention."""

    head_norms: tuple[nn.RMSNorm, nn.RMSNorm] | None
    rope: nn.Module
    rotary: Rotary
    shape: AttentionShape
    scale: float
    softcap: float | None
    window: int | None
    sinks: mx.array | None
    query_scaling: QueryScaling | None

    @staticmethod
    def of(block: nn.Module, window: int | None, page_size: int) -> AttentionSpec:
        per_layer_input = PerLayerInputSpec.of(block)
        besides = () if per_layer_input is None else _PER_LAYER_INPUT
        mlp, attention_norms, mlp_norms = _around(block, "self_attn", besides)
        attention = block.self_attn
        parts = parts_of(attention)
        names = next((names for names in MODULES.attentions if names.parts == parts), None)
        if names is None:
            raise NotFusable("attention of other parts")
        query_scaling = _query_scaling(attention)
        shares = is_one_of(attention, MODULES.sharing)
        known = {"attn_scale"} if query_scaling else {"shared_kv", "offset"} if shares else set()
        _expect_given(attention, known)
        qkv = linears_in(attention, _projections(names))
        head_norms = _head_norms(attention, names)
        alone = shares and not attention.has_kv
        dtype = attention_norms.pre.weight.dtype
        clipped = is_one_of(block, MODULES.clipped) and dtype == mx.float16
        expect(not clipped, "sums that are clipped to what float16 has")
        heads, kv_heads = (
            int(first_of(attention, each)) for each in (MODULES.heads, MODULES.kv_heads)
        )
        rows = sum(linear.weight.shape[0] for linear in qkv)
        gated = is_one_of(attention, MODULES.gated)
        dim = rows // (heads * (2 if gated else 1) + (0 if alone else 2 * kv_heads))
        if head_norms is not None:
            sizes = {norm.weight.size for norm in head_norms}
            epsilons = {norm.eps for norm in head_norms}
            expect(sizes == {dim} and len(epsilons) == 1, "norms over all heads at once")
        dims, traditional = turned(attention.rope)
        expect(traditional or dims % 16 == 0, f"rotation of {dims} elements")
        scaled = is_one_of(block, MODULES.scaled_layers)
        output = linears_in(attention, (names.output,))[0]
        return AttentionSpec(
            qkv=qkv,
            output=output,
            group=group_of(output),
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
                _norms_values(attention, names, head_norms),
                alone,
            ),
            shape=AttentionShape(heads, kv_heads, dim, page_size, dtype),
            scale=first_of(attention, MODULES.scales),
            softcap=getattr(attention, "attn_logit_softcapping", None),
            window=window,
            # float32, as the kernels take sinks.
            sinks=attention.sinks.astype(mx.float32) if "sinks" in attention else None,
            query_scaling=query_scaling,
            per_layer_input=per_layer_input,
            layer_scale=block.layer_scalar.astype(dtype) if scaled else None,
        )

    @property
    def head_weights(self) -> tuple[mx.array, mx.array] | None:
        """Weights of the norms of q and k, or None if there are no norms."""
        return self.head_norms and (self.head_norms[0].weight, self.head_norms[1].weight)

    def _own_weights(self) -> list[mx.array]:
        weights = list(self.head_weights or ())
        return weights if self.sinks is None else [*weights, self.sinks]


@dataclass(frozen=True, slots=True)
class MLASpec(LayerSpec):
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
    def of(block: nn.Module, page_size: int) -> MLASpec:
        mlp, attention_norms, mlp_norms = _around(block, "self_attn")
        own = block.self_attn
        expect(parts_of(own) - _LATENT in _LATENT_QUERIES, "latent attention of other parts")
        _expect_given(own)
        absorb, expand = own.embed_q, own.unembed_out
        expect(type(absorb) in _BY_HEAD and type(expand) in _BY_HEAD, "heads' matrices of a kind")
        ranked = "q_a_proj" in own
        first = "q_a_proj" if ranked else "q_proj"
        norms = [norm_in(own.kv_a_layernorm), *([norm_in(own.q_a_layernorm)] if ranked else [])]
        expect(len({norm.eps for norm in norms}) == 1, "norms that differ")
        heads, rank = absorb.weight.shape[:2]
        qkv = linears_in(own, (first, "kv_a_proj_with_mqa"))
        queries = linears_in(own, ("q_b_proj",))[0] if ranked else None
        dims = qkv[1].weight.shape[0] - rank
        made = qkv[0] if queries is None else queries
        shape = LatentShape(
            q_heads=heads,
            rank=rank,
            dims=dims,
            plain=made.weight.shape[0] // heads - dims,
            queried=qkv[0].weight.shape[0],
            page_size=page_size,
            dtype=attention_norms.pre.weight.dtype,
            values=expand.weight.shape[1],
        )
        _, traditional = turned(own.rope)
        output = linears_in(own, ("o_proj",))[0]
        return MLASpec(
            qkv=qkv,
            output=output,
            group=group_of(output),
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
class DeltaSpec(LayerSpec):
    """Layer whose tokens meet in a state, which each token changes by the gated delta rule."""

    shape: DeltaShape
    given: DeltaWeights

    @staticmethod
    def of(block: nn.Module) -> DeltaSpec:
        mlp, norms, mlp_norms = _around(block, "linear_attn")
        own = block.linear_attn
        names = declared(own, MODULES.deltas)
        if names is None:
            raise NotFusable(f"a layer of the kind {type(own).__name__}")
        dtype = norms.pre.weight.dtype
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
        linears = linears_in(own, names)
        expect("bias" not in own.conv1d, "a convolution with a bias")
        expect(
            sum(linear.weight.shape[0] for linear in linears) == shape.columns,
            "projections of other sizes",
        )
        output = linears_in(own, ("out_proj",))[0]
        group = getattr(own, "sharding_group", None)
        return DeltaSpec(linears, output, mlp, norms, mlp_norms, shape, given, group=group)

    def _own_weights(self) -> list[mx.array]:
        given = self.given
        return [given.convolution, given.rates, given.offsets, given.norm]


@dataclass(frozen=True, slots=True)
class ShortConvSpec(LayerSpec):
    """Layer whose tokens meet in a gated short convolution: C * convolution(B * x), where B, C and
    x are parts of one product (Liquid AI, "LFM2 Technical Report", 2025, section 2.1).

    given: the convolution's weights, (taps, channels).
    """

    shape: ShortShape
    given: mx.array

    @staticmethod
    def of(block: nn.Module) -> ShortConvSpec:
        mlp, norms, mlp_norms = _around(block, "conv")
        own = block.conv
        expect(
            is_one_of(own, MODULES.short_convolutions), f"a layer of the kind {type(own).__name__}"
        )
        expect("bias" not in own.conv, "a convolution with a bias")
        dtype = norms.pre.weight.dtype
        channels, taps = own.conv.weight.shape[:2]
        given = mx.contiguous(own.conv.weight[:, :, 0].T.astype(dtype))
        shape = ShortShape(channels, taps, dtype)
        linears = linears_in(own, ("in_proj",))
        expect(linears[0].weight.shape[0] == shape.columns, "projections of other sizes")
        return ShortConvSpec(
            linears, linears_in(own, ("out_proj",))[0], mlp, norms, mlp_norms, shape, given
        )

    def _own_weights(self) -> list[mx.array]:
        return [self.given]


AnyLayer = AttentionSpec | MLASpec | DeltaSpec | ShortConvSpec


def _expect_given(attention: nn.Module, known: Set[str] = frozenset()) -> None:
    """Check the arguments and the rotation of `attention`.

    Raises:
        NotFusable: the module takes an argument that is not `known`, or rotates heads in an unknown
            way.
    """
    # Other arguments may depend on the position, and make a difference only far into a text.
    given = signature(type(attention).__call__).parameters.keys() - _GIVEN - known
    expect(not given, f"attention that takes {', '.join(sorted(given))}")
    expect(is_known(attention.rope), f"{type(attention.rope).__name__}")


def _query_scaling(attention: nn.Module) -> QueryScaling | None:
    if not is_one_of(attention, MODULES.scaled_queries):
        return None
    return QueryScaling(attention.scaling_beta, attention.original_max_position_embeddings)


def layer_in(block: nn.Module, window: int | None, page_size: int) -> AnyLayer:
    """Return the spec of a block. window: the tokens that attention sees, None for all.

    Raises:
        NotFusable: the block is no layer of a common decoder.
    """
    if "linear_attn" in block:
        return DeltaSpec.of(block)
    if "conv" in block:
        return ShortConvSpec.of(block)
    if "self_attn" in block and "embed_q" in block.self_attn:
        return MLASpec.of(block, page_size)
    return AttentionSpec.of(block, window, page_size)


def _around(
    block: nn.Module, name: str, besides: Sequence[str] = ()
) -> tuple[FeedForwardSpec, Norms, Norms]:
    """Return a block's MLP, the norms around its part `name`, and the norms around the MLP.

    besides: names of further parts that the block has.

    Raises:
        NotFusable: the block has other parts.
    """
    parts = parts_of(block)
    beside = BESIDE if parts >= BESIDE else set()
    for names in MODULES.blocks:
        if parts == {name, names.feed_forward, *names.norms, *besides, *beside}:
            mlp = mlp_in(block[names.feed_forward])
            whole = MLPAndMoESpec.of(block, mlp) if beside else mlp
            return whole, Norms.of(block, names.attention), Norms.of(block, names.mlp)
    raise NotFusable("a block of other parts")


def _head_norms(
    attention: nn.Module, names: AttentionNames
) -> tuple[nn.RMSNorm, nn.RMSNorm] | None:
    """Return the norms of q and k, or None if there are none. Where there are queries alone, the
    norm of q stands for both."""
    if not names.norms:
        return None
    return norm_in(attention[names.norms[0]]), norm_in(attention[names.norms[-1]])


def _norms_values(
    attention: nn.Module, names: AttentionNames, others: tuple[nn.RMSNorm, nn.RMSNorm] | None
) -> bool:
    """Return whether heads of v are normed as those of q and k are, but without weights.

    Raises:
        NotFusable: heads of v are normed in another way.
    """
    if names.value_norm is None:
        return False
    norm = attention[names.value_norm]
    known = is_one_of(norm, MODULES.bare_norms)
    alike = known and others is not None and norm.eps == others[0].eps
    expect(alike, "norms of values of another kind")
    return True


def _projections(names: AttentionNames) -> tuple[str, ...]:
    """Return the projections that make q, k and v, or q alone. Two make values of keys."""
    two = len(names.projections) == 2
    return (*names.projections, names.projections[1]) if two else names.projections
