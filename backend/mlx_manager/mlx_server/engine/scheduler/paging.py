"""Pages for the rows of the next step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from mlx_manager.mlx_server.engine.kv.pages import PagePool
from mlx_manager.mlx_server.engine.sequence import Sequence


class RowMemory(Protocol):
    """Memory of the rows, which somebody else accounts for."""

    def grow(self, lacking: int, *, urgent: bool) -> bool:
        """Add at least `lacking` pages to the pool; return whether that was possible. Urgent growth
        may take memory that others could spare."""
        ...

    def enter(self, sequence: Sequence) -> bool:
        """Make room for what a sequence keeps besides pages; return whether that was possible.
        Called once there are pages for the sequence."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Free what a sequence keeps besides pages: it has given up its pages, if it had any."""
        ...


class Paging:
    """Supply of pages.

    Args:
        pool: the pages.
        memory: where more pages come from.
        horizon: tokens ahead that running rows get pages for, all of them at once, where there is
            plenty: their tables then change in few steps.
    """

    def __init__(self, pool: PagePool, memory: RowMemory, horizon: int = 0) -> None:
        self.pool = pool
        self._memory = memory
        self._horizon = horizon
        # The first step that may find one of the running rows without the page it needs.
        self._short_at = 0

    # -- running rows --------------------------------------------------------------------------

    def is_short(self, running: list[Sequence], step: int) -> bool:
        """Return whether the running rows need more pages in `step` than could be handed out."""
        return step >= self._short_at and len(self._short(running)) > self.pool.available

    def supply(self, running: list[Sequence], step: int, give_way: Callable[[], Sequence]) -> None:
        """See that every running row has a page for one more token.

        give_way: pauses a row so that others get its pages, removes it from `running` if it runs,
            and returns it.
        """
        if step < self._short_at:
            return
        short = self._short(running)
        if short and self._horizon:
            self._reach_ahead(running)
            short = self._short(running)
        for row in short:
            if row in running:
                self._continue(row, give_way)
        size = self.pool.page_size
        room = [len(row.table) * size - row.computed - row.due + 1 for row in running]
        self._short_at = step + min(room, default=0)

    def stretch(self, row: Sequence, tokens: int, spare: int) -> int:
        """Give a running row pages for so many tokens beyond its next one, if that is at nobody's
        expense; return for how many of them it has pages then.

        spare: pages that must be left.
        """
        size, table = self.pool.page_size, row.table
        lacking = self.pool.pages_for(row.computed + row.due + tokens) - len(table)
        if lacking > 0:
            free = self.pool.free - spare
            ample = lacking <= free or self._memory.grow(lacking - free, urgent=False)
            if ample or lacking + spare <= self.pool.available:
                table.extend(self.pool.allocate(lacking) or ())
        return min(tokens, len(table) * size - row.computed - row.due)

    def look_again(self) -> None:
        """Look at all running rows again before the next step: one has joined, or may have drawn
        more than a token."""
        self._short_at = 0

    def _short(self, running: list[Sequence]) -> list[Sequence]:
        """Return the running rows that have no page for their next token."""
        size = self.pool.page_size
        return [row for row in running if row.computed + row.due > len(row.table) * size]

    def _reach_ahead(self, running: list[Sequence]) -> None:
        """Give all running rows the pages that they need shortly, where there are plenty."""

        def lacking(row: Sequence) -> int:
            end = min(row.computed + 1 + self._horizon, row.prompt_length + row.limit)
            return max(self.pool.pages_for(end) - len(row.table), 0)

        wanted = {row.key: lacking(row) for row in running}
        total = sum(wanted.values())
        free = self.pool.free
        if total > free and not self._memory.grow(total - free, urgent=False):
            return
        for row in running:
            if wanted[row.key]:
                row.table.extend(self.pool.allocate(wanted[row.key]) or ())

    def _continue(self, row: Sequence, give_way: Callable[[], Sequence]) -> None:
        """Give a running row one more page, at the cost of other rows if need be."""
        while (pages := self._take(1)) is None:
            if give_way() is row:
                return
        row.table.extend(pages)

    # -- prompts -------------------------------------------------------------------------------

    def admit(self, sequence: Sequence, shared: list[int], spare: int) -> list[int] | None:
        """Take the pages that a prompt needs for all of itself and one token, besides the `shared`
        ones, which get a reference more. None, with nothing taken, if there is no room.

        spare: pages that must be left.
        """
        self.pool.retain(shared)
        count = self.pool.pages_for(len(sequence.tokens) + 1) - len(shared)
        pages = self._take(count) if self._has_room(count + spare) else None
        if pages is not None and not self._memory.enter(sequence):
            self.pool.release(pages)
            pages = None
        if pages is None:
            self.pool.release(shared)
        return pages

    def vacate(self, sequence: Sequence) -> None:
        """Free a sequence's pages and what it keeps besides. Its queue has been left already."""
        self.pool.release(sequence.vacate())
        self._memory.forget(sequence)

    def _has_room(self, count: int) -> bool:
        """Return whether `count` pages can be had: free, new, cached, or new at others' expense."""
        pool, grow = self.pool, self._memory.grow
        return (
            count <= pool.free
            or grow(count - pool.free, urgent=False)
            or count <= pool.available
            or grow(count - pool.available, urgent=True)
        )

    def _take(self, count: int) -> list[int] | None:
        return self.pool.allocate(count) if self._has_room(count) else None
