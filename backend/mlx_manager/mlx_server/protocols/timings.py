"""Timings of an answer, in llama.cpp's shape.

Source: `result_timings` in llama.cpp's server.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mlx_manager.mlx_server.timeline import Timeline


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


def timing(timeline: Timeline, row: int) -> Timing | None:
    """Return the times of a row so far; None before its prompt has been processed."""
    line = timeline.rows[row]
    if line.started is None:
        return None
    until = timeline.now() if line.finished is None else line.end
    return Timing(
        line.started.prompt_tokens,
        line.started.cached_tokens,
        line.started.prefill,
        line.usage.completion_tokens,
        until - line.first,
        line.first,
    )


def timings(timeline: Timeline, rows: Iterable[int], n: int = 1) -> dict[str, Any] | None:
    """Return the times of rows that ran side by side, n for each prompt; None if none began."""
    found = [(row, own) for row in rows if (own := timing(timeline, row)) is not None]
    if not found:
        return None
    prompts = [own for row, own in found if row % n == 0] or [found[0][1]]
    every = [own for _, own in found]
    read = sum(own.prompt_tokens - own.cached_tokens for own in prompts)
    written = sum(own.predicted_tokens for own in every)
    reading = max(own.prompt for own in prompts)
    writing = max(own.predicted for own in every)
    return {
        "cache_n": sum(own.cached_tokens for own in prompts),
        **_pace("prompt", read, reading),
        **_pace("predicted", written, writing),
        "first_token_ms": _milliseconds(min(own.first for own in every)),
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
