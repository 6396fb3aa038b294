"""BERT, and the layers that RoBERTa and MPNet have in common with it.

Source: transformers 5.24, `models/bert/modeling_bert.py`.
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

OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


class Embeddings(nn.Module):  # type: ignore[misc]
    """Words, places and, unless `segments` is None, segments, added up and normed."""

    def __init__(self, config: Config, segments: int | None) -> None:
        super().__init__()
        size = config.whole("hidden_size", 768)
        self.word_embeddings = nn.Embedding(config.whole("vocab_size", 30522), size)
        self.position_embeddings = nn.Embedding(config.whole("max_position_embeddings", 512), size)
        if segments is not None:
            self.token_type_embeddings = nn.Embedding(segments, size)
        self.LayerNorm = nn.LayerNorm(size, eps=config.number("layer_norm_eps", 1e-12))

    def __call__(self, batch: PaddedBatch, places: mx.array) -> mx.array:
        """Return (rows, longest, hidden). places: positions of the tokens, (longest,) or (rows,
        longest)."""
        x = self.word_embeddings(batch.ids) + self.position_embeddings(places)
        if "token_type_embeddings" in self:
            x = x + self.token_type_embeddings(batch.segments)
        normed: mx.array = self.LayerNorm(x)
        return normed


class SelfAttention(nn.Module):  # type: ignore[misc]
    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(size, size) for _ in range(3))
        self._heads, self._scale = heads, (size // heads) ** -0.5

    def __call__(self, x: mx.array, mask: Mask) -> mx.array:
        layers = self.query, self.key, self.value
        q, k, v = (split(layer(x), self._heads) for layer in layers)
        return attend(q, k, v, mask, self._scale)


class Added(nn.Module):  # type: ignore[misc]
    """A product, added to what was there before, and normed."""

    def __init__(self, inputs: int, size: int, eps: float) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, size)
        self.LayerNorm = nn.LayerNorm(size, eps=eps)

    def __call__(self, x: mx.array, before: mx.array) -> mx.array:
        normed: mx.array = self.LayerNorm(self.dense(x) + before)
        return normed


class PostNormLayer(nn.Module):  # type: ignore[misc]
    """A layer whose attention and MLP are each added to what was there before, and normed."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.size = config.whole("hidden_size", 768)
        self.heads = config.whole("num_attention_heads", 12)
        self.eps = config.number("layer_norm_eps", 1e-12)
        inner = config.whole("intermediate_size", 3072)
        self.intermediate = {"dense": nn.Linear(self.size, inner)}
        self.output = Added(inner, self.size, self.eps)
        self._act = config.activation("hidden_act", "gelu")

    def attended(self, x: mx.array, mask: Mask) -> mx.array:
        """Return (rows, longest, hidden): what attention gives, added to `x` and normed."""
        raise NotImplementedError

    def __call__(self, x: mx.array, mask: Mask) -> mx.array:
        x = self.attended(x, mask)
        y: mx.array = self.output(self._act(self.intermediate["dense"](x)), x)
        return y


class Layer(PostNormLayer):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.attention: dict[str, nn.Module] = {
            "self": SelfAttention(self.size, self.heads),
            "output": Added(self.size, self.size, self.eps),
        }

    def attended(self, x: mx.array, mask: Mask) -> mx.array:
        y: mx.array = self.attention["output"](self.attention["self"](x, mask), x)
        return y


class Bert(Body):
    """`BertModel`, without its pooler, which only a head reads."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.sizes = sizes_of(config)
        self.embeddings = Embeddings(config, self.sizes.segments)
        layers = config.whole("num_hidden_layers", 12)
        self.encoder = {"layer": [Layer(config) for _ in range(layers)]}

    def __call__(self, batch: PaddedBatch, made: list[mx.array]) -> mx.array:
        x = self.embeddings(batch, self.places(batch))
        mask = batch.to_all()
        for layer in self.encoder["layer"]:
            x = layer(x, mask)
            made.append(x)
        return x

    def places(self, batch: PaddedBatch) -> mx.array:
        """Return the tokens' positions."""
        return mx.arange(batch.ids.shape[1])


class PooledHead(ScoreHead):
    """`BertForSequenceClassification`'s head: the pooler on the first token, and a layer."""

    def __init__(self, config: Config, labels: int) -> None:
        super().__init__()
        size = config.whole("hidden_size", 768)
        self.pooler = {"dense": nn.Linear(size, size)}
        self.classifier = nn.Linear(size, labels)

    def __call__(self, hidden: mx.array, batch: PaddedBatch) -> mx.array:
        logits: mx.array = self.classifier(mx.tanh(self.pooler["dense"](hidden[:, 0])))
        return logits


def sizes_of(config: Config) -> Sizes:
    """
    Raises:
        ModelNotSupported: a variation of BERT that is not known here.
        ModelLoadFailed: a setting has a value that can't be.
    """
    config.must_be("position_embedding_type", "absolute")
    config.must_be("is_decoder", False)
    config.must_be("add_cross_attention", False)
    config.activation("hidden_act", "gelu")
    size, heads = config.whole("hidden_size", 768), config.whole("num_attention_heads", 12)
    return Sizes(
        vocabulary=config.whole("vocab_size", 30522),
        hidden=size,
        widest=max(3 * size, config.whole("intermediate_size", 3072)),
        heads=heads,
        head=head_size(config, size, heads),
        segments=config.whole("type_vocab_size", 2, least=0),
    )


ARCHITECTURE = Architecture(
    sizes_of,
    Bert,
    PooledHead,
    prefix="bert.",
    unread=("pooler.", "cls.", "embeddings.position_ids"),
    renamed=OLD_NAMES,
)
