"""A batch of texts, and the masks under which its tokens see each other."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

Mask = mx.array | str
CAUSAL = "causal"
"""Mask under which a token sees those before it and itself. Rows are filled up at their ends, so
that no token of a text sees the filling."""


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """Texts as rows of token ids, filled up at their ends.

    ids, segments: int32 (rows, longest); a segment is 1 in the second text of a pair. lengths:
    int32 (rows,).
    """

    ids: mx.array
    segments: mx.array
    lengths: mx.array

    @property
    def shown(self) -> mx.array:
        """Return bool (rows, longest), False for the filling."""
        return mx.arange(self.ids.shape[1])[None] < self.lengths[:, None]

    def to_all(self) -> mx.array:
        """Return the mask under which a token sees every token of its text."""
        return self.shown[:, None, None]

    def to_near(self, reach: int, *, back: bool = False) -> Mask:
        """Return the mask under which a token sees those of its text up to `reach` tokens away.

        back: it sees none after itself.
        """
        longest = self.ids.shape[1]
        if longest <= reach + 1:
            return CAUSAL if back else self.to_all()
        places = mx.arange(longest)
        away = places[:, None] - places[None]
        near = (away <= reach) & (away >= (0 if back else -reach))
        # The filling sees itself: a softmax over nothing is NaN, which would spread.
        return (near & self.to_all()) | (away == 0)
