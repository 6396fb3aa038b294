"""Acceptance of one row's drafts, learnt as it goes on."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlx_manager.mlx_server.engine.speculation.draft import Method

# Likelihood that a drafted token is drawn if all before it were, before anything has been seen.
EXPECTED: dict[Method, float] = {
    "grammar": 0.98,
    "prediction": 0.8,
    "ngram": 0.6,
    "draft_model": 0.7,
    "mtp": 0.8,
}
# Weight of each token of a draft in the moving average.
LEARNT = 0.1
# Part of the way back to what is expected at first with each step of a row that tried no draft,
# since its drafts were poor: the row tries one again when its text has changed.
FORGOTTEN = 0.01
# The same of a draft model or head, which guesses at any time, at a price.
FORGOTTEN_OF_MODEL = 0.002


@dataclass(slots=True)
class Acceptance:
    """Likelihood that a drafted token is drawn, by method, and counts.

    drafted, accepted: tokens of predictions. See `Usage`.
    """

    rates: dict[Method, float] = field(default_factory=lambda: dict(EXPECTED))
    drafted: int = 0
    accepted: int = 0
    _guessed: Method | None = None

    @property
    def modelled(self) -> float | None:
        """Return the rate of a draft model's tokens; None if it has guessed none for this row."""
        return None if self._guessed is None else self.rates[self._guessed]

    def begin(self, method: Method, usual: float) -> None:
        """Note that a draft model guesses for this row, by `method`: at first its tokens are as
        likely as usual."""
        if self._guessed is None:
            self._guessed = method
            self.rates[method] = usual

    def observe(self, method: Method, drafted: int, accepted: int) -> None:
        """Learn that the first `accepted` of `drafted` tokens, which were tried, were drawn."""
        self.learn(method, drafted, accepted)
        if method == "prediction":
            self.drafted += drafted
            self.accepted += accepted

    def learn(self, method: Method, drafted: int, accepted: int) -> None:
        """Learn that the first `accepted` of `drafted` tokens, tried or not, were drawn."""
        rate = self.rates[method]
        for _ in range(accepted):
            rate += LEARNT * (1 - rate)
        if accepted < drafted:
            rate -= LEARNT * rate
        self.rates[method] = rate

    def pass_over(self, method: Method, steps: int = 1) -> None:
        """Note that no draft was tried in so many steps, since it would not have been worth it."""
        forgotten = 1 - (1 - FORGOTTEN) ** steps
        self.rates[method] += forgotten * (EXPECTED[method] - self.rates[method])

    def pass_over_model(self, method: Method, usual: float) -> None:
        """Note that a draft model's guesses, by `method`, were not tried in a step: in time, they
        are taken to be drawn as often as usual again."""
        self.rates[method] += FORGOTTEN_OF_MODEL * (usual - self.rates[method])

    @staticmethod
    def tokens(rate: float, drafted: int) -> float:
        """Return how many of `drafted` tokens are expected to be drawn."""
        return drafted if rate >= 1 else rate * (1 - rate**drafted) / (1 - rate)
