"""Attention for CPUs on which MLX's exponentials are slow.

MLX computes exponentials by Apple's vector units, and elsewhere one by one: 12 ns each on a 2024
server core, where a power of two takes 4 ns and a product 0.2 ns. The softmax would take most of
the time of attention to a long context.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

if TYPE_CHECKING:
    from mlx_manager.mlx_server.engine.kv.store import LayerStore, Numbers

# Fewest scores for which the faster exponentials save more than the additional operations cost.
LEAST_SCORES = 1 << 12
# Scores that a core's second cache holds beside their powers.
CACHED_SCORES = 1 << 18
LEAST_BLOCK = 16
# Smallest page that is attended in place: a product for each smaller page costs more than gathering
# the pages.
LEAST_PAGE = 8
_LOG2_E = math.log2(math.e)


def pays(like: mx.array, exponentials: int) -> bool:
    """Return whether powers of two are faster than MLX's exponentials.

    like: array of the type and on the device in question. exponentials: how many are computed.
    """
    return (
        exponentials >= LEAST_SCORES
        and like.dtype == mx.float32
        and sys.platform != "darwin"
        and mx.default_device() == mx.cpu
    )


def block_of(heads: int, seen: int) -> int:
    """Return how many queries to attend at once, so that their scores stay in the cache."""
    return max(LEAST_BLOCK, CACHED_SCORES // (heads * seen))


def attend_causal(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """Attend the last queries of a sequence to the whole sequence, in float32.

    Args:
        queries: (1, heads, count, dim).
        keys, values: (1, kv_heads, seen, dim), the last `count` of them the queries' own.

    Returns:
        (1, heads, count, dim of the values).
    """
    heads, count, dim = queries.shape[1:]
    kv_heads, seen = keys.shape[1:3]
    before, group = seen - count, heads // kv_heads
    # The query heads that share a key head are its queries. Powers of two instead of e.
    own = (queries * (scale * _LOG2_E)).reshape(1, kv_heads, group * count, dim)
    hidden = np.where(np.tri(count, dtype=bool), np.float32(0), np.float32(-np.inf))
    earlier = own @ keys[:, :, :before].swapaxes(2, 3)
    latest = own @ keys[:, :, before:].swapaxes(2, 3) + mx.array(np.tile(hidden, (group, 1)))
    most = mx.maximum(
        mx.max(earlier, axis=-1, keepdims=True), mx.max(latest, axis=-1, keepdims=True)
    )
    earlier, latest = mx.power(2.0, earlier - most), mx.power(2.0, latest - most)
    # A product with ones adds up eight times as fast as a sum.
    weights = earlier @ mx.ones((before, 1)) + mx.sum(latest, axis=-1, keepdims=True)
    out = (earlier @ values[:, :, :before] + latest @ values[:, :, before:]) / weights
    return out.reshape(1, heads, count, values.shape[3])


def attend_rows(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    hidden: mx.array | None = None,
) -> mx.array:
    """Attend each row's queries to all of the row's keys that are not hidden, in float32.

    Args:
        queries: (rows, kv_heads, queries, dim).
        keys, values: (rows, kv_heads, seen, dim).
        hidden: (rows, 1, 1, seen) 0, or -inf where a row has nothing to see; None: it sees all.

    Returns:
        (rows, kv_heads, queries, dim of the values).
    """
    scores = (queries * (scale * _LOG2_E)) @ keys.swapaxes(2, 3)
    if hidden is not None:
        scores = scores + hidden
    weights = mx.power(2.0, scores - mx.max(scores, axis=-1, keepdims=True))
    *outer, seen = weights.shape
    sums = (weights.reshape(-1, seen) @ mx.ones((seen, 1))).reshape(*outer, 1)
    return (weights @ values) / sums


def attend_pages(
    queries: mx.array, store: LayerStore, table: Numbers, scale: float, hidden: mx.array
) -> mx.array:
    """Attend rows as `attend_rows` does, over pages in place, with one product for each page.

    Gathering the pages would take as long as attending to them.

    Args:
        queries: (rows, kv_heads, queries, dim).
        table: (rows, n) pages.
        hidden: (rows, 1, n, 1, page_size) 0, or -inf where a row has nothing to see.

    Returns:
        (rows, kv_heads, queries, dim of the values).
    """
    rows, heads, count, dim = queries.shape
    size = store.page_size
    row, page, product = table.for_products(heads, store.keys.shape[1] // size)
    keys, values = store.in_pages()
    own = (queries * (scale * _LOG2_E)).reshape(rows * heads, count, dim)
    scores = mx.gather_mm(own, keys.swapaxes(1, 2), row, page) + hidden
    most = mx.max(mx.max(scores, axis=4, keepdims=True), axis=2, keepdims=True)
    weights = mx.power(2.0, scores - most)
    sums = (weights.reshape(-1, size) @ mx.ones((size, 1))).reshape(*weights.shape[:4], 1)
    parts = mx.gather_mm(weights.reshape(-1, count, size), values, product, page)
    return mx.sum(parts, axis=2) / mx.sum(sums, axis=2)


def gated_by(gate: mx.array, up: mx.array) -> mx.array:
    """Return `silu(gate) * up`, float32."""
    return gate / (mx.power(2.0, gate * -_LOG2_E) + 1.0) * up


def gelu_gated_by(gate: mx.array, up: mx.array) -> mx.array:
    """Return `gelu_approx(gate) * up`, float32: (1 + tanh(u)) / 2 is 1 / (1 + e^(-2 * u))."""
    twice = -2 * math.sqrt(2 / math.pi) * _LOG2_E
    turn = gate * (gate * gate * (0.044715 * twice) + twice)
    return gate / (mx.power(2.0, turn) + 1.0) * up
