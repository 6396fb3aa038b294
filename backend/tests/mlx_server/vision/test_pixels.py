"""Pictures as towers get them: turned, flattened and in RGB."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from mlx_manager.mlx_server import core
from mlx_manager.mlx_server.vision.pixels import rgb


def file_of(image: Image.Image, form: str = "PNG", **more: object) -> core.Image:
    stream = io.BytesIO()
    image.save(stream, form, **more)
    return core.Image(stream.getvalue(), "", *image.size)


def corners(image: Image.Image) -> list[tuple[int, ...]]:
    pixels = np.asarray(image)
    return [tuple(map(int, pixels[y, x])) for y in (0, -1) for x in (0, -1)]


RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


def half_red() -> Image.Image:
    """Red on the left, blue on the right."""
    made = Image.new("RGB", (8, 4), RED)
    made.paste(BLUE, (4, 0, 8, 4))
    return made


def test_exif_turns_a_picture() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = rgb(file_of(half_red(), exif=exif))
    assert turned.size == (4, 8)
    assert corners(turned) == [RED, RED, BLUE, BLUE]


def test_transparent_pixels_are_white() -> None:
    made = half_red().convert("RGBA")
    made.putpixel((0, 0), (0, 0, 0, 0))
    assert corners(rgb(file_of(made))) == [WHITE, BLUE, RED, BLUE]
    palette = Image.new("P", (2, 2), 1)
    palette.putpalette([0, 0, 0, *RED])
    palette.putpixel((0, 0), 0)
    assert corners(rgb(file_of(palette, transparency=0))) == [WHITE, RED, RED, RED]


def test_the_first_frame_counts() -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in (RED, BLUE)]
    stream = io.BytesIO()
    frames[0].save(stream, "GIF", save_all=True, append_images=frames[1:])
    assert corners(rgb(core.Image(stream.getvalue(), "", 4, 4))) == [RED] * 4


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "CMYK", "I;16", "RGBA"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    form = "TIFF" if mode in ("CMYK", "I;16") else "PNG"
    found = rgb(file_of(Image.new(mode, (4, 4)), form))
    assert (found.mode, found.size) == ("RGB", (4, 4))
