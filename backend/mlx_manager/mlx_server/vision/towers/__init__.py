"""Towers by family, each over mlx-vlm's modules or its own; mlx-vlm is imported with a tower."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mlx_manager.mlx_server.vision.towers.base import Checkpoint, VisionTower


def tower_of(name: str, checkpoint: Checkpoint) -> VisionTower:
    """Return the tower of that name for a checkpoint, its weights not yet read.

    Raises:
        ImportError: a library is not installed, or lacks the family.
        KeyError, TypeError, ValueError, ...: the checkpoint's settings are incomplete.
    """
    module: Any = import_module(f"{__name__}.{name}")
    tower: VisionTower = module.Tower(checkpoint)
    return tower
