"""Architectures of encoders, one a file, by the `model_type` of their config.json.

A module's parameters have the names that transformers gives them in a checkpoint, less the prefix
of the bare model. So a checkpoint needs no translation, and its quantisation is found by name.
"""

from __future__ import annotations

from mlx_manager.mlx_server.encoders.architectures import (
    bert,
    distilbert,
    gemma3,
    modernbert,
    mpnet,
    qwen3,
    roberta,
)
from mlx_manager.mlx_server.encoders.architectures.architecture import Architecture

ARCHITECTURES: dict[str, Architecture] = {
    "bert": bert.ARCHITECTURE,
    "camembert": roberta.ARCHITECTURE,
    "distilbert": distilbert.ARCHITECTURE,
    "gemma3_text": gemma3.ARCHITECTURE,
    "modernbert": modernbert.ARCHITECTURE,
    "mpnet": mpnet.ARCHITECTURE,
    "qwen3": qwen3.ARCHITECTURE,
    "roberta": roberta.ARCHITECTURE,
    "xlm-roberta": roberta.ARCHITECTURE,
}
