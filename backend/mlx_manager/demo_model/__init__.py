"""The embedded default model, `mlx-manager/demo`: a tiny Llama that answers about this server."""

from __future__ import annotations

from pathlib import Path


def demo_model_path() -> Path:
    """The folder that holds the model's config, tokenizer, chat template and weights."""
    return Path(__file__).parent
