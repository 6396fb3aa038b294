"""Statistics of an engine, for metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlx_manager.mlx_server.engine.disk.tier import DiskStats
from mlx_manager.mlx_server.engine.durations import Distribution, Durations
from mlx_manager.mlx_server.engine.scheduler.schedule import Schedule
from mlx_manager.mlx_server.engine.speculation.draft import Method

HOST_BOUNDS = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005),
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
)
GAP_BOUNDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15),
    *(0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Counts of drafts. tokens: those that were tried. accepted: those of them that were drawn."""

    drafts: int = 0
    tokens: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Figures of an engine. Bytes are those of all layers together.

    kv_format: of the numbers in pages, see `LayerStore.format`; "" if there are no pages.
    pages_attainable: most pages that there could be. Counted since the engine was made: steps,
    prompt_tokens and generated_tokens of all rows, prefix_queries and prefix_hits in tokens,
    pauses, drafts, draft_tokens and accepted_tokens. drafts_by_method: the last three of each way
    in which drafts were found. disk: None without one.
    host_time, token_gaps: see `Statistics`.
    """

    forward: str
    running: int
    prefilling: int
    waiting: int
    pages_held: int
    pages_cached: int
    pages_free: int
    pages_attainable: int
    page_size: int
    page_bytes: int
    kv_format: str
    tokens_live: int
    steps: int
    prompt_tokens: int
    generated_tokens: int
    prefix_queries: int
    prefix_hits: int
    pauses: int
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    drafts_by_method: Mapping[Method, DraftCounts]
    disk: DiskStats | None
    host_time: Distribution
    token_gaps: Distribution


class Statistics:
    """Counters of one engine. One thread counts; any may read.

    Attributes:
        steps: steps queued on the device.
        prompt_tokens: of prompts that have been processed, those found in pages included.
        generated_tokens: tokens drawn for rows that wanted them.
        prefix_queries, prefix_hits: tokens of prompts that were looked up, and found.
        pauses: times that rows had their pages taken away.
        drafts, draft_tokens: drafts that were tried, and their tokens. accepted_tokens: those of
            them that were drawn.
        by_method: counts of drafts by the way in which they were found.
        host: time of each step less the wait for the device.
        gaps: time between a row's tokens, as the host reads them; those of a draft come together,
            and count as one.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.pauses = 0
        self.drafts = 0
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self.by_method: dict[Method, DraftCounts] = {}
        self.host = Durations(HOST_BOUNDS)
        self.gaps = Durations(GAP_BOUNDS)

    def count_step(self, schedule: Schedule, *, reuse: bool) -> None:
        """Count a step that has been queued. reuse: whether prefixes are looked up."""
        self.steps += 1
        for prefill in schedule.prefills:
            row = prefill.sequence
            if prefill.final and not row.started:
                self.prompt_tokens += row.prompt_length
                if reuse:
                    self.prefix_queries += row.prompt_length
                    self.prefix_hits += row.cached or 0

    def count_draft(self, method: Method, tokens: int, accepted: int) -> None:
        """Count a draft of so many tokens that was tried, and the tokens of it that were drawn, as
        one more was, which `count_tokens` counts."""
        known = self.by_method.get(method, DraftCounts())
        self.by_method[method] = DraftCounts(
            known.drafts + 1, known.tokens + tokens, known.accepted + accepted
        )
        self.drafts += 1
        self.draft_tokens += tokens
        self.accepted_tokens += accepted
        self.generated_tokens += accepted

    def count_tokens(self, now: float, before: Sequence[float]) -> None:
        """Count tokens that were read at `now`, one of each row, and the gaps before them.

        All rows of the last step share one time, and are counted at once.

        Args:
            now: when the tokens were read, in seconds.
            before: when each row's token before was read; 0 if the row has had none.
        """
        self.generated_tokens += len(before)
        for earlier in set(before):
            if earlier:
                self.gaps.add(now - earlier, before.count(earlier))
