"""`POST /v1/rerank`, also as `/rerank` and `/v2/rerank`, for Cohere's and Jina's clients."""

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
from mlx_manager.mlx_server.schemas.embeddings import RerankRequest, RerankResponse
from mlx_manager.mlx_server.services.embeddings import rank

router = APIRouter(prefix="/v1", tags=["openai"])
unversioned = APIRouter(include_in_schema=False)
"""The same routes by the paths that Cohere's and Jina's clients put together."""


@unversioned.post("/rerank")
@unversioned.post("/v2/rerank")
@router.post(
    "/rerank",
    openapi_extra=takes(RerankRequest),
    responses={200: {"model": RerankResponse}},
)
async def rerank_documents(request: Request) -> Response:
    """The documents by how well they answer the query, best first."""
    server = server_of(request)
    body = await read(request, RerankRequest, server.settings.api)
    asked = embeddings.ranking(body, server.pool.resolve(body.model), new_id("rerank"))
    async with UntilHangup(request.receive):
        encoded = await rank(server.inference(request, body), asked)
    return LargeResponse(embeddings.ranked(body, asked, encoded), notes(body))
