"""Choice of a model's adapter: by the `model_type` in its config.json, else by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_manager.mlx_server.models.adapters.base import DefaultAdapter, ModelAdapter, Tokenizer
from mlx_manager.mlx_server.models.adapters.families import (
    DeepSeekAdapter,
    GemmaAdapter,
    GLMAdapter,
    GptOssAdapter,
    GraniteAdapter,
    HunyuanAdapter,
    MistralAdapter,
    PhiAdapter,
    QwenAdapter,
)
from mlx_manager.mlx_server.models.adapters.llama import LlamaAdapter
from mlx_manager.mlx_server.models.family import detect_model_family

_ADAPTERS: Mapping[str, type[DefaultAdapter]] = {
    adapter.family: adapter
    for adapter in (
        LlamaAdapter,
        QwenAdapter,
        MistralAdapter,
        GemmaAdapter,
        PhiAdapter,
        GLMAdapter,
        DeepSeekAdapter,
        GraniteAdapter,
        HunyuanAdapter,
        GptOssAdapter,
    )
}


def get_adapter(
    source: str | Mapping[str, Any] | None, name: str = "", tokenizer: Tokenizer = None
) -> ModelAdapter:
    """Return the adapter of a model.

    source: its config.json or, where there is none, its name (which `name` may have, too).
    """
    config = source if isinstance(source, Mapping) else None
    family = detect_model_family(config if config else name or str(source or ""))
    return _ADAPTERS.get(family, DefaultAdapter)(config, tokenizer)
