"""Prompts for text between two others, for the models whose tokenizers have tokens for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """Special tokens of an infilling prompt, in front of its parts.

    prefix: before the text's beginning. suffix: before the text's end. middle: before the text that
    is to be written. suffix_first: the end comes before the beginning.
    """

    prefix: str
    suffix: str
    middle: str | None
    suffix_first: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in (self.prefix, self.suffix, self.middle) if name)


INFILL = (
    InfillTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    InfillTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    InfillTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    InfillTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    InfillTokens("▁<PRE>", "▁<SUF>", "▁<MID>"),
    InfillTokens("[PREFIX]", "[SUFFIX]", None, suffix_first=True),
)
"""Tokens of Qwen2.5-Coder and CodeGemma; StarCoder and Granite; SantaCoder; DeepSeek-Coder;
CodeLlama; Codestral."""
