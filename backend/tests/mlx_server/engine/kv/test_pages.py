"""Page bookkeeping against a plain model that knows what every token place of every page holds."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from mlx_manager.mlx_server.engine.kv.pages import PagePool, PageTable
from mlx_manager.mlx_server.engine.kv.prefix import ROOT, Node

SIZE = 3
# Few tokens, so that prompts often begin alike.
TOKENS = st.sampled_from([5, 6])
PROMPTS = st.lists(TOKENS, min_size=1, max_size=5 * SIZE)


class Row:
    """A sequence as the engine keeps it: its tokens, its pages, how many of them are committed."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.pages: list[int] = []
        self.node: Node = ROOT
        self.committed = 0
        # Pages that the index names for this row's own prefix: those stay found while held.
        self.findable = 0


class Crowd(RuleBasedStateMachine):
    """Rows come, share, grow, fork and leave; the model remembers what they wrote where."""

    rows = Bundle("rows")

    @initialize(pages=st.integers(0, 24))
    def begin(self, pages: int) -> None:
        self.pool = PagePool(SIZE, pages)
        self.live: list[Row] = []
        # What each place holds: the token and all before it, which its key and value depend on.
        self.memory: dict[tuple[int, int], tuple[int, ...]] = {}
        self.free = set(range(pages))
        # Least recently released first.
        self.cached: list[int] = []
        self.indexed: set[int] = set()

    # -- what rows do ------------------------------------------------------------------------

    @rule(target=rows, prompt=PROMPTS)
    def admit(self, prompt: list[int]) -> object:
        return self._admit(prompt)

    @rule(target=rows, row=rows, more=PROMPTS)
    def next_turn(self, row: Row, more: list[int]) -> object:
        return self._admit(row.tokens + more)

    @rule(row=rows, token=TOKENS)
    def grow(self, row: Row, token: int) -> None:
        if row not in self.live:
            return
        if self.pool.pages_for(len(row.tokens) + 1) > len(row.pages):
            pages = self._allocate(1)
            if pages is None:
                return
            row.pages += pages
        row.tokens.append(token)
        self._write(row, len(row.tokens) - 1)

    @rule(row=rows)
    def commit(self, row: Row) -> None:
        if row in self.live:
            self._commit(row)

    @rule(target=rows, row=rows)
    def fork(self, row: Row) -> object:
        """A second row with the same beginning: it shares the full pages and copies the last."""
        if row not in self.live:
            return multiple()
        full = len(row.tokens) // SIZE
        twin = Row(list(row.tokens))
        self._retain(row.pages[:full])
        own = self._allocate(self.pool.pages_for(len(twin.tokens) + 1) - full)
        if own is None:
            self._release(row.pages[:full])
            return multiple()
        twin.pages = row.pages[:full] + own
        twin.node, twin.committed = row.node, min(row.committed, full)
        for place in range(full * SIZE, len(twin.tokens)):
            self._write(twin, place)
        self.live.append(twin)
        return twin

    @rule(row=consumes(rows), finished=st.booleans())
    def leave(self, row: Row, finished: bool) -> None:
        if row not in self.live:
            return
        if finished:
            self._commit(row)
        self.live.remove(row)
        self._release(row.pages)

    # -- what happens to the pool --------------------------------------------------------------

    @rule(count=st.integers(0, 30))
    def pressure(self, count: int) -> None:
        pages = self._allocate(count)
        if pages is not None:
            self._release(pages)

    @rule(pages=st.integers(0, 6))
    def enlarge(self, pages: int) -> None:
        self.free |= set(range(self.pool.size, self.pool.size + pages))
        self.pool.grow(pages)

    @rule()
    def drop_cached(self) -> None:
        assert self.pool.drop_cached() == len(self.cached)
        for page in list(self.cached):
            self._forget(page)
            self.free.add(page)

    @rule(most=st.none() | st.integers(0, 4))
    def shrink(self, most: int | None) -> None:
        before = self.pool.size
        removed = self.pool.shrink(most)
        assert self.pool.size == before - removed
        gone = set(range(self.pool.size, before))
        assert gone <= self.free
        self.free -= gone
        assert removed == most or not self.pool.size or self.pool.size - 1 not in self.free
        assert most is None or removed <= most

    @precondition(lambda self: self.live)
    @rule()
    def everybody_leaves(self) -> None:
        for row in self.live:
            self._release(row.pages)
        self.live.clear()
        assert self.pool.held == 0
        assert self.pool.available == self.pool.size

    # -- what must always hold -----------------------------------------------------------------

    @invariant()
    def every_page_is_in_exactly_one_state(self) -> None:
        held = {page for row in self.live for page in row.pages}
        assert len(held) + len(self.cached) + len(self.free) == self.pool.size
        assert held | set(self.cached) | self.free == set(range(self.pool.size))
        assert (self.pool.held, self.pool.cached, self.pool.free) == (
            len(held),
            len(self.cached),
            len(self.free),
        )

    @invariant()
    def references_are_the_tables_that_hold_the_page(self) -> None:
        for page in range(self.pool.size):
            assert self.pool.references(page) == sum(page in row.pages for row in self.live)

    @invariant()
    def every_row_reads_what_it_wrote(self) -> None:
        for row in self.live:
            for place in range(len(row.tokens)):
                where = row.pages[place // SIZE], place % SIZE
                assert self.memory[where] == tuple(row.tokens[: place + 1])

    @invariant()
    def a_match_holds_the_tokens_that_were_asked_for(self) -> None:
        for row in self.live:
            asked = [*row.tokens, 7]
            self._check_match(asked)
            found = self.pool.match(asked)
            assert found[: row.findable] == row.pages[: row.findable]

    # -- the plain model -----------------------------------------------------------------------

    def _admit(self, prompt: list[int]) -> object:
        known = self._check_match(prompt)
        self._retain(known)
        own = self._allocate(self.pool.pages_for(len(prompt) + 1) - len(known))
        if own is None:
            self._release(known)
            return multiple()
        row = Row(list(prompt))
        row.pages = known + own
        row.committed = row.findable = len(known)
        row.node = self.pool.node(known[-1]) if known else ROOT
        for place in range(len(known) * SIZE, len(prompt)):
            self._write(row, place)
        self.live.append(row)
        return row

    def _check_match(self, asked: list[int]) -> list[int]:
        found = self.pool.match(asked)
        assert len(found) * SIZE < len(asked)
        assert found == self.pool.match(asked)
        for i, page in enumerate(found):
            assert page not in self.free
            for place in range(i * SIZE, (i + 1) * SIZE):
                assert self.memory[page, place % SIZE] == tuple(asked[: place + 1])
        return found

    def _write(self, row: Row, place: int) -> None:
        page = row.pages[place // SIZE]
        assert self.pool.references(page) == 1
        assert page not in self.indexed
        self.memory[page, place % SIZE] = tuple(row.tokens[: place + 1])

    def _commit(self, row: Row) -> None:
        for i in range(row.committed, len(row.tokens) // SIZE):
            tokens = row.tokens[i * SIZE : (i + 1) * SIZE]
            row.node = self.pool.commit(row.node, tokens, row.pages[i])
            row.committed = i + 1
            found = self.pool.match([*row.tokens[: (i + 1) * SIZE], 7])
            if found == row.pages[: i + 1]:
                row.findable = i + 1
        self.indexed |= {page for page in row.pages if self._is_indexed(page)}

    def _is_indexed(self, page: int) -> bool:
        try:
            self.pool.node(page)
        except KeyError:
            return False
        return True

    def _allocate(self, count: int) -> list[int] | None:
        pages = self.pool.allocate(count)
        if count > len(self.free) + len(self.cached):
            assert pages is None
            return None
        lowest = sorted(self.free)[:count]
        oldest = self.cached[: count - len(lowest)]
        assert pages == lowest + oldest
        self.free -= set(lowest)
        for page in oldest:
            self._forget(page)
        return pages

    def _forget(self, page: int) -> None:
        self.cached.remove(page)
        self.indexed.remove(page)

    def _retain(self, pages: list[int]) -> None:
        self.pool.retain(pages)
        self.cached = [page for page in self.cached if page not in pages]

    def _release(self, pages: list[int]) -> None:
        self.pool.release(pages)
        for page in reversed(pages):
            if self.pool.references(page) == 0:
                if page in self.indexed:
                    self.cached.append(page)
                else:
                    self.free.add(page)


TestCrowd = Crowd.TestCase
TestCrowd.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)


def fill(pool: PagePool, tokens: list[int]) -> list[int]:
    """Pages that a row which computed `tokens` has committed and still holds."""
    pages = pool.allocate(pool.pages_for(len(tokens)))
    assert pages is not None
    node = ROOT
    for i in range(len(tokens) // pool.page_size):
        page = tokens[i * pool.page_size : (i + 1) * pool.page_size]
        node = pool.commit(node, page, pages[i])
    return pages


def test_the_end_of_a_prefix_is_forgotten_before_its_beginning() -> None:
    pool = PagePool(2, 4)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    pages = fill(pool, tokens)
    pool.release(pages)
    for left in (3, 2, 1, 0):
        taken = pool.allocate(1)
        assert taken == [pages[left]]
        assert pool.match([*tokens, 9]) == pages[:left]


def test_the_least_recently_used_prefix_is_forgotten_first() -> None:
    pool = PagePool(2, 3)
    a, b, c = (fill(pool, [10 * i, 10 * i + 1]) for i in (1, 2, 3))
    for pages in (a, b, c):
        pool.release(pages)
    again = pool.match([10, 11, 0])
    assert again == a
    pool.retain(again)
    pool.release(again)
    assert pool.allocate(1) == b
    assert pool.allocate(1) == c
    assert pool.match([10, 11, 0]) == a


def test_allocation_is_all_or_nothing() -> None:
    pool = PagePool(2, 3)
    pool.release(fill(pool, [1, 2]))
    assert pool.allocate(4) is None
    assert (pool.free, pool.cached) == (2, 1)
    assert pool.match([1, 2, 3]) == [0]
    assert pool.allocate(0) == []


def test_pages_that_are_handed_out_again_are_told_once() -> None:
    pool = PagePool(2, 3)
    first = pool.allocate(2)
    assert first is not None
    assert pool.take_stale() == []
    pool.release(first)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.take_stale() == [0, 1]
    assert pool.take_stale() == []
    pool.release([1, 2])
    assert pool.allocate(1) == [1]
    pool.release([1])
    # What is added after pages have been removed has held nothing.
    assert pool.shrink() == 2
    pool.grow(2)
    assert pool.allocate(2) == [1, 2]
    assert pool.take_stale() == []


def test_a_prompt_that_is_known_entirely_leaves_its_last_token_to_compute() -> None:
    pool = PagePool(2, 4)
    pages = fill(pool, [1, 2, 3, 4])
    assert pool.match([1, 2, 3, 4]) == pages[:1]
    assert pool.match([1, 2, 3, 4, 5]) == pages
    assert pool.match([1]) == []


def test_the_same_tokens_after_different_prefixes_are_different_pages() -> None:
    pool = PagePool(2, 8)
    fill(pool, [1, 2, 7, 7])
    other = fill(pool, [3, 4, 7, 7])
    assert pool.match([3, 4, 7, 7, 0]) == other


def test_the_children_of_a_forgotten_page_are_not_found_under_its_successor() -> None:
    pool = PagePool(2, 4)
    first = fill(pool, [1, 2, 3, 4])
    # The beginning alone goes: its child is still held.
    pool.release(first[:1])
    assert pool.allocate(3) == [2, 3, first[0]]
    assert pool.match([1, 2, 3, 4, 5]) == []


def test_equal_pages_are_indexed_once_and_the_other_one_becomes_free() -> None:
    pool = PagePool(2, 4)
    kept, private = fill(pool, [1, 2]), fill(pool, [1, 2])
    pool.release(private)
    pool.release(kept)
    assert (pool.cached, pool.free) == (1, 3)
    assert pool.match([1, 2, 3]) == kept


def test_without_a_prefix_cache_every_released_page_is_free() -> None:
    pool = PagePool(2, 4, prefix_cache=False)
    pages = fill(pool, [1, 2, 3, 4])
    assert pool.match([1, 2, 3, 4, 5]) == []
    pool.release(pages)
    assert (pool.free, pool.cached, pool.drop_cached()) == (4, 0, 0)


def test_shrinking_stops_at_the_last_page_in_use() -> None:
    pool = PagePool(2, 6)
    pages = pool.allocate(6)
    assert pages is not None
    pool.release([0, 1, 2, 4, 5])
    assert pool.shrink() == 2
    assert (pool.size, pool.held, pool.free) == (4, 1, 3)
    pool.grow(1)
    assert pool.allocate(4) == [0, 1, 2, 4]


def test_a_cached_page_at_the_end_keeps_the_pool_from_shrinking() -> None:
    pool = PagePool(2, 2)
    pages = fill(pool, [1, 2, 3, 4])
    pool.release(pages)
    assert pool.shrink() == 0
    assert pool.drop_cached() == 2
    assert pool.shrink() == 2


def test_a_pool_that_starts_over_knows_nothing_of_before() -> None:
    pool = PagePool(2, 3)
    [page] = pool.allocate(1) or []
    pool.commit(ROOT, [1, 2], page)
    pool.attach(page, "state")
    pool.reset()
    assert (pool.size, pool.free, pool.held, pool.cached) == (0, 0, 0, 0)
    assert pool.attachments == []
    pool.grow(2)
    assert pool.match([1, 2, 3]) == []
    assert pool.allocate(2) == [0, 1]
    assert pool.take_stale() == []


def test_an_attachment_goes_with_its_page() -> None:
    pool = PagePool(2, 2)
    pages = fill(pool, [1, 2, 3, 4])
    pool.attach(pages[1], "state")
    pool.release(pages)
    assert pool.attachment(pages[1]) == "state"
    assert pool.allocate(1) == [pages[1]]
    assert pool.attachment(pages[1]) is None
    assert pool.attachments == []


def test_the_attachment_used_least_recently_is_given_up_first() -> None:
    pool = PagePool(1, 3)
    fill(pool, [1, 2, 3])
    for page in range(3):
        pool.attach(page, f"state {page}")
    pool.attach(0, "state 0")
    given_up = [pool.detach_oldest() for _ in range(4)]
    assert given_up == ["state 1", "state 2", "state 0", None]


@pytest.mark.parametrize(
    ("pages", "neighbours"),
    [
        ([], True),
        ([7], True),
        ([3, 4, 5], True),
        ([3, 5], False),
        ([4, 3], False),
        ([0, 1, 2, 9, 10], False),
    ],
)
def test_a_table_knows_whether_its_pages_are_neighbours(pages: list[int], neighbours: bool) -> None:
    table = PageTable(pages)
    assert table.neighbours is neighbours
    for page in pages:
        if page is pages[0]:
            table = PageTable()
        table.extend([page])
    assert table.neighbours is neighbours
    assert table.clear() == pages
    assert table.neighbours
    table.extend([40, 41])
    assert table.neighbours
    assert table.pages.tolist() == [40, 41]


def test_a_table_holds_any_number_of_pages() -> None:
    numbers = random.Random(1).sample(range(10_000), 1000)
    table = PageTable(numbers[:3])
    table.extend(numbers[3:])
    assert len(table) == 1000
    assert table.pages.tolist() == numbers
