"""From tokens' vectors to a text's: pooling, and the layers after it.

Source: sentence-transformers 6.2, `sentence_transformer/modules/pooling.py` and
`base/modules/dense.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import mlx.core as mx
from mlx import nn

from mlx_manager.mlx_server.encoders.batch import PaddedBatch
from mlx_manager.mlx_server.models.checkpoint.sentence import DenseActivation, Pooling

ACTIVATIONS: dict[DenseActivation, Callable[[mx.array], mx.array]] = {
    "identity": lambda x: x,
    "tanh": mx.tanh,
    "sigmoid": mx.sigmoid,
    "relu": nn.relu,
    "gelu": nn.gelu,
    "silu": nn.silu,
}


def pooled(hidden: mx.array, batch: PaddedBatch, poolings: Sequence[Pooling]) -> mx.array:
    """Pool `hidden`, (rows, longest, dimensions), to float32 (rows, dimensions) by each of
    `poolings`, one beside the other."""
    return mx.concatenate([pooled_by(pooling, hidden, batch) for pooling in poolings], axis=1)


def pooled_by(pooling: Pooling, hidden: mx.array, batch: PaddedBatch) -> mx.array:
    shown, lengths = batch.shown[..., None], batch.lengths[:, None]
    match pooling:
        case "mean":
            return total(hidden, shown) / lengths
        case "mean_sqrt_len":
            return total(hidden, shown) / mx.sqrt(lengths.astype(mx.float32))
        case "weightedmean":
            # The first token counts once, the second twice, ...
            weights = mx.where(shown, mx.arange(1, hidden.shape[1] + 1)[:, None], 0)
            return total(hidden.astype(mx.float32) * weights, shown) / weights.sum(axis=1)
        case "max":
            return mx.where(shown, hidden.astype(mx.float32), -math.inf).max(axis=1)
        case "cls":
            return hidden[:, 0].astype(mx.float32)
        case "last":
            return hidden[mx.arange(hidden.shape[0]), batch.lengths - 1].astype(mx.float32)


def total(hidden: mx.array, shown: mx.array) -> mx.array:
    return mx.where(shown, hidden.astype(mx.float32), 0.0).sum(axis=1)


class DenseLayer(nn.Module):  # type: ignore[misc]
    """sentence-transformers' Dense."""

    def __init__(self, inputs: int, outputs: int, bias: bool, activation: DenseActivation) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=bias)
        self._act = ACTIVATIONS[activation]

    def __call__(self, x: mx.array) -> mx.array:
        return self._act(self.linear(x))
