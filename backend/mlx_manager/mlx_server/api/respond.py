"""The one way from a call to a response, streamed or not, for every protocol; and from what was
encoded, or asked of a tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from mlx_manager.mlx_server.api.connection import UntilHangup, notes, unheld_header
from mlx_manager.mlx_server.api.sse import EventStreamResponse, Sender
from mlx_manager.mlx_server.api.state import server_of
from mlx_manager.mlx_server.engine.stream import Work
from mlx_manager.mlx_server.schemas.anthropic import MessagesRequest
from mlx_manager.mlx_server.schemas.ollama import OllamaBody
from mlx_manager.mlx_server.schemas.openai import GenerationParameters
from mlx_manager.mlx_server.schemas.responses import ResponsesRequest
from mlx_manager.mlx_server.services.inference import AnswerCollector, StreamWriter, collect

BLOCK = 64 * 2**10
"""Characters of a large body that are written before others have their turn."""


async def respond(
    request: Request,
    body: GenerationParameters | MessagesRequest | OllamaBody | ResponsesRequest,
    work: Work,
    writer: StreamWriter,
    answer: AnswerCollector,
) -> Response:
    """Stream the steps of `work` if `body` asks for it, or else wait for all of them.

    Either way the caller's hanging up cancels the work.
    """
    headers = notes(body)
    if body.stream:
        keepalive = server_of(request).settings.api.keepalive
        return EventStreamResponse(work, writer, keepalive=keepalive, headers=headers)
    unheld: dict[str, None] = {}
    async with UntilHangup(request.receive):
        collected = await collect(
            work, answer, lambda begun: unheld.update(dict.fromkeys(begun.unheld))
        )
    return LargeResponse(collected, headers | unheld_header(unheld))


class LargeResponse(Response):
    """JSON that is sent as it is written, in blocks, between which the event loop serves others.

    A body of a single block says how long it is. What `pieces` raises comes too late for a status,
    save in the first two blocks.
    """

    media_type = "application/json"

    def __init__(self, pieces: Iterator[str], headers: Mapping[str, str]) -> None:
        super().__init__(headers=headers)
        del self.headers["content-length"]
        self._blocks = blocks(pieces)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        block, following = next(self._blocks), next(self._blocks, b"")
        if not following:
            self.headers["content-length"] = str(len(block))
        sender = Sender(send, scope.setdefault("state", {}).setdefault("send", send), self)
        async with UntilHangup(receive):
            while following:
                await sender.send(block)
                await asyncio.sleep(0)
                block, following = following, next(self._blocks, b"")
        await sender.send(block, more=False)


def blocks(pieces: Iterator[str]) -> Iterator[bytes]:
    """The pieces joined to blocks of `BLOCK` characters, or a piece more."""
    joined: list[str] = []
    size = 0
    for piece in pieces:
        joined.append(piece)
        size += len(piece)
        if size >= BLOCK:
            yield "".join(joined).encode()
            joined, size = [], 0
    if joined:
        yield "".join(joined).encode()
