"""Record of each call, made once for all that count, log or keep it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from mlx_manager.mlx_server.core import (
    Caller,
    Finished,
    FinishReason,
    GenerationRequest,
    Progress,
    Started,
    Usage,
    the_long_way,
)
from mlx_manager.mlx_server.errors import MLXManagerError
from mlx_manager.mlx_server.observability.observer import Observation

CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class RowRecord:
    """Record of one row. Times in seconds, `first` and `end` since the call began.

    started: event after the prefill, at `first`. finished: event of the row's end, at `end`. None:
    there was no such event. drawn: tokens of the answer, read or not.
    """

    started: Started | None
    first: float
    finished: Finished | None
    end: float
    drawn: int = 0

    @property
    def usage(self) -> Usage:
        """Return the token usage of the row; without `finished`, with the tokens drawn so far."""
        if self.finished is not None:
            return self.finished.usage
        if self.started is not None:
            return Usage(self.started.prompt_tokens, self.drawn, self.started.cached_tokens)
        return Usage(0, 0)


@dataclass(frozen=True, slots=True)
class CallRecord:
    """Record of one call.

    began: seconds since 1970. load: seconds until the model was loaded; None if it never was.
    seconds: from the beginning to the end of the last row. failure: code of the error that ended
    the call, `cancelled` if the caller went away, "" if the call was answered. max_tokens: the
    limit that was asked for, or None.
    """

    model: str
    caller: Caller
    began: float
    load: float | None
    seconds: float
    rows: tuple[RowRecord, ...]
    prompts: tuple[int, ...]
    max_tokens: int | None
    failure: str

    @property
    def usage(self) -> Usage:
        """Return the token usage of all rows; a prompt that several rows share is counted once."""
        usages = [row.usage for row in self.rows]
        asked = [usages[row] for row in self.prompts]
        return Usage(
            sum(usage.prompt_tokens for usage in asked),
            sum(usage.completion_tokens for usage in usages),
            sum(usage.cached_tokens for usage in asked),
            sum(usage.reasoning_tokens for usage in usages),
        )

    @property
    def reasons(self) -> tuple[FinishReason, ...]:
        """Return why the rows ended, in their order; rows that did not end are left out."""
        return tuple(row.finished.reason for row in self.rows if row.finished is not None)

    @property
    def outcome(self) -> str:
        """Return `failure`, or else the rows' reasons, each once."""
        return self.failure or ",".join(dict.fromkeys(self.reasons))


Sink = Callable[[CallRecord], None]


class Recorder:
    """An observer that makes a record of each call, and hands it to `sinks` when the call ends."""

    def __init__(
        self, sinks: Sequence[Sink], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._sinks = sinks
        self._clock = clock

    @contextmanager
    def observe(self, requests: Sequence[GenerationRequest]) -> Iterator[Observation]:
        recording = Recording(requests, self._clock)
        failure = MLXManagerError.code
        try:
            yield recording
            failure = ""
        except MLXManagerError as error:
            failure = error.code
            raise
        except (GeneratorExit, asyncio.CancelledError):
            failure = CANCELLED
            raise
        finally:
            record = recording.record(failure)
            for sink in self._sinks:
                sink(record)


class Recording:
    """Observation of when each row begins and ends; other events cost a comparison or two."""

    def __init__(self, requests: Sequence[GenerationRequest], clock: Callable[[], float]) -> None:
        self._requests = requests
        self._clock = clock
        self._start = clock()
        self._began = time.time()
        self._load: float | None = None
        self._started: dict[int, tuple[Started, float]] = {}
        self._finished: dict[int, tuple[Finished, float]] = {}

    def loading(self) -> None:
        """Do nothing: `leased` counts from the start of the call."""

    def leased(self) -> None:
        self._load = self._since()

    def add(self, step: Progress) -> None:
        for row, events in step:
            if row not in self._started:
                for event in events:
                    if type(event) is Started:
                        self._started[row] = event, self._since()
            if type(end := events[-1]) is Finished:
                self._finished[row] = end, self._since()

    def record(self, failure: str) -> CallRecord:
        first, seconds = self._requests[0], self._since()
        return CallRecord(
            first.model,
            first.caller,
            self._began,
            self._load,
            seconds,
            tuple(self._row(row) for row in range(len(self._requests))),
            prompts(self._requests),
            first.max_tokens,
            failure,
        )

    def _row(self, row: int) -> RowRecord:
        started, first = self._started.get(row, (None, 0.0))
        finished, end = self._finished.get(row, (None, 0.0))
        drawn = 0
        if started is not None:
            drawn = started.drawn()
            # Records may be kept, and the row with its tokens need not be.
            started = replace(started, drawn=int, shortcut=the_long_way)
        return RowRecord(started, first, finished, end, drawn)

    def _since(self) -> float:
        return self._clock() - self._start


def prompts(requests: Sequence[GenerationRequest]) -> tuple[int, ...]:
    """Return the rows with a prompt of their own: n answers to a prompt share one prompt object."""
    return tuple(
        row
        for row, request in enumerate(requests)
        if row == 0 or request.prompt is not requests[row - 1].prompt
    )
