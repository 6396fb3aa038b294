"""Qwen2.5-VL, most of whose layers attend within windows."""

from __future__ import annotations

import mlx.core as mx

from mlx_manager.mlx_server.engine.prompt_images import Features
from mlx_manager.mlx_server.vision.towers.base import Checkpoint, expect_activation
from mlx_manager.mlx_server.vision.towers.patches import Patches, PatchTower

DEFAULTS = {"size": {"shortest_edge": 3136, "longest_edge": 12845056}}


class Tower(PatchTower):
    def __init__(self, checkpoint: Checkpoint) -> None:
        from mlx_vlm.models.qwen2_5_vl.config import VisionConfig
        from mlx_vlm.models.qwen2_5_vl.vision import VisionModel

        settings = VisionConfig.from_dict({**checkpoint.encoder, "model_type": "qwen2_5_vl"})
        expect_activation(checkpoint, "silu")
        super().__init__(checkpoint, VisionModel(settings), DEFAULTS)

    def features(self, part: Patches) -> Features:
        patches, grid = part
        return Features(self.module(self.cast(patches), mx.array(grid)))
