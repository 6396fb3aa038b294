"""Reader of pictures: from their sources to checked `core.Image`s, off the event loop."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

from mlx_manager.mlx_server.config import ImageLimits
from mlx_manager.mlx_server.core import Image
from mlx_manager.mlx_server.images.decode import PictureSize, check_format, measured
from mlx_manager.mlx_server.images.hosts import Hosts
from mlx_manager.mlx_server.images.sources import PictureSource, decoded
from mlx_manager.mlx_server.utils.daemon_threads import DaemonThreads

AT_ONCE = 2
"""Pictures that are decoded at once; each takes four bytes a pixel meanwhile."""
MOST_KNOWN = 4096
"""Pictures whose sizes are kept, by their digests."""


class ImageReader:
    """Reader of pictures. Its methods run in asyncio; it belongs to one event loop.

    Equal bytes are decoded once: a conversation sends its pictures with every turn.

    Attributes:
        decodings: number of pictures that have been decoded so far.
    """

    def __init__(self, limits: ImageLimits, hosts: Hosts | None = None) -> None:
        self._limits = limits
        self._hosts = hosts or Hosts(limits.hosts, limits.fetch_seconds)
        self._threads = DaemonThreads(AT_ONCE)
        self._known: OrderedDict[str, PictureSize] = OrderedDict()
        self._under_way: dict[str, asyncio.Task[PictureSize]] = {}
        self.decodings = 0

    async def read(self, sources: Sequence[PictureSource], key: str = "") -> list[Image]:
        """Return the pictures, in the order of their sources.

        key: name of the caller; callers take turns.

        Raises:
            InvalidRequest: one of them can't be read; of several, the first. The error names its
                place.
        """
        reading = [asyncio.create_task(self._read(source, key)) for source in sources]
        try:
            return [await task for task in reading]
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)

    async def _read(self, source: PictureSource, key: str) -> Image:
        data, declared, digest = await self._bytes(source, key)
        kind = check_format(data, declared, source.param)
        size = self._known.get(digest)
        if size is None:
            size = await self._measured(data, kind, digest, source.param, key)
        else:
            self._known.move_to_end(digest)
        return Image(data, digest, size.width, size.height, source.param)

    async def _bytes(self, source: PictureSource, key: str) -> tuple[bytes, str | None, str]:
        """Return a picture's bytes, the media type that is declared, and the digest."""
        most, data = self._limits.max_bytes, None
        if source.remote:
            data = await self._hosts.fetch(source.text, most, source.param)
        return await self._threads.run(partial(_digested, source, data, most), key)

    async def _measured(
        self, data: bytes, kind: str, digest: str, param: str, key: str
    ) -> PictureSize:
        """Return a picture's size. Requests that bring equal bytes meanwhile wait for one decoding;
        where it fails, each has its own, whose error names its own place."""
        if (other := self._under_way.get(digest)) is not None:
            await asyncio.wait([other])
            if (size := self._known.get(digest)) is not None:
                return size
        task = asyncio.create_task(self._decode(data, kind, digest, param, key))
        self._under_way[digest] = task
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        # One of those who wait may be gone before the others.
        return await asyncio.shield(task)

    async def _decode(
        self, data: bytes, kind: str, digest: str, param: str, key: str
    ) -> PictureSize:
        try:
            size = await self._threads.run(
                partial(measured, data, kind, self._limits.max_pixels, param), key
            )
        finally:
            self._under_way.pop(digest, None)
        self.decodings += 1
        self._known[digest] = size
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
        return size


def _digested(
    source: PictureSource, data: bytes | None, most: int
) -> tuple[bytes, str | None, str]:
    declared = None
    if data is None:
        data, declared = decoded(source, most)
    return data, declared, hashlib.sha256(data).hexdigest()
