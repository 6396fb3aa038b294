"""Gemma 4: pictures keep their proportions; squares of patches are pooled to rows.

Source: transformers 5.24, `models/gemma4`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from mlx_manager.mlx_server import core
from mlx_manager.mlx_server.engine.prompt_images import Features
from mlx_manager.mlx_server.vision.layout import Layout
from mlx_manager.mlx_server.vision.pixels import rgb
from mlx_manager.mlx_server.vision.towers.base import Checkpoint, VisionTower, expect_activation

Patches = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


class Module(nn.Module):  # type: ignore[misc]
    """Encoder and projector, under mlx-vlm's names."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        from mlx_vlm.models.gemma4.config import VisionConfig
        from mlx_vlm.models.gemma4.gemma4 import MultimodalEmbedder
        from mlx_vlm.models.gemma4.vision import VisionModel

        super().__init__()
        settings = VisionConfig.from_dict(checkpoint.encoder)
        self.vision_tower = VisionModel(settings)
        self.embed_vision = MultimodalEmbedder(
            settings.hidden_size, checkpoint.text["hidden_size"], settings.rms_norm_eps
        )


class Tower(VisionTower):
    row = "<|image|>"

    def __init__(self, checkpoint: Checkpoint) -> None:
        from transformers.models.gemma4.image_processing_pil_gemma4 import (
            Gemma4ImageProcessorPil,
        )

        super().__init__()
        expect_activation(checkpoint, "gelu_pytorch_tanh")
        self.module = Module(checkpoint)
        encoder = checkpoint.encoder
        self._patch, self._pool = encoder["patch_size"], encoder["pooling_kernel_size"]
        most = {"max_soft_tokens": encoder["default_output_length"]}
        fixed = {"patch_size": self._patch, "pooling_kernel_size": self._pool}
        self._processor = Gemma4ImageProcessorPil.from_dict(
            {**most, **checkpoint.processor, **fixed, "do_resize": True}
        )
        self._most = self._processor.max_soft_tokens * self._pool**2
        self.scale = checkpoint.text["hidden_size"] ** 0.5
        self.whole = checkpoint.text.get("use_bidirectional_attention") == "vision"
        self.windowed = self.whole

    def layout(self, image: core.Image) -> Layout:
        side = self._patch * self._pool
        height, width = pooled(image.height, image.width, self._patch, self._pool, self._most)
        rows = (height // side) * (width // side)
        return Layout(f"<|image>{self.row}<image|>", (rows,))

    def pixels(self, image: core.Image) -> Patches:
        """Return the patches, (patches, numbers), and the column and line of each."""
        found = self._processor([rgb(image)], return_tensors="np")
        patches = np.asarray(found["pixel_values"])[0]
        places = np.asarray(found["image_position_ids"])[0]
        real = places[:, 0] >= 0
        return patches[real], places[real]

    def renamed(self, name: str) -> str:
        return name.removeprefix("model.")

    def layers(self) -> list[nn.Module]:
        layers: list[nn.Module] = self.module.vision_tower.encoder.layers
        return layers

    def parts(self, pixels: Patches) -> Iterator[Patches]:
        yield pixels

    def features(self, part: Patches) -> Features:
        patches, places = (mx.array(array)[None] for array in part)
        hidden = self.module.vision_tower(patches, places)
        return Features(self.module.embed_vision(hidden)[0])


def pooled(height: int, width: int, patch: int, pool: int, most: int) -> tuple[int, int]:
    """Return the largest size of about the same proportions, in multiples of `patch` * `pool`
    pixels, that has at most `most` patches."""
    side = patch * pool
    factor = math.sqrt(most * patch**2 / (height * width))
    lines = math.floor(factor * height / side)
    columns = math.floor(factor * width / side)
    longest = most // pool**2
    if lines == 0:
        lines, columns = 1, min(width // height, longest)
    elif columns == 0:
        lines, columns = min(height // width, longest), 1
    return lines * side, columns * side
