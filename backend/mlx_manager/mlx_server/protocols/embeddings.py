"""OpenAI's embeddings and Cohere's rerank: body → request, what was encoded → body. Pure."""

from __future__ import annotations

import sys
from array import array
from base64 import b64encode

from mlx_manager.mlx_server import core
from mlx_manager.mlx_server.core import EmbeddingRequest, Encoded
from mlx_manager.mlx_server.protocols.parameters import Refusal, refuse_unsupported
from mlx_manager.mlx_server.schemas.embeddings import (
    Embedding,
    EmbeddingsRequest,
    EmbeddingsResponse,
    EncodingUsage,
    RerankDocument,
    RerankRequest,
    RerankResponse,
    RerankResult,
)

UNSUPPORTED_IN_RERANK: dict[str, Refusal] = {
    "max_chunks_per_doc": Refusal((1,)),
    "max_tokens_per_doc": Refusal(instead="Use `truncate_prompt_tokens`."),
    "rank_fields": Refusal(([], ["text"]), "Documents are texts."),
}


def embedding(body: EmbeddingsRequest, model: str, request_id: str) -> EmbeddingRequest:
    return EmbeddingRequest(
        model,
        inputs(body),
        body.dimensions,
        body.truncate_prompt_tokens,
        body.prompt_name,
        request_id,
    )


def inputs(body: EmbeddingsRequest) -> tuple[str | tuple[int, ...], ...]:
    match body.input:
        case str(text):
            return (text,)
        case [int(), *_] as ids:
            return (tuple(ids),)  # type: ignore[arg-type]
        case several:
            return tuple(
                given if isinstance(given, str) else tuple(given)  # type: ignore[arg-type]
                for given in several
            )


def vectors(body: EmbeddingsRequest, model: str, encoded: Encoded) -> EmbeddingsResponse:
    as_text = body.encoding_format == "base64"
    return EmbeddingsResponse(
        object="list",
        data=[
            Embedding(
                object="embedding",
                index=index,
                embedding=base64(row) if as_text else row.tolist(),
            )
            for index, row in enumerate(encoded.rows)
        ],
        model=model,
        usage=usage(encoded),
    )


def base64(row: array[float]) -> str:
    """float32, little-endian."""
    if sys.byteorder == "big":
        row = row[:]
        row.byteswap()
    return b64encode(row).decode()


def ranking(body: RerankRequest, model: str, request_id: str) -> core.RerankRequest:
    """
    Raises:
        UnsupportedParameter: what is not honoured here.
    """
    refuse_unsupported(body, UNSUPPORTED_IN_RERANK)
    return core.RerankRequest(
        model,
        body.query,
        texts(body),
        body.truncate_prompt_tokens,
        body.use_activation is not False,
        request_id,
    )


def texts(body: RerankRequest) -> tuple[str, ...]:
    return tuple(
        document.text if isinstance(document, RerankDocument) else document
        for document in body.documents
    )


def ranked(body: RerankRequest, asked: core.RerankRequest, encoded: Encoded) -> RerankResponse:
    """Best first; of equal ones, that which came first."""
    scores = [row[0] for row in encoded.rows]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    results = [
        RerankResult(index=index, relevance_score=scores[index])
        for index in order[: body.top_n or None]
    ]
    if body.return_documents is not False:
        for result in results:
            result.document = RerankDocument(text=asked.documents[result.index])
    return RerankResponse(
        id=asked.request_id, model=asked.model, results=results, usage=usage(encoded)
    )


def usage(encoded: Encoded) -> EncodingUsage:
    return EncodingUsage(prompt_tokens=encoded.tokens, total_tokens=encoded.tokens)
