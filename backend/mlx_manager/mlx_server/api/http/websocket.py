"""`/v1/responses` over a WebSocket: each `response.create` is the request that POST would be.

The handshake and each frame go through the whole application as HTTP requests, so that keys,
limits, ids, the log and metrics are those of every other request. What is answered comes back as
frames: an event each, or an `error` with the status that HTTP would have had.

Source: OpenAI's guide to WebSocket mode, and codex-api's `responses_websocket.rs`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from pydantic_core import from_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_manager.mlx_server.api.connection import check_brackets
from mlx_manager.mlx_server.api.state import Server
from mlx_manager.mlx_server.errors import InvalidRequest, MLXManagerError, Overloaded
from mlx_manager.mlx_server.protocols import sse
from mlx_manager.mlx_server.protocols.answer import error_body
from mlx_manager.mlx_server.protocols.responses import error_frame
from mlx_manager.mlx_server.services.response_store import LatestResponse

log = logging.getLogger(__name__)

CREATE = "response.create"
MOST_WAITING = 16
"""Frames that wait while a response is made; there is no reason for more than one."""
LONGEST_ID = 120
SERVICE_RESTART = 1012
SHAKEN = ("connection", "upgrade", "expect", "origin", "x-request-id", "transfer-encoding")
"""Headers of the handshake alone, besides those of WebSockets and of contents."""
KEEP_ALIVE = sse.dump({"type": "keepalive"})
"""A sign of life, of which Codex takes note, as it does not of a ping. OpenAI sends it likewise."""


def install(app: FastAPI, server: Server) -> None:
    """Serve WebSockets as requests of `app`. To be called last: no layer is around this one."""
    app.add_middleware(WebSockets, server=server)


class WebSockets:
    """The layer around all that know HTTP only."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self.app = app
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await self.app(scope, receive, send)
            return
        await Session(self.app, self._server, scope, receive, send).serve()


class Session:
    """One connection, from its handshake to its end: a response at a time, in order."""

    def __init__(
        self, app: ASGIApp, server: Server, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._app = app
        self._server = server
        self._scope = scope
        self._receive = receive
        self._send = send
        self._latest = LatestResponse()
        self._waiting: deque[str] = deque()
        self._size = 0
        self._more = asyncio.Event()
        self._gone = asyncio.Event()
        self._id = ""
        self._turns = 0

    async def serve(self) -> None:
        """Answer until the client hangs up or the server goes out of service."""
        if not await self._shake_hands():
            return
        reading = asyncio.create_task(self._read())
        draining = asyncio.create_task(self._server.drain.beginning())
        try:
            while await self._is_asked(draining):
                text = self._waiting.popleft()
                self._size -= len(text)
                await self._take(text)
            if not self._gone.is_set():
                reason = "The server is going out of service."
                close = {"type": "websocket.close", "code": SERVICE_RESTART, "reason": reason}
                await self._tell(close)
        finally:
            reading.cancel()
            draining.cancel()

    # -- the connection ------------------------------------------------------------------------

    async def _shake_hands(self) -> bool:
        """Accept the connection if a GET by these headers would be."""
        await self._receive()
        answer = SocketAnswer()
        scope = self._request("GET", self._scope["headers"])
        scope["state"]["websocket"] = True
        await self._app(scope, NoBody(self._gone), answer.send)
        self._id = scope["state"]["request_id"][:LONGEST_ID]
        if answer.status == HTTPStatus.SWITCHING_PROTOCOLS:
            await self._tell({"type": "websocket.accept", "headers": answer.headers})
            return True
        if "websocket.http.response" in self._scope.get("extensions", {}):
            start = {"status": answer.status, "headers": answer.headers}
            await self._tell({"type": "websocket.http.response.start"} | start)
            await self._tell({"type": "websocket.http.response.body", "body": answer.body})
        else:
            await self._tell({"type": "websocket.close"})
        return False

    async def _read(self) -> None:
        """Take frames as they come, so that a hang-up is noticed while one is answered."""
        while (message := await self._receive())["type"] == "websocket.receive":
            text = message.get("text")
            if text is None:
                await self._fail(InvalidRequest("Send frames of text, each a JSON object."))
            elif (
                len(self._waiting) >= MOST_WAITING
                or self._size + len(text) > self._server.settings.api.max_body
            ):
                await self._fail(
                    Overloaded("Too much waits on this connection. Wait for the responses.")
                )
            else:
                self._waiting.append(text)
                self._size += len(text)
                self._more.set()
        self._gone.set()

    async def _is_asked(self, draining: asyncio.Task[None]) -> bool:
        """Wait for a frame; False if none is to be answered any more."""
        self._more.clear()
        if not self._waiting:
            waits = [asyncio.create_task(event.wait()) for event in (self._more, self._gone)]
            await asyncio.wait([*waits, draining], return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        return bool(self._waiting) and not self._gone.is_set() and not draining.done()

    async def _tell(self, message: Message) -> None:
        try:
            await self._send(message)
        except OSError:
            # As servers do once the client is gone.
            self._gone.set()

    async def _say(self, text: str) -> None:
        await self._tell({"type": "websocket.send", "text": text})

    async def _fail(self, error: MLXManagerError) -> None:
        await self._say(error_frame(error.status, error_body(error), {}))

    # -- a frame -------------------------------------------------------------------------------

    async def _take(self, text: str) -> None:
        try:
            body = asked(text)
        except InvalidRequest as error:
            await self._fail(error)
            return
        if body is not None:
            await self._respond(body)

    async def _respond(self, body: bytes) -> None:
        """Send what the application answers to a POST of the body."""
        self._turns += 1
        headers = [
            (name, value)
            for name, value in self._scope["headers"]
            if not name.startswith((b"sec-websocket-", b"content-", b"accept"))
            and name.decode("latin-1") not in SHAKEN
        ]
        headers += [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", f"{self._id}.{self._turns}".encode()),
        ]
        scope = self._request("POST", headers)
        scope["state"]["latest"] = self._latest
        answer = SocketAnswer(self)
        await self._app(scope, NoBody(self._gone, body), answer.send)
        if answer.status != HTTPStatus.OK:
            told = {
                name.decode("latin-1"): value.decode("latin-1") for name, value in answer.headers
            }
            await self._say(error_frame(answer.status, json.loads(answer.body or b"{}"), told))

    async def say_events(self, data: bytes) -> None:
        """Send each event of a piece of a stream as a frame of its own."""
        for event in data.split(b"\n\n"):
            _, found, content = event.partition(b"data: ")
            if found and content.startswith(b"{"):
                await self._say(content.decode())
            elif event.startswith(b":"):
                await self._say(KEEP_ALIVE)

    def _request(self, method: str, headers: list[tuple[bytes, bytes]]) -> Scope:
        """The scope of an HTTP request that the connection's client might have made."""
        kept = ("asgi", "server", "client", "root_path", "path", "raw_path", "app")
        return {name: self._scope[name] for name in kept if name in self._scope} | {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "scheme": "https" if self._scope.get("scheme") == "wss" else "http",
            "query_string": self._scope.get("query_string", b""),
            "headers": headers,
            "state": dict(self._scope.get("state", {})),
        }


class NoBody:
    """ASGI messages of a request: its body if the request has one, and the hang-up."""

    def __init__(self, gone: asyncio.Event, body: bytes = b"") -> None:
        self._gone = gone
        self._body: bytes | None = body

    async def __call__(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}


class SocketAnswer:
    """Answer of the application: sent to `session` at once if the answer is a stream, or kept."""

    def __init__(self, session: Session | None = None) -> None:
        self.status = HTTPStatus.OK.value
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""
        self._session = session

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = list(message.get("headers", ()))
        elif self._session is not None and self.status == HTTPStatus.OK:
            await self._session.say_events(message.get("body", b""))
        else:
            self.body += message.get("body", b"")


def asked(text: str) -> bytes | None:
    """Return the body of the request that a frame stands for; None if it stands for none.

    Raises:
        InvalidRequest: it is no `response.create`.
        RequestTooLarge: it has too many lists and objects.
    """
    check_brackets(text)
    try:
        event = from_json(text)
    except ValueError:
        event = _with_halves(text)
    match event:
        case {"type": "response.create", "response": dict(body), **beside}:
            # Everything beside it belongs to the event, but for what OpenAI's has there.
            return _body(body | beside)
        case {"type": "response.create"}:
            return _body(event)
        case {"type": "response.processed"}:
            return None
        case {"type": str(kind)}:
            raise InvalidRequest(
                f"`type` {ascii(kind)[:64]} is not supported: a frame is a {CREATE!r}.",
                param="type",
            )
    raise InvalidRequest(f"A frame must be a JSON object of `type` {CREATE!r}.", param="type")


def _with_halves(text: str) -> Any:
    """A frame that may have halves of characters, which are replaced where the body is read."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"The frame is not valid JSON: {error}.") from None


def _body(event: dict[str, Any]) -> bytes:
    """JSON, all ASCII. What goes by frames is streamed, whatever the frame says of it."""
    fields = {name: value for name, value in event.items() if name != "type"}
    return json.dumps(fields | {"stream": True}).encode()
