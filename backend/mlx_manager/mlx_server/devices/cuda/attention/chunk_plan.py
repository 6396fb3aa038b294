"""Which thread block attends which queries of prompts' chunks over which part of their context.

Blocks of few queries far into a prompt would leave most of a GPU without work: their contexts are
cut, and the block of a tile of queries that ends last merges the parts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_manager.mlx_server.devices.cuda.mapped import send

FIELDS = 9
"""int32 columns of an item: first query, queries, table row, tokens that the first query sees;
first and last token of the part of the context (the last exclusive), number of this part, parts of
these queries, place of their first part among the partial results."""

CUTS = (2, 3, 4, 6, 8)
"""Parts that the longest context may be cut into."""

MOST_PARTS = 1024
"""Partial results of a launch for each key/value head; the kernels' counters are sized by it."""

# On an H200; see `cut`.
START = 256
MERGE = 384
LEAST = 512
# Estimates are no better than this.
GAIN = 0.95


@dataclass(frozen=True, slots=True)
class QueryRun:
    """Consecutive queries of one sequence.

    first: the number of the first among the step's queries. row: of the page table. length: tokens
    that the first sees, itself included; each one sees a token more than the one before. One query
    of length 0 is padding.
    """

    first: int
    count: int
    row: int
    length: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a launch is shared out: a block takes `queries` of a key/value head and walks their
    context in tiles of `tokens`; `at_once` blocks run at a time."""

    queries: int
    tokens: int
    kv_heads: int
    at_once: int


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """items: (work, FIELDS) int32, those that take longest first. parts: partial results for each
    key/value head, 0 if no context is cut."""

    items: mx.array
    parts: int

    @property
    def work(self) -> int:
        return int(self.items.shape[0])


def cut(
    runs: Iterable[QueryRun],
    blocks: Blocks,
    window: int | None = None,
    *,
    start: int = START,
    merge: int = MERGE,
    least: int = LEAST,
) -> ChunkPlan:
    """Cut queries into what blocks take, and their contexts where that ends sooner.

    Args:
        window: tokens that a query looks back on, the current one included.
        start, merge: what a block takes to begin and end, and beyond that if its context is cut,
            in the time to attend so many tokens. least: tokens that a part has at least.
    """
    tiles = np.array(
        [
            (run.first + start, min(blocks.queries, run.count - start), run.row, run.length + start)
            for run in runs
            for start in range(0, run.count, blocks.queries)
        ],
        np.int64,
    )
    _, count, _, length = tiles.T
    low = np.zeros_like(length) if window is None else np.maximum(length - window, 0)
    low, high = low // blocks.tokens, -(-(length + count - 1) // blocks.tokens)
    sizes = high - low
    costs = _Costs(blocks, start, merge, -(-least // blocks.tokens))
    parts = costs.parts(sizes)
    which = np.repeat(np.arange(len(tiles)), parts)
    divided = np.where(parts > 1, parts, 0)
    number = np.arange(len(which)) - np.repeat(np.cumsum(parts) - parts, parts)
    size, of = sizes[which], parts[which]
    items = np.empty((len(which), FIELDS), np.int32)
    items[:, :4] = tiles[which]
    items[:, 4] = (low[which] + size * number // of) * blocks.tokens
    items[:, 5] = (low[which] + size * (number + 1) // of) * blocks.tokens
    items[:, 6] = number
    items[:, 7] = of
    items[:, 8] = (np.cumsum(divided) - divided)[which]
    order = np.lexsort((-items[:, 3], items[:, 4] - items[:, 5]))
    return ChunkPlan(send(items[order]), int(divided.sum()))


@dataclass(frozen=True, slots=True)
class _Costs:
    """See `cut`; `least` is in tiles."""

    blocks: Blocks
    start: int
    merge: int
    least: int

    def parts(self, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Into how many parts to cut contexts of `sizes` tiles each."""
        best = np.ones_like(sizes)
        # With several blocks to each place there is little to gain.
        if len(sizes) * self.blocks.kv_heads > 4 * self.blocks.at_once:
            return best
        soonest = self._time(sizes, best)
        for cuts in CUTS:
            size = max(-(-int(sizes.max()) // cuts), self.least)
            parts = np.maximum(-(-sizes // size), 1)
            if parts.sum() > MOST_PARTS:
                break
            time = self._time(sizes, parts)
            if time < GAIN * soonest:
                best, soonest = parts, time
        return best

    def _time(self, sizes: npt.NDArray[np.int64], parts: npt.NDArray[np.int64]) -> float:
        """When the last block ends, in tokens: the longest lower bound of those that hold for any
        order (Graham, Bounds on multiprocessing timing anomalies, 1969)."""
        each = sizes / parts * self.blocks.tokens + self.start + np.where(parts > 1, self.merge, 0)
        times = np.repeat(np.sort(each.repeat(parts))[::-1], self.blocks.kv_heads)
        places = self.blocks.at_once
        bounds = [times.sum() / places]
        for turns in range((len(times) - 1) // places + 1):
            end = turns * places + 1
            bounds.append(times[end - turns - 1 : end].sum())
        return float(max(bounds))
