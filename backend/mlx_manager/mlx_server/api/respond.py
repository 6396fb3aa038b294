"""The one way from progress to a response, streamed or not, for every protocol."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from fastapi import Request, Response

from mlx_manager.mlx_server.api.connection import UntilHangup, unknown_header
from mlx_manager.mlx_server.api.sse import EventStreamResponse
from mlx_manager.mlx_server.api.state import server_of
from mlx_manager.mlx_server.core import Progress
from mlx_manager.mlx_server.schemas.anthropic import MessagesRequest
from mlx_manager.mlx_server.schemas.openai import GenerationParameters
from mlx_manager.mlx_server.schemas.responses import ResponsesRequest
from mlx_manager.mlx_server.services.inference import Answer, Stream, collect


async def respond(
    request: Request,
    body: GenerationParameters | MessagesRequest | ResponsesRequest,
    progress: AsyncGenerator[Progress, None],
    stream: Stream,
    answer: Answer,
) -> Response:
    """Stream the progress if `body` asks for it, or else wait for all of it.

    Either way the caller's hanging up closes `progress`, which cancels the work.
    """
    headers = unknown_header(body)
    if body.stream:
        keepalive = server_of(request).settings.api.keepalive
        return EventStreamResponse(progress, stream, keepalive=keepalive, headers=headers)
    async with UntilHangup(request.receive):
        collected = await collect(progress, answer)
    content = collected.model_dump_json(exclude_unset=True)
    return Response(content, media_type="application/json", headers=headers)
