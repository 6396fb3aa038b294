"""Llama 3 and its relatives, CodeLlama, and models that are fine-tuned from them."""

from __future__ import annotations

from typing import ClassVar

from mlx_manager.mlx_server.models.adapters.base import DefaultAdapter


class LlamaAdapter(DefaultAdapter):
    """Llama models. Llama 3 ends a turn with `<|eot_id|>`, or `<|eom_id|>` before a tool's result.

    Its config.json names at most one of these tokens, and a fine-tune's often neither. CodeLlama
    ends an infilled text with `▁<EOT>`.
    """

    family: ClassVar[str] = "llama"
    turn_ends: ClassVar[tuple[str, ...]] = (
        "▁<EOT>",
        "<|end_of_text|>",
        "<|eom_id|>",
        "<|eot_id|>",
    )
