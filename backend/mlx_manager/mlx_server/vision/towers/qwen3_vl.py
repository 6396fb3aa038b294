"""Qwen3-VL, and Qwen 3.5 and 3.6, whose tower is the same without DeepStack."""

from __future__ import annotations

import mlx.core as mx

from mlx_manager.mlx_server.engine.prompt_images import Features
from mlx_manager.mlx_server.vision.towers.base import Checkpoint, expect_activation
from mlx_manager.mlx_server.vision.towers.patches import Patches, PatchTower

DEFAULTS = {
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


class Tower(PatchTower):
    def __init__(self, checkpoint: Checkpoint) -> None:
        from mlx_vlm.models.qwen3_vl.config import VisionConfig
        from mlx_vlm.models.qwen3_vl.vision import VisionModel

        # The tower of every kind is Qwen3-VL's.
        settings = VisionConfig.from_dict({**checkpoint.encoder, "model_type": "qwen3_vl"})
        expect_activation(checkpoint, "gelu_pytorch_tanh")
        super().__init__(checkpoint, VisionModel(settings), DEFAULTS)
        self.levels = len(settings.deepstack_visual_indexes)
        if self.mrope is not None:
            # Configs of Qwen3-VL need not say so.
            self.mrope = type(self.mrope)(self.mrope.sections, interleaved=True)

    def features(self, part: Patches) -> Features:
        patches, grid = part
        rows, levels = self.module(self.cast(patches), mx.array(grid))
        return Features(rows, tuple(levels))
