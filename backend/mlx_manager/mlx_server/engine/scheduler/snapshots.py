"""Reuse of prefixes where layers have state besides pages: prompts are cut where it is kept."""

from __future__ import annotations

from collections.abc import Callable

from mlx_manager.mlx_server.engine.kv.pages import PagePool
from mlx_manager.mlx_server.engine.scheduler.prefixes import PagePrefixes, Prefix
from mlx_manager.mlx_server.engine.sequence import Sequence
from mlx_manager.mlx_server.utils.prefixes import alike

# Fewest tokens that prompts must begin alike with for something to be attached where they part: an
# attachment takes as much memory as the keys and values of some hundred tokens, or more.
LEAST_BEGINNING = 64
# Most places where a prompt is cut for other prompts, the last ones: each takes a step.
MOST_BRANCHES = 2
# Number of the latest prompts that a new one is compared with.
LATELY_COME = 16


class SnapshotPrefixes(PagePrefixes):
    """Reuse where a prefix is pages and a snapshot of the other layers' state.

    A prefix ends where a snapshot is attached to its last page. See `borders` for where that is.

    Args:
        pool: the pages.
        restore: begins a sequence with the snapshot of its prefix.
        worth: tokens that a snapshot must save.
        copies: whether a sequence that goes on from a snapshot holds all of it a second time, and
            takes pages for that.
    """

    def __init__(
        self,
        pool: PagePool,
        restore: Callable[[Sequence, object], None],
        *,
        worth: int = 0,
        copies: bool = False,
        indexed: Callable[[Sequence, int, int], None] | None = None,
    ) -> None:
        super().__init__(pool, indexed=indexed)
        self._restore = restore
        self._worth = worth
        self._copies = copies

    def find(self, sequence: Sequence) -> Prefix:
        seen = self._seen(sequence)
        count = len(seen)
        while count and self._pool.attachment(seen[count - 1]) is None:
            count -= 1
        known = seen[:count]
        state = self._pool.attachment(known[-1]) if known else None
        return Prefix(seen, known, [] if self._copies else known, state)

    def adopt(self, sequence: Sequence, prefix: Prefix, pages: list[int]) -> None:
        super().adopt(sequence, prefix, pages)
        if not prefix.known:
            return
        self._restore(sequence, prefix.state)
        last = prefix.known[-1]
        # The page may have been given up, even for this sequence.
        if self._pool.attachment(last) is prefix.state:
            self._pool.attach(last, prefix.state)
            # A sequence that copies does not hold the pages, but has used them as much.
            self._pool.retain(prefix.known)
            self._pool.release(prefix.known)

    def mark_beginnings(self, sequence: Sequence, prompts: list[Sequence]) -> None:
        """Mark where a new prompt parts from others that have come lately, so that the first of
        them to be computed keeps the beginning that they share."""
        if sequence.scores_prompt:
            return
        size = self._pool.page_size
        for other in prompts[-LATELY_COME:]:
            common = alike(sequence.content, other.content) // size * size
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
        size, begun = self._pool.page_size, sequence.adopted
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

    def _ends(self, other: Sequence, known: int) -> list[int]:
        # At borders that are passed, something has been attached, or could not be.
        return [end for end in self.borders(other) if end >= other.computed]

    def _kept(self, sequence: Sequence) -> int:
        return 0 if sequence.scores_prompt else max(self.borders(sequence), default=0)
