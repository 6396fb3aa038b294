"""Pictures as transformers' image processors take them. Host work, on any thread."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from mlx_manager.mlx_server import core

if TYPE_CHECKING:
    from PIL.Image import Image


def rgb(image: core.Image) -> Image:
    """Return a picture in RGB: its first frame, turned as EXIF says, on white where it is
    transparent.

    Raises:
        OSError, ValueError: the file is no picture that Pillow reads.
    """
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(image.data)) as opened:
        turned = ImageOps.exif_transpose(opened)
        if turned.has_transparency_data:
            layer = turned.convert("RGBA")
            turned = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
        return turned.convert("RGB")
