"""Sources of pictures in requests: data URLs, base64, and addresses."""

from __future__ import annotations

import binascii
import re
from dataclasses import dataclass, field
from urllib.parse import unquote_to_bytes

from mlx_manager.mlx_server.errors import (
    InvalidParameter,
    MLXManagerError,
    RequestTooLarge,
    UnsupportedParameter,
)

DATA_URL = re.compile(r"data:([^,;]*)((?:;[^,;]*)*),", re.IGNORECASE)
LONGEST_HEAD = 256
"""Characters of a data URL before its data."""
PIECE = 2**18
"""Characters of base64 that are decoded at once; a multiple of four."""
URL_SAFE = str.maketrans("-_", "+/")
SPACE = str.maketrans("", "", " \t\r\n")


@dataclass(frozen=True, slots=True)
class PictureSource:
    """A picture as a request brings it.

    text: base64, a data URL, or the http(s) address where `remote`. media_type: as declared beside
    base64; None: not at all. param: its place in the request.
    """

    text: str = field(repr=False)
    param: str
    media_type: str | None = None
    remote: bool = False


def url_source(url: str, param: str) -> PictureSource:
    """Return the source that a URL names.

    Raises:
        UnsupportedParameter: the URL is neither a data URL nor of http or https.
    """
    scheme = url[:16].partition(":")[0].lower()
    if scheme == "data":
        return PictureSource(url, param)
    if scheme in ("http", "https"):
        return PictureSource(url, param, remote=True)
    raise UnsupportedParameter(
        f"`{param}` must be a data URL (data:image/png;base64,...), or an http(s) address of a "
        "host that the server's owner allows.",
        param=param,
    )


def base64_source(text: str, media_type: str | None, param: str) -> PictureSource:
    """Return the source of base64. A data URL in its place is taken for what it says."""
    if text[:5].lower() == "data:":
        return PictureSource(text, param)
    return PictureSource(text, param, media_type)


def decoded(source: PictureSource, most: int) -> tuple[bytes, str | None]:
    """Return the bytes of a source that is not `remote`, and the media type that it declares.

    most: the most bytes that a picture may have. This runs on any thread.

    Raises:
        InvalidParameter: it is no base64, or no data URL.
        RequestTooLarge: it has more bytes than allowed.
    """
    text, declared = source.text, source.media_type
    if text[:5].lower() != "data:":
        return _from_base64(text, most, source.param), declared
    head = DATA_URL.match(text[:LONGEST_HEAD])
    if head is None:
        raise InvalidParameter(
            f"`{source.param}` is no data URL such as data:image/png;base64,...",
            param=source.param,
        )
    declared, body = head[1].strip(), text[head.end() :]
    if head[2].lower().split(";")[-1].strip() == "base64":
        return _from_base64(body, most, source.param), declared
    if len(body) > 3 * most:
        raise too_large(most, source.param)
    data = unquote_to_bytes(body)
    check_bytes(len(data), most, source.param)
    return data, declared


def _from_base64(text: str, most: int, param: str) -> bytes:
    if "%" in text[:LONGEST_HEAD] or "%" in text[-8:]:
        text = unquote_to_bytes(text).decode("latin-1")
    if len(text) > most * 2:
        raise too_large(most, param)
    try:
        data = _decoded(_padded(text))
    except (binascii.Error, ValueError):
        raise InvalidParameter(f"`{param}` is not valid base64.", param=param) from None
    check_bytes(len(data), most, param)
    return data


def _decoded(text: str) -> bytes:
    """Return the bytes of base64. Other threads run between its pieces.

    Raises:
        ValueError: it is no base64.
    """
    if 0 <= text.find("=") < len(text) - 2:
        raise ValueError("padding is at the end")
    data = bytearray()
    for start in range(0, len(text), PIECE):
        data += binascii.a2b_base64(text[start : start + PIECE], strict_mode=True)
    return bytes(data)


def _padded(text: str) -> str:
    """Return base64 without line breaks, in the usual alphabet, and padded."""
    if any(sign in text for sign in " \t\r\n"):
        text = text.translate(SPACE)
    if "-" in text or "_" in text:
        text = text.translate(URL_SAFE)
    return text + "=" * (-len(text) % 4)


def check_bytes(size: int, most: int, param: str) -> None:
    """
    Raises:
        InvalidParameter: a picture has no bytes.
        RequestTooLarge: it has more than allowed.
    """
    if size == 0:
        raise InvalidParameter(f"`{param}` is empty.", param=param)
    if size > most:
        raise too_large(most, param)


def too_large(most: int, param: str) -> MLXManagerError:
    return RequestTooLarge(
        f"`{param}` is larger than a picture may be here ({most / 2**20:g} MB; "
        "MLX_SERVER_MAX_IMAGE_MB).",
        param=param,
    )
