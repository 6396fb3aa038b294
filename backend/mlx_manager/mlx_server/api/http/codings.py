"""Bodies that clients compress, decompressed in pieces that stay within the limit of a body.

Codex sends zstd; proxies and SDKs have gzip, br and deflate.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Generator, Iterator

import brotli
import zstandard

from mlx_manager.mlx_server.errors import InvalidRequest, RequestTooLarge

PIECE = 256 * 2**10
"""Bytes that are decompressed before others have their turn."""
ZSTD_WINDOW = 8 * 2**20
"""Bytes that a decoder of zstd must keep at most (RFC 9659); a frame could ask for gigabytes."""


async def decoded(body: bytes, content_encoding: str, limit: int) -> bytes:
    """Return a body without the codings that its `Content-Encoding` lists.

    limit: the most bytes that it may have after each of them is undone.

    Raises:
        InvalidRequest: a coding is not known here, or the body is not of that coding.
        RequestTooLarge: it would be larger; what is beyond the limit is never decompressed.
    """
    names = [name.strip().lower() for name in content_encoding.split(",") if name.strip()]
    check(names)
    for name in reversed(names):
        body = await _undone(body, name, limit)
    return body


def check(names: list[str]) -> None:
    """
    Raises:
        InvalidRequest: a coding is not known here.
    """
    for name in names:
        if name not in DECODERS:
            known = ", ".join(sorted(DECODERS.keys() - {"identity", "x-gzip"}))
            raise InvalidRequest(
                f"This server can't read `Content-Encoding: {ascii(name)[1:-1][:64]}`. Send the "
                f"body as it is, or in one of: {known}."
            )


async def _undone(body: bytes, name: str, limit: int) -> bytes:
    pieces: list[bytes] = []
    size = 0
    try:
        for piece in DECODERS[name](body):
            size += len(piece)
            if size > limit:
                raise RequestTooLarge(
                    f"The body is larger than this server accepts once its {name} is undone "
                    f"({limit} bytes; MLX_SERVER_MAX_BODY_MB)."
                )
            pieces.append(piece)
            await asyncio.sleep(0)
    except (zlib.error, zstandard.ZstdError, brotli.error, EOFError) as error:
        raise InvalidRequest(f"The body is not valid {name}: {error or 'it ends early'}.") from None
    return b"".join(pieces)


def _identity(body: bytes) -> Iterator[bytes]:
    yield body


def _gzip(body: bytes) -> Iterator[bytes]:
    """The members of a gzip file, one after the other."""
    while body:
        body = yield from _inflated(body, zlib.MAX_WBITS | 16)


def _deflate(body: bytes) -> Iterator[bytes]:
    """As RFC 9110 has it, with zlib's header, or bare, as some clients send it."""
    wrapped = len(body) > 1 and body[0] & 15 == zlib.DEFLATED and (body[0] << 8 | body[1]) % 31 == 0
    yield from _inflated(body, zlib.MAX_WBITS if wrapped else -zlib.MAX_WBITS)


def _inflated(body: bytes, bits: int) -> Generator[bytes, None, bytes]:
    """Yield the pieces of one stream, and return what comes after its end."""
    inflater = zlib.decompressobj(bits)
    while not inflater.eof:
        piece = inflater.decompress(body, PIECE)
        body = inflater.unconsumed_tail
        if not piece and not body and not inflater.eof:
            raise EOFError
        yield piece
    return inflater.unused_data


def _zstd(body: bytes) -> Iterator[bytes]:
    reader = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW).stream_reader(
        body, read_across_frames=True
    )
    while piece := reader.read(PIECE):
        yield piece


def _brotli(body: bytes) -> Iterator[bytes]:
    inflater = brotli.Decompressor()
    yield inflater.process(body, output_buffer_limit=PIECE)
    while not inflater.is_finished():
        piece = inflater.process(b"", output_buffer_limit=PIECE)
        if not piece and not inflater.is_finished():
            raise EOFError
        yield piece


DECODERS: dict[str, Callable[[bytes], Iterator[bytes]]] = {
    "identity": _identity,
    "gzip": _gzip,
    "x-gzip": _gzip,
    "deflate": _deflate,
    "br": _brotli,
    "zstd": _zstd,
}
"""Content codings, by the names that HTTP registers."""
