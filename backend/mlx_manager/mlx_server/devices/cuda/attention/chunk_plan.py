"""Work list of prompts' chunks: the queries and the part of their context of each thread block.

If there are few queries with a long context, whole contexts would leave most of a GPU idle. So
contexts are cut, and of the blocks that share a tile of queries the last to end merges the parts.
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

# Measured on an H200, in tokens; see `cut`.
START = 256
MERGE = 384
LEAST = 512
# A cut must shorten the estimated time to this fraction, since estimates are no more exact.
GAIN = 0.95


@dataclass(frozen=True, slots=True)
class QueryRun:
    """Consecutive queries of one sequence.

    first: index of the first query among the step's queries. count: number of queries. row: row of
    the page table. length: tokens that the first query sees, itself included; each query sees one
    token more than the query before. A single query of length 0 is padding.
    """

    first: int
    count: int
    row: int
    length: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """Division of a launch into blocks.

    queries: queries of a key/value head that a block takes. tokens: tokens of a tile of the
    context. kv_heads: key/value heads. at_once: blocks that run at a time.
    """

    queries: int
    tokens: int
    kv_heads: int
    at_once: int


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Work list of a launch.

    items: (work, FIELDS) int32, in order of falling run time. parts: partial results for each
    key/value head, 0 if no context is cut.
    """

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
    """Cut queries into tiles of a block, and their contexts where the launch then ends sooner.

    Args:
        runs: queries of the launch.
        blocks: division of the launch.
        window: tokens that a query looks back on, the current one included.
        start: time of a block to begin and end, as the tokens attended in the same time.
        merge: additional time if the context is cut, in the same unit.
        least: fewest tokens of a part.
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
    """Estimated costs of a launch; see `cut`. `least` is in tiles."""

    blocks: Blocks
    start: int
    merge: int
    least: int

    def parts(self, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the numbers of parts to cut contexts of `sizes` tiles into."""
        best = np.ones_like(sizes)
        # With several waves of blocks there is little to gain.
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
        """Return the estimated end of the last block, in tokens.

        The estimate is the largest of the lower bounds that hold for any order of the blocks
        (Graham, Bounds on multiprocessing timing anomalies, 1969).
        """
        each = sizes / parts * self.blocks.tokens + self.start + np.where(parts > 1, self.merge, 0)
        times = np.repeat(np.sort(each.repeat(parts))[::-1], self.blocks.kv_heads)
        places = self.blocks.at_once
        bounds = [times.sum() / places]
        for turns in range((len(times) - 1) // places + 1):
            end = turns * places + 1
            bounds.append(times[end - turns - 1 : end].sum())
        return float(max(bounds))
