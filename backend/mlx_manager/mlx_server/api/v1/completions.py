"""`POST /v1/completions`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from mlx_manager.mlx_server.api.connection import check_rows, read
from mlx_manager.mlx_server.api.documentation import takes
from mlx_manager.mlx_server.api.respond import respond
from mlx_manager.mlx_server.api.state import server_of
from mlx_manager.mlx_server.protocols import completions
from mlx_manager.mlx_server.schemas.openai import (
    CompletionRequest,
    CompletionResponse,
)

router = APIRouter(prefix="/v1", tags=["openai"])


@router.post(
    "/completions",
    openapi_extra=takes(CompletionRequest),
    responses={200: {"model": CompletionResponse}},
)
async def completion(request: Request) -> Response:
    """Continue one or several texts, whole or as server-sent events."""
    server = server_of(request)
    body = await read(request, CompletionRequest, server.settings.api)
    head = completions.head(body, server.pool.resolve(body.model))
    asked, param = "`prompt`, `n` and `best_of` ask for", "n" if head.n > 1 else "prompt"
    check_rows(asked, head.rows, param, server.settings.engine)
    call = server.inference(request, body).generate(completions.requests(body, head))
    writer = completions.CompletionStream(head, call.timeline)
    answer = completions.CompletionAnswer(head, call.timeline)
    return await respond(request, body, call.run, writer, answer)
