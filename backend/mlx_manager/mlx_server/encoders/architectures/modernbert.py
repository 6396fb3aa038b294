"""ModernBERT.

Source: transformers 5.24, `models/modernbert/modeling_modernbert.py`.
"""

from __future__ import annotations

import mlx.core as mx
from mlx import nn

from mlx_manager.mlx_server.encoders.architectures.architecture import (
    Architecture,
    Body,
    Config,
    ScoreHead,
    Sizes,
    attend,
    head_size,
    split,
)
from mlx_manager.mlx_server.encoders.batch import Mask, PaddedBatch
from mlx_manager.mlx_server.encoders.pooling import pooled
from mlx_manager.mlx_server.models.checkpoint.sentence import Pooling

GLOBAL, LOCAL = 160_000.0, 10_000.0


def norm(config: Config) -> nn.LayerNorm:
    size, bias = config.whole("hidden_size", 768), config.flag("norm_bias", False)
    return nn.LayerNorm(size, eps=config.number("norm_eps", 1e-5), bias=bias)


class Attention(nn.Module):  # type: ignore[misc]
    def __init__(self, config: Config, base: float) -> None:
        super().__init__()
        size, self._heads = (
            config.whole("hidden_size", 768),
            config.whole("num_attention_heads", 12),
        )
        bias = config.flag("attention_bias", False)
        self.Wqkv = nn.Linear(size, 3 * size, bias=bias)
        self.Wo = nn.Linear(size, size, bias=bias)
        self._rope = nn.RoPE(size // self._heads, base=base)
        self._scale = (size // self._heads) ** -0.5

    def __call__(self, x: mx.array, mask: Mask) -> mx.array:
        q, k, v = (split(part, self._heads) for part in mx.split(self.Wqkv(x), 3, axis=-1))
        mixed: mx.array = self.Wo(attend(self._rope(q), self._rope(k), v, mask, self._scale))
        return mixed


class Layer(nn.Module):  # type: ignore[misc]
    """A layer. The first one has no norm before its attention: the embeddings are normed."""

    def __init__(self, config: Config, base: float, first: bool) -> None:
        super().__init__()
        size, inner = config.whole("hidden_size", 768), config.whole("intermediate_size", 1152)
        bias = config.flag("mlp_bias", False)
        if not first:
            self.attn_norm = norm(config)
        self.attn = Attention(config, base)
        self.mlp_norm = norm(config)
        self.mlp = {
            "Wi": nn.Linear(size, 2 * inner, bias=bias),
            "Wo": nn.Linear(inner, size, bias=bias),
        }
        self._act = config.activation("hidden_activation", "gelu")

    def __call__(self, x: mx.array, mask: Mask) -> mx.array:
        x = x + self.attn(self.attn_norm(x) if "attn_norm" in self else x, mask)
        inner, gate = mx.split(self.mlp["Wi"](self.mlp_norm(x)), 2, axis=-1)
        y: mx.array = x + self.mlp["Wo"](self._act(inner) * gate)
        return y


class ModernBert(Body):
    """`ModernBertModel`: layers that see all of a text, and layers that see what is near."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.sizes = sizes_of(config)
        size = self.sizes.hidden
        self._near = windows_of(config)
        self._reach = config.whole("local_attention", 128, least=2) // 2
        everywhere, near = bases_of(config)
        self.embeddings = {
            "tok_embeddings": nn.Embedding(self.sizes.vocabulary, size),
            "norm": norm(config),
        }
        self.layers = [
            Layer(config, near if is_near else everywhere, first=index == 0)
            for index, is_near in enumerate(self._near)
        ]
        self.final_norm = norm(config)

    def __call__(self, batch: PaddedBatch, made: list[mx.array]) -> mx.array:
        x: mx.array = self.embeddings["norm"](self.embeddings["tok_embeddings"](batch.ids))
        everywhere, near = batch.to_all(), batch.to_near(self._reach)
        for layer, is_near in zip(self.layers, self._near, strict=True):
            x = layer(x, near if is_near else everywhere)
            made.append(x)
        normed: mx.array = self.final_norm(x)
        return normed


class PredictionHead(ScoreHead):
    """`ModernBertForSequenceClassification`'s head: a layer, an activation and a norm on the pooled
    tokens, and a layer."""

    def __init__(self, config: Config, labels: int) -> None:
        super().__init__()
        size = config.whole("hidden_size", 768)
        bias = config.flag("classifier_bias", False)
        self.head = {"dense": nn.Linear(size, size, bias=bias), "norm": norm(config)}
        self.classifier = nn.Linear(size, labels)
        self._act = config.activation("classifier_activation", "gelu")
        offered: dict[str, Pooling] = {"cls": "cls", "mean": "mean"}
        self._pooling = config.choice("classifier_pooling", offered, "cls")

    def __call__(self, hidden: mx.array, batch: PaddedBatch) -> mx.array:
        vectors = pooled(hidden, batch, (self._pooling,)).astype(hidden.dtype)
        logits: mx.array = self.classifier(
            self.head["norm"](self._act(self.head["dense"](vectors)))
        )
        return logits


def windows_of(config: Config) -> list[bool]:
    """Return for each layer whether it sees what is near only."""
    every = config.whole("global_attn_every_n_layers", 3)
    layers = config.whole("num_hidden_layers", 22)
    return config.layer_types(layers, lambda index: index % every != 0)


def bases_of(config: Config) -> tuple[float, float]:
    """Return RoPE's bases, of the layers that see all and of those that see what is near."""
    return (
        config.rotary_base(GLOBAL, "full_attention", "global_rope_theta"),
        config.rotary_base(LOCAL, "sliding_attention", "local_rope_theta"),
    )


def sizes_of(config: Config) -> Sizes:
    """
    Raises:
        ModelNotSupported: a variation that is not known here.
        ModelLoadFailed: a setting has a value that can't be.
    """
    config.activation("hidden_activation", "gelu")
    windows_of(config)
    bases_of(config)
    size, heads = config.whole("hidden_size", 768), config.whole("num_attention_heads", 12)
    return Sizes(
        vocabulary=config.whole("vocab_size", 50368),
        hidden=size,
        widest=max(3 * size, 2 * config.whole("intermediate_size", 1152)),
        heads=heads,
        head=head_size(config, size, heads),
    )


ARCHITECTURE = Architecture(
    sizes_of,
    ModernBert,
    PredictionHead,
    prefix="model.",
    # The masked-language model's head has the same names as a classifier's.
    unread=("head.", "decoder."),
)
