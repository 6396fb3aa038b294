"""Checks of the kernels against plain arithmetic, on random pages, which they must pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_manager.mlx_server.devices.attention.kernel import (
    AttentionShape,
    CodedKernels,
    CodedShape,
    PagedKernels,
    Rotary,
)
from mlx_manager.mlx_server.devices.attention.writer import Pools
from mlx_manager.mlx_server.devices.cuda.attention.chunk_plan import QueryRun
from mlx_manager.mlx_server.devices.cuda.attention.chunks import ChunkKernels

# Queries of a chunk, and what the last of them sees; the last contexts are cut where there is room.
CHUNKS = ((37, 37), (100, 300), (1, 600), (17, 2600))
Floats = npt.NDArray[np.float32]
Write = Callable[..., mx.array]
"""Type of `PagedKernels.write`."""

# Lengths around the borders of tiles and pages, one that is split, and a padding row.
LENGTHS = (1, 15, 16, 17, 0, 33, 250, 700, 2600)
# bfloat16 keeps 8 bits of a weight and of the result.
TOLERANCE = 1e-2


@dataclass(frozen=True, slots=True)
class AttentionFeatures:
    """Features of a model's attention beyond the plain softmax."""

    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """Random queries over random pages; values are exact in the shape's dtype.

    q: (queries, q_heads, head_dim). k_pool, v_pool: (kv_heads, slots, head_dim), NaN wherever no
    query may look. table: (rows, max_pages). lengths, table_rows: (queries,).
    """

    shape: AttentionShape
    features: AttentionFeatures
    scale: float
    q: Floats
    k_pool: Floats
    v_pool: Floats
    table: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]
    table_rows: npt.NDArray[np.int32]
    sinks: Floats | None

    def expected(self) -> Floats:
        """Return (queries, q_heads, head_dim) by the definition, in float32; 0 for length 0."""
        out = np.zeros_like(self.q)
        for query, (length, row) in enumerate(zip(self.lengths, self.table_rows, strict=True)):
            if length:
                out[query] = self._attend(query, int(length), self.table[row])
        return out

    def _attend(self, query: int, length: int, pages: npt.NDArray[np.int32]) -> Floats:
        size, group = self.shape.page_size, self.shape.group
        start = max(0, length - self.features.window) if self.features.window else 0
        places = np.arange(start, length)
        slots = pages[places // size].astype(np.int64) * size + places % size
        keys = np.repeat(self.k_pool[:, slots], group, axis=0)
        values = np.repeat(self.v_pool[:, slots], group, axis=0)
        scores = np.einsum("hd,htd->ht", self.q[query], keys) * self.scale
        if self.features.softcap is not None:
            scores = self.features.softcap * np.tanh(scores / self.features.softcap)
        top = scores.max(axis=1, keepdims=True)
        if self.sinks is not None:
            top = np.maximum(top, self.sinks[:, None])
        weights = np.exp(scores - top)
        total = weights.sum(axis=1)
        if self.sinks is not None:
            total += np.exp(self.sinks - top[:, 0])
        return np.asarray(np.einsum("ht,htd->hd", weights, values) / total[:, None])


def random_problem(
    shape: AttentionShape,
    features: AttentionFeatures = AttentionFeatures(),
    lengths: Sequence[int] = LENGTHS,
    *,
    seed: int = 0,
    unused_page: int = 0,
) -> AttentionProblem:
    """Pages of the rows lie in random order; `unused_page` fills the rest of the table."""
    rng = np.random.default_rng(seed)
    size = shape.page_size
    counts = [-(-length // size) for length in lengths]
    order = rng.permutation(sum(counts)).astype(np.int32)
    table = np.full((len(counts), max(1, *counts)), unused_page, np.int32)
    slots = (sum(counts) or 1) * size
    k_pool = np.full((shape.kv_heads, slots, shape.head_dim), np.nan, np.float32)
    v_pool = k_pool.copy()
    taken = 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table[row, :count] = order[taken : taken + count]
        taken += count
        start = max(0, length - features.window) if features.window else 0
        places = np.arange(start, length)
        seen = table[row, places // size].astype(np.int64) * size + places % size
        drawn = (shape.kv_heads, len(places), shape.head_dim)
        k_pool[:, seen] = exact(rng.normal(size=drawn), shape.dtype)
        v_pool[:, seen] = exact(rng.normal(size=drawn), shape.dtype)
    q = rng.normal(size=(len(counts), shape.q_heads, shape.head_dim)) * 2
    return AttentionProblem(
        shape=shape,
        features=features,
        scale=shape.head_dim**-0.5,
        q=exact(q, shape.dtype),
        k_pool=k_pool,
        v_pool=v_pool,
        table=table,
        lengths=np.asarray(lengths, np.int32),
        table_rows=np.arange(len(counts), dtype=np.int32),
        sinks=rng.normal(size=shape.q_heads).astype(np.float32) if features.sinks else None,
    )


def chunk_problem(
    shape: AttentionShape,
    features: AttentionFeatures,
    runs: Sequence[tuple[int, int]],
    *,
    unused_page: int = 0,
) -> tuple[AttentionProblem, list[QueryRun]]:
    """Return a problem with runs of queries, each given as (queries, tokens the last one sees)."""
    # The first query of a run sees farthest back, so its window decides which slots are NaN.
    widest = None if features.window is None else features.window + max(n for n, _ in runs)
    ends = [length for _, length in runs]
    problem = random_problem(shape, replace(features, window=widest), ends, unused_page=unused_page)
    found, first = [], 0
    for row, (count, length) in enumerate(runs):
        found.append(QueryRun(first, count, row, length - count + 1))
        first += count
    rng = np.random.default_rng(2)
    q = rng.normal(size=(first, shape.q_heads, shape.head_dim)) * 2
    lengths = [run.length + i for run in found for i in range(run.count)]
    rows = [run.row for run in found for _ in range(run.count)]
    return replace(
        problem,
        features=features,
        q=exact(q, shape.dtype),
        lengths=np.array(lengths, np.int32),
        table_rows=np.array(rows, np.int32),
    ), found


@dataclass(frozen=True, slots=True)
class CodedProblem:
    """Problem over pages in 8 bits; see `CodedKernels`.

    codes: (2 * kv_heads, slots, head_dim) int8. scales: (2 * kv_heads, slots, groups), exact in
    bfloat16, NaN wherever no query may look. plain: the problem with the numbers that these stand
    for.
    """

    plain: AttentionProblem
    codes: npt.NDArray[np.int8]
    scales: Floats

    @staticmethod
    def of(problem: AttentionProblem, group: int) -> CodedProblem:
        rng = np.random.default_rng(3)
        heads, slots, dim = problem.k_pool.shape
        codes = rng.integers(-127, 128, (2 * heads, slots, dim), dtype=np.int8)
        drawn = rng.uniform(0.002, 0.012, (2 * heads, slots, dim // group))
        scales = exact(drawn, mx.bfloat16)
        unseen = np.isnan(problem.k_pool[:1, :, 0]).repeat(2 * heads, axis=0)
        scales[unseen] = np.nan
        numbers = codes * scales.repeat(group, axis=2)
        plain = replace(problem, k_pool=numbers[:heads], v_pool=numbers[heads:])
        return CodedProblem(plain, codes, scales)


@dataclass(frozen=True, slots=True)
class FreshProblem:
    """Problem whose newest tokens are not in their pages yet.

    qkv: (rows, q_heads + 2 * kv_heads, head_dim), with gates if there are any, or q alone.
    rotation: (rows, dims). norms: (2, head_dim). ready: the equivalent plain problem, with the
    newest tokens in their pages.
    """

    ready: AttentionProblem
    rotary: Rotary
    qkv: Floats
    rotation: Floats
    norms: Floats

    @staticmethod
    def of(problem: AttentionProblem, rotary: Rotary) -> FreshProblem:
        rng = np.random.default_rng(1)
        shape, rows, dims = problem.shape, len(problem.lengths), rotary.dims
        heads = shape.q_heads + (0 if rotary.alone else 2 * shape.kv_heads)
        gates = shape.q_heads if rotary.gated else 0
        qkv = exact(rng.normal(size=(rows, heads + gates, shape.head_dim)), shape.dtype)
        norms = exact(rng.uniform(0.5, 2, size=(2, shape.head_dim)), shape.dtype)
        angles = rng.uniform(0, 6, size=(rows, dims // 2))
        parts = np.stack([np.cos(angles), np.sin(angles)], 2 if rotary.traditional else 1)
        rotation = parts.reshape(rows, dims).astype(np.float32)
        q, kv = np.split(qkv, [shape.q_heads + gates], axis=1)
        q = q[:, :: 2 if rotary.gated else 1]
        q = finished(q, norms[0], rotation, rotary, shape.dtype)
        if rotary.alone:
            return FreshProblem(replace(problem, q=q), rotary, qkv, rotation, norms)
        k, v = np.split(kv, 2, axis=1)
        k = finished(k, norms[1], rotation, rotary, shape.dtype)
        if rotary.values:
            v = normed(v, rotary.epsilon or 0.0, shape.dtype)
        pools = problem.k_pool.copy(), problem.v_pool.copy()
        for row in np.flatnonzero(problem.lengths).tolist():
            slot = _newest_slot(problem, row)
            pools[0][:, slot], pools[1][:, slot] = k[row], v[row]
        ready = replace(problem, q=q, k_pool=pools[0], v_pool=pools[1])
        return FreshProblem(ready, rotary, qkv, rotation, norms)

    def unwritten(self) -> AttentionProblem:
        """Return `ready` with NaN in the slots of the newest tokens."""
        if self.rotary.alone:
            return self.ready
        pools = self.ready.k_pool.copy(), self.ready.v_pool.copy()
        for row in np.flatnonzero(self.ready.lengths).tolist():
            for pool in pools:
                pool[:, _newest_slot(self.ready, row)] = np.nan
        return replace(self.ready, k_pool=pools[0], v_pool=pools[1])

    def slots(self) -> npt.NDArray[np.int32]:
        """Return (rows,) slots of the rows' newest tokens; -1 for padding."""
        lengths = self.ready.lengths.tolist()
        places = [_newest_slot(self.ready, row) if n else -1 for row, n in enumerate(lengths)]
        return np.array(places, np.int32)


def _newest_slot(problem: AttentionProblem, row: int) -> int:
    place, size = problem.lengths[row] - 1, problem.shape.page_size
    return int(problem.table[row, place // size]) * size + int(place % size)


def finished(x: Floats, norm: Floats, rotation: Floats, rotary: Rotary, dtype: mx.Dtype) -> Floats:
    """Return heads (rows, heads, head_dim), normalised and rotated as MLX's functions do it."""
    if rotary.epsilon is not None:
        x = exact(normed(x, rotary.epsilon, dtype) * norm, dtype)
    turn, dims = rotation[:, None], rotary.dims
    if rotary.traditional:
        first, second = x[..., :dims:2], x[..., 1:dims:2]
        cosine, sine = turn[..., ::2], turn[..., 1::2]
    else:
        first, second = x[..., : dims // 2], x[..., dims // 2 : dims]
        cosine, sine = turn[..., : dims // 2], turn[..., dims // 2 :]
    turned = first * cosine - second * sine, first * sine + second * cosine
    out = x.copy()
    axis = 3 if rotary.traditional else 2
    out[..., :dims] = np.stack(turned, axis).reshape(*x.shape[:2], dims)
    return exact(out, dtype)


def normed(x: Floats, epsilon: float, dtype: mx.Dtype) -> Floats:
    """Return heads normalised without weights."""
    return exact(x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon), dtype)


def self_check(
    kernels: PagedKernels,
    features: AttentionFeatures = AttentionFeatures(),
    rotary: Rotary | None = None,
) -> str | None:
    """Return None if the kernels work on this device, else the error.

    With `rotary`, `rotate_and_write` and `attend_fused` are checked, too.
    """
    wrong = _check_attention(kernels, features) or check_writer(
        kernels.write, kernels.shape.pools, kernels.shape.page_size
    )
    if wrong is None and rotary is not None:
        wrong = _check_rotated(kernels, rotary)
        if wrong is None and not rotary.alone:
            wrong = _check_fused(kernels, features, rotary)
    return wrong


def check_coded(
    kernels: CodedKernels, of: CodedShape, features: AttentionFeatures = AttentionFeatures()
) -> str | None:
    """Return None if attention over pages in 8 bits works on this device, else the error."""
    problem = CodedProblem.of(random_problem(of.attention, features), of.group)
    plain, dtype = problem.plain, of.attention.dtype
    out = kernels.attend_codes(
        mx.array(plain.q[:, :, None]).astype(dtype),
        mx.array(problem.codes),
        mx.array(problem.scales).astype(mx.bfloat16),
        mx.array(plain.table),
        mx.array(plain.lengths),
        scale=plain.scale,
        splits=kernels.plan(plain.lengths, window=features.window),
        window=features.window,
        softcap=features.softcap,
        sinks=None if plain.sinks is None else mx.array(plain.sinks),
    )
    off = difference(numbers(out)[:, :, 0], plain.expected())
    if off > TOLERANCE:
        return f"attention over 8 bits differs from the reference by {off:.3g}"
    return None


def check_chunks(
    kernels: ChunkKernels, features: AttentionFeatures = AttentionFeatures()
) -> str | None:
    """Return None if the kernel for prompts' chunks works on this device, else the error."""
    problem, runs = chunk_problem(kernels.shape, features, CHUNKS)
    dtype = kernels.shape.dtype
    out = kernels.attend(
        mx.array(problem.q[:, :, None]).astype(dtype),
        mx.array(problem.k_pool).astype(dtype),
        mx.array(problem.v_pool).astype(dtype),
        mx.array(problem.table),
        kernels.plan(runs, features.window),
        mx.zeros((1,), mx.int32),
        scale=problem.scale,
        window=features.window,
        softcap=features.softcap,
        sinks=None if problem.sinks is None else mx.array(problem.sinks),
    )
    off = difference(numbers(out)[:, :, 0], problem.expected())
    if off <= TOLERANCE:
        return None
    return f"{kernels.tiles.name}: chunks differ from the reference by {off:.3g}"


def difference(out: Floats, expected: Floats) -> float:
    """Return the largest norm of an error, relative to the expected norm; infinite for NaN."""
    error = np.linalg.norm(out - expected, axis=-1)
    norm = np.linalg.norm(expected, axis=-1)
    ratio = error / np.where(norm > 0, norm, 1.0)
    return float(np.where(np.isnan(ratio), np.inf, ratio).max())


def _check_attention(kernels: PagedKernels, features: AttentionFeatures) -> str | None:
    problem = random_problem(kernels.shape, features)
    dtype = kernels.shape.dtype
    out = kernels.attend(
        mx.array(problem.q[:, :, None]).astype(dtype),
        mx.array(problem.k_pool).astype(dtype),
        mx.array(problem.v_pool).astype(dtype),
        mx.array(problem.table),
        mx.array(problem.lengths),
        mx.zeros((1,), mx.int32),
        **_how(kernels, problem, features),
    )
    off = difference(numbers(out)[:, :, 0], problem.expected())
    return None if off <= TOLERANCE else f"attention differs from the reference by {off:.3g}"


def _check_rotated(kernels: PagedKernels, rotary: Rotary) -> str | None:
    problem = FreshProblem.of(random_problem(kernels.shape), rotary)
    pools = _pools(problem.unwritten())
    out = kernels.rotate_and_write(
        *_prepared(problem), *pools, mx.array(problem.slots()), rotary=rotary
    )
    off = difference(numbers(out)[:, :, 0], problem.ready.q)
    if off > TOLERANCE:
        return f"rotated queries differ from the reference by {off:.3g}"
    if not _arrived(pools, problem.ready):
        return "rotated keys or their values did not arrive in their pages, or others did"
    return None


def _check_fused(kernels: PagedKernels, features: AttentionFeatures, rotary: Rotary) -> str | None:
    problem = FreshProblem.of(random_problem(kernels.shape, features), rotary)
    unwritten = problem.unwritten()
    pools = _pools(unwritten)
    out = kernels.attend_fused(
        *_prepared(problem),
        *pools,
        mx.array(unwritten.table),
        mx.array(unwritten.lengths),
        rotary=rotary,
        **_how(kernels, unwritten, features),
    )
    found = numbers(out).reshape(unwritten.q.shape)
    off = difference(found, problem.ready.expected())
    if off > TOLERANCE:
        return f"fused attention differs from the reference by {off:.3g}"
    if not _arrived(pools, problem.ready):
        return "the newest tokens did not arrive in their pages, or something else did"
    return None


def _how(
    kernels: PagedKernels, problem: AttentionProblem, features: AttentionFeatures
) -> dict[str, Any]:
    """Return the keyword arguments of `attend` and `attend_fused`."""
    return {
        "scale": problem.scale,
        "splits": kernels.plan(problem.lengths, window=features.window),
        "window": features.window,
        "softcap": features.softcap,
        "sinks": None if problem.sinks is None else mx.array(problem.sinks),
    }


def _arrived(pools: tuple[mx.array, mx.array], written: AttentionProblem) -> bool:
    keys, values = map(numbers, pools)
    return as_written(keys, written.k_pool) and as_written(values, written.v_pool)


def _pools(problem: AttentionProblem) -> tuple[mx.array, mx.array]:
    dtype = problem.shape.dtype
    pools = mx.array(problem.k_pool).astype(dtype), mx.array(problem.v_pool).astype(dtype)
    mx.eval(pools)
    return pools


def _prepared(
    problem: FreshProblem,
) -> tuple[mx.array, mx.array, tuple[mx.array, mx.array] | None]:
    """Return the q/k/v product of a step, its rotations and the heads' norms."""
    dtype = problem.ready.shape.dtype
    qkv = mx.array(problem.qkv.reshape(len(problem.qkv), -1)).astype(dtype)
    norms = None
    if problem.rotary.epsilon is not None:
        norms = (mx.array(problem.norms[0]).astype(dtype), mx.array(problem.norms[1]).astype(dtype))
    return qkv, mx.array(problem.rotation), norms


def as_written(found: Floats, expected: Floats) -> bool:
    """Return whether pools hold the expected numbers, and NaN exactly where NaN is expected."""
    close = np.isclose(found, expected, rtol=2e-2, atol=2e-2, equal_nan=True)
    return bool(close.all())


def check_writer(write: Write, pools: Pools, page_size: int) -> str | None:
    """Return None if `write` puts keys and values into pages on this device, else the error."""
    rng = np.random.default_rng(1)
    rows, slots = 3, 2 * page_size
    dims = pools.key_dim, pools.value_dim
    given = [mx.zeros((pools.kv_heads, slots, dim), pools.dtype) for dim in dims]
    new = [
        mx.array(rng.normal(size=(rows, pools.kv_heads, 1, dim))).astype(pools.dtype)
        for dim in dims
    ]
    mx.eval(*given, *new)
    mx.eval(write(*given, *new, mx.array([slots - 1, -1, 0], mx.int32)))
    for pool, tokens in zip(given, new, strict=True):
        expected = np.zeros(pool.shape, np.float32)
        expected[:, slots - 1] = numbers(tokens)[0, :, 0]
        expected[:, 0] = numbers(tokens)[2, :, 0]
        if not np.array_equal(numbers(pool), expected):
            return "a write into pages did not arrive, or arrived elsewhere"
    return None


def exact(values: npt.NDArray[Any], dtype: mx.Dtype) -> Floats:
    """Return `values` rounded to `dtype`: to the nearest, ties to even."""
    wide = values.astype(np.float32)
    if dtype == mx.float16:
        return wide.astype(np.float16).astype(np.float32)
    if dtype == mx.bfloat16:
        bits = wide.view(np.uint32)
        return ((bits + (0x7FFF + (bits >> 16 & 1))) & 0xFFFF0000).view(np.float32)
    return wide


def numbers(array: mx.array) -> Floats:
    return np.array(array.astype(mx.float32))
