"""The parts that the towers of Qwen's models share: pictures in patches of their own proportions.

Source: transformers 5.24, `models/qwen2_vl/image_processing_pil_qwen2_vl.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from mlx_manager.mlx_server import core
from mlx_manager.mlx_server.engine.prompt_images import MRope
from mlx_manager.mlx_server.vision.layout import Layout
from mlx_manager.mlx_server.vision.pixels import rgb
from mlx_manager.mlx_server.vision.towers.base import Checkpoint, VisionTower, refused

NARROWEST = 200
"""Highest ratio of a picture's sides."""
Patches = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


class PatchTower(VisionTower):
    """A tower whose input is patches, four of which make a row of features."""

    row = "<|image_pad|>"

    def __init__(
        self, checkpoint: Checkpoint, module: nn.Module, defaults: Mapping[str, Any]
    ) -> None:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        super().__init__()
        self.module = module
        self.mrope = mrope_of(checkpoint.text)
        encoder = checkpoint.encoder
        fixed = {
            "patch_size": encoder["patch_size"],
            "merge_size": encoder["spatial_merge_size"],
            "temporal_patch_size": encoder["temporal_patch_size"],
        }
        settings = {**defaults, **checkpoint.processor, **fixed}
        self._processor = Qwen2VLImageProcessorPil.from_dict(settings)
        self._factor = fixed["patch_size"] * fixed["merge_size"]
        self._resizes = bool(self._processor.do_resize)
        self._fewest = self._processor.size["shortest_edge"]
        self._most = self._processor.size["longest_edge"]

    def layout(self, image: core.Image) -> Layout:
        longer, shorter = max(image.height, image.width), min(image.height, image.width)
        if longer > NARROWEST * shorter:
            raise refused(
                image,
                f"it is {image.width} x {image.height} pixels, and one side may be at most "
                f"{NARROWEST} times as long as the other",
            )
        height, width = image.height, image.width
        if self._resizes:
            height, width = resized(height, width, self._factor, self._fewest, self._most)
        grid = height // self._factor, width // self._factor
        return Layout(self.row, (grid[0] * grid[1],), grid)

    def pixels(self, image: core.Image) -> Patches:
        """Return the patches, (patches, numbers), and how many there are in time, height and
        width."""
        found = self._processor([rgb(image)], return_tensors="np")
        return np.asarray(found["pixel_values"]), np.asarray(found["image_grid_thw"])

    def renamed(self, name: str) -> str:
        for module in ("visual.", "vision_tower."):
            _, found, rest = name.partition(module)
            if found:
                return rest
        return name

    def layers(self) -> list[nn.Module]:
        layers: list[nn.Module] = self.module.blocks
        return layers

    def parts(self, pixels: Patches) -> Iterator[Patches]:
        yield pixels

    def cast(self, pixels: np.ndarray[Any, Any]) -> mx.array:
        """Return patches in the type of the tower's weights."""
        return mx.array(pixels).astype(self.module.patch_embed.proj.weight.dtype)


def resized(height: int, width: int, factor: int, fewest: int, most: int) -> tuple[int, int]:
    """Return the size in multiples of `factor` pixels, with at least `fewest` and at most `most`
    pixels, and about the same proportions."""
    rounded = round(height / factor) * factor, round(width / factor) * factor
    if rounded[0] * rounded[1] > most:
        shrink = math.sqrt(height * width / most)
        return (
            max(factor, math.floor(height / shrink / factor) * factor),
            max(factor, math.floor(width / shrink / factor) * factor),
        )
    if rounded[0] * rounded[1] < fewest:
        growth = math.sqrt(fewest / (height * width))
        return (
            math.ceil(height * growth / factor) * factor,
            math.ceil(width * growth / factor) * factor,
        )
    return rounded


def mrope_of(text: Mapping[str, Any]) -> MRope | None:
    """Return the M-RoPE of a language model by its settings."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = text.get(name)
        if isinstance(rope, Mapping) and "mrope_section" in rope:
            first, second, third = rope["mrope_section"]
            return MRope((first, second, third), bool(rope.get("mrope_interleaved", False)))
    return None
