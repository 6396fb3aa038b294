"""Scheduler: the rows and prompt chunks of the next step, and the pages that they need.

Queues, paging, fairness and the reuse of prefixes are policies of their own; the scheduler puts
them together. No arrays and no clock here: only sequences, pages and the budget of a step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from mlx_manager.mlx_server.engine.kv.pages import PagePool
from mlx_manager.mlx_server.engine.scheduler.fairness import Fairness
from mlx_manager.mlx_server.engine.scheduler.load import Budget, StepLoad
from mlx_manager.mlx_server.engine.scheduler.paging import Paging, RowMemory
from mlx_manager.mlx_server.engine.scheduler.prefixes import PagePrefixes
from mlx_manager.mlx_server.engine.scheduler.queues import Queues
from mlx_manager.mlx_server.engine.scheduler.schedule import Schedule, chunk
from mlx_manager.mlx_server.engine.sequence import Sequence
from mlx_manager.mlx_server.engine.speculation.draft import Draft, Proposal

# A row has only just begun while it has drawn at most so many tokens; more where steps are so short
# that pages are given ahead, and a burst's prompts take many of them.
JUST_BEGUN = 2
JUST_BEGUN_AHEAD = 16
# So many of them have a claim at most where steps are long: whoever comes while a larger burst
# begins would wait for steps of whole chunks, one after another.
MOST_BEGUN = 16


class Admission(Enum):
    """Outcome of admitting a waiting prompt. LATER: wait for a row, or for pages under way."""

    ADMITTED = auto()
    LATER = auto()
    NO_ROOM = auto()


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of steps.

    max_rows: sequences that may hold pages at once. horizon: see `Paging`. abreast: see `Fairness`.
    scored: most prompt tokens of a step that logits are wanted of, at least a page.
    """

    max_rows: int
    horizon: int = 0
    abreast: int = 0
    scored: int = sys.maxsize


class FeatureFinder(Protocol):
    """The pictures of sequences: `engine.pictures.Pictures`, as far as the scheduler knows them."""

    def begin(self, sequence: Sequence) -> None:
        """Find the features that an admitted sequence needs, or have them made."""
        ...


class Disk(Protocol):
    """Prefixes on disk: `engine.disk.tier.DiskTier`, as far as the scheduler knows it."""

    def begin(self, sequence: Sequence) -> None:
        """Have what an admitted sequence goes on from beyond memory read, if that is worth it."""
        ...


class Drafting(Protocol):
    """Chooser of drafts."""

    def is_likely(self, rows: list[Sequence], *, prompts: bool) -> bool:
        """Return whether one of the running rows may bring a draft to the next step. prompts:
        whether there are prompts under way."""
        ...

    def choose(
        self, rows: list[Sequence], load: StepLoad, most: int, room: Callable[[Sequence, int], int]
    ) -> Iterable[tuple[Sequence, Proposal]]:
        """Yield rows and the drafts that they had best bring to a step of this load, at most `most`
        tokens in all.

        room: gives a row pages for so many tokens beyond its next one, where there are some, and
        returns for how many of them it has pages.
        """
        ...


class Scheduler:
    """Owner of the queues and the pages, which chooses the work of each step.

    Args:
        pool: the pages.
        memory: makes more pages, and room for what rows keep besides.
        prefixes: the way in which prefixes are reused.
        limits: of each step.
        pictures: what sees pictures, if something does.
        disk: has prefixes beyond memory, if there is a disk for them.
        drafting: chooses drafts, if rows may bring some.

    Attributes:
        closed: while it is set, who waits goes on waiting.
        pauses: number of times that a row had its pages taken away.
    """

    def __init__(
        self,
        pool: PagePool,
        memory: RowMemory,
        prefixes: PagePrefixes,
        limits: SchedulerLimits,
        pictures: FeatureFinder | None = None,
        *,
        disk: Disk | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        self.queues = Queues(limits.max_rows)
        self.prefixes = prefixes
        self.closed = False
        self.pauses = 0
        self._limits = limits
        self._pictures = pictures
        self._disk = disk
        self._drafting = drafting
        self._paging = Paging(pool, memory, limits.horizon)
        self._fairness = Fairness(self.queues, pool.pages_for, limits.abreast)
        self._steps = 0
        # Keys of the prompts with a chunk in the last step.
        self._chunked: set[int] = set()
        # Whether the next step is `StepLoad.late`.
        self._late = False

    @property
    def tight(self) -> bool:
        """Return whether a row may be left out of a step or paused: the running rows need more
        pages than there are, or another key is owed its part."""
        running = self.queues.running
        return self._paging.is_short(running, self._steps + 1) or self._fairness.has_claims

    def awaits_drafts(self, tried: bool) -> bool:
        """Return whether the next step depends on tokens that the host must have read: a running
        row may bring a draft to it, or has brought one to the last step (`tried`)."""
        if tried or self._drafting is None:
            self._late = tried
        else:
            prompts = any(not prompt.blocked for prompt in self.queues.prefilling)
            self._late = self._drafting.is_likely(self.queues.running, prompts=prompts)
        return self._late

    @property
    def beginning(self) -> int:
        """Return the number of prompts and rows that have a claim to a start; see
        `Queues.beginning`."""
        if self._limits.horizon:
            return self.queues.beginning(JUST_BEGUN_AHEAD, self._limits.max_rows)
        return self.queues.beginning(JUST_BEGUN, MOST_BEGUN)

    # -- sequences -----------------------------------------------------------------------------

    def may_queue(self, sequence: Sequence, most: int) -> bool:
        """Return whether a sequence may wait: there is room among `most`, or its owner has less
        than its part of them."""
        return self._fairness.may_queue(sequence, most)

    def submit(self, sequence: Sequence) -> None:
        sequence.submitted_at = self._steps
        self._fairness.shares.enter(sequence)
        self.prefixes.mark_beginnings(sequence, self.queues.prompts)
        self.queues.waiting.append(sequence)

    def share(self, sequence: Sequence) -> None:
        """Index the pages that the sequence has filled."""
        self.prefixes.share(sequence)

    def share_prompts(self) -> None:
        """Index the pages that prompts have filled up to the last step. `schedule` does this first;
        a caller that has time for it earlier makes the next `schedule` faster."""
        self.prefixes.share_prompts(self.queues.prefilling)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended from whichever queue it is in, and free its pages."""
        self.queues.remove(sequence)
        self._fairness.shares.leave(sequence)
        self._paging.vacate(sequence)

    def at_borders(self) -> Iterator[Sequence]:
        """Yield the prompts whose state is to be kept as the last step leaves it."""
        for sequence in self.queues.prefilling:
            chunked = sequence.key in self._chunked
            if chunked and sequence.computed in self.prefixes.borders(sequence):
                yield sequence

    # -- steps ---------------------------------------------------------------------------------

    def schedule(self, budget: Budget) -> Schedule:
        """Choose the next step's work and give it pages.

        Counts what it chose into each sequence's `computed`. Where there are prompts, the budget of
        a step without any must be at least a token.
        """
        self._steps += 1
        full = self.queues.set_full_aside(self._steps)
        self.share_prompts()
        row = self._fairness.in_the_way()
        # A token of the row that the host has not read yet would be drawn a second time.
        if row is not None and not row.pending:
            self._pause(row)
        self._paging.supply(self.queues.running, self._steps, self._pause_last)
        chosen = Schedule(self._fairness.turn(self._steps), late=self._late)
        self._late = False
        scored = self._prefill(chosen, budget)
        if self._drafting is not None and chosen.rows:
            self._draft(chosen, self._drafting, scored)
        self._chunked = {prefill.sequence.key for prefill in chosen.prefills}
        chosen.count_rows()
        for row in chosen.rows:
            row.stepped_at = self._steps
        self.queues.running += full
        return chosen

    def _draft(self, chosen: Schedule, drafting: Drafting, most: int) -> None:
        """Let rows bring drafts, at most so many tokens in all, where there are pages. A row that
        has more than one token due brings one in any case."""
        spare = len(self.queues.running)

        def room(row: Sequence, tokens: int) -> int:
            return max(self._paging.stretch(row, tokens, spare), 0)

        for row, proposal in drafting.choose(chosen.rows, chosen.load, most, room):
            samplers = row.samplers_along(proposal.tokens[: room(row, len(proposal.tokens))])
            if len(samplers) > 1:
                tokens = proposal.tokens[: len(samplers) - 1]
                chosen.add_draft(Draft(row, proposal.method, tokens, samplers, row.due))
        bring = {draft.sequence.key for draft in chosen.drafts}
        for row in chosen.rows:
            if row.due > 1 and row.key not in bring:
                chosen.add_draft(Draft(row, None, (), [row.sampler], row.due))
        if chosen.drafts:
            self._paging.look_again()
            self.queues.look_again()

    def _prefill(self, chosen: Schedule, budget: Budget) -> int:
        """Admit what there is room for, choose the prompt tokens of this step, and return how many
        more tokens logits may be wanted of.

        If the first of them are of a key that is owed its first row, the rows of others wait for
        this one step, so that it need not wait for theirs.
        """
        refused, gives_way, scored = None, False, self._limits.scored
        for sequence in self.queues.in_order(self._steps, self._fairness.shares):
            if sequence.blocked:
                continue
            if budget(chosen.load, sequence.computed) <= 0:
                break
            # A prompt that has waited longest is not overtaken for ever by smaller ones.
            admits = not sequence.table and refused is None
            if admits and self._admit(sequence) is Admission.NO_ROOM:
                refused = sequence
            if not sequence.table or sequence.blocked:
                continue
            if not chosen.prefills and self._fairness.is_owed(sequence):
                chosen.leave_rows_out()
                gives_way = True
            tokens = self._add_chunk(chosen, sequence, budget, scored)
            if sequence.scores_prompt:
                scored -= tokens
            elif not tokens:
                break
        self._fairness.settle(chosen, self._steps, gives_way, refused)
        return scored

    def _add_chunk(self, chosen: Schedule, sequence: Sequence, budget: Budget, scored: int) -> int:
        """Add as much of a prompt as the budget allows, and return the number of its tokens.

        scored: most tokens of a prompt whose tokens all have logits.
        """
        left = budget(chosen.load, sequence.computed)
        if sequence.scores_prompt:
            left = min(left, scored)
        size, border = self._paging.pool.page_size, self.prefixes.next_border(sequence)
        prefill = chunk(sequence, left, size, border, first=not chosen.prefills)
        if prefill is None:
            return 0
        chosen.add(prefill)
        if prefill.final:
            sequence.joined_at = sequence.stepped_at = self._steps
            self.queues.join(sequence)
            self.prefixes.join(sequence)
            self._paging.look_again()
        return prefill.tokens

    def _admit(self, sequence: Sequence) -> Admission:
        """Give a waiting prompt pages for all of itself and one token, or leave it waiting."""
        queues, prefixes = self.queues, self.prefixes
        if self.closed or queues.admitted >= queues.max_rows:
            return Admission.LATER
        prefix = prefixes.find(sequence)
        if prefixes.comes_shortly(sequence, len(prefix.known), queues.prefilling):
            return Admission.LATER
        # A page for each running row stays free, or this one would be paused again at once. Not for
        # a sequence that is owed a row: others are paused for it, and it need not wait for pages.
        spare = 0 if self._fairness.is_owed(sequence) else len(queues.running)
        pages = self._paging.admit(sequence, prefix.shared, spare)
        if pages is None:
            return Admission.NO_ROOM
        prefixes.adopt(sequence, prefix, pages)
        queues.admit(sequence)
        if self._disk is not None and prefixes.reuse and not sequence.scores_prompt:
            self._disk.begin(sequence)
        if sequence.images is not None and self._pictures is not None:
            self._pictures.begin(sequence)
        return Admission.ADMITTED

    def _pause(self, sequence: Sequence) -> None:
        """Take a sequence's pages away, and let it wait to be recomputed when there is room."""
        self.pauses += 1
        self.queues.put_back(sequence)
        self._paging.vacate(sequence)

    def _pause_last(self) -> Sequence:
        """Pause the row that gives way to others, and return it."""
        row = self._fairness.last_in()
        self._pause(row)
        return row
