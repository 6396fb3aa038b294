"""The embedded model that sees, `mlx-manager/demo-vision`: it answers about simple drawings."""

from __future__ import annotations

from pathlib import Path


def demo_vision_model_path() -> Path:
    """The folder that holds the model's config, tokenizer, chat template and weights."""
    return Path(__file__).parent
