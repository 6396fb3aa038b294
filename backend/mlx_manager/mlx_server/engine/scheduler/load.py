"""Amount of work in a step, as far as it costs time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class StepLoad:
    """Amount of work in a step.

    rows: running rows. tokens: prompt tokens, in chunks. context: tokens before a chunk, summed
    over chunks. seen: tokens that a chunk's token attends to, itself included, summed over all.
    drafting: those of the rows that bring drafts. drafts: tokens of all drafts, and those of the
    rows that are computed again. late: whether the last step's tokens were read before this one was
    planned, for the sake of drafts. fresh: whether a step with drafts is of a kind that is not
    compiled yet, so that later ones take less.
    """

    rows: int = 0
    tokens: int = 0
    context: int = 0
    seen: int = 0
    drafting: int = 0
    drafts: int = 0
    late: bool = False
    fresh: bool = False

    def with_chunk(self, before: int, tokens: int) -> StepLoad:
        """Return this load with a chunk of `tokens` more tokens of a prompt, after its first
        `before`, which have been processed already."""
        return replace(
            self,
            tokens=self.tokens + tokens,
            context=self.context + before,
            seen=self.seen + tokens * before + tokens * (tokens + 1) // 2,
        )

    def with_draft(self, tokens: int) -> StepLoad:
        """Return this load with a draft of so many tokens, which one of the rows brings."""
        return replace(self, drafting=self.drafting + 1, drafts=self.drafts + tokens)


Budget = Callable[[StepLoad, int], int]
"""Function that returns how many tokens of a prompt a step of the given load may process besides,
where the given number of the prompt's tokens has been processed already."""
