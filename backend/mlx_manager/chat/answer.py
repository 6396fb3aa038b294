"""One answer as it arrives: its text, its figures, and why it ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from mlx_manager.completion_stream import Chunk, Usage
from mlx_manager.printable import in_utf8


@dataclass(slots=True)
class Answer:
    """One answer. `first` and `ended` are seconds after the question; None until then.

    `stopped`: the person ended it. `usage` None: the server did not say, or was not let.
    """

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    usage: Usage | None = None
    first: float | None = None
    ended: float | None = None
    stopped: bool = False

    def figures(self) -> str:
        """`42 tokens · 85.3 tok/s · first after 0.12 s · prompt 31 (16 cached)`, what is known."""
        parts = ["stopped"] if self.stopped else []
        if self.finish_reason == "length":
            parts.append("cut at the token limit")
        if self.usage is not None:
            parts.append(count(self.usage.completion, "token"))
            if (speed := self.speed()) is not None:
                parts.append(f"{speed:,.1f} tok/s")
        if self.first is not None:
            parts.append(f"first after {self.first:.2f} s")
        if self.usage is not None:
            cached = f" ({self.usage.cached:,} cached)" if self.usage.cached else ""
            parts.append(f"prompt {self.usage.prompt:,}{cached}")
        return " · ".join(parts)

    def speed(self) -> float | None:
        """Tokens a second after the first; None where there are too few to tell."""
        if self.usage is None or self.first is None or self.ended is None:
            return None
        spent = self.ended - self.first
        return (
            (self.usage.completion - 1) / spent if spent > 0 and self.usage.completion > 1 else None
        )

    def document(self) -> dict[str, Any]:
        """Return the answer as JSON: usage under OpenAI's names, times in seconds."""
        usage = self.usage and {
            "prompt_tokens": self.usage.prompt,
            "completion_tokens": self.usage.completion,
            "cached_tokens": self.usage.cached,
        }
        return {
            "text": self.text,
            "reasoning": self.reasoning,
            "finish_reason": "stopped" if self.stopped else self.finish_reason,
            "usage": usage,
            "seconds": {"first_token": self.first, "total": self.ended},
        }


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def collect(
    chunks: Iterable[Chunk],
    show: Callable[[Chunk], None],
    clock: Callable[[], float] = time.perf_counter,
) -> Answer:
    """Read an answer to its end, showing each piece. Ctrl-C ends it early and keeps what came."""
    answer = Answer()
    started = clock()
    try:
        for chunk in chunks:
            if chunk.carries_output and answer.first is None:
                answer.first = clock() - started
            answer.text += chunk.text
            answer.reasoning += chunk.reasoning
            answer.finish_reason = chunk.finish_reason or answer.finish_reason
            answer.usage = chunk.usage or answer.usage
            show(chunk)
    except KeyboardInterrupt:
        answer.stopped = True
    answer.text, answer.reasoning = in_utf8(answer.text), in_utf8(answer.reasoning)
    answer.ended = clock() - started
    return answer
