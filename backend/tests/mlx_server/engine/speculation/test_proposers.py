"""Texts in which the end of another text is looked for."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mlx_manager.mlx_server.engine.speculation.acceptance import Acceptance
from mlx_manager.mlx_server.engine.speculation.proposers import SearchedTokens

FEW = st.lists(st.integers(0, 2), max_size=40)


def longest(text: list[int], end: list[int]) -> int:
    """Length of the longest end of `end` that stands in `text` with something after it."""
    lengths = [
        size
        for size in range(1, len(end) + 1)
        for at in range(len(text) - size)
        if text[at : at + size] == end[len(end) - size :]
    ]
    return max(lengths, default=0)


@given(FEW, st.lists(st.integers(0, 2), min_size=1, max_size=12), st.integers(1, 4))
def test_what_follows_the_longest_match_is_found(text: list[int], end: list[int], least: int):
    most = 5
    found = SearchedTokens(text).follow(end, least, most)
    length = longest(text, end)
    if length < least:
        assert found == []
        return
    matching = end[len(end) - length :]
    follows = [
        text[at + length : at + length + most]
        for at in range(len(text) - length)
        if text[at : at + length] == matching
    ]
    assert found in follows
    assert len(found) == max(map(len, follows))


@given(st.lists(FEW, max_size=6), st.lists(st.integers(0, 2), min_size=2, max_size=9))
def test_a_text_that_grows_is_the_same_text(parts: list[list[int]], end: list[int]):
    grown, whole = SearchedTokens([]), [token for part in parts for token in part]
    for part in parts:
        grown.extend(part)
    assert grown.size == len(whole)
    assert grown.follow(end, 2, 4) == SearchedTokens(whole).follow(end, 2, 4)
    assert grown.first(3) == whole[:3]


def test_the_last_of_equal_matches_with_enough_after_it_is_taken():
    text = [1, 2, 3, 7, 7, 1, 2, 3, 8, 8, 1, 2, 3]
    assert SearchedTokens(text).follow([1, 2, 3], 3, 2) == [8, 8]
    # Behind the last one there are fewer.
    assert SearchedTokens(text).follow([1, 2, 3], 3, 7) == [7, 7, 1, 2, 3, 8, 8]


def test_a_loop_is_drafted_as_far_as_it_is_asked_for():
    text = [5, 6] * 20
    assert SearchedTokens(text).follow(text[-16:], 3, 8) == [5, 6] * 4


def test_expected_tokens_of_a_draft():
    assert Acceptance.tokens(1.0, 5) == 5
    assert np.isclose(Acceptance.tokens(0.5, 3), 0.5 + 0.25 + 0.125)
    assert Acceptance.tokens(0.0, 3) == 0
