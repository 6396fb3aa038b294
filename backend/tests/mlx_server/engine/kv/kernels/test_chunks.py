"""Attention of prompt chunks against plain arithmetic, its source run on a CPU."""

from __future__ import annotations

from itertools import cycle

import mlx.core as mx
import numpy as np
import pytest
from engine.kv.kernels.test_kernels import (
    BF16,
    DEVICE,
    F16,
    F32,
    I32,
    NOWHERE,
    loaded,
    poison,
    shape,
    stored,
)

from mlx_manager.mlx_server.engine.kv.kernels import chunks
from mlx_manager.mlx_server.engine.kv.kernels.check import (
    TOLERANCE,
    Features,
    chunk_problem,
    difference,
)
from mlx_manager.mlx_server.engine.kv.kernels.chunks import (
    GroupTiles,
    QueryRun,
    Tiles,
    WarpTiles,
    tiles_for,
    tiles_of,
)
from mlx_manager.mlx_server.engine.kv.kernels.kernel import Variant

CASES = {
    "llama-1b": (shape(8, 2, 64, BF16), Features()),
    "llama-8b-pages-of-32": (shape(8, 2, 128, BF16, page=32), Features()),
    "window": (shape(4, 2, 128, F16), Features(window=50)),
    "multi-head-80": (shape(2, 2, 80, F16), Features()),
    "softcap-96": (shape(6, 2, 96, BF16), Features(softcap=5.0)),
    "sinks-window": (shape(16, 2, 64, BF16), Features(window=70, sinks=True)),
    "gemma-256": (shape(4, 2, 256, BF16), Features(window=64, softcap=20.0)),
    "group-of-7": (shape(14, 2, 64, F16), Features()),
    "multi-query-20": (shape(20, 1, 64, BF16), Features(sinks=True)),
}
# Queries and the tokens that the last of them sees: a whole prompt, a piece, one alone.
RUNS = ((37, 37), (20, 90), (1, 130), (70, 200))


# The forms of the kernel for compute capability 9.0 that the cases take in turn.
GROUPS = (GroupTiles(1, 32), GroupTiles(2, 64), GroupTiles(1, 48, 3), GroupTiles(3, 32))


class Kernels:
    def __init__(self, compile_cuda, forms: list[Tiles]) -> None:
        self.forms = dict(zip(CASES, forms, strict=True))
        entries = []
        for name, (of, features) in CASES.items():
            source = chunks.chunk_source(of, self.forms[name], variant(of, features))
            entries.append(
                (source, (of.dtype, of.dtype, of.dtype, I32, I32, F32, I32), (of.dtype,))
            )
        self.library = compile_cuda(entries)


@pytest.fixture(scope="module")
def in_warps(compile_cuda) -> Kernels:
    return Kernels(compile_cuda, [tiles_for(of, DEVICE) for of, _ in CASES.values()])


@pytest.fixture(scope="module")
def in_groups(compile_cuda) -> Kernels:
    return Kernels(compile_cuda, [form for form, _ in zip(cycle(GROUPS), CASES)])


def variant(of, features: Features) -> Variant:
    return Variant(
        of.head_dim**-0.5, features.window, features.softcap, features.sinks, divided=False
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kernels", ["in_warps", "in_groups"])
def test_chunks_attend_to_what_each_query_may_see(kernels, name, request):
    kernels = request.getfixturevalue(kernels)
    of, features = CASES[name]
    form = kernels.forms[name]
    problem, runs = chunk_problem(of, features, RUNS, unused_page=NOWHERE)
    out = poison(problem.q.shape, of.dtype)
    tiles = tiles_of(of, form, runs)
    sinks = np.zeros(1, np.float32) if problem.sinks is None else problem.sinks
    pools = (stored(problem.k_pool, of.dtype), stored(problem.v_pool, of.dtype))
    kernels.library.call(
        list(CASES).index(name),
        [stored(problem.q, of.dtype), *pools, problem.table, tiles, sinks, np.zeros(1, np.int32)],
        [out],
        (of.kv_heads * form.threads, len(tiles), 1),
        (form.threads, 1, 1),
    )
    assert difference(loaded(out, of.dtype), problem.expected()) <= TOLERANCE


def test_every_query_is_in_one_tile_and_the_longest_come_first():
    runs = [QueryRun(0, 37, 0, 1), QueryRun(37, 100, 1, 300), QueryRun(140, 1, 2, 5)]
    tiles = tiles_of(shape(12, 4, 64, mx.bfloat16), WarpTiles(4, 64), runs)
    queries = sorted(q for first, count, _, _ in tiles for q in range(first, first + count))
    assert queries == [*range(137), 140]
    assert (np.diff(tiles[:, 3]) <= 0).all()
    assert all(length - first == {0: 1, 1: 263, 2: -135}[row] for first, _, row, length in tiles)
