"""KV pages as bookkeeping: which page is whose, which is free, which may be forgotten.

Pure Python; the arrays behind the page numbers live in `store`. A page is in exactly one of three
states:

* free: nobody holds it and nothing in it is worth keeping;
* held: `references(page) > 0` sequences have it in their tables;
* cached: nobody holds it, its tokens are known to the prefix index, and it is reused by whoever
  asks for the same tokens, or taken (least recently used first) when free pages run out.

Only full pages are ever shared, and a full page is never written again: that is the whole proof
that no page is written while shared. The layers of a draft model are apart: they may be filled
later, with the same by whoever does it, and decide nothing (`engine/speculation/draft_model.py`).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, takewhile

import numpy as np
from numpy.typing import NDArray

from mlx_manager.mlx_server.engine.kv.prefix import ROOT, Node, PrefixIndex


class PageTable:
    """The pages of one sequence, in order.

    Attributes:
        neighbours: whether each page follows the one before it, so that the sequence's keys are
            one slice of the store.
    """

    def __init__(self, pages: Iterable[int] = ()) -> None:
        self._array = np.zeros(8, np.int32)
        self._size = 0
        self.neighbours = True
        self.extend(pages)

    def __len__(self) -> int:
        return self._size

    @property
    def pages(self) -> NDArray[np.int32]:
        """Return a view of the table, (pages,) int32."""
        return self._array[: self._size]

    def extend(self, pages: Iterable[int]) -> None:
        more = list(pages)
        if not more:
            return
        size = self._size + len(more)
        if size > len(self._array):
            room = np.zeros(max(size, 2 * len(self._array)), np.int32)
            room[: self._size] = self.pages
            self._array = room
        following = int(self._array[self._size - 1]) + 1 if self._size else more[0]
        if more != list(range(following, following + len(more))):
            self.neighbours = False
        self._array[self._size : size] = more
        self._size = size

    def clear(self) -> list[int]:
        """Empty the table and return the pages that were in it."""
        pages: list[int] = self.pages.tolist()
        self._size = 0
        self.neighbours = True
        return pages


class PagePool:
    """The pages of one model.

    Args:
        page_size: tokens a page holds.
        pages: pages that exist at first; `grow` adds more.
        prefix_cache: whether full pages are indexed for reuse.

    Attributes:
        size: pages that there are.
        free: those that hold nothing.
    """

    def __init__(self, page_size: int, pages: int = 0, *, prefix_cache: bool = True) -> None:
        self.page_size = page_size
        self.size = 0
        self.free = 0
        # A heap of runs of free pages: the first, and the one behind the last.
        self._runs: list[tuple[int, int]] = []
        self._references: list[int] = []
        self._index = PrefixIndex() if prefix_cache else None
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._attachments: dict[int, object] = {}
        self._labels: dict[int, object] = {}
        # The lowest numbers go first: all below this one have been handed out.
        self._handed_out = 0
        self._stale: set[int] = set()
        self.grow(pages)

    # -- figures -------------------------------------------------------------------------------

    @property
    def cached(self) -> int:
        """Return the number of unreferenced pages kept for reuse."""
        return len(self._cached)

    @property
    def available(self) -> int:
        """Return the number of pages that `allocate` could hand out now."""
        return self.free + len(self._cached)

    @property
    def held(self) -> int:
        """Return the number of pages in some sequence's table."""
        return self.size - self.available

    @property
    def removable(self) -> int:
        """Return the number of pages that `shrink` could remove once nothing is cached."""
        return sum(1 for _ in takewhile(lambda count: not count, reversed(self._references)))

    def references(self, page: int) -> int:
        return self._references[page]

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages that `tokens` tokens take."""
        return -(-tokens // self.page_size)

    # -- taking and giving ---------------------------------------------------------------------

    def reset(self) -> None:
        """Remove all pages, whoever holds them, and forget what is known of them."""
        self.size = self.free = self._handed_out = 0
        self._runs, self._references = [], []
        self._index = None if self._index is None else PrefixIndex()
        self._cached.clear()
        self._attachments.clear()
        self._labels.clear()
        self._stale.clear()

    def grow(self, pages: int) -> None:
        """Add `pages` free pages at the end."""
        if pages:
            heapq.heappush(self._runs, (self.size, self.size + pages))
        self._references.extend([0] * pages)
        self.free += pages
        self.size += pages

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` pages, each with one reference, or None (and nothing taken) if short.

        The lowest numbers first, so that a lone sequence's pages are neighbours and its keys can
        be read as a slice instead of being gathered.
        """
        if count > self.available:
            return None
        pages = self._lowest(min(count, self.free))
        while len(pages) < count:
            pages.append(self._evict())
        for page in pages:
            self._references[page] = 1
        self._stale.update(page for page in pages if page < self._handed_out)
        self._handed_out = max(self._handed_out, max(pages, default=0) + 1)
        return pages

    def _lowest(self, count: int) -> list[int]:
        """Take the `count` lowest free pages, and return them."""
        pages: list[int] = []
        while len(pages) < count:
            first, behind = self._runs[0]
            end = min(behind, first + count - len(pages))
            pages.extend(range(first, end))
            if end == behind:
                heapq.heappop(self._runs)
            else:
                heapq.heapreplace(self._runs, (end, behind))
        self.free -= count
        return pages

    def _set_free(self, pages: list[int]) -> None:
        for run in runs(sorted(pages)):
            heapq.heappush(self._runs, run)
        self.free += len(pages)

    def take_stale(self) -> list[int]:
        """Return the pages handed out since the last call that hold what other sequences left."""
        stale, self._stale = sorted(self._stale), set()
        return stale

    def retain(self, pages: Iterable[int]) -> None:
        """Add a reference to each page; a cached page becomes held."""
        for page in pages:
            if self._references[page] == 0:
                del self._cached[page]
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drop a reference to each page of a table.

        Last page first: the end of a prefix must be forgotten before its beginning, without
        which it could never be found again.
        """
        unknown: list[int] = []
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page] == 0:
                if self._index is not None and self._index.knows(page):
                    self._cached[page] = None
                else:
                    unknown.append(page)
        self._set_free(unknown)

    def drop_cached(self) -> int:
        """Forget every unreferenced page; returns how many became free."""
        dropped = [self._evict() for _ in range(len(self._cached))]
        self._set_free(dropped)
        return len(dropped)

    def shrink(self, most: int | None = None) -> int:
        """Remove the free pages at the end, `most` at most; returns how many that were."""
        free = {page for first, behind in self._runs for page in range(first, behind)}
        size = self.size
        least = 0 if most is None else max(0, size - most)
        while size > least and size - 1 in free:
            size -= 1
        removed = self.size - size
        if removed:
            self._runs = list(runs(sorted(page for page in free if page < size)))
            self.free -= removed
            del self._references[size:]
            self.size = size
            self._handed_out = min(self._handed_out, size)
            self._stale = {page for page in self._stale if page < size}
        return removed

    def _evict(self) -> int:
        assert self._index is not None
        page, _ = self._cached.popitem(last=False)
        self._index.forget(page)
        self._attachments.pop(page, None)
        self._labels.pop(page, None)
        return page

    # -- prefix reuse --------------------------------------------------------------------------

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Return the longest known run of full pages at the start of `tokens`, unretained.

        Never all of `tokens`: at least the last one is left to compute, for its logits.
        """
        if self._index is None:
            return []
        return self._index.match(tokens, self.page_size, (len(tokens) - 1) // self.page_size)

    def attach(self, page: int, attachment: object) -> None:
        """Keep `attachment` with an indexed page, until the page is forgotten or `detach_oldest`.

        Attaching again what is attached already counts as using it.
        """
        self._attachments.pop(page, None)
        self._attachments[page] = attachment

    def attachment(self, page: int) -> object | None:
        return self._attachments.get(page)

    def detach_oldest(self) -> object | None:
        """Give up the attachment that was used least recently, if there is any."""
        for page in self._attachments:
            return self._attachments.pop(page)
        return None

    @property
    def attachments(self) -> list[object]:
        return list(self._attachments.values())

    def label(self, page: int, label: object) -> None:
        """Note something of an indexed page, until the page is forgotten. A page that is not
        indexed, since an equal one is, stays without."""
        if self._index is not None and self._index.knows(page):
            self._labels[page] = label

    @property
    def labels(self) -> Mapping[int, object]:
        """Return the labels by their pages."""
        return self._labels

    def oldest(self, count: int) -> list[int]:
        """Return the cached pages that would be taken next, at most `count`."""
        return list(islice(self._cached, count))

    @property
    def newest(self) -> list[int]:
        """Return the cached pages, those used last first."""
        return list(reversed(self._cached))

    def commit(self, parent: Node, tokens: Sequence[int], page: int) -> Node:
        """Record that held `page` is full and holds `tokens` after `parent`; return its node.

        If an equal page is known already, that one stays indexed and this one stays private.
        """
        if self._index is None:
            return ROOT
        return self._index.insert(parent, tokens, page)

    def content(self, page: int) -> Node | None:
        """Return the node of a page, by which its content is known; None if it is not indexed."""
        known = self._index is not None and self._index.knows(page)
        return self.node(page) if known else None

    def node(self, page: int) -> Node:
        """Return the node of an indexed page, as parent for the page that follows it."""
        return ROOT if self._index is None else self._index.node(page)


def runs(pages: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first of each run of neighbours in `pages`, and the page behind its last."""
    begun = 0
    for place, page in enumerate(pages, 1):
        if place == len(pages) or pages[place] != page + 1:
            yield pages[begun], page + 1
            begun = place
