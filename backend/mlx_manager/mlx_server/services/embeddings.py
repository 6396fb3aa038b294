"""Embedding and reranking, which generate no tokens, on the path of every call."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
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
    Progress,
    RerankRequest,
    Started,
    Usage,
)
from mlx_manager.mlx_server.services.calls import Call
from mlx_manager.mlx_server.services.inference import EncoderLease, Inference


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

    async def work(lease: EncoderLease, call: Call) -> AsyncGenerator[Progress, None]:
        encoded = await question(lease.backend, partial(call.follow, [(0, [Admitted()])]))
        found.append(encoded)
        tokens = encoded.tokens
        yield [(0, [Started(tokens), Finished("stop", Usage(tokens, 0))])]

    leasing = inference.pool.lease(shown.model, kind)
    async with aclosing(inference.follow([shown], leasing, work)) as progress:
        async for _ in progress:
            pass
    return found[0]
