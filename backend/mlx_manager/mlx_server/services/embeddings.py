"""Embedding and reranking, which generate no tokens, on the path of every call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Literal

from mlx_manager.mlx_server.core import (
    Admitted,
    EmbeddingRequest,
    Encoded,
    Encoder,
    Finished,
    GenerationRequest,
    RerankRequest,
    Started,
    Usage,
)
from mlx_manager.mlx_server.engine.stream import UNREAD
from mlx_manager.mlx_server.services.inference import EncoderLease, Inference, PushRow


async def embed(inference: Inference, request: EmbeddingRequest) -> Encoded:
    """Return a vector for each input. Cancelling the call cancels the work.

    Raises:
        MLXManagerError: see `core.Encoder`; or there is no such embedding model.
    """
    shown = inference.reading(request.model, request.request_id, request.inputs)
    own = replace(request, caller=shown.caller, priority=shown.priority)
    return await encode(inference, shown, "embedding", lambda model, begun: model.embed(own, begun))


async def rank(inference: Inference, request: RerankRequest) -> Encoded:
    """Return a score for each document, in the order of the request; see `embed`."""
    texts = (request.query, *request.documents)
    shown = inference.reading(request.model, request.request_id, texts)
    own = replace(request, caller=shown.caller, priority=shown.priority)
    return await encode(inference, shown, "reranker", lambda model, begun: model.rank(own, begun))


async def encode(
    inference: Inference,
    shown: GenerationRequest,
    kind: Literal["embedding", "reranker"],
    question: Callable[[Encoder, Callable[[], None]], Awaitable[Encoded]],
) -> Encoded:
    found: list[Encoded] = []

    async def work(lease: EncoderLease, push: PushRow) -> None:
        encoded = await question(lease.backend, partial(push, 0, [Admitted()], 0))
        found.append(encoded)
        tokens = encoded.tokens
        push(0, [Started(tokens), Finished("stop", Usage(tokens, 0))], 0)

    leasing = inference.pool.lease(shown.model, kind)
    await inference.call([shown], leasing, work).run(UNREAD)
    return found[0]
