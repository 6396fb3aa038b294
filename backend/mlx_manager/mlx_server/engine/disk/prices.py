"""Prices of computing and of reading, as they have been measured."""

from __future__ import annotations

WEIGHT = 0.25
"""Share of the newest measurement in a price."""
LEAST_TOKENS = 64
"""Fewest prompt tokens of a step that tell what prompts cost."""
LOOKS = 16
"""Reads that are not worth it, after which one is tried: the disk may be faster now."""


class LearntRate:
    """Units a second; None before anything has been measured."""

    def __init__(self) -> None:
        self.value: float | None = None

    def observe(self, units: float, seconds: float) -> None:
        if units <= 0 or seconds <= 0:
            return
        new, old = units / seconds, self.value
        # Times add up, and rates do not.
        self.value = new if old is None else 1 / (WEIGHT / new + (1 - WEIGHT) / old)

    def seconds(self, units: float) -> float:
        """Return the expected seconds; 0 if nothing is known."""
        return 0.0 if self.value is None else units / self.value


class Prices:
    """Learnt prices of one model.

    token_bytes: bytes on disk of a token.

    Attributes:
        prefill: prompt tokens computed a second.
        read: bytes a second that come from disk, checked.
        fill: bytes a second that are put into pages.
        copy: bytes a second that are copied off the device.
    """

    def __init__(self, token_bytes: int) -> None:
        self.prefill, self.read, self.fill, self.copy = (
            LearntRate(),
            LearntRate(),
            LearntRate(),
            LearntRate(),
        )
        self.token_bytes = token_bytes
        self._refused = 0

    def observe_step(self, tokens: int, seconds: float) -> None:
        """Learn from a step with so many prompt tokens. seconds: those that it took for these."""
        if tokens >= LEAST_TOKENS:
            self.prefill.observe(tokens, seconds)

    def reading(self, tokens: int, share: float = 1.0) -> float:
        """Return the seconds until so many tokens have come from disk; 0 if nothing is known.
        share: part of the time in which they are put into pages."""
        nbytes = tokens * self.token_bytes
        return self.read.seconds(nbytes) + self.fill.seconds(nbytes) / share

    def computed_meanwhile(self, tokens: int) -> int | None:
        """Return how many of `tokens` tokens had best be computed while the others are read, so
        that both take as long; None if computing all is faster than reading all, or as fast."""
        reading, computing = self.reading(tokens), self.prefill.seconds(tokens)
        if not reading or not computing:
            return 0
        if reading >= computing:
            self._refused += 1
            return 0 if self._refused % LOOKS == 0 else None
        return int(tokens * reading / (reading + computing))
