"""Reuse of prefixes: the pages that a prompt need not compute, since others have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlx_manager.mlx_server.engine.kv.pages import PagePool
from mlx_manager.mlx_server.engine.kv.prefix import ROOT
from mlx_manager.mlx_server.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Prefix:
    """Beginning of a prompt that the index holds.

    seen: pages of the longest prefix that others have computed. known: those of them that need not
    be computed again. shared: those that the prompt's own table begins with. state: the attachment
    of the last known page, if the model has other state than pages.
    """

    seen: list[int]
    known: list[int]
    shared: list[int]
    state: object | None = None


class PagePrefixes:
    """Reuse where pages alone make up a prefix.

    reuse: whether prefixes may be looked up. indexed: told of each page that is indexed, with its
    sequence and its number in the sequence.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        reuse: bool = True,
        indexed: Callable[[Sequence, int, int], None] | None = None,
    ) -> None:
        self.reuse = reuse
        self._pool = pool
        self._indexed = indexed
        # Prompts that the last step completed: their pages are not shared before the next one.
        self._joining: list[Sequence] = []

    # -- lookup --------------------------------------------------------------------------------

    def find(self, sequence: Sequence) -> Prefix:
        """Return the prefix of a prompt, unretained."""
        seen = self._seen(sequence)
        return Prefix(seen, seen, seen)

    def comes_shortly(self, sequence: Sequence, known: int, prefilling: list[Sequence]) -> bool:
        """Return whether another prompt under way is computing pages that this one can go on from,
        beyond its `known` pages. Ignore less urgent prompts: they may get no further while more
        urgent ones are there."""
        if not self.reuse or sequence.scores_prompt:
            return False
        size = self._pool.page_size
        ahead = [other for other in prefilling if other.priority <= sequence.priority]
        return any(
            known * size < end < len(sequence.tokens)
            and other.content[:end] == sequence.content[:end]
            for other in [*ahead, *self._joining]
            for end in self._ends(other, known)
        )

    def adopt(self, sequence: Sequence, prefix: Prefix, pages: list[int]) -> None:
        """Begin a prompt with its prefix, whose shared pages have been retained, and with `pages`
        for the rest."""
        size = self._pool.page_size
        node = self._pool.node(prefix.shared[-1]) if prefix.shared else ROOT
        new = sequence.cached is None
        sequence.adopt(prefix.shared, len(prefix.known) * size, node)
        if new:
            sequence.kept = max(0, self._kept(sequence) - sequence.adopted)
        sequence.table.extend(pages)
        sequence.branches.add(len(prefix.seen) * size)

    def mark_beginnings(self, sequence: Sequence, prompts: list[Sequence]) -> None:
        """Mark where a new prompt parts from `prompts`, which have come before it."""

    def borders(self, sequence: Sequence) -> list[int]:
        """Return where a prompt is cut so that something can be attached, at ends of full pages."""
        return []

    def next_border(self, sequence: Sequence) -> int | None:
        """Return the first border that the prompt has not reached; None if there is none."""
        return next((end for end in self.borders(sequence) if end > sequence.computed), None)

    def _seen(self, sequence: Sequence) -> list[int]:
        """Return the pages of the longest prefix that others have computed."""
        reuse = self.reuse and not sequence.scores_prompt
        return self._pool.match(sequence.content) if reuse else []

    def _ends(self, other: Sequence, known: int) -> list[int]:
        """Return the numbers of tokens after which others can go on from a prompt under way."""
        return [(known + 1) * self._pool.page_size]

    def _kept(self, sequence: Sequence) -> int:
        """Return how many of a prompt's tokens the same prompt could have from the index later."""
        size = self._pool.page_size
        return (len(sequence.tokens) - 1) // size * size if self.reuse else 0

    # -- sharing -------------------------------------------------------------------------------

    def share(self, sequence: Sequence) -> None:
        """Index the pages that the sequence has filled."""
        if self.reuse:
            size = self._pool.page_size
            for start, page in sequence.full_pages(size):
                content = sequence.content[start : start + size]
                sequence.committed(self._pool.commit(sequence.node, content, page))
                if self._indexed is not None:
                    self._indexed(sequence, start // size, page)

    def join(self, sequence: Sequence) -> None:
        """Note that the next step completes a prompt."""
        self._joining.append(sequence)

    def share_prompts(self, prefilling: list[Sequence]) -> None:
        """Index the pages that prompts have filled up to the last step, whether or not it has run:
        later steps may read what it computes, as steps run in order."""
        for sequence in [*prefilling, *self._joining]:
            self.share(sequence)
        self._joining = []
