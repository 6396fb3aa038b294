"""Drafts: tokens that a row is expected to draw next, which one step tries all together.

The row's sampler draws at the place of each, from the logits that come after it, with the draw
number and the state that it would have there without the draft. What it draws is kept up to and
including the first token that differs from the draft. So the row gets the tokens that it would get
one a step: with a draft of fixed tokens this is speculative sampling (arXiv:2302.01318), whose
distribution is the sampler's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mlx_manager.mlx_server.engine.sampling import SamplerState

if TYPE_CHECKING:
    from mlx_manager.mlx_server.engine.sequence import Sequence as Row

Method = Literal["grammar", "prediction", "ngram", "draft_model"]


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may follow, at least one, and the way in which they were found."""

    method: Method
    tokens: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Draft of one row in one step.

    samplers: the states by which the row draws: its own, and the one after each of `tokens`.
    """

    sequence: Row
    method: Method
    tokens: Sequence[int]
    samplers: Sequence[SamplerState]

    @property
    def places(self) -> int:
        """Return the number of tokens that the row draws, kept or not."""
        return len(self.samplers)
