"""RoBERTa, XLM-RoBERTa and CamemBERT: BERT's layers, and positions that begin after the padding's.

Source: transformers 5.24, `models/roberta/modeling_roberta.py`.
"""

from __future__ import annotations

import mlx.core as mx
from mlx import nn

from mlx_manager.mlx_server.encoders.architectures.architecture import (
    Architecture,
    Config,
    ScoreHead,
)
from mlx_manager.mlx_server.encoders.architectures.bert import OLD_NAMES, Bert, sizes_of
from mlx_manager.mlx_server.encoders.batch import PaddedBatch

PADDING = 1
"""The padding's id, where config.json does not say."""


class Roberta(Bert):
    """`RobertaModel`, without its pooler, which nothing reads."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._padding = config.whole("pad_token_id", PADDING, least=0)

    def places(self, batch: PaddedBatch) -> mx.array:
        return places_after(batch.ids, self._padding)


class FirstTokenHead(ScoreHead):
    """`RobertaClassificationHead`: a layer, tanh and a layer on the first token."""

    def __init__(self, config: Config, labels: int) -> None:
        super().__init__()
        size = config.whole("hidden_size", 768)
        self.classifier = {"dense": nn.Linear(size, size), "out_proj": nn.Linear(size, labels)}

    def __call__(self, hidden: mx.array, batch: PaddedBatch) -> mx.array:
        dense, out = self.classifier["dense"], self.classifier["out_proj"]
        logits: mx.array = out(mx.tanh(dense(hidden[:, 0])))
        return logits


def places_after(ids: mx.array, padding: int) -> mx.array:
    """Return positions (rows, longest) that count tokens from `padding` + 1 on. A token of the id
    `padding`, wherever it stands, is at the position `padding` and not counted."""
    counted = (ids != padding).astype(mx.int32)
    return mx.cumsum(counted, axis=1) * counted + padding


ARCHITECTURE = Architecture(
    sizes_of,
    Roberta,
    FirstTokenHead,
    prefix="roberta.",
    unread=("pooler.", "lm_head.", "embeddings.position_ids"),
    renamed=OLD_NAMES,
)
