"""Eight people who read long answers while something goes wrong beside them."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import httpx
from live import LiveServer

PEOPLE = 8


@dataclass
class Told:
    """What one of them got to read: pieces of text, and how it ended.

    broken: the connection was closed in the middle. tokens: as the server has counted them.
    """

    pieces: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    error: dict[str, Any] | None = None
    tokens: int | None = None
    done: bool = False
    broken: bool = False
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, line: str) -> None:
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            self.done = True
            return
        chunk = json.loads(data)
        if "error" in chunk:
            self.error = chunk["error"]
            return
        if chunk.get("usage"):
            self.tokens = chunk["usage"]["completion_tokens"]
        if not chunk["choices"]:
            return
        choice = chunk["choices"][0]
        self.finish_reason = choice["finish_reason"] or self.finish_reason
        if choice["delta"].get("content"):
            self.pieces.append(choice["delta"]["content"])
            self.begun.set()

    @property
    def well(self) -> bool:
        return self.done and self.finish_reason == "length" and self.error is None


def question(tokens: int, person: int = 0, **fields: Any) -> dict[str, Any]:
    """An answer of exactly so many tokens."""
    return {
        "messages": [{"role": "user", "content": f"Tell me about number {person}."}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    } | fields


class Crowd:
    """Entered once all answers have begun. `told` is what each has read so far.

    Leaving waits for the end of all of them.
    """

    def __init__(self, http: httpx.AsyncClient, tokens: int = 200, **fields: Any) -> None:
        self._http = http
        self._questions = [question(tokens, person, **fields) for person in range(PEOPLE)]
        self.told = [Told() for _ in range(PEOPLE)]

    async def __aenter__(self) -> Crowd:
        self._readers = [
            asyncio.create_task(self._read(body, told))
            for body, told in zip(self._questions, self.told, strict=True)
        ]
        begun = asyncio.gather(*(told.begun.wait() for told in self.told))
        ended = asyncio.gather(*self._readers)
        await asyncio.wait([begun, ended], return_when=asyncio.FIRST_COMPLETED)
        begun.cancel()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            for reader in self._readers:
                reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=kind is not None)

    async def _read(self, body: dict[str, Any], told: Told) -> None:
        try:
            await self._read_all(body, told)
        except httpx.RemoteProtocolError:
            told.broken = True

    async def _read_all(self, body: dict[str, Any], told: Told) -> None:
        url = "/v1/chat/completions"
        async with self._http.stream("POST", url, json=body) as response:
            if response.status_code != 200:
                told.error = json.loads(await response.aread())["error"]
                return
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    told.take(line)


class SteadyCrowd(Crowd):
    """A crowd who ask again whenever they have read an answer, until the context is left: at any
    pace of the server all of them are reading meanwhile. `all_told` has every answer."""

    def __init__(self, http: httpx.AsyncClient, tokens: int = 100, **fields: Any) -> None:
        super().__init__(http, tokens, stream_options={"include_usage": True}, **fields)
        self.all_told: list[Told] = []
        self._tokens = tokens
        self._left = False

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._left = True
        await super().__aexit__(kind, error, traceback)

    @property
    def well(self) -> bool:
        """True if nobody has lost a token."""
        return all(told.well and told.tokens == self._tokens for told in self.all_told)

    async def _read(self, body: dict[str, Any], told: Told) -> None:
        while True:
            self.all_told.append(told)
            await super()._read(body, told)
            if self._left or not told.well:
                return
            told = Told()


async def connect(server: LiveServer, first: bytes, receive_buffer: int = 0) -> socket.socket:
    """A connection on which `first` has been sent. Of what comes the system keeps little on this
    side, if the buffer is small."""
    address = urlsplit(server.url)
    made = socket.socket()
    if receive_buffer:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    made.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(made, (address.hostname, address.port))
    await loop.sock_sendall(made, first)
    return made
