"""The model runner: the rows of a schedule become logits, and these become tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from mlx_manager.mlx_server.core import TokenLogprob
from mlx_manager.mlx_server.devices.cuda.mapped import send
from mlx_manager.mlx_server.engine.sampling import best, sample
from mlx_manager.mlx_server.engine.scheduler.load import StepLoad
from mlx_manager.mlx_server.engine.scheduler.schedule import Prefill, Schedule
from mlx_manager.mlx_server.engine.scores import LogitPositions, Scores
from mlx_manager.mlx_server.engine.sequence import Sequence
from mlx_manager.mlx_server.engine.speculation.draft import Draft
from mlx_manager.mlx_server.engine.speculation.head import RowStates, StepStates
from mlx_manager.mlx_server.engine.speculation.unread import UnreadStates
from mlx_manager.mlx_server.engine.step.batch import Batch
from mlx_manager.mlx_server.engine.step.host_tokens import HostTokens
from mlx_manager.mlx_server.execution.forward import Chunk, Decode, Forward


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """A step whose logits are described, and perhaps computed already.

    batch: the rows that draw. logits: (draws, vocabulary), those of padding may follow. states: the
    hidden states, where they are kept.
    """

    batch: Batch
    logits: mx.array
    load: StepLoad
    scores: Scores
    states: StepStates | None = None


@dataclass(slots=True, eq=False)
class SampledStep:
    """A step that has been queued whole, its tokens included.

    tokens: (draws,) uint32, for the next step. host_tokens: the same, for the host. states: as in
    `LaunchedStep`.
    """

    batch: Batch
    tokens: mx.array
    host_tokens: HostTokens
    load: StepLoad
    scores: Scores
    states: StepStates | None = None

    @property
    def begins_rows(self) -> bool:
        """Return whether all tokens that the step draws are first tokens."""
        return not self.load.rows and bool(self.batch.rows)

    def scores_of(self, tokens: list[int]) -> dict[int, TokenLogprob]:
        """Return the scores of tokens whose rows ask for scores, by the tokens' numbers."""
        return self.scores.read(self.batch.drawing, tokens)


class ModelRunner:
    """Runs schedules through a model. Keeps the batch for as long as the same rows go together.

    forward: how the model is run.
    """

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._scheduled: list[Sequence] = []
        self._batch = Batch(())

    def launch(self, schedule: Schedule, last: SampledStep | None) -> LaunchedStep:
        """Describe the logits of a step; `last` is the step whose tokens the host has not read."""
        drafts = [self._kept(draft) for draft in schedule.drafts]
        drafting = {draft.sequence.key for draft in drafts}
        rows = schedule.rows
        batch = self._batch_of([r for r in rows if r.key not in drafting] if drafting else rows)
        decode = self._decode(batch, last) if batch.rows else None
        chunks = [*map(_drafted, drafts), *map(_chunk, schedule.prefills)]
        logits = self._forward.run(decode, chunks)
        states = _states(self._forward.hidden, batch, drafts, schedule)
        scores = Scores()
        if chunks:
            places = [draft.places for draft in drafts]
            positions = LogitPositions.of(len(batch.rows), chunks, places)
            for number, start in positions.chunks.items():
                row, chunk = schedule.prefills[number - len(drafts)].sequence, chunks[number]
                scores.add_prompt(row, logits[start:], chunk)
            logits = positions.drawn(logits)
            joining = [p.sequence for p in schedule.prefills if p.final]
            if joining or drafts:
                verified = [draft.sequence for draft in drafts]
                batch = Batch([*batch.rows, *verified, *joining], drafts)
        load = schedule.load
        if drafts and not self._forward.repeats:
            load = replace(load, fresh=True)
        return LaunchedStep(batch, logits, load, scores, states)

    def _kept(self, draft: Draft) -> Draft:
        """Return the draft with what recurrent layers have kept of its row so far."""
        if self._forward.prefixes == "pages" or not draft.tokens:
            return draft
        return replace(draft, before=self._forward.snapshot(draft.sequence.key))

    def queue(self, launched: LaunchedStep) -> None:
        """Queue a step's logits."""
        self._forward.queue()
        mx.async_eval(launched.logits)  # type: ignore[no-untyped-call]

    def sample(self, launched: LaunchedStep) -> SampledStep:
        """Queue a step whole, its tokens included. On a CPU this computes most of it."""
        self._forward.queue()
        batch, logits, scores = launched.batch, launched.logits, launched.scores
        if not batch.rows:
            # With nothing to draw, something must still be waited for.
            tokens = logits[:1, 0].astype(mx.uint32)
        elif batch.plain:
            tokens = best(logits)
        else:
            tokens = sample(logits, batch.sampling, batch.drawn)
            scores.add_drawn(logits, batch.drawing, tokens)
        host_tokens = HostTokens.of(tokens)
        states = [] if launched.states is None else [launched.states.states]
        mx.async_eval(tokens, host_tokens.sent, scores.arrays(), self._forward.state(), states)  # type: ignore[no-untyped-call]
        for row in batch.rows:
            row.pending += 1
        return SampledStep(batch, tokens, host_tokens, launched.load, scores, launched.states)

    def rest(self) -> None:
        """Drop the batch: there was nothing to run."""
        self._scheduled, self._batch = [], Batch(())

    def _batch_of(self, rows: list[Sequence]) -> Batch:
        """Return the batch of `rows`, in the order that the forward wants."""
        if rows != self._scheduled:
            order = self._forward.order([r.key for r in rows], [r.computed for r in rows])
            self._scheduled, self._batch = rows, Batch([rows[i] for i in order])
        return self._batch

    def _decode(self, batch: Batch, last: SampledStep | None) -> Decode:
        if last is not None and last.batch is batch:
            tokens = last.tokens
        else:
            tokens = _newest(batch.rows, last)
        lengths = [row.computed for row in batch.rows]
        return Decode(batch.keys, batch.tables, lengths, tokens, batch.shifts, last is None)


def _newest(rows: list[Sequence], last: SampledStep | None) -> mx.array:
    """Return the rows' newest tokens; for rows with unread tokens, those that `last` draws."""
    known = [row for row in rows if not row.pending]
    read = send(np.array([row.tokens[-1] for row in known], np.int32)).view(mx.uint32)
    if last is None or len(known) == len(rows):
        return read
    place = {row.key: i for i, row in enumerate(last.batch.rows)}
    tokens = last.tokens
    if known:
        place |= {row.key: i for i, row in enumerate(known, tokens.size)}
        tokens = mx.concatenate([tokens, read])
    places = [place[row.key] for row in rows]
    same = places == list(range(len(place)))
    return tokens if same else tokens[send(np.array(places, np.int32))]


def _chunk(prefill: Prefill) -> Chunk:
    sequence, n = prefill.sequence, prefill.tokens
    start = sequence.computed - n
    tokens = sequence.tokens[start : start + n]
    every = sequence.scores_prompt and len(sequence.prompt_scores) < sequence.prompt_length - 1
    return _seen(sequence, tokens, prefill.final, every)


def _drafted(draft: Draft) -> Chunk:
    """Return the chunk of a row's own tokens that are due, and its draft."""
    sequence = draft.sequence
    return _seen(sequence, [*sequence.tokens[-draft.due :], *draft.tokens], True, True)


def _states(
    hidden: mx.array | None, batch: Batch, drafts: Iterable[Draft], schedule: Schedule
) -> StepStates | None:
    """Return the hidden states of a step, where they are kept. batch: the rows without drafts, in
    the order of the step."""
    if hidden is None:
        return None
    counts = [(row, 1) for row in batch.rows]
    counts += [(draft.sequence, draft.queries) for draft in drafts]
    counts += [(prefill.sequence, prefill.tokens) for prefill in schedule.prefills]
    found, number = [], 0
    for row, count in counts:
        if row.proposer is not None and row.images is None:
            unread = row.unread = row.unread or UnreadStates()
            found.append(RowStates(row, unread, row.computed - count, count, number))
        number += count
    return StepStates(hidden, found)


def _seen(sequence: Sequence, tokens: list[int], final: bool, every: bool) -> Chunk:
    """Return a chunk of a sequence whose `computed` ends with `tokens`, with its pictures."""
    n, images = len(tokens), sequence.images
    span, start = sequence.span(n), sequence.computed - n
    if images is None:
        return Chunk(sequence.key, span, tokens, final, every)
    shown = images.shown(start, start + n, sequence.features)
    angles = images.angles_of(start, start + n)
    return Chunk(sequence.key, span, tokens, final, every, shown, angles)
