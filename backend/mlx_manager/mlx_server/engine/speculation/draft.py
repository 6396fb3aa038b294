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
from mlx_manager.mlx_server.execution.forward import Snapshot

if TYPE_CHECKING:
    from mlx_manager.mlx_server.engine.sequence import Sequence as Row

Method = Literal["grammar", "prediction", "ngram", "draft_model", "mtp"]


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may follow, at least one, and the way in which they were found."""

    method: Method
    tokens: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Draft of one row in one step.

    tokens: none if the row only sees again what it has drawn; `method` is None then. samplers: the
    states by which the row draws: its own, and the one after each of `tokens`. due: the row's own
    tokens before these that the step computes; see `Sequence.due`. before: what recurrent layers
    have kept of the row before the step, to which they go back if not all is drawn.
    """

    sequence: Row
    method: Method | None
    tokens: Sequence[int]
    samplers: Sequence[SamplerState]
    due: int = 1
    before: Snapshot | None = None

    @property
    def places(self) -> int:
        """Return the number of tokens that the row draws, kept or not."""
        return len(self.samplers)

    @property
    def queries(self) -> int:
        """Return the number of tokens that the step computes of the row."""
        return self.due + len(self.tokens)
