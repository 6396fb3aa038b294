"""The timeline of a call: its moments and token counts. The call writes it as events pass; whoever
counts, logs, traces or charges the call, or tells its times, reads it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mlx_manager.mlx_server.core import (
    Admitted,
    Caller,
    Event,
    Finished,
    FinishReason,
    GenerationRequest,
    Started,
    Usage,
)

CANCELLED = "cancelled"


@dataclass(slots=True)
class RowTimeline:
    """The timeline of one row. Moments are in seconds since the call arrived.

    admitted: start of the prefill; None before it, and for a row that takes no processing.
    started: event of the first token, which came at `first`. finished: last event, which came at
    `end`. None: there has been no such event. tokens: number drawn for the answer so far, whether
    the client has read them or not.
    """

    admitted: float | None = None
    started: Started | None = None
    first: float = 0.0
    finished: Finished | None = None
    end: float = 0.0
    tokens: int = 0

    @property
    def usage(self) -> Usage:
        """Return the token counts of the row so far."""
        if self.finished is not None:
            return self.finished.usage
        if self.started is not None:
            return Usage(self.started.prompt_tokens, self.tokens, self.started.cached_tokens)
        return Usage(0, 0)


@dataclass(slots=True, eq=False)
class Timeline:
    """The timeline of one call. Moments are in seconds since the call arrived.

    prompts: rows with a prompt of their own; the n answers to a prompt follow it. max_tokens: the
    limit that was asked for, or None. arrived: seconds since 1970.
    loading: moment since which the call waits for its model to load; None if it does not. leased:
    moment since which the call has its model; None before.
    seconds: length of the call, 0 before its end. failure: code of the error that ended the call,
    `cancelled` if the caller went away, "" if there was none; message: the error's.
    """

    model: str
    caller: Caller
    rows: tuple[RowTimeline, ...]
    prompts: tuple[int, ...] = (0,)
    max_tokens: int | None = None
    arrived: float = field(default_factory=time.time)
    loading: float | None = None
    leased: float | None = None
    seconds: float = 0.0
    failure: str = ""
    message: str = ""
    clock: Callable[[], float] = time.perf_counter
    _origin: float = field(init=False)

    def __post_init__(self) -> None:
        self._origin = self.clock()

    @staticmethod
    def of(requests: Sequence[GenerationRequest]) -> Timeline:
        """Return the timeline of a call that arrives now. The answers to a prompt share one prompt
        object, and are side by side."""
        first = requests[0]
        return Timeline(
            first.model,
            first.caller,
            tuple(RowTimeline() for _ in requests),
            tuple(
                row
                for row, request in enumerate(requests)
                if row == 0 or request.prompt is not requests[row - 1].prompt
            ),
            first.max_tokens,
        )

    # -- writing, by the call ------------------------------------------------------------------

    def follow(self, row: int, events: list[Event], tokens: int) -> None:
        """Write down the events of one step of a row."""
        line = self.rows[row]
        line.tokens = tokens
        if line.started is None:
            for event in events:
                match event:
                    case Admitted():
                        line.admitted = self.now()
                    case Started():
                        line.started, line.first = event, self.now()
        if type(last := events[-1]) is Finished:
            line.finished, line.end = last, self.now()

    def close(self, failure: str, message: str) -> None:
        """Write down the end of the call."""
        self.seconds, self.failure, self.message = self.now(), failure, message

    # -- reading -------------------------------------------------------------------------------

    def now(self) -> float:
        """Return the seconds since the call arrived."""
        return self.clock() - self._origin

    @property
    def finished(self) -> bool:
        """Return whether all rows have finished."""
        return all(row.finished is not None for row in self.rows)

    @property
    def usage(self) -> Usage:
        """Return the token counts of all rows; a prompt that several rows share is counted once."""
        usages = [row.usage for row in self.rows]
        asked = [usages[row] for row in self.prompts]
        return Usage(
            sum(usage.prompt_tokens for usage in asked),
            sum(usage.completion_tokens for usage in usages),
            sum(usage.cached_tokens for usage in asked),
            sum(usage.reasoning_tokens for usage in usages),
            kept_tokens=sum(usage.kept_tokens for usage in usages),
            accepted_prediction_tokens=sum(usage.accepted_prediction_tokens for usage in usages),
            rejected_prediction_tokens=sum(usage.rejected_prediction_tokens for usage in usages),
        )

    @property
    def reasons(self) -> tuple[FinishReason, ...]:
        """Return why the rows ended, in their order; rows that did not end are left out."""
        return tuple(row.finished.reason for row in self.rows if row.finished is not None)

    @property
    def outcome(self) -> str:
        """Return `failure`, or else the rows' reasons, each once."""
        return self.failure or ",".join(dict.fromkeys(self.reasons))
