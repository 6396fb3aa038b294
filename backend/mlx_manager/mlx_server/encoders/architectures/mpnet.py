"""MPNet: BERT's layers, with a bias for the distance of two tokens.

Source: transformers 5.24, `models/mpnet/modeling_mpnet.py`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import mlx.core as mx
import numpy as np
from mlx import nn

from mlx_manager.mlx_server.encoders.architectures.architecture import (
    Architecture,
    Body,
    Config,
    Sizes,
    attend,
    split,
)
from mlx_manager.mlx_server.encoders.architectures.bert import OLD_NAMES, Embeddings, PostNormLayer
from mlx_manager.mlx_server.encoders.architectures.bert import sizes_of as sizes_of_bert
from mlx_manager.mlx_server.encoders.architectures.roberta import FirstTokenHead, places_after
from mlx_manager.mlx_server.encoders.batch import Mask, PaddedBatch

PADDING = 1
"""The padding's id by which positions are counted, whatever config.json says."""
BUCKETS, FARTHEST = 32, 128
"""The number of buckets, and the distance from which on all tokens are in the last one."""


class Attention(nn.Module):  # type: ignore[misc]
    def __init__(self, size: int, heads: int, eps: float) -> None:
        super().__init__()
        self.attn = {name: nn.Linear(size, size) for name in "qkvo"}
        self.LayerNorm = nn.LayerNorm(size, eps=eps)
        self._heads, self._scale = heads, (size // heads) ** -0.5

    def __call__(self, x: mx.array, mask: Mask) -> mx.array:
        q, k, v = (split(self.attn[name](x), self._heads) for name in "qkv")
        mixed = self.attn["o"](attend(q, k, v, mask, self._scale))
        normed: mx.array = self.LayerNorm(mixed + x)
        return normed


class Layer(PostNormLayer):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.attention = Attention(self.size, self.heads, self.eps)

    def attended(self, x: mx.array, mask: Mask) -> mx.array:
        return self.attention(x, mask)


class MPNet(Body):
    """`MPNetModel`, without its pooler, which nothing reads."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.sizes = sizes_of(config)
        self.embeddings = Embeddings(config, segments=None)
        layers = config.whole("num_hidden_layers", 12)
        self.encoder = {
            "layer": [Layer(config) for _ in range(layers)],
            "relative_attention_bias": nn.Embedding(BUCKETS, self.sizes.heads),
        }

    def __call__(self, batch: PaddedBatch, made: list[mx.array]) -> mx.array:
        x = self.embeddings(batch, places_after(batch.ids, PADDING))
        bias = self.encoder["relative_attention_bias"](buckets_of(x.shape[1]))
        bias = bias.astype(x.dtype).transpose(2, 0, 1)
        mask = mx.where(batch.to_all(), bias, mx.array(-math.inf, x.dtype))
        for layer in self.encoder["layer"]:
            x = layer(x, mask)
            made.append(x)
        return x


def sizes_of(config: Config) -> Sizes:
    """
    Raises:
        ModelNotSupported: a variation that is not known here.
        ModelLoadFailed: a setting has a value that can't be.
    """
    config.must_be("relative_attention_num_buckets", BUCKETS)
    return replace(sizes_of_bert(config), segments=2, biased=True)


def buckets_of(longest: int) -> mx.array:
    """Return the bucket of each pair of tokens by their distance, (longest, longest) int32.

    Half of the buckets are for tokens before. Half of those are for the nearest ones, a bucket
    each, and the others grow with the distance up to `FARTHEST`.
    """
    half, near = BUCKETS // 2, BUCKETS // 4
    far = np.arange(longest, dtype=np.int32)
    # In float32 as there: a distance of 16 is exactly at the border of two buckets.
    growth = np.log(np.maximum(far, 1).astype(np.float32) / np.float32(near))
    scale = np.float32(math.log(FARTHEST / near))
    grown = near + (growth / scale * np.float32(half - near)).astype(np.int32)
    after = np.where(far < near, far, np.minimum(grown, half - 1)).astype(np.int32)
    by_distance = mx.array(np.concatenate([after[:0:-1] + half, after]))
    away = mx.arange(longest)[:, None] - mx.arange(longest)[None]
    return by_distance[away + longest - 1]


ARCHITECTURE = Architecture(
    sizes_of,
    MPNet,
    FirstTokenHead,
    prefix="mpnet.",
    unread=("pooler.", "lm_head.", "embeddings.position_ids"),
    renamed=OLD_NAMES,
)
