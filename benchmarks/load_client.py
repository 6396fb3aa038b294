"""Sends requests all at once and says when every piece of every answer came.

Runs as a process of its own: reads a JSON list of requests from standard input and writes a JSON
list of answers. While requests run it only notes times and bytes; everything is parsed afterwards,
so that on a machine of few cores the client is not what is measured.

    echo '[{"url": "http://127.0.0.1:8000/v1/chat/completions", "body": {...}, "key": null}]' |
        python load_client.py
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

Piece = tuple[float, bytes]
TIMEOUT = 300


@dataclass(slots=True)
class Answer:
    """`started`, `first` (first text) and `ended` are seconds since the clock's zero.

    `arrivals` are the times of the pieces that carried text, `tokens` what `usage` said.
    """

    status: int = 0
    started: float = 0.0
    first: float = 0.0
    ended: float = 0.0
    text: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None
    arrivals: list[float] = field(default_factory=list)
    error: str | None = None


class Exchange(asyncio.Protocol):
    """One request on one connection; `done` gets the raw pieces with their times."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._pieces: list[Piece] = []
        self.done: asyncio.Future[list[Piece]] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self._pieces.append((time.perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None:
            self.done.set_result(self._pieces)
        else:
            self.done.set_exception(exc)


def encode(url: str, body: dict[str, Any], key: str | None) -> bytes:
    parts = urlsplit(url)
    payload = json.dumps(body).encode()
    authorization = "" if key is None else f"Authorization: Bearer {key}\r\n"
    head = (
        f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n{authorization}\r\n"
    )
    return head.encode() + payload


async def send(
    url: str, body: dict[str, Any], after: float = 0.0, key: str | None = None
) -> Answer:
    """Send a request, `after` seconds from now."""
    await asyncio.sleep(after)
    parts = urlsplit(url)
    answer = Answer(started=time.perf_counter())
    try:
        _, exchange = await asyncio.get_running_loop().create_connection(
            lambda: Exchange(encode(url, body, key)), parts.hostname, parts.port
        )
        pieces = await asyncio.wait_for(exchange.done, TIMEOUT)
    except (OSError, TimeoutError) as error:
        answer.error = repr(error)
        return answer
    answer.ended = pieces[-1][0] if pieces else time.perf_counter()
    read(pieces, answer)
    return answer


def read(pieces: list[Piece], answer: Answer) -> None:
    """Fill `answer` from what came: status, then a stream of events or one JSON body."""
    head, lines = split_head(pieces)
    if not head:
        answer.error = "the connection was closed without an answer"
        return
    answer.status = int(head.split(b" ", 2)[1])
    if b"chunked" in head.lower():
        lines = dechunk(lines)
    if b"text/event-stream" in head.lower():
        for moment, line in split_lines(lines):
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                note(json.loads(line[6:]), moment, answer)
    else:
        body = json.loads(b"".join(data for _, data in lines))
        note(body, answer.ended, answer)


def split_head(pieces: list[Piece]) -> tuple[bytes, list[Piece]]:
    gathered = b""
    for index, (moment, data) in enumerate(pieces):
        gathered += data
        head, border, rest = gathered.partition(b"\r\n\r\n")
        if border:
            return head, [(moment, rest), *pieces[index + 1 :]]
    return b"", []


def dechunk(pieces: list[Piece]) -> list[Piece]:
    """Undo HTTP's chunked transfer; a chunk's time is that of the piece that completed it."""
    chunks: list[Piece] = []
    buffer = b""
    for moment, data in pieces:
        buffer += data
        while (border := buffer.find(b"\r\n")) >= 0:
            size = int(buffer[:border].split(b";")[0], 16)
            end = border + 2 + size
            if len(buffer) < end + 2:
                break
            chunks.append((moment, buffer[border + 2 : end]))
            buffer = buffer[end + 2 :]
    return chunks


def split_lines(pieces: list[Piece]) -> list[Piece]:
    lines: list[Piece] = []
    buffer = b""
    for moment, data in pieces:
        *complete, buffer = (buffer + data).split(b"\n")
        lines += [(moment, line.rstrip(b"\r")) for line in complete]
    return lines


def note(body: dict[str, Any], moment: float, answer: Answer) -> None:
    if "error" in body:
        answer.error = json.dumps(body["error"])
    for choice in body.get("choices", ()):
        source = choice.get("delta") or choice.get("message") or choice
        text = source.get("content") or source.get("text") or ""
        if text:
            answer.first = answer.first or moment
            answer.text += text
            answer.arrivals.append(moment)
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    if usage := body.get("usage"):
        answer.tokens = usage["completion_tokens"]
        answer.prompt_tokens = usage["prompt_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        answer.cached_tokens = details.get("cached_tokens") or 0


async def send_all(requests: list[dict[str, Any]]) -> list[Answer]:
    return await asyncio.gather(*(send(**request) for request in requests))


def main() -> None:
    requests = json.load(sys.stdin)
    try:
        import uvloop

        run: Any = uvloop.run
    except ImportError:
        run = asyncio.run
    json.dump([asdict(answer) for answer in run(send_all(requests))], sys.stdout)


if __name__ == "__main__":
    main()
