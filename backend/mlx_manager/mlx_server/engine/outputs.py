"""Outputs: drawn tokens on their way to the events that readers get."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from mlx_manager.mlx_server.core import (
    Event,
    Finished,
    FinishReason,
    Started,
    TextDelta,
    TokenLogprob,
    Usage,
)
from mlx_manager.mlx_server.engine.guided import DrawnToken, GuidedRows
from mlx_manager.mlx_server.engine.scheduler.scheduler import Scheduler
from mlx_manager.mlx_server.engine.sequence import Sequence as Row
from mlx_manager.mlx_server.engine.speculation.acceptance import Acceptance
from mlx_manager.mlx_server.engine.speculation.verified import Tried, TriedDrafts
from mlx_manager.mlx_server.engine.statistics import Statistics
from mlx_manager.mlx_server.engine.step.batch import Batch
from mlx_manager.mlx_server.engine.stream import Outbox
from mlx_manager.mlx_server.errors import MLXManagerError
from mlx_manager.mlx_server.execution.forward import Snapshot
from mlx_manager.mlx_server.text.grammar.guide import Masks


class Outputs:
    """Output processor of an engine: detokenises, parses, ends rows.

    Tokens of guided rows, and those of drafts, are settled as soon as they are read, since the next
    draw depends on them.
    All tokens are routed when there is time for it. An error of one row in either leaves the other
    rows' tokens where they are; `go_on` continues with them.

    Args:
        scheduler: told which rows have filled pages or ended.
        outbox: where events go.
        masks: finds the masks of guided rows.
        page_size: tokens of a page.
        statistics: counts tokens and drafts.
        restore: see `TriedDrafts`.

    Attributes:
        at_fault: the row whose own output is being worked on: an error then fails this row alone.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        outbox: Outbox,
        masks: Masks,
        page_size: int,
        statistics: Statistics,
        *,
        restore: Callable[[Row, Snapshot], None],
    ) -> None:
        self.at_fault: Row | None = None
        self._scheduler = scheduler
        self._outbox = outbox
        self._page_size = page_size
        self._statistics = statistics
        self._guided = GuidedRows(masks)
        self._tried = TriedDrafts(masks, restore)
        self._unrouted: deque[DrawnToken] = deque()

    @property
    def pending(self) -> bool:
        """Return whether there are tokens that nobody has been told of."""
        return bool(self._guided or self._tried or self._unrouted)

    @property
    def rows(self) -> Iterator[Row]:
        """Return the rows with such tokens."""
        yield from self._guided
        yield from self._tried
        yield from (row for row, *_ in self._unrouted)

    def go_on(self) -> None:
        """Settle and route the tokens that were left when a row failed."""
        self.settle()
        self._route()

    def take(
        self,
        batch: Batch,
        tokens: Sequence[int],
        scores: Mapping[int, TokenLogprob],
        now: float,
    ) -> None:
        """Append a step's tokens to its rows, read at `now`. Rows that they end give up their
        pages.

        Rows that had ended already (cancelled, or run one step too far by the lookahead) are left
        out.

        scores: of the tokens that have some, by their numbers.
        """
        before: list[float] = []
        # A page is full when its last token is known and computed, which is now or one later.
        size = self._page_size
        number = -1
        for row in batch.rows:
            number += 1
            draft = batch.drafts.get(row.key) if batch.drafts else None
            first = number
            if draft is not None:
                number += draft.places - 1
            row.pending -= 1
            if row.ended or row.outcome is not None:
                continue
            before.append(row.read_at)
            row.read_at = now
            if draft is not None:
                own = {i - first: scores[i] for i in range(first, number + 1) if i in scores}
                self._tried.add(Tried(draft, tokens[first : number + 1], own))
                continue
            token = tokens[number]
            row.append(token)
            drawn = row, token, scores.get(number) if scores else None
            if row.guide is not None:
                self._guided.add(drawn)
                continue
            if row.outcome is not None or len(row.tokens) % size <= 1:
                self._leave_or_go_on(row)
            self._unrouted.append(drawn)
        self._statistics.count_tokens(now, before)

    def settle(self) -> None:
        """Parse the guided rows' last tokens, end rows that do not go on, and set the masks of
        others. Append what is accepted of drafts."""
        while self._guided:
            row, token, score = drawn = self._guided.next()
            if row.ended:
                continue
            self.at_fault = row
            if row.outcome != "stop":
                row.parse_ahead(token, score)
            self.at_fault = None
            self._leave_or_go_on(row)
            self._unrouted.append(drawn)
            self._guided.parsed(row)
        self._guided.find_masks()
        while self._tried:
            self._settle_draft(self._tried.next())

    def _settle_draft(self, tried: Tried) -> None:
        row, draft = tried.row, tried.draft
        if row.ended:
            return
        self.at_fault = row
        kept = self._tried.accept(tried)
        self.at_fault = None
        if draft.method is not None:
            self._statistics.count_draft(draft.method, len(draft.tokens), kept - 1)
            if row.proposer is not None:
                row.proposer.acceptance.observe(draft.method, len(draft.tokens), kept - 1)
        self._leave_or_go_on(row)
        self._unrouted.append((row, tried.tokens[kept - 1], tried.scores.get(kept - 1)))

    def deliver(self) -> None:
        """Make events of all tokens, and send them."""
        self._route()
        self._outbox.flush()

    def end(self, row: Row, failure: MLXManagerError | None = None) -> None:
        """End a row; its pages are free at once, those it filled being kept for reuse. Its reader
        gets the failure, if there is one, with the next delivery."""
        row.ended = True
        self._release(row)
        if failure is not None:
            self._outbox.fail(row.stream, failure)

    def _route(self) -> None:
        while self._unrouted:
            row, token, score = self._unrouted.popleft()
            if row.ended:
                continue
            self.at_fault = row
            if row.failure is not None:
                self.end(row, row.failure)
            else:
                self._outbox.put(row.stream, self._events(row, token, score))
        self.at_fault = None

    def _events(self, row: Row, token: int, score: TokenLogprob | None) -> list[Event]:
        events: list[Event] = []
        if row.parsed is not None:
            events, row.parsed = row.parsed, None
        elif row.outcome != "stop":
            events = row.parser.push(token, score)
            if row.parser.complete:
                row.outcome = "stop"
        if not row.started:
            row.started = True
            queued, prefill = row.admitted_at - row.queued_at, row.read_at - row.admitted_at
            started = Started(
                row.prompt_length,
                row.cached or 0,
                queued=queued,
                prefill=prefill,
                kept_tokens=row.kept,
            )
            events = [started, *events]
        if row.outcome is not None:
            events += row.parser.finish("length" if token in row.cutting_ids else row.outcome)
            if row.parser.stopped is not None:
                # It may have been found only in what had been held back.
                row.outcome = "stop"
            if token in row.stop_ids and score is not None and row.scores_prompt:
                # Whoever scores texts counts on a score for each token, drawn or given.
                events.append(TextDelta("", (score,)))
            events.append(_finished(row, row.outcome))
            self.end(row)
        return events if row.shape is None or not events else row.shape(events)

    def _leave_or_go_on(self, row: Row) -> None:
        """Share the pages that the row has filled, and give them up if it leaves."""
        if row.outcome is None:
            self._scheduler.share(row)
        else:
            self._release(row)

    def _release(self, row: Row) -> None:
        self._scheduler.share(row)
        self._scheduler.remove(row)


def _finished(row: Row, reason: FinishReason) -> Finished:
    predicted = Acceptance() if row.proposer is None else row.proposer.acceptance
    usage = Usage(
        prompt_tokens=row.prompt_length,
        completion_tokens=len(row.tokens) - row.prompt_length,
        cached_tokens=row.cached or 0,
        reasoning_tokens=row.parser.reasoning_tokens,
        kept_tokens=row.kept,
        accepted_prediction_tokens=predicted.accepted,
        rejected_prediction_tokens=predicted.drafted - predicted.accepted,
    )
    called = reason == "stop" and row.parser.called
    return Finished("tool_calls" if called else reason, usage, row.parser.stopped)
