"""Llama 3 and its kin, CodeLlama, and what is fine-tuned from them."""

from __future__ import annotations

from typing import ClassVar

from mlx_manager.mlx_server.models.adapters.base import DefaultAdapter


class LlamaAdapter(DefaultAdapter):
    """Llama 3 ends a turn with `<|eot_id|>`, and with `<|eom_id|>` when it awaits a tool's result.

    Its config.json names one of them at most, and fine-tunes often neither. CodeLlama ends what it
    fills in with `▁<EOT>`.
    """

    family: ClassVar[str] = "llama"
    turn_ends: ClassVar[tuple[str, ...]] = (
        "▁<EOT>",
        "<|end_of_text|>",
        "<|eom_id|>",
        "<|eot_id|>",
    )
