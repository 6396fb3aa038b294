"""Spec of a whole decoder, read of mlx-lm's module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.base import gather_last_axis
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

from mlx_manager.mlx_server.devices.attention.kernel import AttentionShape
from mlx_manager.mlx_server.devices.gathered import GATHERED
from mlx_manager.mlx_server.execution.images import MRope
from mlx_manager.mlx_server.execution.spec.layers import (
    AnyLayer,
    AttentionSpec,
    DeltaSpec,
    ShortConvSpec,
    layer_in,
)
from mlx_manager.mlx_server.execution.spec.parts import (
    NotFusable,
    declared,
    expect,
    is_norm,
    is_one_of,
    norm_in,
    parts_of,
)
from mlx_manager.mlx_server.execution.spec.rotation import Rotation, kind_of
from mlx_manager.mlx_server.models.families import MODULES

_BODY = {"embed_tokens", "layers"}
# Parts that make the layers' own inputs of each token.
_PER_LAYER_EMBEDDING = (
    "embed_tokens_per_layer",
    "per_layer_model_projection",
    "per_layer_projection_norm",
)


@dataclass(frozen=True, slots=True)
class PerLayerEmbedding:
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
    def of(body: nn.Module) -> PerLayerEmbedding | None:
        """Return the maker of a body, or None if it has none."""
        if not is_one_of(body, MODULES.per_layer_inputs):
            return None
        embed, projection, norm = (body.get(name) for name in _PER_LAYER_EMBEDDING)
        if embed is None:
            return None
        return PerLayerEmbedding(
            embed,
            body.embed_tokens_per_layer_scale,
            projection,
            body.per_layer_projection_scale,
            norm_in(norm),
            len(body.layers),
            body.per_layer_input_scale,
        )

    def __call__(self, tokens: mx.array, hidden: mx.array) -> mx.array:
        """Return the own inputs, (tokens, layers, width). hidden: the first layer's input for
        `tokens`."""
        shape = (tokens.shape[0], self.layers, -1)
        own = (self.embed(tokens) * self.scale).reshape(shape)
        projected = self.norm((self.projection(hidden) * self.projection_scale).reshape(shape))
        inputs: mx.array = (projected + own) * self.sum_scale
        return inputs


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A common decoder, before anything is joined.

    sources: for each layer, the number of the layer whose keys and values, or state, it uses: its
    own, except for the last layers of some models. rotations: the model's kinds of rotation. kinds:
    for each layer, the number of its kind among them; 0 for a layer without rotation. scale: the
    factor of embeddings, a number of the layers' type, if there is one. head: the module with the
    vocabulary's weights, `embed` or a layer of its own. softcap: that of logits, if there is one.
    per_layer: the maker of the layers' own inputs, if there are any. group: the ranks that have
    shares of the vocabulary, in their order; None where `head` has all of it.
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
    per_layer: PerLayerEmbedding | None
    group: mx.distributed.Group | None = None

    @staticmethod
    def of(model: nn.Module, page_size: int, mrope: MRope | None = None) -> DecoderSpec:
        """Return the parts of `model`. mrope: the axes of its positions, if there are several.

        Raises:
            NotFusable: `model` is no common decoder.
        """
        text = model.language_model if parts_of(model) == {"language_model"} else model
        expect("model" in text and parts_of(text) <= {"model", "lm_head"}, "a head")
        body = text.model
        embeds = nn.Embedding | nn.QuantizedEmbedding
        expect(isinstance(body.get("embed_tokens"), embeds), "an input of other parts")
        head = text.get("lm_head", body.embed_tokens)
        per_layer = PerLayerEmbedding.of(body)
        own = parts_of(body) - (set() if per_layer is None else set(_PER_LAYER_EMBEDDING))
        last = [body[name] for name in MODULES.last_norms if own == {*_BODY, name}]
        expect(len(last) == 1 and is_norm(last[0]), "a body of other parts")
        windows, sources = _windows(model), _sources(body)
        expect(len(windows) == len(set(sources)), "layers without a cache, or with several")
        layers = [
            layer_in(block, windows[source], page_size)
            for block, source in zip(body.layers, sources, strict=True)
        ]
        _expect_sources(layers, sources)
        rotations: dict[tuple[Any, ...], Rotation] = {}
        kinds = []
        for layer in layers:
            if isinstance(layer, DeltaSpec | ShortConvSpec):
                kinds.append(0)
                continue
            kind = kind_of(layer.rope)
            if kind not in rotations:
                rotations[kind] = Rotation.of(layer.rope, layer.rotary, mrope)
            kinds.append(list(rotations).index(kind))
        expect(bool(rotations), "no layer with attention")
        return DecoderSpec(
            layers,
            sources,
            list(rotations.values()),
            kinds,
            body.embed_tokens,
            _scale(body, layers[0].shape.dtype),
            norm_in(last[0]),
            head,
            getattr(text, "final_logit_softcapping", None),
            per_layer,
            head.group if isinstance(head, GATHERED) else getattr(text, "sharding_group", None),
        )

    def embedded(self, tokens: mx.array) -> mx.array:
        """Return the first layer's input, (tokens, width)."""
        embeddings: mx.array = self.embed(tokens)
        return embeddings if self.scale is None else embeddings * self.scale

    def vocabulary(self, hidden: mx.array) -> mx.array:
        """Return the logits, (rows, vocabulary), of rows behind the last norm."""
        multiply = self.head
        if isinstance(self.head, GATHERED):
            multiply = self.head.share
        elif self.head is self.embed:
            multiply = self.embed.as_linear
        return self.finished(multiply(hidden))

    def finished(self, share: mx.array) -> mx.array:
        """Return the logits of a product with `head`: those of all ranks, behind their soft cap, if
        they have one."""
        logits = share if self.group is None else gather_last_axis(share, self.group)
        return logits if self.softcap is None else _capped(logits, self.softcap)


@partial(mx.compile, shapeless=True)
def _capped(logits: mx.array, most: float) -> mx.array:
    return mx.tanh(logits / most) * most


def attention_shapes(model: nn.Module, page_size: int) -> set[AttentionShape]:
    """Return the attention shapes of a common decoder's layers; an empty set for another model."""
    try:
        layers = DecoderSpec.of(model, page_size).layers
    except NotFusable:
        return set()
    return {layer.shape for layer in layers if isinstance(layer, AttentionSpec)}


def _sources(body: nn.Module) -> list[int]:
    """Return `DecoderSpec.sources` of a body."""
    name = declared(body, MODULES.kv_sources)
    return list(range(len(body.layers)) if name is None else getattr(body, name))


def _expect_sources(layers: Sequence[AnyLayer], sources: Sequence[int]) -> None:
    """Check the layers' sources.

    Raises:
        NotFusable: layers without keys and values of their own are not the last, or attend
            otherwise than their source.
    """
    count = len(set(sources))
    expect(sources[:count] == list(range(count)), "layers that share what comes later")
    for layer, source in zip(layers, sources, strict=True):
        alone = isinstance(layer, AttentionSpec) and layer.rotary.alone
        expect(alone == (layers[source] is not layer), "keys and values that are shared")
        expect(not alone or layer.shape == layers[source].shape, "keys of another shape")


def _scale(body: nn.Module, dtype: mx.Dtype) -> float | None:
    """Return the factor of embeddings of `dtype`, or None if there is none."""
    rounded = declared(body, MODULES.embedding_scales)
    if rounded is None:
        return None
    first = dtype if rounded == "own" else getattr(mx, rounded)
    scale = mx.array(body.norm.weight.size**0.5, first).astype(dtype)
    return float(np.array(scale.astype(mx.float32)))


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
