"""The routes that OpenAI's and Anthropic's clients know.

Each module's router has whole paths: a router that includes others has no routes of its own to
list, and whoever looks through `v1_router.routes` wants to see what is served.
"""

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

ROUTERS = (
    chat.router,
    completions.router,
    embeddings.router,
    messages.router,
    models.router,
    rerank.router,
    responses.router,
    tokens.router,
)

v1_router = APIRouter(routes=[route for router in ROUTERS for route in router.routes])
unversioned_router = APIRouter(routes=[*rerank.unversioned.routes, *tokens.unversioned.routes])
"""Routes that clients ask for under other paths as well."""
