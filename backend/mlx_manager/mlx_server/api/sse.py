"""Server-sent events: one write a step, signs of life, and an end when the caller goes.

A step is written to the connection in the very callback in which it comes, if the connection takes
it. See "The order of delivery" in `engine/stream.py`.

Our own rather than sse-starlette's: that one sends each event by itself, through a task group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlx_manager.mlx_server.api.connection import UntilHangup, unheld_header
from mlx_manager.mlx_server.core import Progress
from mlx_manager.mlx_server.engine.stream import Inbox, Work, working
from mlx_manager.mlx_server.errors import MLXManagerError
from mlx_manager.mlx_server.services.inference import StreamWriter, starts


class EventStreamResponse(Response):
    """Response that sends the bytes that `writer` makes of each step of `work`, then its end.

    The headers go out with the first bytes, be it an event or a sign of life, so that what
    fails before still gets its own status. Afterwards a failure is an event, and the last one.
    """

    def __init__(
        self, work: Work, writer: StreamWriter, *, keepalive: float, headers: Mapping[str, str]
    ) -> None:
        self.work = work
        self.writer = writer
        self.keepalive = keepalive
        super().__init__(
            headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers},
            media_type=writer.media_type,
        )
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # An exception that nobody foresaw passes through here; whoever catches it asks the writer
        # for its last event.
        state = scope.setdefault("state", {})
        state["stream"] = self.writer
        sender = Sender(send, state.setdefault("send", send), self, state.get("chunks"))
        inbox = Inbox(partial(self._write_at_once, sender))
        async with UntilHangup(receive), working(self.work, inbox) as task:
            heart = asyncio.create_task(sender.beat(self.keepalive, self.writer.keep_alive))
            # A task of its own, so that each step does not wake up all the layers around.
            sending = asyncio.create_task(self._send_all(sender, inbox, task))
            try:
                last = await sending
            finally:
                heart.cancel()
        await sender.send(last, more=False)

    async def _send_all(self, sender: Sender, inbox: Inbox, task: asyncio.Task[None]) -> bytes:
        """Send all that the task puts into the inbox; return what is to be sent last."""
        try:
            async for step in inbox:
                if not sender.started:
                    self._name_unheld(step)
                await sender.send(self.writer.write(step))
            await task
        except MLXManagerError as error:
            if not sender.started:
                raise
            return self.writer.fail(error)
        return self.writer.end()

    def _name_unheld(self, step: Progress) -> None:
        """Add the header that the first rows to begin call for."""
        for begun in starts(step):
            self.headers.update(unheld_header(begun.unheld))

    def _write_at_once(self, sender: Sender, step: Progress) -> bool:
        if not sender.is_free():
            return False
        sender.write(self.writer.write(step))
        return True


class Chunks(Protocol):
    """Pieces of an answer that is under way, straight to the connection."""

    def are_taken(self) -> bool:
        """Return whether the answer has begun and the caller keeps up with it."""
        ...

    def write(self, data: bytes) -> None: ...


class Sender:
    """The way to the caller, shared by an answer and its keep-alive.

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
        """Return whether `write` is possible.

        It is while the answer has begun, the caller keeps up, and no `send` is under way.
        """
        if self._chunks is None or self._sending or not self.started:
            return False
        return self._chunks.are_taken()

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
