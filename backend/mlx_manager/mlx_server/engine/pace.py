"""How much of the waiting prompts a step may process without making running streams stutter."""

from __future__ import annotations

# A step with prompt tokens in it may take this many times a step without. Readers of running
# streams are promised a p99 gap of four times the median; the rest is for what varies.
STRETCH = 2.5
SMOOTHING = 0.2


class Pace:
    """Learns what rows and prompt tokens cost, and sets the prefill budget from it.

    Args:
        most: prompt tokens of a step when nobody is waiting for their next token.
        least: prompt tokens of a step at any time.
        page: tokens of a page, of which a budget is a multiple.
    """

    def __init__(self, most: int, least: int, page: int) -> None:
        self._most = most
        self._least = least
        self._page = page
        self._decode_step: float | None = None
        self._prompt_token: float | None = None

    def observe(self, seconds: float, rows: int, prompt_tokens: int) -> None:
        """A step with so many running rows and prompt tokens took so long."""
        if prompt_tokens == 0:
            self._decode_step = _blend(self._decode_step, seconds)
        else:
            alone = (self._decode_step or 0.0) if rows else 0.0
            cost = max(seconds - alone, seconds * 0.1) / prompt_tokens
            self._prompt_token = _blend(self._prompt_token, cost)

    def budget(self, rows: int, prompts: int) -> int:
        """Prompt tokens for a step beside `rows` running rows, in whole pages.

        While more prompts wait for their first token than rows for their next, the rows give
        way: a burst is not made to wait behind the few that got in first.
        """
        if prompts > rows:
            return self._most
        if not self._prompt_token:
            return self._least
        # A row costs what a prompt token costs at least; what was last seen may be older.
        decode_step = max(self._decode_step or 0.0, rows * self._prompt_token)
        affordable = int((STRETCH - 1) * decode_step / self._prompt_token)
        return min(max(affordable // self._page * self._page, self._least), self._most)


def _blend(old: float | None, new: float) -> float:
    return new if old is None else old + SMOOTHING * (new - old)
