"""Cost of work, learnt from the seconds that pieces of it took."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter

# Factor on the weight of older observations at each new one.
KEPT = 0.96
# Rounds of improving one price at a time, starting from the last prices. Few are enough, since the
# next observation brings the next rounds. Several observations learnt from at once bring as many
# rounds each, up to MOST_ROUNDS in all.
ROUNDS = 4
MOST_ROUNDS = 32
# Weight of observations that are forgotten: they say nothing any more, and their weight would soon
# underflow to 0 and be divided by.
FORGOTTEN = 1e-100


class Cost:
    """Seconds as a sum of amounts times prices, none below zero: least squares that forget.

    Errors count as shares of what was seen, so that a step that took ten times as long as expected
    does not weigh more than one that took twice as long. Where what is seen could be put down to
    several kinds of work, it is put down to the first; prices that it says nothing about stay.
    """

    def __init__(self, kinds: int) -> None:
        self.prices = [0.0] * kinds
        self._products = [[0.0] * kinds for _ in range(kinds)]
        self._seconds = [0.0] * kinds

    @property
    def known(self) -> bool:
        """Return whether any price is known."""
        return any(self.prices)

    def of(self, amounts: Sequence[float]) -> float:
        return sum(price * amount for price, amount in zip(self.prices, amounts, strict=True))

    def learn(self, amounts: Sequence[float], seconds: float) -> None:
        """Learn that `amounts` took `seconds`. Ignore times of zero, which coarse clocks give."""
        self.learn_all([(amounts, seconds)])

    def learn_all(self, seen: Iterable[tuple[Sequence[float], float]]) -> None:
        """Learn from several observations, oldest first; find prices once, from all of them."""
        told = [(tuple(amounts), seconds) for amounts, seconds in seen if seconds > 0]
        for amounts, same in groupby(told, key=itemgetter(0)):
            self._add(amounts, [seconds for _, seconds in same])
        for _ in range(min(ROUNDS * len(told), MOST_ROUNDS)):
            for i in range(len(self.prices)):
                self._improve(i)

    def _add(self, amounts: Sequence[float], times: Sequence[float]) -> None:
        """Add observations of the same `amounts`, summed up before they are added."""
        expected = self.of(amounts)
        kept, squares, seconds = 1.0, 0.0, 0.0
        for time in times:
            share = 1 / max(time, expected)
            kept *= KEPT
            squares = squares * KEPT + share * share
            seconds = seconds * KEPT + share * share * time
        for i, (own, row) in enumerate(zip(amounts, self._products, strict=True)):
            for j, other in enumerate(amounts):
                row[j] = row[j] * kept + own * other * squares
            self._seconds[i] = self._seconds[i] * kept + own * seconds

    def _improve(self, i: int) -> None:
        """Set one price to what suits the others best."""
        row, prices = self._products[i], self.prices
        if row[i] > FORGOTTEN:
            others = sum(a * b for a, b in zip(row, prices, strict=True)) - row[i] * prices[i]
            prices[i] = max((self._seconds[i] - others) / row[i], 0.0)
