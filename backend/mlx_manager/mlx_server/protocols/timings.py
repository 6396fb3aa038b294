"""Timings of an answer, in llama.cpp's shape.

Source: `result_timings` in llama.cpp's server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from mlx_manager.mlx_server.core import Finished, Started


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one row. prompt: seconds of processing. predicted: seconds since it ended.

    first: seconds from the request's arrival to the end of its prompt.
    """

    prompt_tokens: int
    cached_tokens: int
    prompt: float
    predicted_tokens: int
    predicted: float
    first: float


@dataclass(slots=True)
class Stopwatch:
    """Times the rows of an answer. clock: gives seconds. began: when the request came."""

    clock: Callable[[], float] = time.perf_counter
    began: float = field(default_factory=time.perf_counter)
    _started: dict[int, tuple[Started, float]] = field(default_factory=dict)
    _finished: dict[int, tuple[Finished, float]] = field(default_factory=dict)

    def start(self, row: int, event: Started) -> None:
        self._started[row] = (event, self.clock())

    def finish(self, row: int, event: Finished) -> None:
        self._finished[row] = (event, self.clock())

    def timing(self, row: int) -> Timing | None:
        """Return the times of a row so far; None before its prompt has been processed."""
        if row not in self._started:
            return None
        begun, at = self._started[row]
        finished, now = self._finished.get(row, (None, self.clock()))
        tokens = begun.drawn() if finished is None else finished.usage.completion_tokens
        return Timing(
            begun.prompt_tokens,
            begun.cached_tokens,
            begun.prefill,
            tokens,
            now - at,
            at - self.began,
        )

    def told(self, rows: Iterable[int], n: int = 1) -> dict[str, Any] | None:
        """Return the times of rows that ran side by side, n for each prompt; None if none began."""
        found = [(row, timing) for row in rows if (timing := self.timing(row)) is not None]
        if not found:
            return None
        prompts = [timing for row, timing in found if row % n == 0] or [found[0][1]]
        timings = [timing for _, timing in found]
        read = sum(timing.prompt_tokens - timing.cached_tokens for timing in prompts)
        written = sum(timing.predicted_tokens for timing in timings)
        reading = max(timing.prompt for timing in prompts)
        writing = max(timing.predicted for timing in timings)
        return {
            "cache_n": sum(timing.cached_tokens for timing in prompts),
            **_pace("prompt", read, reading),
            **_pace("predicted", written, writing),
            "first_token_ms": _milliseconds(min(timing.first for timing in timings)),
        }


def _pace(name: str, tokens: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": tokens,
        f"{name}_ms": _milliseconds(seconds),
        f"{name}_per_token_ms": _milliseconds(seconds / tokens) if tokens else 0.0,
        f"{name}_per_second": round(tokens / seconds, 3) if seconds > 0 else 0.0,
    }


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)
