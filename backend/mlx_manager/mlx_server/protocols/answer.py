"""Parts of every OpenAI answer: id, time, model, choices and token usage; or an error."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Literal

from mlx_manager import __version__
from mlx_manager.mlx_server import core
from mlx_manager.mlx_server.errors import MLXManagerError
from mlx_manager.mlx_server.protocols import sse
from mlx_manager.mlx_server.protocols.timings import timings
from mlx_manager.mlx_server.schemas.openai import (
    CompletionTokensDetails,
    PromptTokensDetails,
    Usage,
)
from mlx_manager.mlx_server.timeline import RowTimeline, Timeline

Times = Literal["never", "last", "always"]
"""Chunks of a choice that have its times."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """Properties of an answer that are known before it begins.

    `rows`: number of choices; each prompt has `n` of them, side by side. `best`: number of choices
    returned for each prompt; None: all. `logprobs` None: none are asked for. `echo`: choices begin
    with their prompts. `counts_all_along`: every chunk has the token counts so far. `times`: the
    chunks that state the speed of the answer.
    """

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))
    n: int = 1
    rows: int = 1
    include_usage: bool = False
    counts_all_along: bool = False
    logprobs: int | None = None
    best: int | None = None
    echo: bool = False
    return_ids: bool = False
    reasoning_field: str = "reasoning_content"
    times: Times = "never"

    @property
    def fingerprint(self) -> str:
        """Name of what draws the answer: a seed draws the same tokens only under the same name."""
        return "fp_" + sha256(f"{__version__} {self.model}".encode()).hexdigest()[:10]


def timed(head: AnswerHead, timeline: Timeline, row: int, *, ended: bool) -> str:
    """Return what a chunk of a choice says of its times, before the chunk's end."""
    if head.times == "never" or (head.times == "last" and not ended):
        return ""
    told = timings(timeline, [row])
    return "" if told is None else f',"timings":{sse.dump(told)}'


def whole_times(head: AnswerHead, timeline: Timeline) -> dict[str, Any]:
    """Return the `timings` of a whole answer, if they are asked for."""
    if head.times == "never":
        return {}
    return {"timings": timings(timeline, range(head.rows), head.n)}


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"


def total(rows: Iterable[core.Usage], n: int) -> Usage:
    """The usage of a whole answer: each prompt counted once, whatever its number of answers.

    `rows` are in order of their index, the n answers of a prompt side by side.
    """
    prompt = completion = cached = reasoning = accepted = rejected = 0
    for index, row in enumerate(rows):
        if index % n == 0:
            prompt += row.prompt_tokens
            cached += row.cached_tokens
        completion += row.completion_tokens
        reasoning += row.reasoning_tokens
        accepted += row.accepted_prediction_tokens
        rejected += row.rejected_prediction_tokens
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        completion_tokens_details=CompletionTokensDetails(
            reasoning_tokens=reasoning,
            accepted_prediction_tokens=accepted,
            rejected_prediction_tokens=rejected,
        ),
    )


def counts_so_far(line: RowTimeline, finished: core.Finished | None) -> str:
    """Return the end of a chunk, from its usage on: the counts of the choice that it belongs to.

    A choice whose prompt has not been processed has none. finished: the choice's end, if the chunk
    is the one that shows it.
    """
    if finished is not None:
        usage: Usage | None = total([finished.usage], 1)
    elif line.started is not None:
        begun = line.started
        so_far = core.Usage(begun.prompt_tokens, line.tokens, begun.cached_tokens)
        usage = total([so_far], 1)
    else:
        usage = None
    return f',"usage":{"null" if usage is None else usage.model_dump_json()}}}\n\n'


def last_chunks(head: AnswerHead, opening: str, finished: Mapping[int, core.Finished]) -> bytes:
    """Return the bytes after a stream's last event: the token counts if asked for, then `[DONE]`.

    opening: beginning of a chunk, up to its choices.
    """
    if not head.include_usage:
        return sse.DONE.encode()
    rows = (finished[row].usage for row in sorted(finished))
    usage = total(rows, head.n).model_dump()
    return f'{opening}],"usage":{sse.dump(usage)}}}\n\n{sse.DONE}'.encode("ascii")


def error_body(error: MLXManagerError) -> dict[str, Any]:
    """A failure in the shape that OpenAI's clients know."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }
