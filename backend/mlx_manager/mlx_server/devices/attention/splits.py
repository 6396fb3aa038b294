"""Work list of a decode step: the part of a context that each thread block reads.

A launch over (rows, longest context) would give a short row as many blocks as the longest one and
leave all but a few with nothing to do. Instead, the contexts are cut on the host, where their
lengths are known, into items of about equal work. The list is padded to few distinct lengths so
that the launches of a long-lived server take few distinct shapes; padding costs a block that
returns at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_manager.mlx_server.devices.cuda.mapped import send

TILE = 16
"""Tokens that a warp or simdgroup takes at a time; a page holds a multiple of it."""

MAX_SPLITS = 64
"""Items that one query's context may be cut into; the kernels' merge is sized by it."""

MIN_TILES = 16
"""Tiles below which cutting a context further costs more in merging than it gains."""

FIELDS = 8
"""int32 columns of an item: query, table row, first tile, last tile (exclusive; the last split's is
open), number of this split, splits of the query, place of its first split in the list, unused."""

ROOM = (8, 32, 64, 128, 256, 512, 1024)
"""Lengths that a list is padded to beyond one item a query; past the last, to its multiples."""


class BlockKind(Enum):
    """Kind of a step's blocks, where there are kernels of several kinds.

    Small blocks are for many short contexts; tall ones for long contexts whose blocks, uncut, just
    fill the device.
    """

    USUAL = auto()
    SMALL = auto()
    TALL = auto()


@dataclass(frozen=True, slots=True)
class Splits:
    """The items of a step, for every layer with the same window.

    The last split of a query takes whatever the query sees beyond it, and tiles that a window has
    left behind are skipped, so a plan stays right while its queries grow; it is made anew when
    rows come or go, and now and then to keep the work even.

    `items` is (work, FIELDS) int32; an item whose query is -1 is padding. `divided` says whether
    any context is cut, so that partial results need room.
    """

    items: mx.array
    divided: bool
    blocks: BlockKind = BlockKind.USUAL

    @property
    def work(self) -> int:
        return int(self.items.shape[0])


def plan(
    lengths: Sequence[int] | npt.NDArray[np.integer],
    *,
    blocks_per_item: int,
    blocks_wanted: int,
    window: int | None = None,
    table_rows: Sequence[int] | npt.NDArray[np.integer] | None = None,
    min_tiles: int = MIN_TILES,
    max_splits: int = MAX_SPLITS,
) -> Splits:
    """Cut the contexts of a step's queries.

    Args:
        lengths: (queries,) tokens each query sees, itself included; 0 marks a padding row, whose
            output is zeros.
        blocks_per_item: thread blocks that an item takes (key/value heads, mostly).
        blocks_wanted: thread blocks worth having in all: enough to keep every multiprocessor
            busy until the end.
        window: tokens that a sliding-window layer looks back on, the current one included.
        table_rows: (queries,) row of the page table that each query reads; its own number when
            None. Several queries of one sequence may share a row.
        min_tiles: no item of a cut context is smaller than this.
        max_splits: items that a context may be cut into.
    """
    seen = np.asarray(lengths, dtype=np.int64)
    queries = len(seen)
    last = -(-seen // TILE)
    first = np.zeros_like(seen) if window is None else np.maximum(seen - window, 0) // TILE
    tiles = last - first
    share = -(-int(tiles.sum()) * blocks_per_item // max(blocks_wanted, 1))
    chunk = np.maximum(max(min_tiles, share), -(-tiles // max_splits))
    splits = np.maximum(tiles // chunk, 1)

    order = np.argsort(-tiles // splits, kind="stable")
    counts = splits[order]
    count = int(counts.sum())
    query = np.repeat(order, counts)
    base = np.repeat(np.cumsum(counts) - counts, counts)
    split = np.arange(count) - base
    of = splits[query]
    items = np.zeros((_room(count, queries), FIELDS), dtype=np.int32)
    items[count:, 0] = -1
    items[:count, 0] = query
    items[:count, 1] = query if table_rows is None else np.asarray(table_rows)[query]
    items[:count, 2] = first[query] + tiles[query] * split // of
    items[:count, 3] = first[query] + tiles[query] * (split + 1) // of
    items[:count, 4] = split
    items[:count, 5] = of
    items[:count, 6] = base
    return Splits(items=send(items), divided=count > queries)


def _room(count: int, queries: int) -> int:
    extra = count - queries
    if extra == 0:
        return queries
    fits = next((size for size in ROOM if size >= extra), None)
    return queries + (fits if fits is not None else -(-extra // ROOM[-1]) * ROOM[-1])
