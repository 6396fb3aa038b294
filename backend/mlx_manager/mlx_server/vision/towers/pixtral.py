"""Pixtral and Mistral 3: pictures keep their proportions, and each line of rows ends with a token.

Source: transformers 5.24, `models/pixtral` and `models/mistral3`.
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
from mlx_manager.mlx_server.vision.towers.base import (
    Checkpoint,
    VisionTower,
    expect_activation,
    under_vision_model,
)

BREAK, END = "[IMG_BREAK]", "[IMG_END]"


class Module(nn.Module):  # type: ignore[misc]
    """Encoder and projector, under mlx-vlm's names. merge: lines and columns of patches that make
    a row."""

    def __init__(self, checkpoint: Checkpoint, merge: int) -> None:
        from mlx_vlm.models.mistral3.mistral3 import Mistral3MultiModalProjector
        from mlx_vlm.models.pixtral.config import VisionConfig
        from mlx_vlm.models.pixtral.pixtral import LlavaMultiModalProjector
        from mlx_vlm.models.pixtral.vision import VisionModel

        super().__init__()
        settings = VisionConfig.from_dict({**checkpoint.encoder, "model_type": "pixtral"})
        self.vision_tower = VisionModel(settings)
        projects = LlavaMultiModalProjector
        known = checkpoint.namespace(settings)
        if checkpoint.config["model_type"] == "mistral3":
            projects = Mistral3MultiModalProjector
            known = checkpoint.namespace(
                settings,
                spatial_merge_size=merge,
                vision_feature_layer=checkpoint.config["vision_feature_layer"],
                multimodal_projector_bias=checkpoint.config["multimodal_projector_bias"],
            )
        self.multi_modal_projector = projects(known)


class Tower(VisionTower):
    row = "[IMG]"

    def __init__(self, checkpoint: Checkpoint) -> None:
        from transformers.models.pixtral.image_processing_pil_pixtral import (
            PixtralImageProcessorPil,
        )

        super().__init__()
        expect_activation(checkpoint, "silu")
        encoder = checkpoint.encoder
        if checkpoint.config["vision_feature_layer"] != -1:
            raise ValueError("its features are not those of the last layer")
        self._merge = checkpoint.config.get("spatial_merge_size", 1)
        self.module = Module(checkpoint, self._merge)
        self._patch = encoder["patch_size"]
        self._side = self._patch * self._merge
        size = {"longest_edge": encoder["image_size"]}
        fixed = {"patch_size": {"height": self._side, "width": self._side}, "do_resize": True}
        self._processor = PixtralImageProcessorPil.from_dict(
            {"size": size, **checkpoint.processor, **fixed}
        )
        # Positions are known for no more.
        longest = self._processor.size["longest_edge"] or encoder["image_size"]
        self._longest = min(longest, encoder["image_size"])
        self._processor.size = type(self._processor.size)(longest_edge=self._longest)
        self._lines = encoder["image_size"] // self._patch

    def layout(self, image: core.Image) -> Layout:
        lines, columns = grid(image.height, image.width, self._side, self._longest)
        text = f"{self.row}{BREAK}" * (lines - 1) + f"{self.row}{END}"
        return Layout(text, (columns,) * lines)

    def pixels(self, image: core.Image) -> np.ndarray[Any, Any]:
        """Return the picture resized, (1, channels, height, width)."""
        found = self._processor([rgb(image)], return_tensors="np")
        pixels: np.ndarray[Any, Any] = np.asarray(found["pixel_values"])
        return pixels

    def renamed(self, name: str) -> str:
        return under_vision_model(name)

    def layers(self) -> list[nn.Module]:
        layers: list[nn.Module] = self.module.vision_tower.vision_model.transformer.layers
        return layers

    def parts(self, pixels: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
        yield pixels

    def features(self, part: np.ndarray[Any, Any]) -> Features:
        """Return the features. mlx-vlm's own pass has a mask of patches by patches, which keeps
        several pictures apart; here is one."""
        model = self.module.vision_tower.vision_model
        pixels = mx.array(part).transpose(0, 2, 3, 1).astype(model.patch_conv.weight.dtype)
        patches = model.patch_conv(pixels)
        _, height, width, size = patches.shape
        hidden = model.ln_pre(patches.reshape(1, height * width, size))
        places = (mx.arange(height)[:, None] * self._lines + mx.arange(width)).flatten()
        angles = model.patch_positional_embedding(hidden, places)
        for layer in model.transformer.layers:
            hidden = layer(hidden, position_embeddings=angles)
        return Features(self._projected(hidden[0], height, width))

    def _projected(self, hidden: mx.array, height: int, width: int) -> mx.array:
        projector = self.module.multi_modal_projector
        if "patch_merger" in projector:
            merge = self._merge
            squares = projector.norm(hidden).reshape(
                height // merge, merge, width // merge, merge, -1
            )
            # A square's numbers come channel by channel.
            joined = squares.transpose(0, 2, 4, 1, 3).reshape(-1, hidden.shape[-1] * merge**2)
            hidden = projector.patch_merger.merging_layer(joined)
        rows: mx.array = projector.linear_2(projector.gelu(projector.linear_1(hidden)))
        return rows


def grid(height: int, width: int, side: int, longest: int) -> tuple[int, int]:
    """Return the lines and columns of rows of a picture whose sides are at most `longest`."""
    ratio = max(height / longest, width / longest)
    if ratio > 1:
        height, width = math.floor(height / ratio), math.floor(width / ratio)
    return (height - 1) // side + 1, (width - 1) // side + 1
