"""An encoder: an architecture, and the layers that turn its output to vectors or scores."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx import nn

from mlx_manager.mlx_server.encoders.architectures.architecture import Body, ScoreHead
from mlx_manager.mlx_server.encoders.batch import PaddedBatch
from mlx_manager.mlx_server.encoders.pooling import DenseLayer, pooled
from mlx_manager.mlx_server.models.checkpoint.sentence import Pooling
from mlx_manager.mlx_server.models.loading.weights import default_device

SHORTEST = 64
"""Tokens of the shortest batch, where batches are filled up to few shapes."""
FUSED_HEADS = (64, 80, 128)
"""Sizes of heads for which GPUs have attention that keeps the scores to itself."""


class EncoderModel(nn.Module):  # type: ignore[misc]
    """The architecture, its pooling or head, and the layers after it.

    Without a head a row becomes a vector, not yet normalised; with one, its logits.

    Args:
        padding: the id that fills up short rows.
    """

    def __init__(
        self,
        body: Body,
        head: ScoreHead | None,
        poolings: Sequence[Pooling],
        dense: list[DenseLayer],
        padding: int,
    ) -> None:
        super().__init__()
        self.body = body
        if head is not None:
            self.head = head
        self.dense = dense
        self._poolings, self._padding = tuple(poolings), padding
        device = default_device()
        sizes = body.sizes
        self._fused = device != "cpu" and sizes.head in FUSED_HEADS and not sizes.biased
        self._few_shapes = device == "cuda"

    @property
    def padding(self) -> int:
        """Return the id that fills up short rows."""
        return self._padding

    @property
    def vocabulary(self) -> int:
        """Return the number of token ids."""
        return self.body.sizes.vocabulary

    @property
    def segments(self) -> int:
        """Return the number of segments; 2 for an architecture that does not read segments."""
        return self.body.sizes.segments

    @property
    def dimensions(self) -> int:
        """Return the number of values in a vector."""
        if self.dense:
            return int(self.dense[-1].linear.weight.shape[0])
        return self.body.sizes.hidden * len(self._poolings)

    def filled_up(self, rows: int, longest: int) -> tuple[int, int]:
        """Return the shape that a batch is filled up to. There are few shapes on NVIDIA, where each
        new one stops the streams beside it for 40 ms and up to a second: cuDNN, MLX's fused
        attention there, prepares itself.
        """
        return next_shape(rows, longest) if self._few_shapes else (rows, longest)

    def working_bytes(self, rows: int, longest: int) -> int:
        """Return an estimate of the bytes that a batch holds at its worst moment.

        A layer's results are gone before the next one's: the widest product's, as float32 and with
        what it is made from and into, for each token; and the scores of attention, of every head
        where MLX has no kernel that keeps them to itself.
        """
        sizes = self.body.sizes
        rows, longest = self.filled_up(rows, longest)
        scores = longest * longest * (1 if self._fused else sizes.heads)
        return 4 * rows * (6 * longest * sizes.widest + 4 * scores)

    def __call__(
        self,
        ids: mx.array,
        segments: mx.array,
        lengths: mx.array,
        made: list[mx.array] | None = None,
    ) -> mx.array:
        """Return (rows, dimensions or labels) in float32 for rows that are padded at their ends.

        ids, segments: int32 (rows, longest); a segment is 1 in the second text of a pair.
        lengths: int32 (rows,). made: gets each layer's result, not evaluated.
        """
        batch = PaddedBatch(ids, segments, lengths)
        hidden = self.body(batch, [] if made is None else made)
        if "head" in self:
            logits: mx.array = self.head(hidden, batch)
            return logits.astype(mx.float32)
        vectors = pooled(hidden, batch, self._poolings)
        for layer in self.dense:
            vectors = layer(vectors)
        return vectors.astype(mx.float32)


def next_shape(rows: int, longest: int) -> tuple[int, int]:
    """Return the next power of two of rows, and the next of four lengths in each octave from 64
    tokens on: in the mean a tenth more tokens in each row."""
    step = max(SHORTEST, 1 << max(0, (longest - 1).bit_length() - 3))
    return 1 << (rows - 1).bit_length(), -(-longest // step) * step
