"""InternVL 3: tiles in the grid whose proportions are nearest, and the whole picture.

Source: transformers 5.24, `models/internvl` and `models/got_ocr2`.
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
    in_parts,
)

BEGIN, END = "<img>", "</img>"
CHAT = "internvl_chat"
"""The `model_type` of checkpoints with the makers' own names of settings and tensors."""
MEAN, DEVIATION = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


class Module(nn.Module):  # type: ignore[misc]
    """Encoder and projector of transformers' checkpoints, under mlx-vlm's names."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        from mlx_vlm.models.internvl.config import VisionConfig
        from mlx_vlm.models.internvl.internvl import MultiModalProjector
        from mlx_vlm.models.internvl.vision import VisionModel

        super().__init__()
        settings = VisionConfig.from_dict(checkpoint.encoder)
        known = checkpoint.namespace(
            settings, downsample_ratio=checkpoint.config["downsample_ratio"]
        )
        self.vision_tower = VisionModel(settings)
        self.multi_modal_projector = MultiModalProjector(known)
        # mlx-vlm's are approximate.
        self.multi_modal_projector.activation = nn.GELU()
        for layer in self.vision_tower.encoder.layer:
            layer.mlp.activation_fn = nn.GELU()

    @property
    def layers(self) -> list[nn.Module]:
        found: list[nn.Module] = self.vision_tower.encoder.layer
        return found

    @property
    def dtype(self) -> mx.Dtype:
        found: mx.Dtype = self.vision_tower.embeddings.patch_embeddings.projection.weight.dtype
        return found

    def encoded(self, pixels: mx.array) -> mx.array:
        """Return the patches of each tile, the whole's own first."""
        found: mx.array = self.vision_tower(pixels)[0]
        return found

    def projected(self, squares: mx.array) -> mx.array:
        """Return the rows of squares of patches."""
        rows: mx.array = self.multi_modal_projector(squares)
        return rows


class ChatModule(nn.Module):  # type: ignore[misc]
    """Encoder and projector of the makers' checkpoints, under mlx-vlm's names."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        from mlx_vlm.models.internvl_chat.config import VisionConfig
        from mlx_vlm.models.internvl_chat.vision import VisionModel

        super().__init__()
        settings = VisionConfig.from_dict({**checkpoint.encoder, "model_type": "intern_vit_6b"})
        merge = int(1 / checkpoint.config["downsample_ratio"])
        inputs, outputs = settings.hidden_size * merge**2, checkpoint.text["hidden_size"]
        self.vision_model = VisionModel(settings)
        for layer in self.vision_model.encoder.layers:
            layer.mlp.activation_fn = nn.GELU()
        self.mlp1 = [
            nn.LayerNorm(inputs),
            nn.Linear(inputs, outputs),
            nn.GELU(),
            nn.Linear(outputs, outputs),
        ]

    @property
    def layers(self) -> list[nn.Module]:
        found: list[nn.Module] = self.vision_model.encoder.layers
        return found

    @property
    def dtype(self) -> mx.Dtype:
        found: mx.Dtype = self.vision_model.embeddings.patch_embedding.weight.dtype
        return found

    def encoded(self, pixels: mx.array) -> mx.array:
        """Return the patches of each tile, the whole's own first."""
        # It returns nothing without them.
        found: mx.array = self.vision_model(pixels, output_hidden_states=True)[0]
        return found

    def projected(self, squares: mx.array) -> mx.array:
        """Return the rows of squares of patches."""
        for layer in self.mlp1:
            squares = layer(squares)
        return squares


class Tower(VisionTower):
    row = "<IMG_CONTEXT>"
    module: Module | ChatModule

    def __init__(self, checkpoint: Checkpoint) -> None:
        from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
            GotOcr2ImageProcessorPil,
        )

        super().__init__()
        expect_activation(checkpoint, "gelu")
        chat = checkpoint.config["model_type"] == CHAT
        self.module = (ChatModule if chat else Module)(checkpoint)
        self._ratio = checkpoint.config["downsample_ratio"]
        side, patch = (one_of(checkpoint.encoder[name]) for name in ("image_size", "patch_size"))
        self._patches = (side // patch) ** 2
        self._rows = int(self._patches * self._ratio**2)
        own = {} if chat else checkpoint.processor
        counts = {"min_patches": 1, "max_patches": checkpoint.config.get("max_dynamic_patch", 12)}
        size = {"height": side, "width": side}
        self._processor = GotOcr2ImageProcessorPil.from_dict(
            {
                **counts,
                "image_mean": MEAN,
                "image_std": DEVIATION,
                **own,
                "size": size,
                "crop_to_patches": True,
                "do_resize": True,
            }
        )

    def layout(self, image: core.Image) -> Layout:
        tiles = self._processor.get_number_of_image_patches(image.height, image.width, {})
        return Layout(f"{BEGIN}{self.row}{END}", (self._rows * tiles,))

    def pixels(self, image: core.Image) -> np.ndarray[Any, Any]:
        """Return the tiles, and the whole picture last, (tiles, channels, side, side)."""
        found = self._processor([rgb(image)], return_tensors="np")
        tiles: np.ndarray[Any, Any] = np.asarray(found["pixel_values"])
        return tiles

    def renamed(self, name: str) -> str:
        return name.removeprefix("model.")

    def layers(self) -> list[nn.Module]:
        return self.module.layers

    def parts(self, pixels: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
        """Yield some tiles at a time: no tile sees another one."""
        yield from in_parts(pixels, self._patches)

    def features(self, part: np.ndarray[Any, Any]) -> Features:
        from mlx_vlm.models.base import pixel_shuffle

        pixels = mx.array(part).transpose(0, 2, 3, 1).astype(self.module.dtype)
        patches = self.module.encoded(pixels)[:, 1:]
        rows = self.module.projected(pixel_shuffle(patches, self._ratio))
        return Features(rows.reshape(-1, rows.shape[-1]))


def one_of(value: Any) -> int:
    """Return a setting that is one number, or a pair of equal ones."""
    return int(value[0] if isinstance(value, list | tuple) else value)
