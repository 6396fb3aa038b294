"""Bytes of a picture, checked by decoding the whole of it.

Pillow is imported at first use: the extra `vision` brings it.
"""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

from mlx_manager.mlx_server.errors import (
    InvalidParameter,
    MLXManagerError,
    RequestTooLarge,
    UnsupportedParameter,
)

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

ALLOWED = "PNG, JPEG, WebP and GIF"
MEDIA_TYPES = {
    "image/png": "PNG",
    "image/jpeg": "JPEG",
    "image/jpg": "JPEG",
    "image/webp": "WebP",
    "image/gif": "GIF",
}
"""Names of media types that are read, and the formats that they mean."""
_SIGNATURES: tuple[tuple[str, int, bytes], ...] = (
    ("PNG", 0, b"\x89PNG\r\n\x1a\n"),
    ("JPEG", 0, b"\xff\xd8\xff"),
    ("WebP", 8, b"WEBP"),
    ("GIF", 0, b"GIF87a"),
    ("GIF", 0, b"GIF89a"),
    ("TIFF", 0, b"II*\0"),
    ("TIFF", 0, b"MM\0*"),
    ("BMP", 0, b"BM"),
    ("PDF", 0, b"%PDF"),
    ("HEIC", 4, b"ftyphei"),
    ("HEIC", 4, b"ftypmif1"),
    ("AVIF", 4, b"ftypavi"),
    ("JPEG XL", 0, b"\xff\x0a"),
    ("JPEG XL", 4, b"JXL \r\n"),
    ("JPEG 2000", 4, b"jP  \r\n"),
    ("ICO", 0, b"\0\0\1\0"),
)
"""Formats by the bytes at a place of their files, those included that are refused by name."""
_BROKEN = (
    *(OSError, SyntaxError, ValueError, EOFError, LookupError, TypeError, AttributeError),
    *(OverflowError, MemoryError, struct.error, zlib.error),
)
"""Errors that Pillow's readers raise for files that are not sound."""
_ORIENTATION = 0x0112


@dataclass(frozen=True, slots=True)
class PictureSize:
    """Width and height of a sound picture in pixels, after EXIF's orientation."""

    width: int
    height: int


def format_of(data: bytes) -> str | None:
    """Return the format that a file's first bytes tell; None if they tell none that is known.

    It may be one that is not read here.
    """
    for name, place, signature in _SIGNATURES:
        if data.startswith(signature, place) and (name != "WebP" or data.startswith(b"RIFF")):
            return name
    head = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n")
    return "SVG" if head.startswith(b"<") and b"<svg" in head else None


def media_type_of(data: bytes) -> str:
    """Return the media type of a picture that has been checked."""
    return f"image/{str(format_of(data)).lower()}"


def data_url_of(data: bytes) -> str:
    """Return a picture that has been checked as a data URL."""
    return f"data:{media_type_of(data)};base64,{b64encode(data).decode()}"


def check_format(data: bytes, declared: str | None, param: str) -> str:
    """Return the format of a picture's bytes.

    declared: the media type that the request names; None: it names none.

    Raises:
        InvalidParameter: the bytes are of another format than is declared, or of none.
        UnsupportedParameter: a format that is not read here, declared or found.
    """
    claimed = None
    if declared is not None:
        claimed = MEDIA_TYPES.get(declared.strip().lower())
        if claimed is None:
            raise UnsupportedParameter(
                f"`{param}` is declared as {declared[:64]!r}; {ALLOWED} are read.", param=param
            )
    found = format_of(data)
    if found is None:
        raise InvalidParameter(
            f"`{param}` is no picture: {ALLOWED} are read, and its bytes are none of these.",
            param=param,
        )
    if found not in MEDIA_TYPES.values():
        raise UnsupportedParameter(f"`{param}` is a {found}; {ALLOWED} are read.", param=param)
    if claimed not in (None, found):
        raise InvalidParameter(
            f"`{param}` is declared as {declared}, but its bytes are a {found}.", param=param
        )
    return found


def measured(data: bytes, kind: str, max_pixels: int, param: str) -> PictureSize:
    """Return the size of a picture after decoding it whole, of a GIF its first frame.

    kind: as `check_format` returns it. max_pixels: more are refused by the file's header, before
    anything is decoded. This takes up to a second and runs on any thread.

    Raises:
        InvalidParameter: the file is truncated or broken, or has no pixels.
        RequestTooLarge: it has more pixels than allowed.
        UnsupportedParameter: Pillow is not installed, or can't read that format.
    """
    opener = _opener(kind, param)
    from PIL.Image import DecompressionBombError, DecompressionBombWarning
    from PIL.ImageOps import exif_transpose

    try:
        with opener(BytesIO(data)) as picture:
            _check_pixels(picture.size, max_pixels, param)
            picture.load()
            _check_pixels(picture.size, max_pixels, param)
            if picture.getexif().get(_ORIENTATION, 1) == 1:
                return PictureSize(*picture.size)
            # A worker turns it, too.
            return PictureSize(*exif_transpose(picture).size)
    except (DecompressionBombError, DecompressionBombWarning):
        raise _too_many_pixels("more", max_pixels, param) from None
    except _BROKEN as error:
        raise InvalidParameter(
            f"`{param}` is a broken {kind}: {_reason(error)}.", param=param
        ) from None


def _reason(error: BaseException) -> str:
    """Return an error of Pillow's in words: its own where they are short and printable."""
    said = str(error)
    if not said or len(said) > 100 or not (said.isascii() and said.isprintable()):
        return "it can't be decoded"
    return said


def _check_pixels(size: tuple[int, int], most: int, param: str) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise InvalidParameter(f"`{param}` is a picture without pixels.", param=param)
    if width * height > most:
        raise _too_many_pixels(f"{width} × {height}", most, param)


def _too_many_pixels(said: str, most: int, param: str) -> MLXManagerError:
    return RequestTooLarge(
        f"`{param}` has {said} pixels; this server reads pictures of up to {most / 1e6:g} million "
        "(MLX_SERVER_MAX_IMAGE_MEGAPIXELS). Make it smaller.",
        param=param,
    )


def _opener(kind: str, param: str) -> Callable[[BytesIO], ImageFile]:
    """Return the reader of one format: what a file looks like chooses no other.

    Raises:
        UnsupportedParameter: Pillow is not installed, or was built without that format.
    """
    try:
        from PIL import features
        from PIL.GifImagePlugin import GifImageFile
        from PIL.JpegImagePlugin import JpegImageFile
        from PIL.PngImagePlugin import PngImageFile
        from PIL.WebPImagePlugin import WebPImageFile
    except ImportError:
        raise UnsupportedParameter(
            f"`{param}`: pictures can't be read here, for Pillow is not installed. The server's "
            "owner installs it with: pip install 'mlx-manager-server[vision]'.",
            param=param,
        ) from None
    readers: dict[str, Any] = {
        "PNG": PngImageFile,
        "JPEG": JpegImageFile,
        "WebP": WebPImageFile,
        "GIF": GifImageFile,
    }
    libraries = {"WebP": "webp", "JPEG": "jpg", "PNG": "zlib"}
    if (library := libraries.get(kind)) is not None and not features.check(library):
        raise UnsupportedParameter(
            f"`{param}` is a {kind}, which the Pillow that is installed here can't read.",
            param=param,
        )
    reader: Callable[[BytesIO], ImageFile] = readers[kind]
    return reader
