"""Kinds of input that a checkpoint takes, told by its small files before it is loaded. No MLX."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mlx_manager.mlx_server.errors import ModelLoadFailed
from mlx_manager.mlx_server.models.checkpoint.weight_files import headers_of, weight_files
from mlx_manager.mlx_server.models.families import vision_facts
from mlx_manager.mlx_server.models.family import VisionFacts

LIBRARIES = {"PIL": "Pillow", "mlx_vlm": "mlx-vlm"}
INSTALL = (
    "pip install 'mlx-manager-server[vision]', then pip install --no-deps 'mlx-vlm>=0.7.10,<0.8'"
)
"""Commands that install what models see by. mlx-vlm's own dependencies take 800 MB, and of them
Pillow and requests are imported."""


def input_modalities(config: Mapping[str, Any], folder: Path) -> tuple[str, ...]:
    """Return the kinds of input of a model: text, and images if its pictures can be read here.

    config: its config.json. folder: its folder. Reads the headers of its weights.
    """
    sees = vision_facts(config) is not None and not blindness(config, folder)
    return ("text", "image") if sees else ("text",)


def blindness(config: Mapping[str, Any], folder: Path) -> str:
    """Return why a model can't see here, as far as its small files tell; "" if it can."""
    facts = vision_facts(config)
    if facts is None:
        if isinstance(config.get("vision_config"), Mapping):
            return f"towers of {config.get('model_type')!r} models are not known here"
        return "it has no vision tower"
    if absent := missing_libraries():
        return f"{' and '.join(absent)} is not installed; to install it: {INSTALL}"
    if not has_tower(facts, folder):
        return "its folder has no tensors of the vision tower"
    return ""


@cache
def missing_libraries() -> tuple[str, ...]:
    """Return the names of the libraries that models see by and that are not installed."""
    return tuple(name for module, name in LIBRARIES.items() if find_spec(module) is None)


def has_tower(facts: VisionFacts, folder: Path) -> bool:
    """Return whether the weights' files have tensors of the tower."""
    weights = weight_files(folder)
    if weights.placed:
        return any(name.startswith(facts.tensors) for name in weights.placed)
    try:
        found = headers_of(weights).values()
    except (ModelLoadFailed, OSError):
        return False
    return any(name.startswith(facts.tensors) for tensors in found for name in tensors)
