"""Idefics 3 and SmolVLM: tiles of one size and the whole picture, each a SigLIP encoder's input.

Source: transformers 5.24, `models/idefics3` and `models/smolvlm`.
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
    in_parts,
)

LARGEST_SIDE = 4096
AROUND, GLOBAL = "<fake_token_around_image>", "<global-img>"


class Module(nn.Module):  # type: ignore[misc]
    """Encoder and connector, under mlx-vlm's names."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        from mlx_vlm.models.idefics3.config import VisionConfig
        from mlx_vlm.models.idefics3.idefics3 import Idefics3Connector
        from mlx_vlm.models.idefics3.vision import VisionModel

        super().__init__()
        settings = VisionConfig.from_dict(checkpoint.encoder)
        factor = checkpoint.config["scale_factor"]
        self.vision_model = VisionModel(settings)
        self.vision_model.post_layernorm.eps = settings.layer_norm_eps
        self.connector = Idefics3Connector(checkpoint.namespace(settings, scale_factor=factor))


class Tower(VisionTower):
    row = "<image>"

    def __init__(self, checkpoint: Checkpoint) -> None:
        from transformers.models.idefics3.image_processing_pil_idefics3 import (
            Idefics3ImageProcessorPil,
        )

        super().__init__()
        expect_activation(checkpoint, "gelu_pytorch_tanh")
        self.module = Module(checkpoint)
        side = checkpoint.encoder["image_size"]
        defaults = {
            "size": {"longest_edge": 4 * side},
            "max_image_size": {"longest_edge": side},
        }
        self._processor = Idefics3ImageProcessorPil.from_dict(
            {**defaults, **checkpoint.processor, "return_row_col_info": True}
        )
        self._splits = bool(self._processor.do_image_splitting)
        self._resizes = bool(self._processor.do_resize)
        self._side = self._processor.size["longest_edge"]
        self._tile = self._processor.max_image_size["longest_edge"]
        self._patches = self._tile // checkpoint.encoder["patch_size"]
        self._rows = (self._patches // checkpoint.config["scale_factor"]) ** 2
        self._natural = self._tile == side

    def layout(self, image: core.Image) -> Layout:
        rows, columns = self._grid(image.height, image.width)
        whole = f"{AROUND}{GLOBAL}{self.row}{AROUND}"
        if not rows:
            return Layout(whole, (self._rows,))
        lines = (
            "".join(f"{AROUND}<row_{row}_col_{column}>{self.row}" for column in columns)
            for row in rows
        )
        text = "".join(f"{line}\n" for line in lines) + f"\n{whole}"
        return Layout(text, (self._rows,) * (len(rows) * len(columns) + 1))

    def _grid(self, height: int, width: int) -> tuple[range, range]:
        """Return the numbers of the rows and columns of tiles, from 1; none for a single tile."""
        if not self._splits:
            return range(0), range(0)
        if self._resizes:
            height, width = below(*to_longest(height, width, self._side), LARGEST_SIDE)
        height, width = in_tiles(height, width, self._tile)
        if max(height, width) <= self._tile:
            return range(0), range(0)
        return range(1, height // self._tile + 1), range(1, width // self._tile + 1)

    def pixels(self, image: core.Image) -> np.ndarray[Any, Any]:
        """Return the tiles, and the whole picture last, (tiles, channels, side, side)."""
        found = self._processor([[rgb(image)]], return_tensors="np")
        tiles: np.ndarray[Any, Any] = np.asarray(found["pixel_values"])[0]
        return tiles

    def renamed(self, name: str) -> str:
        return name.removeprefix("model.")

    def layers(self) -> list[nn.Module]:
        layers: list[nn.Module] = self.module.vision_model.encoder.layers
        return layers

    def parts(self, pixels: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
        """Yield some tiles at a time: no tile sees another one."""
        yield from in_parts(pixels, self._patches**2)

    def features(self, part: np.ndarray[Any, Any]) -> Features:
        model = self.module.vision_model
        weight = model.embeddings.patch_embedding.weight
        pixels = mx.array(part).transpose(0, 2, 3, 1).astype(weight.dtype)
        # Positions are interpolated where tiles are not as large as those in training.
        size = (len(part), self._patches, self._patches)
        mask = None if self._natural else mx.ones(size, dtype=mx.bool_)
        hidden, *_ = model(pixels, patch_attention_mask=mask)
        rows = self.module.connector(hidden.astype(weight.dtype))
        return Features(rows.reshape(-1, rows.shape[-1]))


def to_longest(height: int, width: int, longest: int) -> tuple[int, int]:
    """Return the size whose longest side is `longest`; the other side is even."""
    ratio = width / height
    if width >= height:
        other = int(longest / ratio)
        return max(other + other % 2, 1), longest
    other = int(longest * ratio)
    return longest, max(other + other % 2, 1)


def below(height: int, width: int, most: int) -> tuple[int, int]:
    """Return the size shrunk until no side is longer than `most`."""
    ratio = width / height
    if width >= height and width > most:
        height, width = int(most / ratio), most
    elif height > width and height > most:
        height, width = most, int(most * ratio)
    return max(height, 1), max(width, 1)


def in_tiles(height: int, width: int, tile: int) -> tuple[int, int]:
    """Return the size in whole tiles."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / ratio) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * ratio) / tile) * tile
    return height, width
