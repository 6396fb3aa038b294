"""The program's socket: how long a client may keep it busy, and how it closes.

While the server drains the socket stays open, so that probes and clients read a 503 with
Retry-After instead of meeting a closed port; it closes when the last call has ended or been cut.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import signal
from asyncio import TimerHandle, Transport
from functools import partial
from http import HTTPStatus
from socket import AF_INET, AF_INET6, SO_REUSEADDR, SOL_SOCKET, socket
from types import FrameType
from typing import Any

import httptools
import uvicorn
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from mlx_manager.mlx_server.address import url_of
from mlx_manager.mlx_server.api.errors import ID_HEADERS, refused_head
from mlx_manager.mlx_server.api.state import Server
from mlx_manager.mlx_server.config import MLXServerSettings
from mlx_manager.mlx_server.errors import HeadersTooLarge, InvalidRequest, MLXManagerError
from mlx_manager.mlx_server.observability.logs import tell
from mlx_manager.mlx_server.services.drain import LAST_WORDS

log = logging.getLogger(__name__)

BACKLOG = 2048
"""Connections that may wait to be accepted: a burst of them is no reason to turn any away."""

KEEP_ALIVE = 75
"""Seconds that an idle connection stays open. Clients keep theirs for 5 to 60; were ours shorter, a
request could meet a connection that is being closed."""

OFFERS = frozenset({b"upgrade", b"http2-settings"})
"""Options of the header `Connection` that offer another protocol."""
PING = 20
"""Seconds between the pings of a WebSocket."""


class Parser:
    """httptools' parser of `connection`'s requests, which goes on where a client offers to change
    the protocol.

    Java's HttpClient offers HTTP/2 by default. httptools stops behind such a head, as what follows
    might be of the new protocol; a server that changes to none may ignore the offer (RFC 9110,
    7.8), so the head is parsed once more without it. A WebSocket is agreed to where one is served.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._parser = self._new()

    def feed_data(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                self._parser.feed_data(rest)
            except httptools.HttpParserUpgrade as offer:
                if self._connection.takes_offer():
                    raise
                head = self._head()
                self._parser = self._new()
                self._parser.feed_data(head)
                rest = rest[offer.args[0] :]
            else:
                return

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def _new(self) -> Any:
        parser = httptools.HttpRequestParser(self._connection)
        # As uvicorn has it.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _head(self) -> bytes:
        """Return the head that was parsed, without its offer of another protocol."""
        method, version = self.get_method(), self.get_http_version().encode()
        if method == b"CONNECT":
            raise httptools.HttpParserInvalidMethodError("no proxy")
        lines = [method + b" " + self._connection.url + b" HTTP/" + version]
        for name, value in self._connection.headers:
            kept = value
            # Without that, `Upgrade` is no offer any more, and who answers may say why.
            if name == b"connection":
                tokens = value.split(b",")
                kept = b",".join(token for token in tokens if token.strip().lower() not in OFFERS)
            lines.append(name + b": " + kept)
        return b"\r\n".join([*lines, b"", b""])


class Connection(HttpToolsProtocol):
    """A connection that its client can't hold by doing nothing, nor fill memory with headers.

    It is closed when a request's headers are not complete `client_timeout` seconds after it was
    made, or after their first byte; and when the client has left 64 KiB lying for as long. More
    than `max_head` bytes of headers are refused; neither httptools nor uvicorn has a limit.
    """

    def __init__(self, *args: Any, client_timeout: float, max_head: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser: Any = Parser(self)
        self._client_timeout = client_timeout
        self._max_head = max_head
        # Bytes of a head that is not complete yet.
        self._unparsed = 0
        self._in_head = False
        self._fault: InvalidRequest = InvalidRequest("The request is not valid HTTP.")
        self._head: TimerHandle | None = None
        self._stall: TimerHandle | None = None
        self._answering: RequestResponseCycle | None = None
        self._upgraded = False

    def takes_offer(self) -> bool:
        """Return True if the request that is being parsed is for a WebSocket."""
        return self.parser.get_method() == b"GET" and self._should_upgrade()

    def handle_websocket_upgrade(self) -> None:
        self._end_timers()
        self._upgraded = True
        super().handle_websocket_upgrade()

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_timers()
        self._hang_up()
        super().connection_lost(exc)
        # They know this connection, and would stay in memory with it.
        self.cycle = self._answering = None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._upgraded:
            return
        if self._in_head and not self.transport.is_closing():
            self._unparsed += len(data)
            if self._unparsed > self._max_head:
                self._refuse(self._too_large())
        if self.cycle is None or self.cycle.response_complete:
            self._expect_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._unparsed = 0
        self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        # What follows a body is no header (RFC 9110, 6.5.1): a key there opens nothing.
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and not self.takes_offer():
            return
        # What is raised ends the parsing: uvicorn then calls `send_400_response`.
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self._max_head:
            self._fault = self._too_large()
            raise self._fault
        if sum(name == b"host" for name, _ in self.headers) > 1:
            # RFC 9112, 3.2: what stands before this server may go by the other one.
            self._fault = InvalidRequest("The request has more than one `Host` header.")
            raise self._fault
        self._in_head = False
        if self._head is not None:
            self._head.cancel()
            self._head = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_head:
            # It has begun while the answer before was under way.
            self._expect_head()

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._fault)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall = self.loop.call_later(self._client_timeout, self.drop)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def drop(self) -> None:
        """Close the connection at once, whatever the client has not taken."""
        # First: uvloop lets whoever waits to write go on, and then raises when it does.
        self._hang_up()
        self.transport.abort()

    def _too_large(self) -> HeadersTooLarge:
        return HeadersTooLarge(
            f"The headers are larger than this server accepts ({self._max_head / 1024:g} kB; "
            "MLX_SERVER_MAX_HEADERS_KB)."
        )

    def _refuse(self, error: InvalidRequest) -> None:
        """Tell the client, unless it is reading another answer, and hang up."""
        said, request_id = refused_head(error, self.url.decode("latin-1"), self.headers)
        log.warning("a request was refused (%s): %s", request_id.decode(), error.message)
        answer = self._answering
        if answer is None or answer.response_complete or not answer.response_started:
            # Its body may be what is broken.
            self._hang_up()
            body = json.dumps(said).encode()
            named = "".join(f"{name.decode()}: {request_id.decode()}\r\n" for name in ID_HEADERS)
            head = (
                f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n{named}"
                "connection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self._in_head = False
        self.transport.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        cycle.scope["state"]["chunks"] = TransportChunks(cycle)
        super()._start_asgi_task(cycle, forgetting(app))

    def _hang_up(self) -> None:
        """Tell the request that is being answered; uvicorn tells the last one that came."""
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()

    def _expect_head(self) -> None:
        if self._head is None and not self.transport.is_closing():
            self._head = self.loop.call_later(self._client_timeout, self.transport.close)

    def _end_timers(self) -> None:
        for timer in (self._head, self._stall):
            if timer is not None:
                timer.cancel()


class WebSocketConnection(WebSocketsSansIOProtocol):
    """A WebSocket that its client can't hold by leaving what it is sent."""

    def __init__(self, *args: Any, client_timeout: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The access log has a line for each connection, and for each response.
        self.logger = logging.getLogger(f"{__name__}.websocket")
        self.logger.setLevel(logging.WARNING)
        self._client_timeout = client_timeout
        self._stall: TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_stall()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall = self.loop.call_later(self._client_timeout, self.drop)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_stall()

    def drop(self) -> None:
        """Close the connection at once, whatever the client has not taken."""
        self.transport.abort()

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None


class TransportChunks:
    """Pieces of an answer of unknown length that go to the transport as they come; for `api.sse`.

    To send one as an ASGI message takes several times as long as it takes the transport.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._transport = cycle.transport

    def are_taken(self) -> bool:
        if self._flow.write_paused or self._transport.is_closing():
            return False
        return self._cycle.chunked_encoding is True

    def write(self, data: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def forgetting(app: ASGI3Application) -> ASGI3Application:
    """Return `app`, with each scope emptied afterwards.

    Many values in a scope refer to the request. Such cycles would stay in memory until the garbage
    collector finds them.
    """

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        await app(scope, receive, send)  # type: ignore[arg-type]
        scope.clear()

    return answered  # type: ignore[return-value]


class Listener(uvicorn.Server):
    """uvicorn's server, which says where it listens once it does, and drains before it stops.

    The first SIGTERM or SIGINT begins the drain; the second ends the program at once.
    """

    def __init__(self, app: FastAPI, server: Server) -> None:
        super().__init__(configuration(app, server.settings))
        self._server = server
        self._ollama_port = server.settings.ollama_port
        self._loop = asyncio.get_running_loop()
        self.url: asyncio.Future[str] = self._loop.create_future()

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Listen, where it is asked for on Ollama's port as well.

        Raises:
            MLXManagerError: it can't be listened there; says why.
        """
        if self._ollama_port is not None:
            sockets = [self._bound(port) for port in (self.config.port, self._ollama_port)]
        try:
            await super().startup(sockets)
        except SystemExit as ending:
            # What uvicorn makes of it, and of a lifespan that fails, once it has logged why.
            match ending.__context__:
                case OSError() as error:
                    raise self._no_address(error, self.config.port) from None
            raise
        if self.should_exit:
            return
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        self.url.set_result(url_of(host, port))

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Close the port, and each connection once its client has taken what it was told, or
        `LAST_WORDS` seconds from now."""
        ending = self._loop.call_later(LAST_WORDS, self._drop_all)
        await super().shutdown(sockets)
        ending.cancel()

    def _drop_all(self) -> None:
        connections: set[Any] = self.server_state.connections
        for connection in tuple(connections):
            connection.drop()

    def _bound(self, port: int) -> socket:
        """Return a socket that is bound to a port of the host.

        Raises:
            MLXManagerError: it can't be bound; says why.
        """
        host = self.config.host
        bound = socket(AF_INET6 if ":" in host else AF_INET)
        bound.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        try:
            bound.bind((host, port))
        except OSError as error:
            bound.close()
            raise self._no_address(error, port) from None
        return bound

    def _no_address(self, error: OSError, port: int) -> MLXManagerError:
        taken = error.errno == errno.EADDRINUSE
        reason = "another program listens there" if taken else error.strerror or str(error)
        option = "--port" if port == self.config.port else "--ollama-port"
        return MLXManagerError(
            f"The server can't listen on {self.config.host}, port {port}: {reason}. "
            f"Choose another with --host and {option}; `mlx-manager doctor` says more."
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal. Runs between any two lines of the main thread."""
        if self._captured_signals:
            signal.signal(sig, signal.SIG_DFL)
            os.kill(os.getpid(), sig)
        self._captured_signals.append(sig)
        self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        self._stopping = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        drain, running = self._server.drain, len(self._server.calls)
        drain.begin(final=True)
        if running:
            tell(
                f"Stopping: {running} running {'request has' if running == 1 else 'requests have'} "
                f"{drain.seconds:g} s to finish. A second signal ends the server at once."
            )
        await drain.done()
        self.should_exit = True


def configuration(app: FastAPI, settings: MLXServerSettings) -> uvicorn.Config:
    connection: Any = partial(
        Connection,
        client_timeout=settings.client_timeout_seconds,
        max_head=int(settings.max_headers_kb * 1024),
    )
    websocket: Any = partial(WebSocketConnection, client_timeout=settings.client_timeout_seconds)
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=connection,
        ws=websocket if settings.websockets else "none",
        ws_max_size=settings.api.max_body,
        ws_ping_interval=PING,
        ws_ping_timeout=settings.client_timeout_seconds,
        # Most are on this machine or near it, where to compress each token takes longer.
        ws_per_message_deflate=False,
        backlog=BACKLOG,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        # For what even a lost connection does not end.
        timeout_graceful_shutdown=LAST_WORDS + 1,
    )
