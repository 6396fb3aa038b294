"""The schedule: the rows and prompt chunks of one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlx_manager.mlx_server.engine.scheduler.load import StepLoad
from mlx_manager.mlx_server.engine.sequence import Sequence
from mlx_manager.mlx_server.engine.speculation.draft import Draft


@dataclass(frozen=True, slots=True)
class Prefill:
    """Chunk of a prompt: its next `tokens` tokens. A `final` chunk gives the first draw."""

    sequence: Sequence
    tokens: int
    final: bool


@dataclass(slots=True)
class Schedule:
    """Work of one step: running rows, a token each, and chunks of prompts. False if there is none.

    drafts: those that some of the rows bring. late: see `StepLoad`. load: the amount of all the
    work.
    """

    rows: list[Sequence]
    prefills: list[Prefill] = field(default_factory=list)
    drafts: list[Draft] = field(default_factory=list)
    late: bool = False
    load: StepLoad = field(init=False)

    def __post_init__(self) -> None:
        self.load = StepLoad(len(self.rows), late=self.late)

    def __bool__(self) -> bool:
        return bool(self.rows or self.prefills)

    def leave_rows_out(self) -> None:
        """Leave the running rows out of a step that has no chunk yet."""
        self.rows, self.load = [], StepLoad()

    def add(self, prefill: Prefill) -> None:
        """Add a chunk, and count its tokens into its sequence's `computed`."""
        sequence = prefill.sequence
        self.load = self.load.with_chunk(sequence.computed, prefill.tokens)
        sequence.computed += prefill.tokens
        self.prefills.append(prefill)

    def add_draft(self, draft: Draft) -> None:
        """Add the draft of one of the rows."""
        self.load = self.load.with_draft(draft.queries - 1)
        self.drafts.append(draft)

    def count_rows(self) -> None:
        """Count what the step computes of the rows into each one's `computed`."""
        for row in self.rows:
            row.computed += row.due
        for draft in self.drafts:
            draft.sequence.computed += len(draft.tokens)


def chunk(
    sequence: Sequence, budget: int, page_size: int, border: int | None, *, first: bool
) -> Prefill | None:
    """Return as much of the prompt as the budget of so many tokens allows.

    The chunk ends at `border` if it gets that far, or on the end of a page, unless it is final, or
    is the first of its step and the budget is less than a page. It ends before the first picture
    whose features are not there, before tokens that are being read from disk, and inside no run
    whose tokens see all of it: a run that is longer than the budget is computed whole. None if the
    chunk would have to be less than a page and is not the first, or would be empty.
    """
    computed, last = sequence.computed, sequence.possible
    end = computed + budget
    if border is not None and border <= min(end, last):
        end = border
    elif end >= last:
        end = last
    elif budget >= page_size:
        end = _outside_runs(sequence, end // page_size * page_size)
    elif first:
        end = _outside_runs(sequence, end)
    else:
        return None
    if end <= computed:
        return None
    return Prefill(sequence, end - computed, final=end == len(sequence.tokens))


def _outside_runs(sequence: Sequence, end: int) -> int:
    """Return where a chunk ends that would end at `end`: before a run that it would cut, or behind
    it if it has nothing else."""
    for start, behind in sequence.runs:
        if start < end < behind:
            return start if start > sequence.computed else behind
    return end
