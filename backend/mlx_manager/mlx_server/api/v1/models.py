"""`GET /v1/models`: what a request may name, loaded or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request

from mlx_manager.mlx_server.api.state import server_of
from mlx_manager.mlx_server.errors import ModelNotFound
from mlx_manager.mlx_server.schemas.openai import (
    Architecture,
    ModelCard,
    ModelList,
    ModelServer,
    ModelWeights,
    TopProvider,
)
from mlx_manager.mlx_server.services.inference import ModelPool

if TYPE_CHECKING:
    from mlx_manager.mlx_server.models.status import ModelStatus

router = APIRouter(prefix="/v1", tags=["openai"])

SAMPLED = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "frequency_penalty"),
    *("presence_penalty", "repetition_penalty", "seed", "stop", "logit_bias", "logprobs"),
    *("top_logprobs", "response_format", "structured_outputs", "tools", "tool_choice"),
    "parallel_tool_calls",
)
"""Parameters of every model that generates, by OpenRouter's names."""
THINKING = ("reasoning", "reasoning_effort")

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
    await pool.look()
    engines = pool.figures()["engines"]
    return [card(status, engines, created) for status in await pool.models()]


def engine_card(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's state and its counters, without `FOR_METRICS`."""
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
        doing=status.doing,
        failure=status.failure,
        origin=status.origin,
        root=_root(status),
        family=status.family,
        context_length=status.context_length,
        max_model_len=status.context_length,
        **abilities(status),
        bytes=status.nbytes,
        weights=weights_of(status),
        sampling=dict(status.sampling) or None,
        servers=servers_of(status) or None,
        engine=None if figures is None else engine_card(figures),
    )


def _root(status: ModelStatus) -> str:
    """Return the model whose files answer, by the name that it has where it is."""
    elsewhere = next((server.model for server in status.servers if server.model), None)
    return status.recipe.base or elsewhere or status.id


def abilities(status: ModelStatus) -> dict[str, Any]:
    """Return what clients decide by: what goes in, how much of it, and what may be asked for.

    Sources: LM Studio's /api/v0/models and OpenRouter's /api/v1/models, as their clients read them.
    """
    generates = status.kind == "text"
    context = status.context_length or None
    sees = "image" in status.input_modalities
    kinds = {"text": "vlm" if sees else "llm", "embedding": "embeddings"}
    outputs = {"text": ["text"], "embedding": ["embeddings"], "reranker": ["scores"]}
    reads = list(status.input_modalities)
    output = outputs.get(status.kind or "", ["text"])
    parameters = [*SAMPLED, *(THINKING if status.thinks else ())] if generates else []
    return {
        "type": kinds.get(status.kind or ""),
        "max_context_length": context,
        "loaded_context_length": context if status.state == "loaded" else None,
        "input_modalities": reads,
        "output_modalities": output,
        "supports_tools": None if status.kind is None else generates,
        "supports_reasoning": status.thinks if generates or status.kind is None else False,
        "capabilities": ["tool_use"] if generates else [],
        "architecture": Architecture(
            modality=f"{'+'.join(reads)}->{'+'.join(output)}",
            input_modalities=reads,
            output_modalities=output,
        ),
        "top_provider": TopProvider(
            context_length=context, max_completion_tokens=context if generates else None
        ),
        "supported_parameters": parameters,
    }


def weights_of(status: ModelStatus) -> ModelWeights | None:
    """The form of its weights; None while it is not loaded."""
    form = status.weights
    if form is None:
        return None
    return ModelWeights(name=form.name, dtype=form.dtype, reason=form.reason)


def servers_of(status: ModelStatus) -> list[ModelServer]:
    """The other machines that have it; none if it is loaded here."""
    return [ModelServer(**asdict(server)) for server in status.servers]
