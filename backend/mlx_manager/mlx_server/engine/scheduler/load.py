"""What a step works on, as far as it costs time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """rows: running rows. tokens: of prompts, in chunks. context: tokens before a chunk, summed
    over chunks. seen: tokens that a chunk's token attends to, itself included, summed over all.
    """

    rows: int = 0
    tokens: int = 0
    context: int = 0
    seen: int = 0

    def with_chunk(self, before: int, tokens: int) -> Load:
        """And `tokens` tokens of a prompt, `before` of which have been processed already."""
        return Load(
            self.rows,
            self.tokens + tokens,
            self.context + before,
            self.seen + tokens * before + tokens * (tokens + 1) // 2,
        )


Budget = Callable[[Load, int], int]
"""How many tokens of a prompt a step of such a load may process besides, if so many of the prompt
have been processed already."""
