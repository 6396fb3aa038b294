"""The last hour: how fast tokens came, how long callers waited, and each recent call."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from mlx_manager.mlx_server.core import GenerationRequest, Started
from mlx_manager.mlx_server.observability.prefixes import (
    KeptPrompt,
    KeptPrompts,
    PromptPart,
    parts_of,
)
from mlx_manager.mlx_server.timeline import Timeline

SECONDS = 10.0
"""Length of a sample."""
SAMPLES = 360
CALLS = 200
COUNTERS = (
    *("generated_tokens", "prompt_tokens", "prefix_queries", "prefix_hits"),
    *("draft_tokens", "accepted_tokens"),
)

Figures = Callable[[], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Sample:
    """A stretch of time with work in it. time: its end, in seconds since 1970.

    tokens, prompt_tokens: generated, and read in prompts, by all models. prefix_queries,
    prefix_hits: tokens that were looked for among those kept, and found. draft_tokens,
    accepted_tokens: those that were tried ahead, and those of them that were drawn. first, gaps:
    median and 99th percentile of the times to the first token and between tokens, in seconds; None:
    there were none.
    """

    time: float
    seconds: float
    tokens: int
    prompt_tokens: int
    prefix_queries: int
    prefix_hits: int
    draft_tokens: int
    accepted_tokens: int
    first: tuple[float, float] | None
    gaps: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class RecentCall:
    """A call that has ended, and nothing of what it said.

    number: counts the calls. ended: in seconds since 1970. load, queued, first: seconds until the
    model was loaded, in the queue, and until the first token; None: it did not get there. missed:
    why not all of the prompt was found among those kept; "" if nothing more could be.
    """

    number: int
    ended: float
    request_id: str
    model: str
    protocol: str
    key: str
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    load: float | None
    queued: float | None
    first: float | None
    seconds: float
    outcome: str
    missed: str


class History:
    """Keeps samples and recent calls in memory. An observer, which belongs to the event loop.

    look: has the models tell their figures. figures: what they told last.
    """

    def __init__(
        self,
        look: Callable[[], Awaitable[None]],
        figures: Figures,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.samples: deque[Sample] = deque(maxlen=SAMPLES)
        self.calls: deque[RecentCall] = deque(maxlen=CALLS)
        self._look = look
        self._figures = figures
        self._clock = clock
        self._kept = KeptPrompts()
        self._number = 0
        self._firsts: list[float] = []
        self._before: Mapping[str, Mapping[str, Any]] = {}
        self._since = clock()

    def begin(
        self, requests: Sequence[GenerationRequest], timeline: Timeline
    ) -> Callable[[], object]:
        """Return the function that keeps the call once it has ended."""
        first = requests[0]

        def end() -> None:
            self._count(timeline, () if first.inputs else parts_of(first.prompt, first.cache_salt))

        return end

    def _count(self, call: Timeline, parts: Sequence[PromptPart]) -> None:
        """Keep a call that has ended. parts: of its first prompt; none of a call that generates
        nothing."""
        begun = [row for row in call.rows if row.started is not None]
        self._firsts += [row.first for row in begun]
        started = begun[0].started if begun else None
        usage = call.usage
        self._number += 1
        self.calls.append(
            RecentCall(
                self._number,
                call.arrived + call.seconds,
                call.caller.request_id,
                call.model,
                call.caller.protocol,
                call.caller.key,
                usage.prompt_tokens,
                usage.cached_tokens,
                usage.completion_tokens,
                call.leased,
                None if started is None else started.queued,
                min((row.first for row in begun), default=None),
                call.seconds,
                call.outcome,
                self._missed(call, parts, begun[0].first, started) if started else "",
            )
        )

    def _missed(
        self, call: Timeline, parts: Sequence[PromptPart], first: float, started: Started
    ) -> str:
        """Return why no more of a call's prompt was found, and keep the prompt for others."""
        if not parts:
            return ""
        prefilled = call.arrived + first
        tokens, cached = started.prompt_tokens, started.cached_tokens
        found = (parts, tokens, cached, prefilled - started.prefill)
        reason = self._kept.reason(call.model, *found)
        self._kept.keep(call.model, KeptPrompt(tuple(parts), prefilled, tokens))
        return reason

    async def keep(self, begun: Callable[[], Awaitable[None]]) -> None:
        """Take a sample every few seconds while there is work; until cancelled.

        begun: waits until a call is under way.
        """
        while True:
            await begun()
            # Work is over in a moment as often as not: its tokens are counted all the same.
            self._since = max(self._since, self._clock() - SECONDS)
            await asyncio.sleep(SECONDS)
            await self._look()
            self.sample()

    def sample(self) -> None:
        """Add a sample of what has happened since the last one, if anything has."""
        now, engines = self._clock(), self._figures()["engines"]
        grown = {name: self._growth(engines, name) for name in COUNTERS}
        firsts, self._firsts = sorted(self._firsts), []
        if any(grown.values()) or firsts:
            self.samples.append(
                Sample(
                    now,
                    max(0.001, now - self._since),
                    grown["generated_tokens"],
                    grown["prompt_tokens"],
                    grown["prefix_queries"],
                    grown["prefix_hits"],
                    grown["draft_tokens"],
                    grown["accepted_tokens"],
                    (_at(firsts, 0.5), _at(firsts, 0.99)) if firsts else None,
                    self._gaps(engines),
                )
            )
        self._before = {model: dict(engine) for model, engine in engines.items()}
        self._since = now

    def _growth(self, engines: Mapping[str, Mapping[str, Any]], name: str) -> int:
        """Return by how much a counter of all models has grown since the last sample."""
        total = 0
        for model, engine in engines.items():
            before = self._before.get(model, {}).get(name, 0)
            count = engine.get(name, 0)
            # A model that was loaded anew counts from 0.
            total += count - before if count >= before else count
        return total

    def _gaps(self, engines: Mapping[str, Mapping[str, Any]]) -> tuple[float, float] | None:
        """Return the median and the 99th percentile of the gaps since the last sample."""
        bounds: Sequence[float] = ()
        counts: list[int] = []
        for model, engine in engines.items():
            if (gaps := engine.get("token_gaps")) is None:
                continue
            before = self._before.get(model, {}).get("token_gaps")
            earlier = before["counts"] if before is not None else [0] * len(gaps["counts"])
            new = [n - old for n, old in zip(gaps["counts"], earlier, strict=True)]
            if min(new) < 0:
                new = list(gaps["counts"])
            bounds = gaps["bounds"]
            counts = [a + b for a, b in zip(counts, new, strict=True)] if counts else new
        if not any(counts):
            return None
        return quantile(bounds, counts, 0.5), quantile(bounds, counts, 0.99)


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float:
    """Return the value below which a share of counted durations is, interpolated within its bucket.

    counts: durations by bucket, the last one those beyond all bounds; at least one is counted.
    """
    wanted = share * sum(counts)
    for place, reached in enumerate(accumulate(counts)):
        if reached >= wanted and counts[place]:
            if place == len(bounds):
                break
            low = bounds[place - 1] if place else 0.0
            within = (wanted - (reached - counts[place])) / counts[place]
            return low + (bounds[place] - low) * within
    return bounds[-1]
