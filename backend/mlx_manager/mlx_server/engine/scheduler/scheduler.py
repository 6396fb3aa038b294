"""Scheduler: the rows and prompt chunks of the next step, and the pages that they need.

No arrays and no clock here: only sequences, pages and the budget of a step.
"""

from __future__ import annotations

import heapq
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from operator import attrgetter
from typing import Protocol

from mlx_manager.mlx_server.engine.kv.pages import PagePool
from mlx_manager.mlx_server.engine.kv.prefix import ROOT
from mlx_manager.mlx_server.engine.scheduler.load import Budget, Load
from mlx_manager.mlx_server.engine.scheduler.shares import DRAWN, Shares, by_owner, newest
from mlx_manager.mlx_server.engine.sequence import Sequence

# A waiting prompt gains this many tokens of priority with each step, so that a long one is
# overtaken by shorter ones for a while, and not for ever.
AGEING = 8
# How many waiting prompts are looked at in one step: a GPU's is to be full of short ones.
LOOK = 128
# Fewest tokens that prompts must begin alike with for something to be attached where they part: an
# attachment takes as much memory as the keys and values of some hundred tokens, or more.
LEAST_BEGINNING = 64
# Most places where a prompt is cut for other prompts, the last ones: each takes a step.
MOST_BRANCHES = 2
# Number of the latest prompts that a new one is compared with.
LATELY_COME = 16
# A row has only just begun while it has drawn at most so many tokens; more where steps are so short
# that pages are given ahead, and a burst's prompts take many of them.
JUST_BEGUN = 2
JUST_BEGUN_AHEAD = 16
# So many of them have a claim at most where steps are long: whoever comes while a larger burst
# begins would wait for steps of whole chunks, one after another.
MOST_BEGUN = 16
# Steps for which rows take turns after several owners were here at once: who comes back after a
# minute or two finds short steps, and a crowd that has the engine to itself goes on at its best.
LATELY = 4096


class Admission(Enum):
    """Outcome of admitting a waiting prompt. LATER: wait for a row, or for pages under way."""

    ADMITTED = auto()
    LATER = auto()
    NO_ROOM = auto()


class Grow(Protocol):
    """Adds at least `lacking` pages; urgent growth may take memory that others could spare."""

    def __call__(self, lacking: int, *, urgent: bool) -> bool: ...


@dataclass(frozen=True, slots=True)
class Prefill:
    """Chunk of a prompt: its next `tokens` tokens. A `final` chunk gives the first draw."""

    sequence: Sequence
    tokens: int
    final: bool


@dataclass(slots=True)
class Schedule:
    rows: list[Sequence] = field(default_factory=list)
    prefills: list[Prefill] = field(default_factory=list)
    load: Load = field(default_factory=Load)

    def __bool__(self) -> bool:
        return bool(self.rows or self.prefills)


class Scheduler:
    """Owner of the queues and the pages, which chooses the work of each step.

    Args:
        pool: the pages.
        max_rows: sequences that may hold pages at once.
        grow: adds pages to the pool.
        enter: makes room for what a sequence keeps besides pages, if it can; called when there are
            pages for it.
        forget: told of each sequence that gives up its pages.
        reuse: whether prefixes may be looked up.
        restore: given when pages alone do not make up a prefix: takes a sequence and what was
            attached to the last page of its prefix. Prefixes then end where something is
            attached, and prompts are cut so that something can be: see `borders`.
        worth: tokens that must be saved by that.
        copies: whether who goes on from there holds all of it a second time, and takes pages for
            that.
        horizon: tokens ahead that running rows get pages for, all of them at once, where there is
            plenty: their tables then change in few steps.
        abreast: running rows that are enough for a step, or 0 where it is best for all of them to
            go at once. Where several owners want the engine, and there are twice as many or more,
            they take turns, so that whoever comes waits for a shorter step.
        scored: most prompt tokens of a step that logits are wanted of, at least a page.
    """

    def __init__(
        self,
        pool: PagePool,
        max_rows: int,
        *,
        grow: Grow,
        forget: Callable[[Sequence], None],
        reuse: bool,
        enter: Callable[[], bool] = lambda: True,
        restore: Callable[[Sequence, object], None] | None = None,
        worth: int = 0,
        copies: bool = False,
        horizon: int = 0,
        abreast: int = 0,
        scored: int = sys.maxsize,
    ) -> None:
        self.pool = pool
        self.waiting: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.running: list[Sequence] = []
        self._max_rows = max_rows
        self._grow = grow
        self._enter = enter
        self._forget = forget
        self.reuse = reuse
        self._restore = restore
        self._worth = worth
        self._copies = copies
        self._horizon = horizon
        self._abreast = abreast
        self._scored = scored
        # While it is set, who waits goes on waiting.
        self.closed = False
        self._steps = 0
        self.pauses = 0
        # Prompts that this step completes: what they computed is not shared before it is read.
        self._joining: list[Sequence] = []
        self._shares = Shares()
        # Whoever found no room in the last step.
        self._refused: Sequence | None = None
        # Whether the running rows were left out of the last step.
        self._gave_way = False
        # The first step that may find one of the running rows without the page it needs.
        self._short_at = 0
        # The last step before which several owners were here.
        self._contested_at = -LATELY

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.prefilling
        yield from self.waiting

    @property
    def tight(self) -> bool:
        """Return whether a row may be left out of a step or paused: the running rows need more
        pages than there are, or another key is owed its part."""
        return (
            (self._steps + 1 >= self._short_at and len(self._short()) > self.pool.available)
            or self._gave_way
            or any(map(self._owed, [*self.prefilling, *self.waiting]))
            or self._in_the_way() is not None
        )

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.prefilling or self.waiting)

    @property
    def admitted(self) -> int:
        """Return the number of sequences that have a row."""
        return len(self.running) + len(self.prefilling)

    @property
    def beginning(self) -> int:
        """Return the number of prompts that are worked on or could be, and of rows that have only
        just begun, after the first of these prompts was submitted: sequences that arrive together
        have the same claim to a start."""
        prompts = [*self.prefilling, *self.waiting]
        if not prompts:
            return 0
        free = max(self._max_rows - self.admitted, 0)
        first = min(prompt.submitted_at for prompt in prompts)
        few, most = JUST_BEGUN, MOST_BEGUN
        if self._horizon:
            few, most = JUST_BEGUN_AHEAD, self._max_rows
        begun = sum(row.drawn <= few and row.joined_at >= first for row in self.running)
        return len(self.prefilling) + min(len(self.waiting), free) + min(begun, most)

    @property
    def ahead(self) -> tuple[int, int]:
        """Return the prompt tokens still to be processed: of all prompts, and of the shortest."""
        lengths = [prompt.remaining for prompt in (*self.prefilling, *self.waiting)]
        return sum(lengths), min(lengths, default=0)

    def submit(self, sequence: Sequence) -> None:
        sequence.submitted_at = self._steps
        self._shares.enter(sequence)
        if self._restore is not None and not sequence.scores_prompt:
            self._mark_beginnings(sequence)
        self.waiting.append(sequence)

    def may_queue(self, sequence: Sequence, most: int) -> bool:
        """Return whether a sequence may wait: there is room among `most`, or its owner has less
        than its part of them."""
        if len(self.waiting) < most:
            return True
        own = sum(other.owner == sequence.owner for other in self.waiting)
        return own < self._shares.part(sequence, most)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended from whichever queue it is in, and free its pages."""
        for queue in (self.running, self.prefilling, self.waiting):
            if sequence in queue:
                queue.remove(sequence)
        self._shares.leave(sequence)
        self._vacate(sequence)

    def schedule(self, budget: Budget) -> Schedule:
        """Choose the next step's work and give it pages.

        Counts what it chose into each sequence's `computed`. Where there are prompts, the budget of
        a step without any must be at least a token.
        """
        self._steps += 1
        self.share_prompts()
        row = self._in_the_way()
        # A token of the row that the host has not read yet would be drawn a second time.
        if row is not None and not row.pending:
            self._pause(row)
        self._refused = None
        if self._steps >= self._short_at:
            self._make_room()
        chosen = Schedule(self._turn())
        self._prefill(chosen, budget)
        for row in chosen.rows:
            row.computed += 1
            row.stepped_at = self._steps
        if self._shares.contested:
            self._contested_at = self._steps
            self._charge(chosen)
        return chosen

    def _turn(self) -> list[Sequence]:
        """Return the running rows whose turn it is: those that have waited longest, if they take
        turns."""
        together = self._steps - self._contested_at > LATELY
        turns = len(self.running) // self._abreast if self._abreast and not together else 1
        if turns <= 1:
            return list(self.running)
        most = -(-len(self.running) // turns)
        return sorted(self.running, key=attrgetter("stepped_at"))[:most]

    def _prefill(self, chosen: Schedule, budget: Budget) -> None:
        """Admit what there is room for, and choose the prompt tokens of this step.

        If the first of them are of a key that is owed its first row, the rows of others wait for
        this one step, so that it need not wait for theirs.
        """
        room, gives_way, scored = True, False, self._scored
        chosen.load = Load(len(chosen.rows))
        for sequence in self._by_priority():
            if budget(chosen.load, sequence.computed) <= 0:
                break
            if not sequence.table and room and self._admit(sequence) is Admission.NO_ROOM:
                # A prompt that has waited longest is not overtaken for ever by smaller ones.
                room = False
                self._refused = sequence
            if not sequence.table:
                continue
            if not chosen.prefills and self._owed(sequence):
                chosen.rows, chosen.load, gives_way = [], Load(), True
            left = budget(chosen.load, sequence.computed)
            if sequence.scores_prompt:
                left = min(left, scored)
            prefill = self._chunk(sequence, left, first=not chosen.prefills)
            if prefill is None and sequence.scores_prompt:
                continue
            if prefill is None:
                break
            if sequence.scores_prompt:
                scored -= prefill.tokens
            chosen.load = chosen.load.with_chunk(sequence.computed, prefill.tokens)
            sequence.computed += prefill.tokens
            chosen.prefills.append(prefill)
            if prefill.final:
                sequence.joined_at = sequence.stepped_at = self._steps
                self.prefilling.remove(sequence)
                self.running.append(sequence)
                self._joining.append(sequence)
                self._short_at = 0
        self._gave_way = gives_way

    def _owed(self, sequence: Sequence) -> bool:
        """Return whether the sequence's key has no running row while others, no more urgent, have.
        Not twice in a row: the others' readers wait for one step at most."""
        return (
            self._shares.contested
            and not self._gave_way
            and bool(self.running)
            and all(
                row.owner != sequence.owner and row.priority >= sequence.priority
                for row in self.running
            )
        )

    def _charge(self, chosen: Schedule) -> None:
        for row in chosen.rows:
            self._shares.charge(row, DRAWN)
        for prefill in chosen.prefills:
            # Tokens that are computed again after a pause are not charged to the owner.
            if not prefill.sequence.started:
                self._shares.charge(prefill.sequence, prefill.tokens)

    def share_prompts(self) -> None:
        """Index the pages that prompts have filled up to the last step, whether or not it has run:
        later steps may read what it computes, as steps run in order. `schedule` does this first;
        a caller that has time for it earlier makes the next `schedule` faster."""
        for sequence in [*self.prefilling, *self._joining]:
            self.share(sequence)
        self._joining = []

    def share(self, sequence: Sequence) -> None:
        """Index the pages that the sequence has filled."""
        if self.reuse:
            size = self.pool.page_size
            for start, page in sequence.full_pages(size):
                tokens = sequence.tokens[start : start + size]
                sequence.committed(self.pool.commit(sequence.node, tokens, page))

    # -- pages ---------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """See that every running row has a page for one more token; some may be paused for it."""
        short = self._short()
        if short and self._horizon:
            self._reach_ahead()
            short = self._short()
        for row in short:
            if row in self.running:
                self._continue(row)
        size = self.pool.page_size
        room = [len(row.table) * size - row.computed for row in self.running]
        self._short_at = self._steps + min(room, default=0)

    def _short(self) -> list[Sequence]:
        """Return the running rows that have no page for their next token."""
        size = self.pool.page_size
        return [row for row in self.running if row.computed >= len(row.table) * size]

    def _reach_ahead(self) -> None:
        """Give all running rows the pages that they need shortly, where there are plenty."""

        def lacking(row: Sequence) -> int:
            end = min(row.computed + 1 + self._horizon, row.prompt_length + row.limit)
            return max(self.pool.pages_for(end) - len(row.table), 0)

        wanted = {row.key: lacking(row) for row in self.running}
        total = sum(wanted.values())
        if total > self.pool.free and not self._grow(total - self.pool.free, urgent=False):
            return
        for row in self.running:
            if wanted[row.key]:
                row.table.extend(self.pool.allocate(wanted[row.key]) or ())

    def _continue(self, row: Sequence) -> None:
        """Give a running row one more page, at the cost of the newest if need be."""
        while (pages := self._take(1)) is None:
            last = self._last_in()
            self._pause(last)
            if last is row:
                return
        row.table.extend(pages)

    def _last_in(self) -> Sequence:
        """Return the row that gives way to others: the newest, of the owner with the most pages if
        several owners are here."""
        rows = [*self.running, *self.prefilling]
        if self._shares.contested:
            least_urgent = max(row.priority for row in rows)
            rows = [row for row in rows if row.priority == least_urgent]
            held = held_by(rows, pages_of)
            most = max(held, key=held.__getitem__)
            rows = [row for row in rows if row.owner == most]
        return max(rows, key=newest)

    def _in_the_way(self) -> Sequence | None:
        """Return the row to pause so that another owner gets its part of the rows, or of the pages.

        None where that would leave the row's owner with less than the other then has: rows and
        pages that are taken are never taken back.
        """
        if not self._shares.contested or not self.waiting:
            return None
        rows = [*self.running, *self.prefilling]
        if len(rows) >= self._max_rows:
            held = held_by(rows, one)
            most = max(held.values())
            owed = [s for s in self.waiting if held[s.owner] + 1 < most]
            if not owed:
                return None
            first = min(owed, key=lambda s: (s.priority, self._shares.served(s), s.submitted_at))
            return self._pausable(rows, held, first, one, 1)
        refused = self._refused
        if refused is None or refused.ended or not rows:
            return None
        needed = self.pool.pages_for(len(refused.tokens) + 1)
        return self._pausable(rows, held_by(rows, pages_of), refused, pages_of, needed)

    def _pausable(
        self,
        rows: list[Sequence],
        held: Counter[str],
        first: Sequence,
        weight: Callable[[Sequence], int],
        needed: int,
    ) -> Sequence | None:
        most = max(held, key=held.__getitem__)
        theirs = [row for row in rows if row.owner == most and row.priority >= first.priority]
        if not theirs or self._shares.served(theirs[0]) < self._shares.served(first):
            return None
        last = max(theirs, key=newest)
        left = held[most] - weight(last)
        return last if left >= held[first.owner] + needed else None

    def _admit(self, sequence: Sequence) -> Admission:
        """Give a waiting prompt pages for all of itself and one token, or leave it waiting."""
        if self.closed or self.admitted >= self._max_rows:
            return Admission.LATER
        seen = self._seen(sequence)
        known = self._usable(seen)
        if self.reuse and self._comes_shortly(sequence, len(known)):
            return Admission.LATER
        state = self.pool.attachment(known[-1]) if known else None
        shared = [] if self._copies else known
        self.pool.retain(shared)
        count = self.pool.pages_for(len(sequence.tokens) + 1) - len(shared)
        # A page for each running row stays free, or this one would be paused again at once. Not for
        # a sequence that is owed a row: others are paused for it, and it need not wait for pages.
        spare = 0 if self._owed(sequence) else len(self.running)
        pages = self._take(count) if self._room(count + spare) else None
        if pages is not None and not self._enter():
            self.pool.release(pages)
            pages = None
        if pages is None:
            self.pool.release(shared)
            return Admission.NO_ROOM
        node = self.pool.node(shared[-1]) if shared else ROOT
        new = sequence.cached is None
        sequence.adopt(shared, len(known) * self.pool.page_size, node)
        if new:
            sequence.kept = max(0, self._kept(sequence) - sequence.adopted)
        sequence.table.extend(pages)
        if known and self._restore is not None:
            self._restore(sequence, state)
            # The page may have been given up, even for this one.
            if self.pool.attachment(known[-1]) is state:
                self.pool.attach(known[-1], state)
                # A sequence that copies does not hold the pages, but has used them as much.
                self.pool.retain(known)
                self.pool.release(known)
        sequence.branches.add(len(seen) * self.pool.page_size)
        self.waiting.remove(sequence)
        self.prefilling.append(sequence)
        return Admission.ADMITTED

    def _seen(self, sequence: Sequence) -> list[int]:
        """Return the pages of the longest prefix that others have computed."""
        reuse = self.reuse and not sequence.scores_prompt
        return self.pool.match(sequence.tokens) if reuse else []

    def _usable(self, seen: list[int]) -> list[int]:
        """Return those of the `seen` pages that need not be computed."""
        count = len(seen)
        if self._restore is not None:
            while count and self.pool.attachment(seen[count - 1]) is None:
                count -= 1
        return seen[:count]

    def _comes_shortly(self, sequence: Sequence, known: int) -> bool:
        """Return whether another prompt under way is computing pages that this one can go on from.
        Ignore less urgent prompts: they may get no further while more urgent ones are there."""
        if sequence.scores_prompt:
            return False
        size = self.pool.page_size
        ahead = [other for other in self.prefilling if other.priority <= sequence.priority]
        for other in [*ahead, *self._joining]:
            if self._restore is None:
                ends = [(known + 1) * size]
            else:
                # At borders that are passed, something has been attached, or could not be.
                ends = [end for end in self.borders(other) if end >= other.computed]
            if any(
                known * size < end < len(sequence.tokens)
                and other.tokens[:end] == sequence.tokens[:end]
                for end in ends
            ):
                return True
        return False

    def _common(self, one: Sequence, other: Sequence) -> int:
        """Return the number of tokens of the full pages that both begin with."""
        size = self.pool.page_size
        return alike(one.tokens, other.tokens) // size * size

    def _mark_beginnings(self, sequence: Sequence) -> None:
        """Mark where a prompt parts from others that have come lately, so that the first of them to
        be computed keeps the beginning that they share."""
        lately = [*self.prefilling, *self.waiting][-LATELY_COME:]
        for other in lately:
            common = self._common(sequence, other)
            for each in (sequence, other):
                if each.computed <= common:
                    each.branches.add(common)

    def borders(self, sequence: Sequence) -> list[int]:
        """Return where a prompt is cut so that something can be attached, at ends of full pages.

        The last border is the last that leaves a token to compute, for prompts that go on from
        this one. Those before, `MOST_BRANCHES` at most, are for prompts that begin like this one:
        where others go another way, and before its last turn, unless this prompt itself goes on
        from something attached. Borders that would save too few tokens are left out.
        """
        size, begun = self.pool.page_size, sequence.adopted
        last = (len(sequence.tokens) - 1) // size * size
        found = []
        others = sequence.branches if begun else {*sequence.branches, sequence.turn}
        branches = {branch // size * size for branch in others}
        for border in [*sorted(b for b in branches if b < last)[-MOST_BRANCHES:], last]:
            alone = border == last and begun == sequence.adopted
            least = self._worth if alone else max(self._worth, LEAST_BEGINNING)
            if border and border - begun >= least:
                found.append(border)
                begun = border
        return found

    def _kept(self, sequence: Sequence) -> int:
        """Return how many of a prompt's tokens the same prompt could have from the index later."""
        if not self.reuse:
            return 0
        if self._restore is None:
            return (len(sequence.tokens) - 1) // self.pool.page_size * self.pool.page_size
        return 0 if sequence.scores_prompt else max(self.borders(sequence), default=0)

    def _room(self, count: int) -> bool:
        """Return whether `count` pages can be had: free, new, cached, or new at others' expense."""
        return (
            count <= self.pool.free
            or self._grow(count - self.pool.free, urgent=False)
            or count <= self.pool.available
            or self._grow(count - self.pool.available, urgent=True)
        )

    def _take(self, count: int) -> list[int] | None:
        return self.pool.allocate(count) if self._room(count) else None

    def _pause(self, sequence: Sequence) -> None:
        """Take a sequence's pages away, and let it wait to be recomputed when there is room."""
        self.pauses += 1
        (self.running if sequence in self.running else self.prefilling).remove(sequence)
        self._vacate(sequence)
        self.waiting.append(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        self.pool.release(sequence.vacate())
        self._forget(sequence)

    # -- order ---------------------------------------------------------------------------------

    def _by_priority(self) -> Iterable[Sequence]:
        """Return prompts by priority, then least served owner, then shortest remaining, with
        ageing."""

        def rank(sequence: Sequence) -> tuple[int, int]:
            waited = self._steps - sequence.submitted_at
            return sequence.priority, sequence.remaining - AGEING * waited

        def ranked(prefilling: list[Sequence], waiting: list[Sequence]) -> list[Sequence]:
            first = heapq.nsmallest(LOOK, waiting, key=rank) if waiting else []
            return sorted([*prefilling, *first], key=rank)

        if not self._shares.contested:
            return ranked(self.prefilling, self.waiting)
        prefilling, waiting = by_owner(self.prefilling), by_owner(self.waiting)
        owners = dict.fromkeys([*prefilling, *waiting])
        queues = {owner: ranked(prefilling[owner], waiting[owner]) for owner in owners}
        return self._shares.in_turn(queues, rank)

    def _chunk(self, sequence: Sequence, budget: int, *, first: bool) -> Prefill | None:
        """Return as much of the prompt as the budget allows. The chunk ends on a page border,
        unless it is final, or is the first of its step and the budget is less than a page; None if
        it would have to be less than a page and is not the first."""
        size = self.pool.page_size
        if self._restore is not None:
            ahead = [end for end in self.borders(sequence) if end > sequence.computed]
            if ahead and ahead[0] <= sequence.computed + budget:
                return Prefill(sequence, ahead[0] - sequence.computed, final=False)
        if sequence.remaining <= budget:
            return Prefill(sequence, sequence.remaining, final=True)
        end = sequence.computed + budget
        if budget >= size:
            end = end // size * size
        elif not first:
            return None
        return Prefill(sequence, end - sequence.computed, final=False)


def alike(a: list[int], b: list[int]) -> int:
    """Return how many tokens `a` and `b` both begin with."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def held_by(rows: Iterable[Sequence], weight: Callable[[Sequence], int]) -> Counter[str]:
    held: Counter[str] = Counter()
    for row in rows:
        held[row.owner] += weight(row)
    return held


def one(_: Sequence) -> int:
    return 1


def pages_of(row: Sequence) -> int:
    return len(row.table)
