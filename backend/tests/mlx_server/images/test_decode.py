from __future__ import annotations

import struct
import zlib
from io import BytesIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import picture
from PIL import Image

from mlx_manager.mlx_server.errors import (
    InvalidParameter,
    InvalidRequest,
    RequestTooLarge,
    UnsupportedParameter,
)
from mlx_manager.mlx_server.images.decode import (
    PictureSize,
    check_format,
    format_of,
    measured,
    media_type_of,
)

KINDS = {"PNG": "PNG", "JPEG": "JPEG", "WebP": "WEBP", "GIF": "GIF"}
PLACE = "messages[0].content[1].image_url.url"
MANY = 10**6


def size_of(data: bytes, most: int = MANY) -> PictureSize:
    return measured(data, check_format(data, None, PLACE), most, PLACE)


@pytest.mark.parametrize("kind", KINDS)
def test_each_allowed_format_is_told_and_measured(kind: str):
    data = picture(KINDS[kind], (12, 8))
    assert check_format(data, f"image/{kind.lower()}", PLACE) == kind
    assert media_type_of(data) == f"image/{kind.lower()}"
    assert size_of(data) == PictureSize(12, 8)


@pytest.mark.parametrize("declared", ["image/jpg", "IMAGE/JPEG", " image/jpeg "])
def test_names_of_one_media_type_are_one(declared: str):
    assert check_format(picture("JPEG"), declared, PLACE) == "JPEG"


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WebP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_turns_the_size(kind: str, orientation: int):
    data = picture(KINDS[kind], (12, 8), orientation=orientation)
    assert size_of(data) == (PictureSize(8, 12) if orientation >= 5 else PictureSize(12, 8))


def test_of_an_animation_the_first_frame_counts():
    frames = [Image.new("RGB", (9, 5), colour) for colour in ("red", "green", "blue")]
    for kind in ("GIF", "WEBP", "PNG"):
        out = BytesIO()
        frames[0].save(out, kind, save_all=True, append_images=frames[1:])
        assert size_of(out.getvalue()) == PictureSize(9, 5)


OTHERS = {
    "TIFF": lambda: _saved("TIFF"),
    "BMP": lambda: _saved("BMP"),
    "ICO": lambda: _saved("ICO"),
    "PDF": lambda: b"%PDF-1.7\n",
    "HEIC": lambda: b"\0\0\0\x18ftypheic\0\0\0\0",
    "AVIF": lambda: b"\0\0\0\x18ftypavif\0\0\0\0",
    "SVG": lambda: b'\n <svg xmlns="http://www.w3.org/2000/svg"/>',
}


def _saved(kind: str) -> bytes:
    out = BytesIO()
    Image.new("RGB", (16, 16)).save(out, kind)
    return out.getvalue()


@pytest.mark.parametrize("kind", OTHERS)
def test_other_formats_are_refused_by_name(kind: str):
    with pytest.raises(UnsupportedParameter, match=f"is a {kind}; PNG, JPEG, WebP and GIF") as got:
        check_format(OTHERS[kind](), None, PLACE)
    assert got.value.param == PLACE


@pytest.mark.parametrize("data", [b"", b"hello", b"\x89PNG", b"RIFF\0\0\0\0WAVE", b"0000WEBP"])
def test_what_is_no_picture_is_refused(data: bytes):
    assert format_of(data) is None
    with pytest.raises(InvalidParameter, match="is no picture"):
        check_format(data, None, PLACE)


@pytest.mark.parametrize("found", KINDS)
@pytest.mark.parametrize("declared", KINDS)
def test_a_disguised_picture_is_refused(found: str, declared: str):
    data = picture(KINDS[found])
    if found == declared:
        assert check_format(data, f"image/{declared.lower()}", PLACE) == found
        return
    with pytest.raises(InvalidParameter, match=f"its bytes are a {found}") as got:
        check_format(data, f"image/{declared.lower()}", PLACE)
    assert got.value.param == PLACE


@pytest.mark.parametrize("declared", ["", "text/plain", "image/svg+xml", "image/tiff", "image/*"])
def test_a_media_type_that_is_not_read_is_refused(declared: str):
    with pytest.raises(UnsupportedParameter, match="PNG, JPEG, WebP and GIF are read"):
        check_format(picture(), declared, PLACE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", [0.3, 0.6, 0.9])
def test_a_truncated_file_is_found(kind: str, part: float):
    data = picture(KINDS[kind], (200, 150))
    with pytest.raises(InvalidParameter, match=f"is a broken {kind}") as got:
        size_of(data[: int(len(data) * part)])
    assert got.value.param == PLACE


def _png(width: int, height: int, rows: bytes) -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        check = zlib.crc32(name + data)
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", check)

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize("side", [2000, 20_000, 2**31 - 1])
def test_too_many_pixels_are_refused_by_the_header(side: int):
    # Nothing follows that could be decoded: only the header has been read.
    with pytest.raises(RequestTooLarge, match="MLX_SERVER_MAX_IMAGE_MEGAPIXELS") as got:
        size_of(_png(side, side, b""))
    assert got.value.param == PLACE


def _gif(width: int, height: int) -> bytes:
    screen = b"GIF89a" + struct.pack("<HHBBB", 4, 4, 0x80, 0, 0) + bytes(6)
    return screen + b"," + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\x02\x44\x01\0;"


def test_a_frame_larger_than_its_gif_says_is_refused():
    with pytest.raises(RequestTooLarge, match="pixels"):
        size_of(_gif(60_000, 60_000))
    with pytest.raises(RequestTooLarge, match="pixels"):
        size_of(_gif(9_000, 9_000))


def test_text_that_inflates_to_gigabytes_is_refused():
    text = zlib.compress(bytes(80 * 2**20), 9)
    data = b"note\0\0" + text
    chunk = struct.pack(">I", len(data)) + b"zTXt" + data
    chunk += struct.pack(">I", zlib.crc32(b"zTXt" + data))
    whole = _png(4, 4, bytes(4 * 13))
    with pytest.raises(InvalidParameter, match="broken PNG"):
        size_of(whole[:33] + chunk + whole[33:])


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_damage_is_measured_or_refused_and_nothing_else(kind: str, data: st.DataObject):
    file = bytearray(picture(KINDS[kind], (16, 16), orientation=6 if kind != "GIF" else None))
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, len(file) - 1))
        file[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(1, len(file)))
    refused: InvalidRequest | None = None
    try:
        size_of(bytes(file[:cut]))
    except InvalidRequest as error:
        refused = error
    assert refused is None or refused.param == PLACE
