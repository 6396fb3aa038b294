"""Cutting a step's contexts into work items."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mlx_manager.mlx_server.devices.attention.splits import MAX_SPLITS, MIN_TILES, TILE, plan

lengths_of_rows = st.lists(st.integers(0, 70_000), min_size=1, max_size=40)


def items_of(lengths, **options):
    splits = plan(lengths, **{"blocks_per_item": 8, "blocks_wanted": 528, **options})
    return splits, np.array(splits.items)


@given(lengths=lengths_of_rows, window=st.none() | st.integers(1, 5000))
def test_every_tile_that_a_query_sees_is_read_once_and_no_other(lengths, window):
    _, items = items_of(lengths, window=window)
    for query, length in enumerate(lengths):
        first = 0 if window is None else max(0, length - window) // TILE
        read = [t for item in items if item[0] == query for t in range(item[2], item[3])]
        assert sorted(read) == list(range(first, -(-length // TILE)))


@given(lengths=lengths_of_rows)
def test_the_splits_of_a_query_lie_side_by_side_in_order(lengths):
    _, items = items_of(lengths)
    for place, (query, _, _, _, split, splits, base, _) in enumerate(items):
        if query >= 0:
            assert place == base + split
            assert 0 <= split < splits <= MAX_SPLITS


@given(lengths=lengths_of_rows)
def test_a_context_is_cut_into_no_more_items_than_asked(lengths):
    _, items = items_of(lengths, blocks_wanted=10_000, min_tiles=1, max_splits=128)
    assert items[:, 5].max() <= 128


def test_a_long_context_is_cut_into_as_many_items_as_asked():
    splits, items = items_of([128 * TILE], blocks_wanted=10_000, min_tiles=1, max_splits=128)
    assert splits.divided
    assert items[:, 5].max() == 128


@given(lengths=lengths_of_rows)
def test_cut_contexts_leave_no_crumbs(lengths):
    _, items = items_of(lengths)
    cut = items[items[:, 5] > 1]
    assert (cut[:, 3] - cut[:, 2] >= MIN_TILES).all()


@given(lengths=lengths_of_rows)
def test_long_items_come_first(lengths):
    _, items = items_of(lengths)
    sizes = (items[:, 3] - items[:, 2])[items[:, 0] >= 0]
    assert (np.diff(sizes) <= 1).all()


def test_one_long_row_among_short_ones_is_cut_alone():
    splits, items = items_of([8192] + [64] * 31)
    assert splits.divided
    assert (items[items[:, 0] > 0][:, 5] == 1).all()
    long = items[items[:, 0] == 0]
    assert (long[:, 3] - long[:, 2]).max() <= 2 * MIN_TILES


def test_contexts_that_fill_the_device_whole_are_not_cut():
    splits, _ = items_of([512] * 64)
    assert not splits.divided
    assert splits.work == 64


def test_lists_have_few_distinct_lengths():
    rng = np.random.default_rng(0)
    works = {items_of(rng.integers(1, 20_000, size=32))[0].work for _ in range(300)}
    assert len(works) <= 8


def test_queries_read_the_table_rows_they_are_given():
    _, items = items_of([100, 90, 80], table_rows=[4, 4, 7])
    assert {(int(item[0]), int(item[1])) for item in items} == {(0, 4), (1, 4), (2, 7)}
