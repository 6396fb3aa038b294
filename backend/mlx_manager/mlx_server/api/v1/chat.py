"""`POST /v1/chat/completions`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from mlx_manager.mlx_server.api.connection import check_rows, read
from mlx_manager.mlx_server.api.documentation import takes
from mlx_manager.mlx_server.api.respond import respond
from mlx_manager.mlx_server.api.state import server_of
from mlx_manager.mlx_server.protocols import chat
from mlx_manager.mlx_server.schemas.openai import (
    ChatCompletionRequest,
    ChatCompletionResponse,
)

router = APIRouter(prefix="/v1", tags=["openai"])


@router.post(
    "/chat/completions",
    openapi_extra=takes(ChatCompletionRequest),
    responses={200: {"model": ChatCompletionResponse}},
)
async def chat_completions(request: Request) -> Response:
    """Answer a conversation, whole or as server-sent events."""
    server = server_of(request)
    limits = server.settings.api
    body = await read(request, ChatCompletionRequest, limits)
    head = chat.head(body, server.pool.resolve(body.model), limits.reasoning_field)
    check_rows("`n` asks for", head.rows, "n", server.settings.engine)
    call = server.inference(request, body).generate(chat.requests(body, head))
    writer = chat.ChatStream(head, call.timeline)
    return await respond(request, body, call.run, writer, chat.ChatAnswer(head, call.timeline))
