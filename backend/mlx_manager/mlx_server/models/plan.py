"""Memory that a model would take, by its config.json alone, before anything of it is here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_manager.mlx_server.models import hub
from mlx_manager.mlx_server.models.architectures import ENCODERS, has_architecture
from mlx_manager.mlx_server.models.catalog import ModelSource
from mlx_manager.mlx_server.models.checkpoint.files import read_json
from mlx_manager.mlx_server.models.checkpoint.folder import context_length
from mlx_manager.mlx_server.models.hub import Repository

ELEMENT = 2
"""Bytes of a number in a KV page; a CPU has 4."""
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
RECURRENT = frozenset({"linear_attention", "mamba", "recurrent", "conv", "ssm"})
"""Kinds of layers whose state does not grow with the tokens."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory that a model would take of `limit` bytes. In bytes and tokens.

    weights: its weights' files. context_length: tokens of prompt and answer; None: not told.
    token_bytes: keys and values of one token, 0 if none are kept; None: the config does not tell.
    """

    weights: int
    limit: int
    context_length: int | None
    token_bytes: int | None

    @property
    def fits(self) -> bool:
        return self.weights < self.limit

    @property
    def tokens(self) -> int | None:
        """Return the tokens of all rows together that fit beside the weights."""
        if not self.token_bytes:
            return None
        return max(0, self.limit - self.weights) // self.token_bytes

    @property
    def rows_at_context(self) -> int | None:
        """Return the rows as long as the context that fit."""
        if self.tokens is None or not self.context_length:
            return None
        return self.tokens // self.context_length


def is_supported(model_type: str) -> bool:
    return model_type in ENCODERS or has_architecture(model_type)


def plan_of(found: Repository, config: Mapping[str, Any], limit: int) -> MemoryPlan:
    """Return what a repository with that config.json would take of `limit` bytes."""
    weights = sum(
        file.nbytes for name, file in found.files.items() if name.endswith(".safetensors")
    )
    return MemoryPlan(
        weights, limit, context_length(config) if config else None, token_bytes(config)
    )


def plan_of_source(source: ModelSource, limit: int) -> MemoryPlan:
    """Return what a model of the catalog would take, which the hub is asked for if it is not here.
    Blocks.

    Raises:
        MLXManagerError: see `hub.look_up`.
    """
    if source.path is None:
        found = hub.look_up(source.repository)
        return plan_of(found, hub.config_of(found), limit)
    config = read_json(source.path / "config.json")
    length = source.context_length or None
    return MemoryPlan(
        source.nbytes, limit, length, token_bytes(config) if source.kind == "text" else 0
    )


def planned(repository: str, limit: int) -> dict[str, Any]:
    """Ask the hub for a model, and return what it would take of `limit` bytes. Blocks.

    Raises:
        MLXManagerError: see `hub.look_up`.
    """
    found = hub.look_up(repository)
    plan, cache = plan_of(found, hub.config_of(found), limit), hub.cache_folder()
    return {
        "id": found.id,
        "licence": found.licence or None,
        "gated": found.gated,
        "model_type": found.model_type or None,
        "supported": not found.model_type or is_supported(found.model_type),
        "bytes": found.nbytes,
        "to_download": found.missing(cache),
        "free_disk": hub.free_bytes(cache),
        "weights": plan.weights,
        "context_length": plan.context_length,
        "token_bytes": plan.token_bytes,
        "limit": limit,
        "fits": plan.fits,
        "tokens": plan.tokens,
        "rows_at_context": plan.rows_at_context,
    }


def token_bytes(config: Mapping[str, Any]) -> int | None:
    """Return the bytes of one token's keys and values over all layers; None where the config does
    not tell. Layers with a sliding window count as if they had none: they keep less."""
    text = {**config, **(config.get("text_config") or {})}
    layers = _first(text, LAYERS)
    if layers is None:
        return None
    kinds = text.get("layer_types")
    if isinstance(kinds, list):
        layers = sum(1 for kind in kinds if kind not in RECURRENT)
    elif isinstance(every := text.get("full_attention_interval"), int) and every > 0:
        layers //= every
    if isinstance(rank := text.get("kv_lora_rank"), int):
        rope = text.get("qk_rope_head_dim")
        return layers * (rank + (rope if isinstance(rope, int) else 0)) * ELEMENT
    heads, hidden = _first(text, HEADS), _first(text, ("hidden_size", "n_embd"))
    shared = _first(text, ("num_key_value_heads", "n_head_kv", "num_kv_heads")) or heads
    width = _first(text, ("head_dim",))
    if width is None and heads and hidden:
        width = hidden // heads
    if shared is None or width is None:
        return None
    return layers * 2 * shared * width * ELEMENT


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    found = (config.get(name) for name in names)
    return next((value for value in found if type(value) is int and value > 0), None)
