"""Server-sent events: one write a step, signs of life, and an end when the caller goes.

Our own rather than sse-starlette's: that one sends each event by itself, through a task group.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlx_manager.mlx_server.api.connection import UntilHangup, unheld_header
from mlx_manager.mlx_server.core import Event, Progress, Started
from mlx_manager.mlx_server.errors import MLXManagerError
from mlx_manager.mlx_server.services.inference import Stream


class EventStreamResponse(Response):
    """Response that sends the bytes that `stream` writes for each piece of progress, then its end.

    The headers go out with the first bytes, be it an event or a sign of life, so that what
    fails before still gets its own status. Afterwards a failure is an event, and the last one.
    """

    def __init__(
        self,
        progress: AsyncGenerator[Progress, None],
        stream: Stream,
        *,
        keepalive: float,
        headers: Mapping[str, str],
    ) -> None:
        self.progress = progress
        self.stream = stream
        self.keepalive = keepalive
        super().__init__(
            headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers},
            media_type=stream.media_type,
        )
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # An exception that nobody foresaw passes through here; whoever catches it asks the stream
        # for its last event.
        state = scope.setdefault("state", {})
        state["stream"] = self.stream
        wire = Wire(send, state.setdefault("send", send), self, state.get("chunks"))
        async with UntilHangup(receive):
            heart = asyncio.create_task(wire.beat(self.keepalive, self.stream.keep_alive))
            # A task of its own, so that each piece does not wake up all the layers around.
            sending = asyncio.create_task(self._send_all(wire))
            try:
                last = await sending
            finally:
                heart.cancel()
        await wire.send(last, more=False)

    async def _send_all(self, wire: Wire) -> bytes:
        """Send all that comes; return what is to be sent last."""
        try:
            async with aclosing(self.progress):
                async for progress in self.progress:
                    if not wire.started:
                        self._name_unheld(progress)
                    await wire.send(self.stream.write(progress))
                    for row, events in progress:
                        if type(begun := events[0]) is Started:
                            begun.shortcut(partial(self._write_at_once, wire, row))
        except MLXManagerError as error:
            if not wire.started:
                raise
            return self.stream.fail(error)
        return self.stream.end()

    def _name_unheld(self, progress: Progress) -> None:
        """Add the header that the first rows to begin call for."""
        for _, events in progress:
            if type(begun := events[0]) is Started:
                self.headers.update(unheld_header(begun.unheld))

    def _write_at_once(self, wire: Wire, row: int, events: list[Event]) -> bool:
        if not wire.is_free():
            return False
        wire.write(self.stream.write([(row, events)]))
        return True


class Chunks(Protocol):
    """Pieces of an answer that is under way, straight to the connection."""

    def are_taken(self) -> bool:
        """Return whether the answer has begun and the caller keeps up with it."""
        ...

    def write(self, data: bytes) -> None: ...


class Wire:
    """The way to the caller, shared by the stream and its keep-alive.

    The layers around see only the beginning and the end. The messages between go past them by
    `direct`, or straight to the connection by `chunks`, if the server has those.
    """

    def __init__(
        self, send: Send, direct: Send, response: Response, chunks: Chunks | None = None
    ) -> None:
        self._send = send
        self._direct = direct
        self._chunks = chunks
        self._sending = 0
        self._response = response
        self._lock = asyncio.Lock()
        self._clock = asyncio.get_running_loop().time
        self._spoke = self._clock()
        self.started = False

    async def send(self, data: bytes, *, more: bool = True) -> None:
        if not data:
            return
        self._spoke = self._clock()
        message = {"type": "http.response.body", "body": data, "more_body": more}
        self._sending += 1
        try:
            async with self._lock:
                send = self._direct if self.started and more else self._send
                if not self.started:
                    await self._send(
                        {
                            "type": "http.response.start",
                            "status": self._response.status_code,
                            "headers": self._response.raw_headers,
                        }
                    )
                    self.started = True
                await send(message)
        finally:
            self._sending -= 1

    def is_free(self) -> bool:
        """Return whether `write` is possible: the caller keeps up, and no `send` is under way."""
        return self._chunks is not None and not self._sending and self._chunks.are_taken()

    def write(self, data: bytes) -> None:
        if data and self._chunks is not None:
            self._spoke = self._clock()
            self._chunks.write(data)

    async def beat(self, interval: float, keep_alive: bytes) -> None:
        """Send `keep_alive` whenever nothing has been sent for `interval` seconds."""
        while True:
            silence = self._clock() - self._spoke
            if silence < interval:
                await asyncio.sleep(interval - silence)
            else:
                await self.send(keep_alive)
