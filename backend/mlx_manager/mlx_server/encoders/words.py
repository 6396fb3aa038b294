"""The head of a reranker that answers with a word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from mlx_manager.mlx_server.encoders.architectures.architecture import ScoreHead
from mlx_manager.mlx_server.encoders.batch import PaddedBatch
from mlx_manager.mlx_server.encoders.pairs import Answers

OUTPUT, EMBEDDING, ANSWERS = "lm_head", "embed_tokens", "answers"


class WordsHead(ScoreHead):
    """The rows of a language model's head for a yes and a no, on the last token.

    Its one logit is that of yes, less that of no: its sigmoid is the softmax over the two.
    """

    def __init__(self, hidden: int, answers: Answers) -> None:
        super().__init__()
        self.answers = mx.zeros((len(answers.ids), hidden))

    def __call__(self, hidden: mx.array, batch: PaddedBatch) -> mx.array:
        last = hidden[mx.arange(hidden.shape[0]), batch.lengths - 1].astype(mx.float32)
        logits = last @ self.answers.astype(mx.float32).T
        if len(self.answers) == 1:
            return logits
        return logits[:, :1] - logits[:, 1:]


def rows_of(
    weights: Mapping[str, mx.array], answers: Answers, config: Mapping[str, Any]
) -> dict[str, mx.array]:
    """Return the head's weights: the rows of a checkpoint's head, or of the embeddings that are
    its head.

    Raises:
        KeyError: the checkpoint lacks them.
    """
    is_apart = f"{OUTPUT}.weight" in weights or config.get("tie_word_embeddings") is False
    name = OUTPUT if is_apart else EMBEDDING
    rows = mx.array(answers.ids)
    weight, scales = weights[f"{name}.weight"], weights.get(f"{name}.scales")
    if scales is None:
        return {ANSWERS: weight[rows]}
    biases, found = weights.get(f"{name}.biases"), config["quantization"]
    named = (found.get(place) for place in (name, f"model.{name}"))
    own = next((one for one in named if isinstance(one, dict)), found)
    dense = mx.dequantize(
        weight[rows],
        scales[rows],
        None if biases is None else biases[rows],
        group_size=own.get("group_size", found["group_size"]),
        bits=own.get("bits", found["bits"]),
        mode=own.get("mode", found.get("mode", "affine")),
    )
    return {ANSWERS: dense}
