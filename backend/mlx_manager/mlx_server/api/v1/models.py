"""`GET /v1/models`: what a request may name, loaded or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request

from mlx_manager.mlx_server.api.state import server_of
from mlx_manager.mlx_server.errors import ModelNotFound
from mlx_manager.mlx_server.schemas.openai import ModelCard, ModelList, ModelWeights
from mlx_manager.mlx_server.services.inference import ModelPool

if TYPE_CHECKING:
    from mlx_manager.mlx_server.models.status import ModelStatus

router = APIRouter()

FOR_METRICS = frozenset({"host_time", "token_gaps"})
"""Distributions, which `/metrics` shows as histograms."""


@router.get("/models/", include_in_schema=False, response_model_exclude_none=True)
@router.get("/models", response_model_exclude_none=True)
async def list_models(request: Request) -> ModelList:
    """Every model on offer, the default one first. Answers while a model loads."""
    server = server_of(request)
    return ModelList(data=await cards(server.pool, server.created))


@router.get("/models/{model_id:path}", response_model_exclude_none=True)
async def retrieve_model(request: Request, model_id: str) -> ModelCard:
    """One of them, also by an alias."""
    server = server_of(request)
    meant = server.pool.resolve(model_id)
    for card in await cards(server.pool, server.created):
        if card.id == meant:
            return card
    raise ModelNotFound(f"There is no model {model_id!r} here.", param="model")


async def cards(pool: ModelPool, created: int) -> list[ModelCard]:
    engines = pool.figures()["engines"]
    return [card(status, engines, created) for status in await pool.models()]


def engine_card(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Its state and its counters."""
    return {name: figure for name, figure in figures.items() if name not in FOR_METRICS}


def card(status: ModelStatus, engines: Mapping[str, dict[str, Any]], created: int) -> ModelCard:
    owner, slash, _ = status.id.partition("/")
    figures = engines.get(status.id)
    return ModelCard(
        id=status.id,
        created=created,
        owned_by=owner if owner and slash else "local",
        kind=status.kind,
        state=status.state,
        origin=status.origin,
        root=status.recipe.base or status.id,
        family=status.family,
        context_length=status.context_length,
        max_model_len=status.context_length,
        bytes=status.nbytes,
        weights=weights_of(status),
        sampling=dict(status.sampling) or None,
        engine=None if figures is None else engine_card(figures),
    )


def weights_of(status: ModelStatus) -> ModelWeights | None:
    """The form of its weights; None while it is not loaded."""
    form = status.weights
    if form is None:
        return None
    return ModelWeights(name=form.name, dtype=form.dtype, reason=form.reason)
