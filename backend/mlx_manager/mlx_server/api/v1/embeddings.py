"""`POST /v1/embeddings`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from mlx_manager.mlx_server.api.connection import (
    UntilHangup,
    notes,
    read,
)
from mlx_manager.mlx_server.api.documentation import takes
from mlx_manager.mlx_server.api.respond import LargeResponse
from mlx_manager.mlx_server.api.state import server_of
from mlx_manager.mlx_server.protocols import embeddings
from mlx_manager.mlx_server.protocols.answer import new_id
from mlx_manager.mlx_server.schemas.embeddings import EmbeddingsRequest, EmbeddingsResponse
from mlx_manager.mlx_server.services.embeddings import embed

router = APIRouter(prefix="/v1", tags=["openai"])


@router.post(
    "/embeddings",
    openapi_extra=takes(EmbeddingsRequest),
    responses={200: {"model": EmbeddingsResponse}},
)
async def create_embeddings(request: Request) -> Response:
    """A vector for each text."""
    server = server_of(request)
    body = await read(request, EmbeddingsRequest, server.settings.api)
    asked = embeddings.embedding(body, server.pool.resolve(body.model), new_id("embd"))
    async with UntilHangup(request.receive):
        encoded = await embed(server.inference(request, body), asked)
    return LargeResponse(embeddings.vectors(body, asked.model, encoded), notes(body))
