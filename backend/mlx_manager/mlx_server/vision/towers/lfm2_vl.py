"""LFM2-VL: tiles, where a picture is large, and the whole picture in its proportions.

Source: transformers 5.24, `models/lfm2_vl`.
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

BEGIN, END, WHOLE = "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"
SETTINGS = (
    *("downsample_factor", "encoder_patch_size", "min_image_tokens", "max_image_tokens"),
    *("tile_size", "max_pixels_tolerance", "do_image_splitting", "min_tiles", "max_tiles"),
    "use_thumbnail",
)
"""Settings that config.json has where the image processor's file lacks them."""
View = tuple[np.ndarray[Any, Any], tuple[int, int]]


class Module(nn.Module):  # type: ignore[misc]
    """Encoder and projector, under mlx-vlm's names."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        from mlx_vlm.models.lfm2_vl.config import VisionConfig
        from mlx_vlm.models.lfm2_vl.lfm2_vl import Lfm2VlMultiModalProjector, PixelUnshuffleBlock
        from mlx_vlm.models.lfm2_vl.vision import VisionModel

        super().__init__()
        config = checkpoint.config
        settings = VisionConfig.from_dict({**checkpoint.encoder, "model_type": "lfm2_vl"})
        self.vision_tower = VisionModel(settings)
        layer = config.get("vision_feature_layer", -1)
        if layer != -1:
            layers = self.vision_tower.encoder.layers
            self.vision_tower.encoder.layers = layers[: layer + 1]
        self.pixel_unshuffle = PixelUnshuffleBlock(config["downsample_factor"])
        names = ("downsample_factor", "projector_hidden_size", "projector_bias")
        self.multi_modal_projector = Lfm2VlMultiModalProjector(
            checkpoint.namespace(
                settings,
                projector_use_layernorm=config.get("projector_use_layernorm", True),
                **{name: config[name] for name in names},
            )
        )


class Tower(VisionTower):
    row = "<image>"

    def __init__(self, checkpoint: Checkpoint) -> None:
        from mlx_vlm.models.lfm2_vl.processing_lfm2_vl import Lfm2VlNumpyImageProcessor

        super().__init__()
        expect_activation(checkpoint, "gelu_pytorch_tanh")
        self.module = Module(checkpoint)
        config = checkpoint.config
        defaults = {name: config[name] for name in SETTINGS if config.get(name) is not None}
        self._processor = Lfm2VlNumpyImageProcessor(
            **{
                **defaults,
                "encoder_patch_size": checkpoint.encoder["patch_size"],
                **checkpoint.processor,
                "do_pad": True,
            }
        )
        self._patch = self._processor.encoder_patch_size
        self._factor = self._processor.downsample_factor
        marks = config.get("use_image_special_tokens", True)
        self._marks = checkpoint.more.get("use_image_special_tokens", marks)

    def layout(self, image: core.Image) -> Layout:
        settings = self._processor
        size = whole_size(
            image.height,
            image.width,
            self._patch * self._factor,
            settings.min_image_tokens,
            settings.max_image_tokens,
        )
        lines, columns = self._tiles(image.height, image.width)
        own = self._rows(*size)
        if lines * columns == 1:
            return Layout(self._marked(self.row), (own,))
        tile = self._rows(settings.tile_size, settings.tile_size)
        text = "".join(
            (f"<|img_row_{line + 1}_col_{column + 1}|>" if self._marks else "") + self.row
            for line in range(lines)
            for column in range(columns)
        )
        runs = (tile,) * (lines * columns)
        if settings.use_thumbnail:
            text += (WHOLE if self._marks else "") + self.row
            runs += (own,)
        return Layout(self._marked(text), runs)

    def _marked(self, text: str) -> str:
        return f"{BEGIN}{text}{END}" if self._marks else text

    def _rows(self, height: int, width: int) -> int:
        sides = (math.ceil(side // self._patch / self._factor) for side in (height, width))
        return math.prod(sides)

    def _tiles(self, height: int, width: int) -> tuple[int, int]:
        """Return the lines and columns of tiles; 1, 1 for a picture that is not cut."""
        settings = self._processor
        side = self._patch * self._factor
        area = max(self._patch, nearest(height, side)) * max(self._patch, nearest(width, side))
        most = settings.max_image_tokens * side**2 * settings.max_pixels_tolerance
        if not settings.do_image_splitting or area <= most:
            return 1, 1
        tiles = settings.tile_size**2
        best, least = (1, 1), math.inf
        for lines, columns in grids(settings.min_tiles, settings.max_tiles):
            difference = abs(width / height - columns / lines)
            larger = height * width > 0.5 * tiles * lines * columns
            if difference < least or (difference == least and larger):
                best, least = (lines, columns), difference
        return best

    def pixels(self, image: core.Image) -> list[View]:
        """Return the patches of each tile and of the whole picture, (patches, numbers), with their
        lines and columns."""
        found = self._processor([rgb(image)])
        sizes = [(int(lines), int(columns)) for lines, columns in found["spatial_shapes"]]
        views = zip(found["pixel_values"], sizes, strict=True)
        return [
            (patches[: lines * columns], (lines, columns)) for patches, (lines, columns) in views
        ]

    def renamed(self, name: str) -> str:
        return name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.")

    def layers(self) -> list[nn.Module]:
        layers: list[nn.Module] = self.module.vision_tower.encoder.layers
        return layers

    def parts(self, pixels: list[View]) -> Iterator[View]:
        """Yield each view: none sees another one."""
        yield from pixels

    def features(self, part: View) -> Features:
        patches, (lines, columns) = part
        *_, hidden = self.module.vision_tower(
            mx.array(patches)[None], spatial_shapes=mx.array([[lines, columns]])
        )
        squares = self.module.pixel_unshuffle(hidden.reshape(1, lines, columns, -1))
        rows = self.module.multi_modal_projector(squares)
        return Features(rows.reshape(-1, rows.shape[-1]))


def nearest(number: int, factor: int) -> int:
    """Return the multiple of `factor` next to `number`."""
    return round(number / factor) * factor


def whole_size(height: int, width: int, side: int, fewest: int, most: int) -> tuple[int, int]:
    """Return the size of a picture in about its proportions, in multiples of `side` pixels, with
    at least `fewest` and at most `most` rows."""
    rounded = max(side, nearest(height, side)), max(side, nearest(width, side))
    area, least, largest = rounded[0] * rounded[1], fewest * side**2, most * side**2
    if area > largest:
        shrink = math.sqrt(height * width / largest)
        return (
            max(side, math.floor(height / shrink / side) * side),
            max(side, math.floor(width / shrink / side) * side),
        )
    if area < least:
        growth = math.sqrt(least / (height * width))
        return (
            math.ceil(height * growth / side) * side,
            math.ceil(width * growth / side) * side,
        )
    return rounded


def grids(fewest: int, most: int) -> list[tuple[int, int]]:
    """Return the lines and columns of all grids with so many tiles, small ones first."""
    found = {
        (lines, columns)
        for lines in range(1, most + 1)
        for columns in range(1, most + 1)
        if fewest <= lines * columns <= most
    }
    return sorted(found, key=lambda grid: (grid[0] * grid[1], grid[1], grid[0]))
