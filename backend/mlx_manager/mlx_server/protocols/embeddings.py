"""OpenAI's embeddings and Cohere's rerank: body → request, what was encoded → body. Pure."""

from __future__ import annotations

import sys
from array import array
from base64 import b64encode
from collections.abc import Iterator

from mlx_manager.mlx_server import core
from mlx_manager.mlx_server.core import EmbeddingRequest, Encoded
from mlx_manager.mlx_server.errors import InvalidParameter
from mlx_manager.mlx_server.protocols.dialects import (
    EMBEDDINGS,
    OF_VECTORS,
    RERANK,
    Refusal,
    foreign,
)
from mlx_manager.mlx_server.protocols.parameters import refuse_unsupported
from mlx_manager.mlx_server.protocols.pieces import filled, joined, whole
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

UNSUPPORTED_IN_EMBEDDINGS: dict[str, Refusal] = {
    **foreign(EMBEDDINGS, EmbeddingsRequest, OF_VECTORS),
}
UNSUPPORTED_IN_RERANK: dict[str, Refusal] = {
    **foreign(RERANK, RerankRequest, OF_VECTORS),
    "max_chunks_per_doc": Refusal((1,)),
    "max_tokens_per_doc": Refusal(instead="Use `truncate_prompt_tokens`."),
    "rank_fields": Refusal(([], ["text"]), "Documents are texts."),
}


def embedding(body: EmbeddingsRequest, model: str, request_id: str) -> EmbeddingRequest:
    """
    Raises:
        InvalidParameter: a prompt to put before token ids.
        UnsupportedParameter: what is not honoured here.
    """
    refuse_unsupported(body, UNSUPPORTED_IN_EMBEDDINGS)
    given = inputs(body)
    ids = next((index for index, one in enumerate(given) if isinstance(one, tuple)), None)
    if body.prompt_name is not None and ids is not None:
        raise InvalidParameter(
            f"`prompt_name` is for texts, and `input[{ids}]` is token ids. Send the text, or ids "
            "that begin with the prompt's.",
            param="prompt_name",
        )
    return EmbeddingRequest(
        model,
        given,
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


def vectors(body: EmbeddingsRequest, model: str, encoded: Encoded) -> Iterator[str]:
    """An `EmbeddingsResponse`, a vector at a time."""
    as_text = body.encoding_format == "base64"
    around = EmbeddingsResponse(object="list", data=[], model=model, usage=usage(encoded))
    embeddings = (
        Embedding(
            object="embedding", index=index, embedding=base64(row) if as_text else row.tolist()
        )
        for index, row in enumerate(encoded.rows)
    )
    return filled(whole(around), "data", joined((whole(one),) for one in embeddings))


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
        instruction=body.instruction,
    )


def texts(body: RerankRequest) -> tuple[str, ...]:
    return tuple(
        document.text if isinstance(document, RerankDocument) else document
        for document in body.documents
    )


def ranked(body: RerankRequest, asked: core.RerankRequest, encoded: Encoded) -> Iterator[str]:
    """A `RerankResponse`, a result at a time: best first; of equal ones, that which came first."""
    scores = [row[0] for row in encoded.rows]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    around = RerankResponse(
        id=asked.request_id, model=asked.model, results=[], usage=usage(encoded)
    )

    def result(index: int) -> RerankResult:
        found = RerankResult(index=index, relevance_score=scores[index])
        if body.return_documents is not False:
            found.document = RerankDocument(text=asked.documents[index])
        return found

    results = map(result, order[: body.top_n or None])
    return filled(whole(around), "results", joined((whole(one),) for one in results))


def usage(encoded: Encoded) -> EncodingUsage:
    return EncodingUsage(prompt_tokens=encoded.tokens, total_tokens=encoded.tokens)
