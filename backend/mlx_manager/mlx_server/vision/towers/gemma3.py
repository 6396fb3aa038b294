"""Gemma 3: every picture is one square of the encoder's size, and has as many rows.

Source: transformers 5.24, `models/gemma3`. Pan and scan, which is off by default, is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from mlx_manager.mlx_server import core
from mlx_manager.mlx_server.engine.prompt_images import Features
from mlx_manager.mlx_server.vision.layout import Layout
from mlx_manager.mlx_server.vision.pixels import rgb
from mlx_manager.mlx_server.vision.towers.base import (
    Checkpoint,
    VisionTower,
    expect_activation,
    under_vision_model,
)

BEGIN, END = "<start_of_image>", "<end_of_image>"


class Module(nn.Module):  # type: ignore[misc]
    """Encoder and projector, under mlx-vlm's names."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        from mlx_vlm.models.gemma3.config import VisionConfig
        from mlx_vlm.models.gemma3.gemma3 import Gemma3MultiModalProjector
        from mlx_vlm.models.gemma3.vision import VisionModel

        super().__init__()
        settings = VisionConfig.from_dict({**checkpoint.encoder, "model_type": "gemma3"})
        self.vision_tower = VisionModel(settings)
        self.vision_tower.vision_model.post_layernorm.eps = settings.layer_norm_eps
        known = checkpoint.namespace(settings)
        known.text_config.mm_tokens_per_image = checkpoint.config["mm_tokens_per_image"]
        self.multi_modal_projector = Gemma3MultiModalProjector(known)


class Tower(VisionTower):
    row = "<image_soft_token>"
    whole = True

    def __init__(self, checkpoint: Checkpoint) -> None:
        from transformers.models.gemma3.image_processing_pil_gemma3 import (
            Gemma3ImageProcessorPil,
        )

        super().__init__()
        expect_activation(checkpoint, "gelu_pytorch_tanh")
        self.module = Module(checkpoint)
        side = checkpoint.encoder["image_size"]
        size = {"height": side, "width": side}
        self._processor = Gemma3ImageProcessorPil.from_dict(
            {**checkpoint.processor, "size": size, "do_pan_and_scan": False}
        )
        self._rows = checkpoint.config["mm_tokens_per_image"]
        # mlx-lm rounds it to bfloat16.
        self.scale = float(mx.array(checkpoint.text["hidden_size"] ** 0.5, mx.bfloat16))

    def layout(self, image: core.Image) -> Layout:
        return Layout(f"\n\n{BEGIN}{self.row}{END}\n\n", (self._rows,))

    def pixels(self, image: core.Image) -> np.ndarray[Any, Any]:
        """Return the square, (1, channels, side, side)."""
        found = self._processor([rgb(image)], return_tensors="np")
        square: np.ndarray[Any, Any] = np.asarray(found["pixel_values"])
        return square

    def renamed(self, name: str) -> str:
        return under_vision_model(name)

    def layers(self) -> list[nn.Module]:
        layers: list[nn.Module] = self.module.vision_tower.vision_model.encoder.layers
        return layers

    def parts(self, pixels: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
        yield pixels

    def features(self, part: np.ndarray[Any, Any]) -> Features:
        weight = self.module.vision_tower.vision_model.embeddings.patch_embedding.weight
        hidden, *_ = self.module.vision_tower(
            mx.array(part).transpose(0, 2, 3, 1).astype(weight.dtype)
        )
        return Features(self.module.multi_modal_projector(hidden)[0])
