"""Attention by powers of two against dense arithmetic in double precision."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx import nn

from mlx_manager.mlx_server.devices.cpu.powers import (
    LEAST_BLOCK,
    attend_causal,
    attend_pages,
    attend_rows,
    block_of,
    gated_by,
    gelu_gated_by,
)
from mlx_manager.mlx_server.engine.kv.store import LayerShape, LayerStore, Numbers

DIM = 8
PAGE = 4


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
    value_dim=st.sampled_from([DIM, 5]),
    loud=st.sampled_from([1.0, 30.0]),
    seed=st.integers(0, 2**16),
)
def test_rows_see_what_is_not_hidden_from_them_of_their_own_pages(
    lengths: list[int], kv_heads: int, group: int, value_dim: int, loud: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    rows, pages = len(lengths), -(-max(lengths) // PAGE)
    table = random.permutation(rows * pages + 3)[: rows * pages].reshape(rows, pages)
    slots = PAGE * (rows * pages + 3)
    queries = random.normal(size=(rows, kv_heads, group, DIM)) * loud
    keys = random.normal(size=(kv_heads, slots, DIM))
    values = random.normal(size=(kv_heads, slots, value_dim))
    store = LayerStore(LayerShape(kv_heads, DIM, value_dim, mx.float32), PAGE)
    store.keys, store.values = (mx.array(a.astype(np.float32)) for a in (keys, values))
    seen = np.arange(pages * PAGE) < np.array(lengths)[:, None]
    hidden = np.where(seen, 0, -np.inf).reshape(rows, 1, pages, 1, PAGE)
    given_arrays = [mx.array(a.astype(np.float32)) for a in (queries, hidden)]
    numbers = Numbers(table.astype(np.int32))
    found = np.array(attend_pages(given_arrays[0], store, numbers, 0.3, given_arrays[1]))
    for row, length in enumerate(lengths):
        places = (table[row][:, None] * PAGE + np.arange(PAGE)).reshape(-1)[:length]
        for head in range(kv_heads):
            own = keys[head][None, places], values[head][None, places]
            alone = expected(queries[row, head][:, None], *own, 0.3)
            np.testing.assert_allclose(found[row, head], alone[:, 0], atol=1e-5 * max(loud, 2))


def test_rows_of_neighbouring_pages_see_all_that_is_given() -> None:
    random = np.random.default_rng(5)
    queries = random.normal(size=(1, 2, 3, DIM))
    keys, values = random.normal(size=(2, 1, 2, 40, DIM))
    arrays = [mx.array(a.astype(np.float32)) for a in (queries, keys, values)]
    found = np.array(attend_rows(*arrays, 0.3))
    for head in range(2):
        own = queries[0, head][:, None], keys[0, head][None], values[0, head][None]
        np.testing.assert_allclose(found[0, head], expected(*own, 0.3)[:, 0], atol=2e-5)


def test_a_gelu_is_mlx_s_own_for_any_gate() -> None:
    most = np.float32(3e38) * np.float32(10.0) ** np.arange(-30, 1, dtype=np.float32)
    gate = mx.array(np.concatenate([np.linspace(-12, 12, 999, dtype=np.float32), most, -most]))
    up = mx.full(gate.shape, 0.5)
    found, own = np.array(gelu_gated_by(gate, up)), np.array(nn.gelu_approx(gate) * up)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, own, rtol=1e-5, atol=1e-6)


def test_a_silu_of_any_gate_is_a_number() -> None:
    x = mx.array([-3e38, -1e4, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 1e4, 3e38])
    exact = np.array(x, np.float64) / (1 + np.exp(np.clip(-np.array(x, np.float64), None, 700)))
    found = np.array(gated_by(x, mx.full(x.shape, 0.5)))
    np.testing.assert_allclose(found, exact / 2, rtol=1e-6, atol=1e-30)
    assert mx.isnan(gated_by(mx.array([mx.nan]), mx.ones(1))).item()
