"""The engine of one text model: sequences go in, events come out. Runs on the MLX thread.

The loop is `step`: rows and chunks of prompts are scheduled, launched, sampled and collected, and
what they tell is delivered, in the order that the device's `Pipeline` has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from time import perf_counter

import mlx.core as mx

from mlx_manager.mlx_server.config import EngineLimits
from mlx_manager.mlx_server.core import Admitted, RowStatus, TokenLogprob
from mlx_manager.mlx_server.engine.admission import AdmissionControl
from mlx_manager.mlx_server.engine.contents import Contents
from mlx_manager.mlx_server.engine.disk.threads import BlockDisk
from mlx_manager.mlx_server.engine.disk.tier import DiskTier, block_bytes
from mlx_manager.mlx_server.engine.memory.accounts import EngineMemory
from mlx_manager.mlx_server.engine.memory.line import Line
from mlx_manager.mlx_server.engine.outputs import Outputs
from mlx_manager.mlx_server.engine.pictures.pictures import Pictures
from mlx_manager.mlx_server.engine.prompt_images import Tower
from mlx_manager.mlx_server.engine.scheduler.prefill_budget import PrefillBudget
from mlx_manager.mlx_server.engine.scheduler.prefixes import PagePrefixes
from mlx_manager.mlx_server.engine.scheduler.schedule import Schedule
from mlx_manager.mlx_server.engine.scheduler.scheduler import Scheduler, SchedulerLimits
from mlx_manager.mlx_server.engine.scheduler.snapshots import SnapshotPrefixes
from mlx_manager.mlx_server.engine.scheduler.step_size import StepSize, chunk_of
from mlx_manager.mlx_server.engine.sequence import Sequence
from mlx_manager.mlx_server.engine.speculation.draft_model import DraftForward, DraftModel
from mlx_manager.mlx_server.engine.speculation.head import READ_AT, DraftHead
from mlx_manager.mlx_server.engine.speculation.speculation import Speculation, objection
from mlx_manager.mlx_server.engine.statistics import EngineStats, Statistics
from mlx_manager.mlx_server.engine.step.clock import StepClock
from mlx_manager.mlx_server.engine.step.pipeline import InPlace, LookAhead, Pipeline
from mlx_manager.mlx_server.engine.step.runner import LaunchedStep, ModelRunner, SampledStep
from mlx_manager.mlx_server.engine.stream import Outbox
from mlx_manager.mlx_server.errors import (
    GenerationFailed,
    InvalidRequest,
    MLXManagerError,
    ServerNotReady,
)
from mlx_manager.mlx_server.execution.forward import Forward, Snapshot
from mlx_manager.mlx_server.text.grammar.guide import Masks
from mlx_manager.mlx_server.utils.memory import Ledger
from mlx_manager.mlx_server.utils.pressure import Pressure

log = logging.getLogger(__name__)

CLOSING = 3.0
"""Seconds in which prefixes are written when the model is unloaded."""


class TextEngine:
    """Engine that serves the sequences of one model.

    Args:
        forward: how the model is run.
        ledger: asked before pages are added; they stand in it as `pages:<name>`, what rows keep
            besides as `states:<name>`, and the kept states of recurrent layers as
            `snapshots:<name>`. Where rows keep mlx-lm's own caches, pages stand for these.
        looks_ahead: queue a step before the last one's tokens are read; see `Pipeline`. Worth it
            where the host is slower than the device; on a CPU it would turn in-place writes into
            copies.
        size: what a step may take on; what it works on is in the ledger as `working:<name>`. None:
            by the limits, with nothing in the ledger.
        clock: returns seconds.
        draft: how a draft model is run, or an MTP head, if there is one. Its keys and values are on
            the same pages.
        tower: reads pictures, if the model sees; their features are in the ledger as
            `images:<name>`.
        wake: called on another thread when the engine, which had no work, has some; None: the
            engine has work while it waits for other threads.
        disk: keeps prefixes, and pictures' features, beyond memory, if there is a disk for them;
            what is on its way there and back is in the ledger as `disk:<name>`.

    Raises:
        OutOfMemory: the ledger does not grant the bytes that a step works on.
    """

    def __init__(
        self,
        name: str,
        forward: Forward,
        limits: EngineLimits,
        ledger: Ledger,
        *,
        looks_ahead: bool,
        size: StepSize | None = None,
        clock: Callable[[], float] = perf_counter,
        tower: Tower | None = None,
        draft: DraftForward | None = None,
        wake: Callable[[], None] | None = None,
        disk: BlockDisk | None = None,
    ) -> None:
        size = size or StepSize(chunk_of(limits))
        self._forward = forward
        forward.serve()
        if draft is not None:
            draft.forward.serve()
        self._limits = limits
        self._ledger = ledger
        self._scored = size.scored
        self._pipeline_of: type[Pipeline] = LookAhead if looks_ahead else InPlace
        self._clock = StepClock(clock)
        self._outbox = Outbox()
        self._masks = Masks()
        self._statistics = Statistics()
        self._closed = False
        # Nothing could be launched, and nothing has come since.
        self._resting = False
        self._contents = Contents()
        self._pictures = None
        if tower is not None:
            line = Line(ledger, f"images:{name}")
            self._pictures = Pictures(tower, line, limits.image_cache, wake, clock)
        self._memory = EngineMemory(
            name,
            forward,
            limits,
            size,
            ledger,
            disturb=self._clock.disturb,
            busy=self._has_rows,
            pictures=self._pictures,
            draft=None if draft is None else draft.forward,
            beside=0 if draft is None else READ_AT * draft.state_bytes,
            block_bytes=None if disk is None else block_bytes(forward, limits.page_size),
        )
        self._wakes = wake is not None
        self._disk = None if disk is None else self._tier(name, disk, looks_ahead, wake or _nothing)
        self._memory.disk = self._disk
        if self._disk is not None and self._pictures is not None:
            self._pictures.keep_on(self._disk.pictures)
        self._budget = PrefillBudget(size, forward, self._memory.working)
        self._draft_model = None if draft is None else self._drafting(draft)
        self._head = self._draft_model if isinstance(self._draft_model, DraftHead) else None
        self._speculation = self._speculating(looks_ahead, size.tokens)
        self._start_over()

    def _drafting(self, draft: DraftForward) -> DraftModel:
        """Return what guesses tokens, by the way in which it is run."""
        kind = DraftModel if draft.give is None else DraftHead
        return kind(draft, self._memory.pool, self._memory.pages.clear_stale, self._clock)

    def _tier(
        self, name: str, disk: BlockDisk, ahead: bool, wake: Callable[[], None]
    ) -> DiskTier | None:
        memory = self._memory
        if not memory.room:
            log.warning(
                "%s: no prefixes are kept on disk, as there is no memory for those on their way",
                name,
            )
            disk.close(0.0)
            return None
        usual = block_bytes(self._forward, self._limits.page_size)
        disk.writes.open(memory.room, usual)
        disk.reads.open(memory.room, usual)
        return DiskTier(
            disk,
            self._forward,
            memory.pool,
            attainable=lambda: memory.attainable_pages,
            clear_stale=memory.pages.clear_stale,
            arrived=self._go_on,
            wake=wake,
            ahead=ahead,
        )

    def _go_on(self, sequence: Sequence, state: Snapshot | None) -> None:
        """Let a prompt go on for which nothing more comes from disk; state: what recurrent layers
        have been given."""
        self._scheduler.share(sequence)
        if state is not None:
            self._memory.snapshots.keep(sequence, state)
        if sequence.images is not None and self._pictures is not None:
            self._pictures.begin(sequence)

    def _speculating(self, looks_ahead: bool, most: int) -> Speculation | None:
        """Return the chooser of drafts, where rows may bring some."""
        limits = self._limits
        always = limits.speculation == "on"
        if why := objection(limits, self._forward):
            if always:
                log.warning("no drafts are tried: %s", why)
            return None
        return Speculation(
            limits.longest_draft,
            most,
            self._budget.plain_time,
            always=always,
            ahead=looks_ahead,
            sees_again=self._forward.prefixes != "pages",
            model=self._draft_model,
        )

    def _start_over(self) -> None:
        """Begin with no rows and nothing under way."""
        forward, limits, memory = self._forward, self._limits, self._memory
        self._scheduler = Scheduler(
            memory.pool,
            memory,
            self._prefixes(),
            SchedulerLimits(limits.max_rows, forward.horizon, forward.abreast, self._scored),
            self._pictures,
            disk=self._disk,
            drafting=self._speculation,
        )
        self._admission = AdmissionControl(self._scheduler, memory, self._ledger, limits)
        self._outputs = Outputs(
            self._scheduler,
            self._outbox,
            self._masks,
            limits.page_size,
            self._statistics,
            restore=memory.snapshots.restore,
        )
        self._runner = ModelRunner(forward)
        self._pipeline = self._pipeline_of(self)
        self._clock.disturb()

    def _prefixes(self) -> PagePrefixes:
        forward, memory, reuse = self._forward, self._memory, self._limits.prefix_cache
        indexed = None if self._disk is None else self._disk.indexed
        if not reuse or forward.prefixes == "pages":
            return PagePrefixes(memory.pool, reuse=reuse, indexed=indexed)
        copies, restore = forward.prefixes == "copy", memory.snapshots.restore
        return SnapshotPrefixes(
            memory.pool, restore, worth=forward.worth, copies=copies, indexed=indexed
        )

    # -- requests ------------------------------------------------------------------------------

    def submit(self, sequence: Sequence) -> None:
        """Take a sequence on, or fail its stream with the reason."""
        sequence.queued_at, self._resting = self._clock.now(), False
        refusal: MLXManagerError | None
        if self._closed:
            refusal = ServerNotReady("The model has just been unloaded. Try again.")
        elif sequence.images is not None and self._pictures is None:
            refusal = InvalidRequest("This model does not see pictures.")
        else:
            refusal = self._admission.refusal(sequence)
        if refusal is None:
            self._contents.name(sequence)
            self._scheduler.submit(sequence)
        else:
            sequence.ended = True
            self._outbox.fail(sequence.stream, refusal)
            self._outbox.flush()

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence that nobody reads any more; its row and pages are free at once."""
        self._resting = False
        if not sequence.ended:
            self._outputs.end(sequence)

    # -- the loop ------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Return the number of steps queued on the device, and of a tower's slices."""
        slices = 0 if self._pictures is None else self._pictures.slices
        return self._statistics.steps + slices

    @property
    def speculates(self) -> bool:
        """Return whether rows may bring drafts."""
        return self._speculation is not None

    def has_work(self) -> bool:
        return self._has_rows() or (self._disk is not None and self._disk.has_copies)

    def _has_rows(self) -> bool:
        busy = self._pipeline.busy or self._scheduler.queues.has_work or self._outputs.pending
        return busy and not self._rests

    @property
    def _rests(self) -> bool:
        """Return whether to sleep until a picture's pixels have come, or something from disk. Rows
        that wait for something else are looked at again then, which is soon."""
        if not self._resting or not self._wakes:
            return False
        sources = [part for part in (self._pictures, self._disk) if part is not None and part.busy]
        return bool(sources) and all(part.awaited for part in sources)

    def step(self) -> None:
        """Queue the next step, and read, parse and deliver the last one's tokens."""
        self._clock.begin()
        self._outputs.go_on()
        if self._disk is not None and self._disk.busy:
            busy = bool(self._pipeline.in_flight)
            if busy and self._pipeline.in_place and self._disk.fills:
                # Pages are copied whole if they are written to while a step under way has them.
                sent = [step.host_tokens.sent for step in self._pipeline.in_flight]
                self._clock.wait(lambda: mx.eval(sent))
            filled, _ = self._clock.wait(partial(self._disk.arrive, busy))
            if filled:
                self._clock.disturb()
        self._pipeline.turn()
        if self._pictures is not None and self._pictures.busy:
            self._see(self._pictures)
        self._note_times()
        if self._disk is not None:
            self._disk.turn(bool(self._pipeline.in_flight))
        self._resting = not self._pipeline.busy and not self._outputs.pending
        if not self._pipeline.in_flight:
            self._clock.disturb()
            if not self._scheduler.queues.has_work:
                self._memory.rest()

    def _see(self, pictures: Pictures) -> None:
        """Go on with the tower, which has the device to itself if there is no step."""
        step = self._pipeline.last
        if step is None:
            self._clock.wait(lambda: pictures.advance(None))
            return
        # Slices are timed by themselves.
        seconds = self._budget.pace.slack(step.load, pictures.waiting)
        self._clock.wait(lambda: mx.eval(step.host_tokens.sent))
        self._clock.wait(lambda: pictures.advance(seconds))
        self._clock.disturb()

    def _note_times(self) -> None:
        on_host, step = self._clock.on_host, self._pipeline.last
        self._statistics.host.add(on_host)
        if step is not None and step.load.tokens:
            self._budget.pace.observe_host(on_host)

    # -- the stages of a step, in the pipeline's order -----------------------------------------

    @property
    def must_collect_first(self) -> bool:
        """Return whether the next schedule depends on tokens that the host has not read."""
        ahead = not self._pipeline.in_place or self._forward.puts_together_ahead
        last = self._pipeline.last
        tried = last is not None and bool(last.batch.drafts)
        return not ahead or self._scheduler.awaits_drafts(tried) or self._scheduler.tight

    @property
    def prompts_wait(self) -> bool:
        """Return whether there are prompts to be processed."""
        return bool(self._scheduler.queues.prompts)

    def schedule(self) -> Schedule:
        """Choose the rows and prompt chunks of the next step. Nothing new is begun where macOS is
        about to end programs for want of memory."""
        pressure = self._memory.mind_others(self.steps)
        self._scheduler.closed = pressure is Pressure.CRITICAL
        if self._head is not None:
            self._head.catch_up(self._scheduler.queues.rows)
        return self._scheduler.schedule(self._budget.next(self._scheduler))

    def launch(self, schedule: Schedule, last: SampledStep | None) -> LaunchedStep | None:
        """Describe the logits of a step; None if it has no work. last: a step whose tokens are on
        the device only."""
        if not schedule:
            self._idle(last)
            return None
        self._memory.pages.clear_stale()
        launched = self._runner.launch(schedule, last)
        self._statistics.count_step(schedule, reuse=self._limits.prefix_cache)
        self._memory.trim(self.steps)
        for prefill in schedule.prefills:
            if not prefill.sequence.admitted_at:
                prefill.sequence.admitted_at = self._clock.now()
                self._outbox.put(prefill.sequence.stream, [Admitted()])
            if self._pictures is not None:
                self._pictures.passed(prefill.sequence)
        return launched

    def _idle(self, last: SampledStep | None) -> None:
        """Do what there is time for where there is no work, and fail sequences that can't run."""
        self._runner.rest()
        if last is None and self._memory.states.lacking:
            # Nothing is under way that would hold the stores as they were.
            self._memory.give_up_pages()
        for sequence, shortage in self._admission.stranded():
            self._outputs.end(sequence, shortage)

    @property
    def unfinished(self) -> bool:
        """Return whether the device has been given only a part of what was launched."""
        return self._forward.unfinished

    def share_prompts(self) -> None:
        """Index pages, so that the next `schedule` need not."""
        self._scheduler.share_prompts()

    def finish(self) -> None:
        """Give the device the rest of what was launched, as there is room for it."""
        self._clock.wait(self._forward.finish)

    def queue(self, launched: LaunchedStep) -> None:
        """Have the device compute a step's logits already."""
        self._runner.queue(launched)

    def sample(self, launched: LaunchedStep) -> SampledStep:
        """Queue the step whole, and keep the states of prompts that it takes to a border."""
        step = self._runner.sample(launched)
        for row in self._scheduler.at_borders():
            self._scheduler.share(row)
            self._memory.snapshots.take(row)
        return step

    def read(self, step: SampledStep) -> tuple[list[int], dict[int, TokenLogprob], float]:
        """Wait for a step; return its tokens, their scores by number, and the time after the
        wait."""
        tokens, now = self._clock.wait(step.host_tokens.read)
        seconds = self._clock.interval(now)
        drafting = 0.0 if self._speculation is None else self._speculation.take_seconds()
        if seconds is not None:
            seconds = max(seconds - drafting, 0.0)
            if self._speculation is None or not self._speculation.observe(seconds, step.load):
                self._budget.pace.observe(seconds, step.load)
            if self._disk is not None:
                plain = self._budget.plain_time(step.load.rows)
                self._disk.prices.observe_step(step.load.tokens, seconds - plain)
        return tokens, step.scores_of(tokens), now

    def take(
        self, step: SampledStep, tokens: list[int], scores: dict[int, TokenLogprob], now: float
    ) -> None:
        """Give the rows their tokens; rows that they end give up their pages."""
        if self._head is not None and step.states is not None:
            self._head.absorb(step.states)
        self._outputs.take(step.batch, tokens, scores, now)
        self._outputs.settle()

    def deliver(self) -> None:
        """Send readers what the tokens taken so far mean."""
        self._outputs.deliver()
        if self._disk is not None:
            self._disk.settle()

    # -- failure -------------------------------------------------------------------------------

    def fail(self, error: Exception) -> None:
        """Fail the row that is at fault, or all of them and start over with fresh pages."""
        self._ledger.heed(error)
        failure = (
            error
            if isinstance(error, MLXManagerError)
            else GenerationFailed("The model failed while generating. The request can be retried.")
        )
        row, self._outputs.at_fault = self._outputs.at_fault, None
        unseen = None if self._pictures is None else self._pictures.take_fault(error)
        if row is not None:
            self._outputs.end(row, failure)
        elif unseen is not None:
            for each in unseen[0]:
                self._outputs.end(each, unseen[1])
        else:
            if not isinstance(error, MLXManagerError):
                self._budget.take_smaller_steps(step.load for step in self._pipeline.under_way)
            self._fail_all(failure)
        self._outbox.flush()

    def _fail_all(self, failure: MLXManagerError) -> None:
        lost = {row.key: row for row in self._scheduler.queues}
        drawing = [row for step in self._pipeline.in_flight for row in step.batch.rows]
        lost |= {row.key: row for row in (*self._outputs.rows, *drawing) if not row.ended}
        for row in lost.values():
            row.ended = True
            self._memory.forget_state(row.key)
            self._outbox.fail(row.stream, failure)
        self._forward.abandon()
        if self._draft_model is not None:
            self._draft_model.abandon()
        self._memory.drop_all()
        self._statistics.pauses += self._scheduler.pauses
        self._budget.start_over()
        self._start_over()

    def close(self) -> None:
        """Fail what is left and give all memory back."""
        self._closed = True
        if self._disk is not None:
            if self._pictures is not None:
                self._pictures.keep_all()
            self._disk.close(CLOSING)
        self._outputs.at_fault = None
        self._memory.close()
        self.fail(GenerationFailed("The model is being unloaded."))

    # -- memory --------------------------------------------------------------------------------

    def make_pages(self) -> None:
        """Make pages before somebody waits for them, where they are many. For a load, which submits
        no row before it is done."""
        if self._forward.horizon:
            self._memory.grow(1, urgent=False)

    def drop_prefixes(self) -> None:
        """Forget every cached prefix, on disk as well, and give its memory back."""
        if self._disk is not None:
            self._disk.purge()
        self._memory.give_up_pages()

    # -- figures -------------------------------------------------------------------------------

    def rows(self) -> list[RowStatus]:
        """Return the status of every row that has not ended, waiting ones too. Safe on any
        thread."""
        return [
            RowStatus(row.request_id, row.prompt_length, row.drawn)
            for row in self._scheduler.queues
        ]

    def stats(self) -> EngineStats:
        """Return the current figures. Safe on any thread."""
        queues, counted = self._scheduler.queues, self._statistics
        pages, pool = self._memory.pages, self._memory.pool
        return EngineStats(
            forward=self._forward.kind,
            running=len(queues.running),
            prefilling=len(queues.prefilling),
            waiting=len(queues.waiting),
            pages_held=pool.held,
            pages_cached=pool.cached,
            pages_free=pool.free,
            pages_attainable=pages.attainable,
            page_size=pool.page_size,
            page_bytes=pages.page_bytes,
            kv_format=self._memory.kv_format,
            tokens_live=sum(row.computed for row in queues.rows),
            steps=counted.steps,
            prompt_tokens=counted.prompt_tokens,
            generated_tokens=counted.generated_tokens,
            prefix_queries=counted.prefix_queries,
            prefix_hits=counted.prefix_hits,
            pauses=counted.pauses + self._scheduler.pauses,
            drafts=counted.drafts,
            draft_tokens=counted.draft_tokens,
            accepted_tokens=counted.accepted_tokens,
            drafts_by_method=dict(counted.by_method),
            disk=None if self._disk is None else self._disk.stats(),
            host_time=counted.host.distribution(),
            token_gaps=counted.gaps.distribution(),
        )


def _nothing() -> None:
    pass
