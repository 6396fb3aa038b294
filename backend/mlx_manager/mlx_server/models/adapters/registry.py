"""Which adapter a model gets: by the `model_type` in its config.json, else by its name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mlx_manager.mlx_server.models.adapters.base import DefaultAdapter, ModelAdapter, Tokenizer
from mlx_manager.mlx_server.models.adapters.families import (
    DeepSeekAdapter,
    GemmaAdapter,
    GLMAdapter,
    GptOssAdapter,
    GraniteAdapter,
    MistralAdapter,
    PhiAdapter,
    QwenAdapter,
)
from mlx_manager.mlx_server.models.adapters.llama import LlamaAdapter

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
        GptOssAdapter,
    )
}

_FAMILIES = (
    # A distilled model's name ends with the family it was made from, and its template does not.
    ("deepseek", r"deepseek"),
    ("gpt-oss", r"gpt[-_]?oss"),
    ("llama", r"llama"),
    ("qwen", r"qwen|qwq"),
    ("mistral", r"mistral|mixtral|ministral|magistral|codestral|devstral|pixtral"),
    ("gemma", r"gemma"),
    ("phi", r"\bphi|phi[-_]?\d|phimoe"),
    ("glm", r"glm"),
    ("granite", r"granite"),
)


def detect_model_family(source: str | Mapping[str, Any]) -> str:
    """The family of a model's name, or of its config.json; "default" if it is none of ours."""
    text = source if isinstance(source, str) else str(source.get("model_type", ""))
    found = (family for family, pattern in _FAMILIES if re.search(pattern, text.lower()))
    return next(found, "default")


def get_adapter(
    source: str | Mapping[str, Any] | None, name: str = "", tokenizer: Tokenizer = None
) -> ModelAdapter:
    """The adapter of a model.

    `source` is its config.json or, where there is none, its name (which `name` may carry too).
    """
    config = source if isinstance(source, Mapping) else None
    family = detect_model_family(config if config else name or str(source or ""))
    return _ADAPTERS.get(family, DefaultAdapter)(config, tokenizer)
