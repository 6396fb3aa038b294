"""DistilBERT.

Source: transformers 5.24, `models/distilbert/modeling_distilbert.py`.
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

EPS = 1e-12


class Layer(nn.Module):  # type: ignore[misc]
    def __init__(self, config: Config) -> None:
        super().__init__()
        size, inner = config.whole("dim", 768), config.whole("hidden_dim", 3072)
        names = ("q_lin", "k_lin", "v_lin", "out_lin")
        self.attention = {name: nn.Linear(size, size) for name in names}
        self.sa_layer_norm = nn.LayerNorm(size, eps=EPS)
        self.ffn = {"lin1": nn.Linear(size, inner), "lin2": nn.Linear(inner, size)}
        self.output_layer_norm = nn.LayerNorm(size, eps=EPS)
        self._heads = config.whole("n_heads", 12)
        self._scale = (size // self._heads) ** -0.5
        self._act = config.activation("activation", "gelu")

    def __call__(self, x: mx.array, mask: Mask) -> mx.array:
        q, k, v = (split(self.attention[f"{name}_lin"](x), self._heads) for name in "qkv")
        mixed = self.attention["out_lin"](attend(q, k, v, mask, self._scale))
        x = self.sa_layer_norm(mixed + x)
        y: mx.array = self.output_layer_norm(self.ffn["lin2"](self._act(self.ffn["lin1"](x))) + x)
        return y


class DistilBert(Body):
    """`DistilBertModel`. It reads no segments."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.sizes = sizes_of(config)
        size = self.sizes.hidden
        places = config.whole("max_position_embeddings", 512)
        self.embeddings = {
            "word_embeddings": nn.Embedding(self.sizes.vocabulary, size),
            "position_embeddings": nn.Embedding(places, size),
            "LayerNorm": nn.LayerNorm(size, eps=EPS),
        }
        layers = config.whole("n_layers", 6)
        self.transformer = {"layer": [Layer(config) for _ in range(layers)]}

    def __call__(self, batch: PaddedBatch, made: list[mx.array]) -> mx.array:
        places = self.embeddings["position_embeddings"](mx.arange(batch.ids.shape[1]))
        x: mx.array = self.embeddings["LayerNorm"](
            self.embeddings["word_embeddings"](batch.ids) + places
        )
        mask = batch.to_all()
        for layer in self.transformer["layer"]:
            x = layer(x, mask)
            made.append(x)
        return x


class FirstTokenHead(ScoreHead):
    """`DistilBertForSequenceClassification`'s head: a layer, ReLU and a layer on the first
    token."""

    def __init__(self, config: Config, labels: int) -> None:
        super().__init__()
        size = config.whole("dim", 768)
        self.pre_classifier = nn.Linear(size, size)
        self.classifier = nn.Linear(size, labels)

    def __call__(self, hidden: mx.array, batch: PaddedBatch) -> mx.array:
        logits: mx.array = self.classifier(nn.relu(self.pre_classifier(hidden[:, 0])))
        return logits


def sizes_of(config: Config) -> Sizes:
    """
    Raises:
        ModelNotSupported: a variation that is not known here.
        ModelLoadFailed: a setting has a value that can't be.
    """
    config.activation("activation", "gelu")
    size, heads = config.whole("dim", 768), config.whole("n_heads", 12)
    return Sizes(
        vocabulary=config.whole("vocab_size", 30522),
        hidden=size,
        widest=max(3 * size, config.whole("hidden_dim", 3072)),
        heads=heads,
        head=head_size(config, size, heads),
    )


ARCHITECTURE = Architecture(
    sizes_of,
    DistilBert,
    FirstTokenHead,
    prefix="distilbert.",
    unread=("vocab_", "embeddings.position_ids"),
)
