"""Masks: which tokens of a text a token sees."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mlx_manager.mlx_server.encoders.batch import CAUSAL, PaddedBatch

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=4)


def batch_of(lengths: list[int]) -> PaddedBatch:
    ids = mx.zeros((len(lengths), max(lengths)), mx.int32)
    return PaddedBatch(ids, mx.zeros_like(ids), mx.array(lengths, mx.int32))


@given(LENGTHS)
def test_a_token_sees_all_of_its_text_and_no_filling(lengths: list[int]):
    seen = np.array(batch_of(lengths).to_all())[:, 0, 0]
    assert [list(row) for row in seen] == [
        [place < length for place in range(max(lengths))] for length in lengths
    ]


@given(LENGTHS, st.integers(1, 12), st.booleans())
def test_a_token_sees_what_is_near(lengths: list[int], reach: int, back: bool):
    mask = batch_of(lengths).to_near(reach, back=back)
    longest = max(lengths)
    seen = np.tril(np.ones((1, longest, longest), bool)) if isinstance(mask, str) else np.array(mask)[:, 0]  # fmt: skip
    seen = np.broadcast_to(seen, (len(lengths), longest, longest))
    for row, length in zip(seen, lengths, strict=True):
        for place in range(length):
            first, last = place - reach, place if back else place + reach
            near = [other for other in range(length) if first <= other <= last]
            assert list(np.flatnonzero(row[place])) == near


@given(LENGTHS, st.integers(1, 12))
def test_every_token_sees_one_at_least(lengths: list[int], reach: int):
    assert bool(mx.all(mx.any(batch_of(lengths).to_near(reach), axis=-1)))


def test_a_window_that_holds_all_costs_no_mask_of_pairs():
    assert batch_of([5, 3]).to_near(4).shape == (2, 1, 1, 5)
    assert batch_of([5, 3]).to_near(4, back=True) == CAUSAL
