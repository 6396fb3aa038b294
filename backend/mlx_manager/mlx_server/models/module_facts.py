"""Facts about mlx-lm's modules by which they read as layer specs (`execution/spec`), as data.

Parts are told by their attributes' names. A layer is read with the names of any family: most
families have those of another. What the names do not tell is told by the modules' classes. A class
is named by its module and its name ("gemma2.MLP"), and stands for its subclasses, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Scores = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True)
class BlockNames:
    """Names of a block's norms and of its MLP.

    attention, mlp: the norms before and after each; None if there is none after it.
    """

    attention: tuple[str, str | None]
    mlp: tuple[str, str | None]
    feed_forward: str

    @property
    def norms(self) -> set[str]:
        return {name for name in (*self.attention, *self.mlp) if name is not None}


@dataclass(frozen=True, slots=True)
class AttentionNames:
    """Names of the parts of attention, beside its rotation `rope`.

    projections: those of q, k and v, or one that makes all three. Where v is missing, values are
    keys that are not rotated; where k is missing, too, another layer's are attended to. norms: of
    the heads of q and k, or of q alone. value_norm: that of the heads of v.
    """

    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    output: str = "o_proj"
    norms: tuple[str, ...] = ()
    value_norm: str | None = None

    @property
    def parts(self) -> set[str]:
        norms = self.norms if self.value_norm is None else (*self.norms, self.value_norm)
        return {*self.projections, self.output, *norms, "rope"}


@dataclass(frozen=True, slots=True)
class MLPNames:
    """Names of the projections of an MLP with a gate; `gate_up` are two, or one that makes both."""

    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"


@dataclass(frozen=True, slots=True)
class SharedNames:
    """Names of a block's shared experts, which are one MLP that every token goes through.

    gate: the layer whose sigmoid weights their result; None if nothing weights it.
    """

    experts: str
    gate: str | None = None

    @property
    def parts(self) -> set[str]:
        return {name for name in (self.experts, self.gate) if name is not None}


@dataclass(frozen=True, slots=True)
class Routing:
    """Rule by which a router, or a block with one, chooses a token's experts and weights them.

    Strings are names of attributes, which may be paths.

    scores: the function of the logits, or the name of the layer that computes it. chosen: the
    number of experts. normalised: the chosen scores are divided by their sum. alone: that also
    holds where a single expert is chosen. bias: a correction of the scores for the choice. scale:
    a factor of the scores. expert_scale: a factor for each expert. least: a number that is added to
    the sum. linear: the layer that makes the logits, where the router is a module of its own that
    has such a layer. norm: makes the weights of the router's own norm, whose epsilon is `eps`.
    """

    scores: Scores | str = "softmax"
    chosen: str = "top_k"
    normalised: bool | str = True
    alone: bool = True
    bias: str | None = None
    scale: str | None = None
    expert_scale: str | None = None
    least: float | None = None
    linear: str | None = None
    norm: Callable[[Any], Any] | None = None


@dataclass(frozen=True, slots=True)
class ModuleFacts:
    """Names of parts, and facts about classes, that a family's modules have.

    Names:
        blocks, attentions, mlps: of their parts.
        experts: of a router and its experts.
        shared_experts: of experts beside these that every token goes through.
        last_norms: of the norm behind the last layer.
        heads, kv_heads, scales: of attention's numbers.

    Classes:
        offset_norms: norms that multiply by 1 + weight.
        bare_norms: norms without weights.
        gelu: MLPs, and activations of experts, that compute GELU's approximation by a tanh.
        clipped: layers that clip their sums to the range of float16.
        gated: attention whose q_proj makes a gate behind each head of q. The head's result is
            multiplied by the gate's sigmoid.
        sharing: attention that may be given the keys and values of another layer.
        scaled_layers: layers that multiply their results by `layer_scalar`.
        scaled_queries: attention that multiplies queries by a factor for each position, its
            argument `attn_scale`.
        unrotated: rotations that do nothing.
        routings: rules of routers, or of blocks whose router is a linear layer.
        beside: experts that lie beside a layer's MLP.
        deltas: layers of the gated delta rule, with the projections that their first product joins.
        short_convolutions: layers with a gated short convolution.
        embedding_scales: bodies that multiply embeddings by the root of their width, with the type
            in which the root is rounded first, "own" for that of the layers.
        kv_sources: bodies whose layers share keys and values, with the name of the list of each
            layer's source.
        per_layer_inputs: bodies that make an input of each token for every layer.
    """

    blocks: tuple[BlockNames, ...] = ()
    attentions: tuple[AttentionNames, ...] = ()
    mlps: tuple[MLPNames, ...] = ()
    experts: tuple[tuple[str, str], ...] = ()
    shared_experts: tuple[SharedNames, ...] = ()
    last_norms: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    kv_heads: tuple[str, ...] = ()
    scales: tuple[str, ...] = ()
    offset_norms: tuple[str, ...] = ()
    bare_norms: tuple[str, ...] = ()
    gelu: tuple[str, ...] = ()
    clipped: tuple[str, ...] = ()
    gated: tuple[str, ...] = ()
    sharing: tuple[str, ...] = ()
    scaled_layers: tuple[str, ...] = ()
    scaled_queries: tuple[str, ...] = ()
    unrotated: tuple[str, ...] = ()
    routings: Mapping[str, Routing] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    deltas: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    short_convolutions: tuple[str, ...] = ()
    embedding_scales: Mapping[str, str] = field(default_factory=dict)
    kv_sources: Mapping[str, str] = field(default_factory=dict)
    per_layer_inputs: tuple[str, ...] = ()
