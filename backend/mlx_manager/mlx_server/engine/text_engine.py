"""The step loop of one text model: admit, step, route, deliver. Runs on the MLX thread.

On a GPU a step's tokens are read (`_read`) when the next step has been queued, and only then parsed
and delivered to their readers (`_deliver`), so that the device hides the work of the host. On a CPU
the next step is put together before they are read, and queued after, so that pages are written in
place. To queue a step on a CPU blocks for most of its time, so tokens are delivered before that.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import mlx.core as mx
import numpy as np

from mlx_manager.mlx_server.config import EngineLimits
from mlx_manager.mlx_server.core import (
    Admitted,
    Event,
    Finished,
    FinishReason,
    RowStatus,
    Started,
    TextDelta,
    TokenLogprob,
    Usage,
)
from mlx_manager.mlx_server.devices import table as devices
from mlx_manager.mlx_server.devices.cuda.mapped import send
from mlx_manager.mlx_server.engine.crew import Crew
from mlx_manager.mlx_server.engine.kv.pages import PagePool
from mlx_manager.mlx_server.engine.letter import Letter
from mlx_manager.mlx_server.engine.meter import Distribution, Meter
from mlx_manager.mlx_server.engine.sampling import best, sample
from mlx_manager.mlx_server.engine.scheduler.load import Budget, Load
from mlx_manager.mlx_server.engine.scheduler.pace import FEWEST, Pace
from mlx_manager.mlx_server.engine.scheduler.scheduler import Prefill, Schedule, Scheduler
from mlx_manager.mlx_server.engine.scheduler.step_size import StepSize, chunk_of
from mlx_manager.mlx_server.engine.scores import Places, Scores
from mlx_manager.mlx_server.engine.sequence import Sequence
from mlx_manager.mlx_server.engine.stream import Outbox
from mlx_manager.mlx_server.errors import (
    GenerationFailed,
    MLXManagerError,
    OutOfMemory,
    Overloaded,
    ServerNotReady,
)
from mlx_manager.mlx_server.execution.forward import Chunk, Decode, Forward, Snapshot
from mlx_manager.mlx_server.text.grammar.guide import Masks
from mlx_manager.mlx_server.utils.memory import (
    Ledger,
    Relief,
    clear_cache,
    working_line,
)
from mlx_manager.mlx_server.utils.pressure import Pressure, out_of_reach
from mlx_manager.mlx_server.utils.text import sized

log = logging.getLogger(__name__)

# The memory of larger steps (`ample`) is taken where there is so many times as much.
PLENTY = 8
# Long steps in a row after which the memory of larger steps is given up.
OFTEN = 32
# Most tokens that room is made for where room costs nothing: slots are numbered by 32 bits.
MOST_ROOM = 1 << 24
# Fewest new pages, as a share of the pool, that are worth copying all pages for while cached pages
# could be given up instead. On a GPU the copy takes 60 ms, and memory left over is of use to steps:
# MLX's buffers of one size are of no use to another, and to free them takes 10 to 20 ms.
WORTHWHILE = 1 / 8
WORTHWHILE_AHEAD = 1 / 2
# States of recurrent layers kept for reuse. Each may be as large as many pages.
MOST_SNAPSHOTS = 16
# MLX keeps freed buffers for reuse; steps of changing sizes leave many behind.
STEPS_BETWEEN_TRIMS = 512


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Figures of an engine. Bytes are those of all layers together.

    pages_attainable: most pages that there could be. Counted since the engine was made: steps,
    prompt_tokens and generated_tokens of all rows, prefix_queries and prefix_hits in tokens,
    pauses. host_time, token_gaps: see `Meter`.
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
    tokens_live: int
    steps: int
    prompt_tokens: int
    generated_tokens: int
    prefix_queries: int
    prefix_hits: int
    pauses: int
    host_time: Distribution
    token_gaps: Distribution


@dataclass(slots=True)
class Step:
    """A step under way: the crew that it draws for, and where their tokens will be, for the next
    step and for the host."""

    crew: Crew
    tokens: mx.array
    letter: Letter
    load: Load
    scores: Scores
    read: bool = False


@dataclass(slots=True)
class Undrawn:
    """A step whose logits are under way: what its tokens are to be drawn from."""

    crew: Crew
    logits: mx.array
    load: Load
    scores: Scores


Read = tuple[Sequence, int, TokenLogprob | None]
"""A row, the token that has been drawn for it, and the token's score if the row asks for scores."""


class TextEngine:
    """Engine that serves the sequences of one model.

    Args:
        forward: how the model is run.
        ledger: asked before pages are added; they stand in it as `pages:<name>`, what rows keep
            besides as `states:<name>`, and the kept states of recurrent layers as
            `snapshots:<name>`. Where rows keep mlx-lm's own caches, pages stand for these.
        looks_ahead: queue a step before the last one's tokens are read. Worth it where the host
            is slower than the device; on a CPU it would turn in-place writes into copies.
        size: what a step may take on; what it works on is in the ledger as `prefill:<name>`. None:
            by the limits, with nothing in the ledger.

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
    ) -> None:
        self._forward = forward
        forward.serve()
        self._limits = limits
        self._size = size or StepSize(chunk_of(limits))
        self._device = devices.current()
        # Most prompt tokens of a step, since larger ones have failed.
        self._most_tokens = self._size.tokens
        # The first step before which memory is given up again, while it is short.
        self._trim_at = 0
        self._has_ample = False
        self._long = 0
        self._ledger = ledger
        self._line = f"pages:{name}"
        self._snapshot_line = f"snapshots:{name}"
        self._lacking_for_snapshot = 0
        self._state_line = f"states:{name}"
        self._lacking_for_state = False
        self._looks_ahead = looks_ahead
        self._clock = clock
        self._outbox = Outbox()
        self._masks = Masks()
        self._growing = False
        # Bytes of the stores beyond their pages, which the ledger allows for.
        self._room = 0
        self._closed = False
        self._meter = Meter()
        self._waited = 0.0
        self._steps = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._pauses = 0
        self._prefix_queries = 0
        self._prefix_hits = 0
        on_pages = sum(store.shape.token_bytes for store in forward.stores)
        self.page_bytes = limits.page_size * (on_pages + forward.token_bytes)
        self._start_over()
        self._working_line = working_line(name)
        working_bytes = self._size.working_bytes
        if not ledger.reserve_if_attainable(self._working_line, working_bytes):
            raise OutOfMemory(
                f"A step of {name} works on up to {sized(working_bytes)}, and "
                f"{sized(ledger.attainable())} of {sized(ledger.total)} are left beside its "
                "weights.",
                retry_after=10,
            )
        self._take_ample()
        ledger.add_relief(Relief.PAGES, self._relieve, self._spare)

    def _start_over(self) -> None:
        reuse, prefixes = self._limits.prefix_cache, self._forward.prefixes
        self._pool = PagePool(self._limits.page_size, prefix_cache=reuse)
        self._scheduler = Scheduler(
            self._pool,
            self._limits.max_rows,
            grow=self._grow,
            enter=self._enter,
            forget=self._forget,
            reuse=reuse,
            restore=self._restore if reuse and prefixes != "pages" else None,
            worth=self._forward.worth,
            copies=prefixes == "copy",
            horizon=self._forward.horizon,
            abreast=self._forward.abreast,
            scored=self._size.scored,
        )
        device = self._device if self._forward.looks_ahead else devices.CPU
        most = self._most_tokens
        least = min(device.least_chunk, most)
        self._pace = Pace(most, least, self._forward.grain, self._size.limits)
        self._under_way: Step | None = None
        # The step whose tokens are waited for.
        self._awaited: Step | None = None
        self._undrawn: Undrawn | None = None
        # Tokens that have been read: what they mean for their row is not known yet (`_settle`),
        # and is known and not handed on yet (`_route`). A row that fails in either leaves the rest.
        self._unsettled: deque[Read] = deque()
        self._unrouted: deque[Read] = deque()
        # Guided rows whose next mask is not known yet.
        self._unguided: list[Sequence] = []
        # The rows of the last step, as they were scheduled and as they went through it.
        self._given: list[Sequence] = []
        self._crew = Crew(())
        # The first step before which a running row may have drawn all its tokens.
        self._full_at = 0
        # The row whose own output is being worked on: an error then fails this row alone.
        self._at_fault: Sequence | None = None
        self._last_read: float | None = None

    # -- requests ------------------------------------------------------------------------------

    def submit(self, sequence: Sequence) -> None:
        """Take a sequence on, or fail its stream with the reason."""
        sequence.queued_at = self._clock()
        refusal = self._refusal(sequence)
        if refusal is None:
            self._scheduler.submit(sequence)
        else:
            sequence.ended = True
            self._outbox.fail(sequence.stream, refusal)
            self._outbox.flush()

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence that nobody reads any more; its row and pages are free at once."""
        if not sequence.ended:
            self._end(sequence)

    def _refusal(self, sequence: Sequence) -> MLXManagerError | None:
        if self._closed:
            return ServerNotReady("The model has just been unloaded. Try again.")
        if self._ledger.pressure() is Pressure.CRITICAL:
            return out_of_reach("The request is not begun")
        scheduler = self._scheduler
        waiting = len(scheduler.waiting)
        rows = self._limits.max_rows - scheduler.admitted
        if not scheduler.may_queue(sequence, self._limits.max_waiting + max(rows, 0)):
            return Overloaded(
                f"The queue is full: {waiting} requests are waiting, and at most "
                f"{self._limits.max_waiting} may (MLX_SERVER_MAX_WAITING). Try again shortly.",
                retry_after=2,
            )
        attainable = self._attainable_pages()
        if self._pool.pages_for(len(sequence.tokens) + sequence.limit) > attainable:
            # Memory of idle models is left to them until the pages are needed.
            attainable += self._ledger.relievable(self._relieve) // max(self.page_bytes, 1)
        shortage = self._shortage(sequence, attainable)
        if shortage is None:
            room = attainable * self._limits.page_size - len(sequence.tokens)
            sequence.limit = min(sequence.limit, room)
        return shortage

    def _shortage(self, sequence: Sequence, attainable: int) -> OutOfMemory | None:
        """Return an error if the sequence's next token could not be drawn even with no other
        row."""
        needed = self._pool.pages_for(len(sequence.tokens) + 1)
        if needed <= attainable:
            return None
        own, most = self._forward.row_bytes, attainable * self.page_bytes
        what = "KV pages" if not own else f"KV pages, beside {sized(own)} that every row takes"
        return OutOfMemory(
            f"The prompt of {len(sequence.tokens)} tokens takes "
            f"{sized(needed * self.page_bytes)} of {what}, and at most {sized(most)} can be had.",
            retry_after=30,
        )

    def _refuse_stranded(self) -> None:
        """Fail sequences that wait for memory that others have taken since; no row's end frees
        it."""
        if self._scheduler.running or self._scheduler.prefilling:
            return
        if self._scheduler.waiting and self._ledger.more_to_come():
            return
        for sequence in tuple(self._scheduler.waiting):
            shortage: OutOfMemory | None
            if self._scheduler.closed:
                shortage = out_of_reach("The request is not begun")
            else:
                shortage = self._shortage(sequence, self._attainable_pages())
            if shortage is not None:
                self._end(sequence)
                self._outbox.fail(sequence.stream, shortage)

    def _attainable_pages(self) -> int:
        """Return the pages that there could be if no other row held any, nothing was kept for
        reuse, and no other model had to give anything up."""
        figures = self._ledger.figures()
        kept = sum(figures.get(line, 0) for line in (self._snapshot_line, self._state_line))
        spare = max(0, figures["available"] + figures["buffer_cache"] + kept)
        have = self._pool.size * self.page_bytes + spare - self._forward.row_bytes
        if not self.page_bytes:
            return 0 if have < 0 else 1 << 40
        return max(0, have) // self.page_bytes

    # -- the loop ------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Return the number of steps queued on the device."""
        return self._steps

    def has_work(self) -> bool:
        left = self._unsettled or self._unrouted or self._undrawn
        return bool(left or self._under_way or self._scheduler.has_work)

    def step(self) -> None:
        """Queue the next step, and read, parse and deliver the last one's tokens."""
        began, self._waited = self._clock(), 0.0
        # Finish the rows of the step before that were left when one of its rows failed.
        self._settle()
        self._route()
        last = self._under_way
        if self._undrawn is None:
            if self._only_begins(last) and self._read(last):
                self._deliver()
            elif not self._may_look_ahead():
                self._read(last)
            self._undrawn = self._launch(last)
        if not self._looks_ahead:
            # What has been put together meanwhile is computed only now: pages are written in place
            # once nothing under way holds them.
            self._read(last)
        if self._forward.unfinished:
            # The device has pieces to go on with.
            self._scheduler.share_prompts()
            # They have come when the device is at what has been queued of this step.
            if self._read(last):
                self._deliver()
            asked = self._clock()
            self._forward.finish()
            self._waited += self._clock() - asked
        if last is not None and not last.read and self._undrawn and self._undrawn.crew.needs_host:
            # Masks and penalties are found while the device computes the logits they apply to.
            mx.async_eval(self._undrawn.logits)  # type: ignore[no-untyped-call]
            self._read(last)
        self._under_way = self._draw(self._undrawn)
        self._undrawn = None
        self._take_snapshots()
        self._read(last)
        self._deliver()
        on_host = self._clock() - began - self._waited
        self._meter.host.add(on_host)
        if self._under_way is not None and self._under_way.load.tokens:
            self._pace.observe_host(on_host)
        if self._under_way is None:
            self._last_read = None
            if not self._scheduler.has_work:
                self._make_room_for_snapshots()
                if self._device.frees_at_once:
                    clear_cache()

    def _budget(self) -> Budget:
        """Return the next step's prefill budget: more than usual where a step is short all the
        same."""
        scheduler, size = self._scheduler, self._size
        wanted = 0
        if size.ample > size.tokens:
            wanted = min(size.wanted(*scheduler.ahead), size.ample)
        if wanted > size.tokens:
            self._weigh_ample(self._pace.is_short(2 * size.tokens))
        return self._pace.budget(scheduler.beginning, wanted if self._has_ample else 0)

    def _weigh_ample(self, short: bool | None) -> None:
        """Have the memory of larger steps if they are short, and give it up if they are long again
        and again: the first ones compile."""
        self._long = self._long + 1 if short is False else 0
        if short and not self._has_ample:
            self._take_ample()
        elif self._long > OFTEN:
            self._give_ample_up()

    def _take_ample(self) -> None:
        """Reserve the memory of larger steps, if that leaves pages nearly all there is."""
        more = self._size.ample_bytes
        plenty = 0 < more <= self._ledger.available() // PLENTY
        self._has_ample = plenty and self._ledger.reserve(self._working_line, more)

    def _give_ample_up(self) -> None:
        if self._has_ample:
            self._has_ample = False
            self._ledger.release(self._working_line, self._size.ample_bytes)

    def _only_begins(self, step: Step | None) -> bool:
        """Return whether all tokens that a step draws are first tokens and no other prompts wait.
        To put the next step together first would delay them by more than the device's pause
        costs."""
        begins = step is not None and not step.load.rows and bool(step.crew.rows)
        first = self._looks_ahead and begins
        return first and not self._scheduler.prefilling and not self._scheduler.waiting

    def _may_look_ahead(self) -> bool:
        ahead = self._looks_ahead or self._forward.puts_together_ahead
        return ahead and not self._scheduler.tight

    def _launch(self, last: Step | None) -> Undrawn | None:
        running = self._scheduler.running
        checked = self._steps >= self._full_at
        full = [row for row in running if row.drawn >= row.limit] if checked else []
        for row in full:
            running.remove(row)
        if checked:
            self._full_at = self._steps + min([r.limit - r.drawn for r in running], default=0)
        self._mind_others()
        schedule = self._scheduler.schedule(self._budget())
        running += full
        if not schedule:
            self._given, self._crew = [], Crew(())
            if last is None and self._lacking_for_state:
                # Nothing is under way that would hold the stores as they were.
                self._give_up_pages()
            self._refuse_stranded()
            return None
        if stale := self._pool.take_stale():
            for store in self._forward.stores:
                store.clear(stale)
        crew = self._crew_of(schedule.rows)
        decode = self._decode(crew, last) if crew.rows else None
        chunks = [_chunk(prefill) for prefill in schedule.prefills]
        logits = self._forward.run(decode, chunks)
        scores = Scores()
        if chunks:
            places = Places.of(len(crew.rows), chunks)
            for number, start in places.chunks.items():
                row, chunk = schedule.prefills[number].sequence, chunks[number]
                scores.add_prompt(row, logits[start:], chunk)
            logits = places.drawn(logits)
            joining = [p.sequence for p in schedule.prefills if p.final]
            if joining:
                crew, self._full_at = Crew([*crew.rows, *joining]), 0
        self._count(schedule)
        return Undrawn(crew, logits, schedule.load, scores)

    def _mind_others(self) -> None:
        """Give up what is only kept for reuse where macOS says that memory is short, and begin
        nothing new where it is about to end programs."""
        pressure = self._ledger.pressure()
        self._scheduler.closed = pressure is Pressure.CRITICAL
        if pressure is Pressure.NORMAL:
            self._trim_at = 0
        elif self._steps >= self._trim_at:
            self._trim_at = self._steps + STEPS_BETWEEN_TRIMS
            clear_cache()
            self._give_up_pages()

    def _draw(self, undrawn: Undrawn | None) -> Step | None:
        if undrawn is None:
            return None
        crew, logits, scores = undrawn.crew, undrawn.logits, undrawn.scores
        if not crew.rows:
            # With nothing to draw, something must still be waited for.
            tokens = logits[:1, 0].astype(mx.uint32)
        elif crew.plain:
            tokens = best(logits)
        else:
            tokens = sample(logits, crew.asked, [row.drawn for row in crew.rows])
            scores.add_drawn(logits, crew.rows, tokens)
        letter = Letter.of(tokens)
        mx.async_eval(tokens, letter.sent, scores.arrays(), self._forward.state())  # type: ignore[no-untyped-call]
        for row in crew.rows:
            row.pending += 1
        return Step(crew, tokens, letter, undrawn.load, scores)

    def _crew_of(self, rows: list[Sequence]) -> Crew:
        """Return the crew of `rows`, in the order that the forward wants."""
        if rows != self._given:
            order = self._forward.order([r.key for r in rows], [r.computed for r in rows])
            self._given, self._crew = rows, Crew([rows[i] for i in order])
        return self._crew

    def _decode(self, crew: Crew, last: Step | None) -> Decode:
        if last is not None and last.crew is crew and not last.read:
            tokens = last.tokens
        else:
            tokens = _newest(crew.rows, last)
        return Decode(crew.keys, crew.tables, [row.computed for row in crew.rows], tokens)

    def _read(self, step: Step | None) -> bool:
        """Wait for the step's tokens; rows that they end give up their pages before the next.
        Return whether there was something to read: not if there is no step, or it has been read.

        Rows that had ended already (cancelled, or run one step too far by the lookahead) are
        left out. Where steps do not overlap with the host's work, the tokens are delivered at once.
        """
        if step is None or step.read:
            return False
        asked, self._awaited = self._clock(), step
        tokens = step.letter.read()
        self._awaited = None
        now = self._clock()
        self._waited += now - asked
        self._observe(step, now)
        rows = step.crew.rows
        scores = step.scores.read(rows, tokens)
        step.read = True
        before: list[float] = []
        # A page is full when its last token is known and computed, which is now or one later.
        size = self._limits.page_size
        for row, token in zip(rows, tokens, strict=False):
            row.pending -= 1
            if row.ended or row.outcome is not None:
                continue
            row.append(token)
            before.append(row.read_at)
            row.read_at = now
            read = row, token, scores.get(row.key) if scores else None
            if row.guide is not None:
                self._unsettled.append(read)
                continue
            if row.outcome is not None or len(row.tokens) % size <= 1:
                self._leave_or_go_on(row)
            self._unrouted.append(read)
        self._generated_tokens += len(before)
        self._meter.read(now, before)
        self._settle()
        if not self._looks_ahead:
            self._deliver()
        return True

    def _settle(self) -> None:
        """Parse the guided rows' last tokens, end rows that do not go on, and set the masks of
        others."""
        while self._unsettled:
            row, token, score = read = self._unsettled.popleft()
            if row.ended:
                continue
            self._at_fault = row
            if row.outcome != "stop":
                row.parse_ahead(token, score)
            self._at_fault = None
            self._leave_or_go_on(row)
            self._unrouted.append(read)
            self._unguided.append(row)
        if self._unguided:
            self._guide([r for r in self._unguided if r.outcome is None and not r.ended])
            self._unguided = []

    def _leave_or_go_on(self, row: Sequence) -> None:
        """Share the pages that the row has filled, and give them up if it leaves."""
        if row.outcome is None:
            self._scheduler.share(row)
        else:
            self._release(row)

    def _guide(self, rows: list[Sequence]) -> None:
        """Set the masks of guided rows, which depend on the tokens drawn last."""
        self._masks.update([row.guide for row in rows if row.guide is not None])
        for row in rows:
            row.follow_guide()

    def _take_snapshots(self) -> None:
        """Keep the states of prompts that have just reached a border of the scheduler. Done when
        their step has been queued, and before the next one is, whose rows may go on from there."""
        if self._forward.prefixes == "pages" or not self._limits.prefix_cache:
            return
        size = self._limits.page_size
        for row in self._scheduler.prefilling:
            if row.computed in self._scheduler.borders(row):
                self._scheduler.share(row)
                # The pages that are found: where an equal one was known, not the row's own. Others
                # may have gone on from there.
                known = self._pool.match(row.tokens)[: row.computed // size]
                snapshot = self._forward.snapshot(row.key)
                if len(known) * size == row.computed and snapshot is not None:
                    self._keep_snapshot(known[-1], snapshot)

    def _keep_snapshot(self, page: int, snapshot: Snapshot) -> None:
        if len(self._pool.attachments) >= MOST_SNAPSHOTS:
            self._pool.detach_oldest()
        # Those of pages that have been given up since are gone, too.
        self._record_snapshots()
        while not self._ledger.spare(snapshot.nbytes):
            if self._pool.detach_oldest() is None:
                self._lacking_for_snapshot = snapshot.nbytes
                return
            self._record_snapshots()
        self._pool.attach(page, snapshot)
        self._record_snapshots()

    def _make_room_for_snapshots(self) -> None:
        """Give pages up where they have taken the room of snapshots, as a crowd does. The cached
        ones are of no use then. Only while there are no rows: a step that has been put together
        would hold the stores as they were."""
        nbytes, self._lacking_for_snapshot = self._lacking_for_snapshot, 0
        # Layers that are all recurrent have pages of no bytes.
        if nbytes and self.page_bytes and not self._pool.attachments:
            self._give_up_pages(-(-MOST_SNAPSHOTS * nbytes // self.page_bytes))

    def _record_snapshots(self) -> None:
        kept = [s.nbytes for s in self._pool.attachments if isinstance(s, Snapshot)]
        self._ledger.record(self._snapshot_line, sum(kept))

    def _restore(self, sequence: Sequence, snapshot: object) -> None:
        assert isinstance(snapshot, Snapshot)
        self._forward.restore(sequence.key, snapshot)

    def _observe(self, step: Step, now: float) -> None:
        if self._last_read is not None:
            self._pace.observe(now - self._last_read, step.load)
        self._last_read = now

    def _deliver(self) -> None:
        self._route()
        self._outbox.flush()

    def _route(self) -> None:
        while self._unrouted:
            row, token, score = self._unrouted.popleft()
            if row.ended:
                continue
            self._at_fault = row
            if row.failure is not None:
                self._end(row)
                self._outbox.fail(row.stream, row.failure)
            else:
                self._outbox.put(row.stream, self._events(row, token, score))
        self._at_fault = None

    def _events(self, row: Sequence, token: int, score: TokenLogprob | None) -> list[Event]:
        events: list[Event] = []
        if row.guide is not None:
            events, row.parsed = row.parsed, []
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
                drawn=row.known,
                shortcut=row.stream.shorten,
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
            self._end(row)
        return events if row.shape is None or not events else row.shape(events)

    def _end(self, row: Sequence) -> None:
        row.ended = True
        self._release(row)

    def _release(self, row: Sequence) -> None:
        """Free the row's pages, those it filled being kept for reuse."""
        self._scheduler.share(row)
        self._scheduler.remove(row)

    def _count(self, schedule: Schedule) -> None:
        self._steps += 1
        if self._steps % STEPS_BETWEEN_TRIMS == 0 and self._device.frees_at_once:
            self._ledger.trim()
        for prefill in schedule.prefills:
            row = prefill.sequence
            if not row.admitted_at:
                row.admitted_at = self._clock()
                self._outbox.put(row.stream, [Admitted()])
            if prefill.final and not row.started:
                self._prompt_tokens += row.prompt_length
                if self._scheduler.reuse:
                    self._prefix_queries += row.prompt_length
                    self._prefix_hits += row.cached or 0

    # -- failure -------------------------------------------------------------------------------

    def fail(self, error: Exception) -> None:
        """Fail the row that is at fault, or all of them and start over with fresh pages."""
        self._ledger.heed(error)
        if self._at_fault is None and not isinstance(error, MLXManagerError):
            self._take_smaller_steps()
        failure = (
            error
            if isinstance(error, MLXManagerError)
            else GenerationFailed("The model failed while generating. The request can be retried.")
        )
        if self._at_fault is not None:
            row, self._at_fault = self._at_fault, None
            self._end(row)
            self._outbox.fail(row.stream, failure)
        else:
            lost = {row.key: row for row in self._scheduler}
            read = [*self._unsettled, *self._unrouted]
            lost |= {row.key: row for row, *_ in read if not row.ended}
            if self._under_way is not None:
                lost |= {row.key: row for row in self._under_way.crew.rows if not row.ended}
            for row in lost.values():
                row.ended = True
                self._forward.forget(row.key)
                self._outbox.fail(row.stream, failure)
            self._forward.abandon()
            self._drop_pages()
            self._pauses += self._scheduler.pauses
            self._start_over()
        self._outbox.flush()

    def _take_smaller_steps(self) -> None:
        """Halve the most tokens of a step after a step that took too long has failed. A failed step
        teaches the pace nothing, so the same prompt would fail again."""
        if not self._device.halves_failed:
            return
        steps = (self._awaited, self._under_way, self._undrawn)
        failed = [step.load.tokens for step in steps if step is not None]
        tokens = min(max(failed, default=0), self._most_tokens)
        if tokens > FEWEST:
            self._most_tokens = max(tokens // 2, FEWEST)
            log.warning(
                "a step with %d prompt tokens failed; from now on one has %d at most",
                tokens,
                self._most_tokens,
            )

    def close(self) -> None:
        """Fail what is left and give all memory back."""
        self._closed = True
        self._at_fault = None
        self._ledger.remove_relief(self._relieve)
        self._has_ample = False
        self._ledger.record(self._working_line, 0)
        self.fail(GenerationFailed("The model is being unloaded."))

    # -- memory --------------------------------------------------------------------------------

    def _grow(self, lacking: int, *, urgent: bool) -> bool:
        """Add at least `lacking` pages if the ledger grants them.

        Only urgent growth may cost others something; other growth takes memory that is free. It
        takes all of that if there is little, since each growth copies the pages.
        """
        granted = self._granted(lacking, urgent=urgent)
        if granted:
            self._resize(self._pool.size + granted)
            self._pool.grow(granted)
        return granted > 0

    def make_pages(self) -> None:
        """Make pages before somebody waits for them, where they are many. For a load, which submits
        no row before it is done."""
        if self._forward.horizon:
            self._grow(1, urgent=False)

    def _granted(self, lacking: int, *, urgent: bool) -> int:
        """Return how many pages to add, `lacking` or more, which the ledger has granted; 0 if
        none."""
        wanted = max(lacking, self._usual_growth())
        spare = max(self._ledger.available() - self._to_come(), 0)
        affordable = spare // max(self.page_bytes, 1)
        if urgent and self._forward.row_bytes:
            wanted = max(lacking, min(affordable, wanted))
        if self._grants(wanted, urgent=urgent):
            return wanted
        worthwhile = WORTHWHILE_AHEAD if self._forward.horizon else WORTHWHILE
        if not urgent and affordable < worthwhile * self._pool.size:
            return 0
        fewer = max(lacking, min(affordable, wanted))
        return fewer if self._grants(fewer, urgent=urgent) else 0

    def _usual_growth(self) -> int:
        """Return the pages to add: half of those there are, within the device's limits. The limits
        of a GPU with memory of its own are for compiled steps, as each new size of the pool costs a
        compilation."""
        device = self._device
        if device.growth_part and not self._forward.horizon:
            device = devices.CPU
        least, most = device.growth
        part = 0.0
        if device.growth_part:
            part = device.growth_part * self._ledger.available() // self.page_bytes
        return int(min(max(least, part, self._pool.size // 2), most))

    def _grants(self, pages: int, *, urgent: bool) -> bool:
        nbytes = pages * self.page_bytes
        spare = urgent or not nbytes or self._ledger.spare(nbytes + self._to_come())
        return spare and self._reserve(self._line, nbytes)

    def _to_come(self) -> int:
        """Return the bytes that growth that is not urgent leaves to the states of rows that may
        come, and to their snapshots: half of all memory, if states take as much, and two rows'
        states in any case. Pages are not given up again for states while rows run."""
        own = self._forward.row_bytes
        held = own * self._scheduler.admitted
        whole = self._ledger.available() + self._pool.size * self.page_bytes + held
        return max(min(own * self._limits.max_rows, whole // 2) - held, 2 * own)

    def _reserve(self, line: str, nbytes: int) -> bool:
        if not nbytes:
            return True
        self._growing = True
        try:
            return self._ledger.reserve(line, nbytes)
        finally:
            self._growing = False

    def _enter(self) -> bool:
        """Reserve the memory that a row keeps besides pages; return whether the ledger grants
        it."""
        self._lacking_for_state = not self._reserve(self._state_line, self._forward.row_bytes)
        return not self._lacking_for_state

    def _forget(self, sequence: Sequence) -> None:
        self._forward.forget(sequence.key)
        if own := self._forward.row_bytes:
            self._ledger.record(self._state_line, own * self._scheduler.admitted)

    def _relieve(self, lacking: int) -> None:
        """Give up cached pages, and the free ones at the end of the stores."""
        if self._growing:
            # The growth under way counts on these pages: giving them up would copy the stores
            # twice.
            while lacking > 0 and isinstance(given_up := self._pool.detach_oldest(), Snapshot):
                self._lacking_for_snapshot = given_up.nbytes
                lacking -= given_up.nbytes
            self._record_snapshots()
            return
        self._give_up_pages()

    def _give_up_pages(self, most: int | None = None) -> None:
        """Forget cached pages, then remove free pages at the end of the stores, `most` at most."""
        self._pool.drop_cached()
        self._record_snapshots()
        if not self.has_work():
            self._give_ample_up()
        if self._pool.shrink(most):
            self._resize(self._pool.size)
            self._ledger.record(self._line, self._pool.size * self.page_bytes)

    def _spare(self) -> int:
        """Return the bytes that `_relieve` could give back."""
        kept: int = self._ledger.figures().get(self._snapshot_line, 0)
        ample = self._size.ample_bytes if self._has_ample and not self.has_work() else 0
        return self._pool.removable * self.page_bytes + kept + ample

    def _drop_pages(self) -> None:
        """Drop all pages, also those that the ledger granted and that were never made, if the step
        failed while making them."""
        self._ledger.record(self._snapshot_line, 0)
        self._ledger.record(self._state_line, 0)
        self._resize(0)
        self._ledger.record(self._line, 0)

    def _resize(self, pages: int) -> None:
        self._ledger.note_peak()
        copied = [store.resize(pages, self._most_pages()) for store in self._forward.stores]
        before, self._room = self._room, sum(store.room_bytes for store in self._forward.stores)
        self._ledger.allow_for(self._room - before)
        if any(copied):
            # The step under way takes longer by the copy, so the pace must not learn from it.
            self._last_read = None

    def _most_pages(self) -> int:
        """Return how many pages the stores should have room for."""
        if self._looks_ahead:
            # Pages that are not written in place are copied, with whatever room there is.
            return 0
        return min(self._attainable_pages(), MOST_ROOM // self._limits.page_size)

    # -- figures -------------------------------------------------------------------------------

    def drop_prefixes(self) -> None:
        """Forget every cached prefix and give its memory back."""
        self._relieve(0)

    def rows(self) -> list[RowStatus]:
        """Return the status of every row that has not ended, waiting ones too. Safe on any
        thread."""
        s = self._scheduler
        return [
            RowStatus(row.request_id, row.prompt_length, row.drawn)
            for row in (*s.running, *s.prefilling, *s.waiting)
        ]

    def stats(self) -> EngineStats:
        """Return the current figures. Safe on any thread."""
        s = self._scheduler
        rows = [*s.running, *s.prefilling]
        return EngineStats(
            forward=self._forward.kind,
            running=len(s.running),
            prefilling=len(s.prefilling),
            waiting=len(s.waiting),
            pages_held=self._pool.held,
            pages_cached=self._pool.cached,
            pages_free=self._pool.free,
            pages_attainable=self._attainable_pages(),
            page_size=self._pool.page_size,
            page_bytes=self.page_bytes,
            tokens_live=sum(row.computed for row in rows),
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            pauses=self._pauses + s.pauses,
            host_time=self._meter.host.distribution(),
            token_gaps=self._meter.gaps.distribution(),
        )


def _newest(rows: list[Sequence], last: Step | None) -> mx.array:
    """Return the rows' newest tokens; for rows with unread tokens, those that `last` draws."""
    known = [row for row in rows if not row.pending]
    read = send(np.array([row.tokens[-1] for row in known], np.int32)).view(mx.uint32)
    if last is None or len(known) == len(rows):
        return read
    place = {row.key: i for i, row in enumerate(last.crew.rows)}
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
    return Chunk(sequence.key, sequence.span(n), tokens, prefill.final, every)


def _finished(row: Sequence, reason: FinishReason) -> Finished:
    usage = Usage(
        prompt_tokens=row.prompt_length,
        completion_tokens=len(row.tokens) - row.prompt_length,
        cached_tokens=row.cached or 0,
        reasoning_tokens=row.parser.reasoning_tokens,
        kept_tokens=row.kept,
    )
    called = reason == "stop" and row.parser.called
    return Finished("tool_calls" if called else reason, usage, row.parser.stopped)
