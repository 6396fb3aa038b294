"""Architectures of encoders, one a file, by the `model_type` of their config.json.

A module's parameters have the names that transformers gives them in a checkpoint, less the prefix
of the bare model. So a checkpoint needs no translation, and its quantisation is found by name.
"""

from __future__ import annotations

from mlx_manager.mlx_server.encoders.families import (
    bert,
    distilbert,
    gemma3,
    modernbert,
    mpnet,
    qwen3,
    roberta,
)
from mlx_manager.mlx_server.encoders.families.family import Family

FAMILIES: dict[str, Family] = {
    "bert": bert.FAMILY,
    "camembert": roberta.FAMILY,
    "distilbert": distilbert.FAMILY,
    "gemma3_text": gemma3.FAMILY,
    "modernbert": modernbert.FAMILY,
    "mpnet": mpnet.FAMILY,
    "qwen3": qwen3.FAMILY,
    "roberta": roberta.FAMILY,
    "xlm-roberta": roberta.FAMILY,
}
