"""Pictures that tests draw."""

from __future__ import annotations

import base64
from io import BytesIO
from typing import Any

from PIL import Image


def picture(
    kind: str = "PNG",
    size: tuple[int, int] = (12, 8),
    colour: Any = (200, 30, 30),
    *,
    orientation: int | None = None,
    **options: Any,
) -> bytes:
    """Return a picture's file. orientation: EXIF's."""
    mode = "RGB" if kind == "JPEG" else "RGBA"
    drawn = Image.new(mode, size, colour)
    # Something that compresses badly enough to be cut anywhere.
    for x in range(size[0]):
        drawn.putpixel((x, x % size[1]), (x % 256, 255 - x % 256, 90))
    out = BytesIO()
    if orientation is not None:
        exif = drawn.getexif()
        exif[0x0112] = orientation
        options["exif"] = exif.tobytes()
    drawn.save(out, kind, **options)
    return out.getvalue()


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{in_base64(data)}"
