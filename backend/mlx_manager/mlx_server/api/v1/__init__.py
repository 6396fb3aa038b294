"""The routes that OpenAI's and Anthropic's clients know."""

from __future__ import annotations

from fastapi import APIRouter

from mlx_manager.mlx_server.api.v1 import (
    chat,
    completions,
    embeddings,
    messages,
    models,
    rerank,
    responses,
    tokens,
)

v1_router = APIRouter(prefix="/v1", tags=["openai"])
v1_router.include_router(chat.router)
v1_router.include_router(completions.router)
v1_router.include_router(embeddings.router)
v1_router.include_router(messages.router)
v1_router.include_router(models.router)
v1_router.include_router(rerank.router)
v1_router.include_router(responses.router)
v1_router.include_router(tokens.router)
