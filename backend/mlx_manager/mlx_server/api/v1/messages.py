"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's API.

Its `anthropic-version` and `x-api-key` headers are accepted, whatever they say.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from mlx_manager.mlx_server.api.connection import UntilHangup, notes, read
from mlx_manager.mlx_server.api.documentation import takes
from mlx_manager.mlx_server.api.respond import respond
from mlx_manager.mlx_server.api.state import server_of
from mlx_manager.mlx_server.defaults import overlaid_prompt
from mlx_manager.mlx_server.protocols import messages
from mlx_manager.mlx_server.schemas.anthropic import (
    CountTokensRequest,
    MessagesRequest,
    MessagesResponse,
    TokenCount,
)

router = APIRouter(prefix="/v1", tags=["openai"])


@router.post(
    "/messages",
    openapi_extra=takes(MessagesRequest),
    responses={200: {"model": MessagesResponse}},
)
async def create_message(request: Request) -> Response:
    """Answer a conversation, whole or as server-sent events."""
    server = server_of(request)
    body = await read(request, MessagesRequest, server.settings.api)
    head = messages.head(body, server.pool.resolve(body.model), request.state.request_id)
    call = server.inference(request, body).generate([messages.request(body, head)])
    return await respond(
        request, body, call.run, messages.MessageStream(head), messages.MessageAnswer(head)
    )


@router.post("/messages/count_tokens", openapi_extra=takes(CountTokensRequest))
async def count_tokens(request: Request, response: Response) -> TokenCount:
    """The tokens that a conversation takes as a prompt."""
    server = server_of(request)
    body = await read(request, CountTokensRequest, server.settings.api)
    response.headers.update(notes(body))
    model = server.pool.resolve(body.model)
    prompt = overlaid_prompt(messages.counted(body), server.pool.overlay(model))
    inference = server.inference(request, body)
    async with UntilHangup(request.receive):
        found = await inference.ask(
            model, lambda it, caller: it.tokenize(prompt, caller=caller), "text"
        )
    return TokenCount(input_tokens=len(found.ids))
