"""Attention by powers of two against dense arithmetic in double precision."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_manager.mlx_server.engine.kv.powers import (
    LEAST_BLOCK,
    attend_causal,
    attend_rows,
    block_of,
)

DIM = 8


def expected(queries: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float) -> np.ndarray:
    """(heads, count, dim of the values), arrays as `attend_causal` takes them, without the 1."""
    heads, count, _ = queries.shape
    kv_heads, seen, _ = keys.shape
    share = np.arange(heads) // (heads // kv_heads)
    scores = np.einsum("hqd,hkd->hqk", queries, keys[share]) * scale
    scores[:, np.arange(seen) > np.arange(seen - count, seen)[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,hkd->hqd", weights / weights.sum(-1, keepdims=True), values[share])


@settings(max_examples=60)
@given(
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1), (3, 3)]),
    count=st.integers(1, 40),
    before=st.integers(1, 300),
    value_dim=st.sampled_from([DIM, 5]),
    loud=st.sampled_from([1.0, 30.0]),
    seed=st.integers(0, 2**16),
)
def test_it_is_attention_to_what_came_before_and_to_oneself(
    heads: tuple[int, int], count: int, before: int, value_dim: int, loud: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    queries = random.normal(size=(heads[0], count, DIM)) * loud
    keys = random.normal(size=(heads[1], before + count, DIM))
    values = random.normal(size=(heads[1], before + count, value_dim))
    given_arrays = [mx.array(a[None].astype(np.float32)) for a in (queries, keys, values)]
    found = attend_causal(*given_arrays, 0.3)
    # Scores of hundreds are themselves off by some 1e-5 in float32.
    np.testing.assert_allclose(
        np.array(found)[0], expected(queries, keys, values, 0.3), atol=1e-5 * max(loud, 2)
    )


@pytest.mark.parametrize("start", [64, 1000])
def test_keys_that_are_a_view_of_a_larger_pool_are_read_in_place(start: int) -> None:
    random = np.random.default_rng(start)
    pool = random.normal(size=(2, 2048, DIM)).astype(np.float32)
    queries = random.normal(size=(1, 4, 16, DIM)).astype(np.float32)
    held = mx.array(pool)[None, :, start : start + 500]
    found = attend_causal(mx.array(queries), held, held, 0.5)
    mine = pool[:, start : start + 500].astype(np.float64)
    np.testing.assert_allclose(
        np.array(found)[0], expected(queries[0].astype(np.float64), mine, mine, 0.5), atol=1e-5
    )


def test_a_block_is_never_so_small_that_products_suffer() -> None:
    assert block_of(heads=32, seen=100_000) == LEAST_BLOCK
    assert block_of(heads=4, seen=4_000) >= LEAST_BLOCK


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    loud=st.sampled_from([1.0, 30.0]),
    seed=st.integers(0, 2**16),
)
def test_rows_see_what_is_not_hidden_from_them(
    lengths: list[int], kv_heads: int, group: int, loud: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    rows, most = len(lengths), max(lengths)
    queries = random.normal(size=(rows, kv_heads, group, DIM)) * loud
    keys, values = random.normal(size=(2, rows, kv_heads, most, DIM))
    hidden = np.where(np.arange(most) < np.array(lengths)[:, None], 0, -np.inf)[:, None, None]
    arrays = [mx.array(a.astype(np.float32)) for a in (queries, keys, values, hidden)]
    found = np.array(attend_rows(*arrays[:3], 0.3, arrays[3]))
    for row, length in enumerate(lengths):
        for head in range(kv_heads):
            alone = expected(
                queries[row, head][:, None],
                keys[row, head][None, :length],
                values[row, head][None, :length],
                0.3,
            )
            np.testing.assert_allclose(found[row, head], alone[:, 0], atol=1e-5 * max(loud, 2))
