"""Checks of latent attention against plain arithmetic, on random pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_manager.mlx_server.devices.attention.check import (
    LENGTHS,
    TOLERANCE,
    Floats,
    as_written,
    difference,
    exact,
    finished,
    numbers,
)
from mlx_manager.mlx_server.devices.attention.kernel import Rotary
from mlx_manager.mlx_server.devices.cuda.attention.chunk_plan import QueryRun
from mlx_manager.mlx_server.devices.cuda.mla.expansion import Expansion, QueryTokens
from mlx_manager.mlx_server.devices.cuda.mla.latent import LatentKernels
from mlx_manager.mlx_server.devices.cuda.mla.shape import LatentShape

# Queries of a chunk, and what the last of them sees; (1, 0) is padding.
CHUNKS = ((37, 37), (1, 0), (20, 300), (1, 600), (5, 1500))
# The same for texts that are expanded, and the tokens of padding behind them.
EXPANDED = ((37, 37), (20, 300), (1, 130), (70, 200))
PADDING = 21
# Large enough to be seen.
EPSILON = 0.1

_NO_NORM = np.ones(1, np.float32)


@dataclass(frozen=True, slots=True)
class LatentProblem:
    """Random queries over random pages; values are exact in the shape's dtype.

    absorbed: (queries, q_heads, rank). ends: (queries, q_heads, plain + dims), the last dims to be
    rotated. rotation: (queries, dims). latents, turned: (slots, rank) and (slots, dims), NaN
    wherever no query may look. table: (rows, max_pages). runs: runs of queries; each has a row of
    the table.
    """

    shape: LatentShape
    traditional: bool
    scale: float
    absorbed: Floats
    ends: Floats
    rotation: Floats
    latents: Floats
    turned: Floats
    table: npt.NDArray[np.int32]
    runs: list[QueryRun]

    @staticmethod
    def of(
        shape: LatentShape,
        runs: Sequence[tuple[int, int]],
        *,
        traditional: bool,
        unused_page: int = 0,
    ) -> LatentProblem:
        """Return a problem with runs of queries, each as (queries, tokens that the last one sees).

        Pages lie in random order; `unused_page` fills the rest of the table.
        """
        rng = np.random.default_rng(0)
        counts = [-(-seen // shape.page_size) for _, seen in runs]
        pages = rng.permutation(sum(counts)).astype(np.int32)
        table = np.full((len(runs), max(1, *counts)), unused_page, np.int32)
        slots = max(sum(counts), 1) * shape.page_size
        latents, turned = (
            np.full((slots, dim), np.nan, np.float32) for dim in (shape.rank, shape.dims)
        )
        found, first, taken = [], 0, 0
        for row, ((queries, seen), count) in enumerate(zip(runs, counts, strict=True)):
            table[row, :count] = pages[taken : taken + count]
            places = slots_of(shape, table[row], seen)
            for pool in (latents, turned):
                pool[places] = exact(rng.normal(size=(seen, pool.shape[1])), shape.dtype)
            found.append(QueryRun(first, queries, row, max(seen - queries + 1, 0)))
            first, taken = first + queries, taken + count
        widths = shape.rank, shape.plain + shape.dims
        drawn = (rng.normal(size=(first, shape.q_heads, width)) * 2 for width in widths)
        absorbed, ends = (exact(each, shape.dtype) for each in drawn)
        return LatentProblem(
            shape=shape,
            traditional=traditional,
            scale=(shape.rank + shape.dims) ** -0.5,
            absorbed=absorbed,
            ends=ends,
            rotation=_rotations(shape, first, traditional),
            latents=latents,
            turned=turned,
            table=table,
            runs=found,
        )

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Tokens that each query sees, (queries,)."""
        seen = [run.length + i for run in self.runs for i in range(run.count)]
        return np.array(seen, np.int32)

    def expected(self) -> Floats:
        """Return (q_heads, queries, rank) by the definition, in float32; 0 for length 0."""
        of = self.shape
        rotary = Rotary(of.dims, self.traditional, None)
        ends = finished(self.ends[..., of.plain :], _NO_NORM, self.rotation, rotary, of.dtype)
        out = np.zeros_like(self.absorbed)
        for run in self.runs:
            for query in range(run.first, run.first + run.count):
                length = run.length + query - run.first
                if length:
                    seen = slots_of(of, self.table[run.row], length)
                    latents = self.latents[seen]
                    scores = self.absorbed[query] @ latents.T + ends[query] @ self.turned[seen].T
                    scores = np.exp((scores - scores.max(1, keepdims=True)) * self.scale)
                    out[query] = scores @ latents / scores.sum(1, keepdims=True)
        return out.swapaxes(0, 1)

    def arrays(self) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array, mx.array]:
        """Return the first arguments of attention: queries, rotation, pools and table."""
        dtype = self.shape.dtype
        absorbed = np.ascontiguousarray(self.absorbed.swapaxes(0, 1))
        return (
            mx.array(absorbed).astype(dtype),
            mx.array(self.ends.reshape(len(self.ends), -1)).astype(dtype),
            mx.array(self.rotation),
            mx.array(self.latents[None]).astype(dtype),
            mx.array(self.turned[None]).astype(dtype),
            mx.array(self.table),
        )


@dataclass(frozen=True, slots=True)
class ExpansionProblem:
    """Problem with random matrices of heads that absorb the queries and expand the results.

    absorb: (q_heads, rank, plain). expand: (q_heads, values, rank).
    """

    latent: LatentProblem
    absorb: Floats
    expand: Floats

    @staticmethod
    def of(
        shape: LatentShape, runs: Sequence[tuple[int, int]], *, traditional: bool
    ) -> ExpansionProblem:
        rng = np.random.default_rng(3)
        heads, rank = shape.q_heads, shape.rank
        absorb = rng.normal(size=(heads, rank, shape.plain)) * rank**-0.5
        expand = rng.normal(size=(heads, shape.values, rank)) * rank**-0.5
        own = LatentProblem.of(shape, runs, traditional=traditional)
        matrices = exact(absorb, shape.dtype), exact(expand, shape.dtype)
        absorbed = own.ends[..., : shape.plain].swapaxes(0, 1) @ matrices[0].swapaxes(1, 2)
        return ExpansionProblem(replace(own, absorbed=absorbed.swapaxes(0, 1)), *matrices)

    def expected(self) -> Floats:
        """Return the expected results, (queries, q_heads, values)."""
        found = self.latent.expected() @ self.expand.swapaxes(1, 2)
        return np.ascontiguousarray(found.swapaxes(0, 1))

    def found(self, expansion: Expansion) -> mx.array:
        """Return the result of `expansion` for the same problem, padding included."""
        own, of = self.latent, self.latent.shape
        _, queries, rotation, latents, turned, _ = own.arrays()
        texts = [
            QueryTokens(run.count, run.length + run.count - 1, own.table[run.row])
            for run in own.runs
        ]
        expanded = expansion.plan(texts, PADDING)
        matrices = (mx.array(each).astype(of.dtype) for each in (self.absorb, self.expand))
        out = expansion.attend(
            mx.pad(queries, [(0, PADDING), (0, 0)]),
            mx.pad(rotation, [(0, PADDING), (0, 0)]),
            (latents, turned),
            expanded.pages,
            (next(matrices), next(matrices)),
            expanded,
            scale=own.scale,
            traditional=own.traditional,
        )
        return out.reshape(-1, of.q_heads, of.values)


def slots_of(shape: LatentShape, pages: npt.NDArray[np.int32], seen: int) -> npt.NDArray[np.int64]:
    """Return the slots of the first `seen` tokens of a text in `pages`."""
    places, size = np.arange(seen), shape.page_size
    return pages[places // size].astype(np.int64) * size + places % size


@dataclass(frozen=True, slots=True)
class WriteProblem:
    """Random output of the first product for a few tokens, to be normed, rotated and written.

    projected: (tokens, queried + rank + dims and padding). norms: (queried,) and (rank,), the first
    unused unless `normed`.
    """

    shape: LatentShape
    traditional: bool
    normed: bool
    projected: Floats
    rotation: Floats
    norms: tuple[Floats, Floats]
    slots: npt.NDArray[np.int32]

    @staticmethod
    def of(
        shape: LatentShape, slots: Sequence[int], *, traditional: bool, normed: bool
    ) -> WriteProblem:
        rng = np.random.default_rng(1)
        width, tokens = shape.queried + shape.rank + shape.dims + 16, len(slots)
        projected = exact(rng.normal(size=(tokens, width)) / 2, shape.dtype)
        widths = shape.queried, shape.rank
        queries, latents = (exact(rng.uniform(0.5, 2, size=w), shape.dtype) for w in widths)
        rotation = _rotations(shape, tokens, traditional)
        places = np.array(slots, np.int32)
        norms = queries, latents
        return WriteProblem(shape, traditional, normed, projected, rotation, norms, places)

    def expected(self) -> tuple[Floats, Floats, Floats]:
        """Return the queries, latent vectors and rotated ones of every token."""
        of = self.shape
        queries, latents, ends, _ = np.split(
            self.projected, np.cumsum([of.queried, of.rank, of.dims]), axis=1
        )
        if self.normed:
            queries = _normalised(queries, self.norms[0], of.dtype)
        rotary = Rotary(of.dims, self.traditional, None)
        turned = finished(ends[:, None], _NO_NORM, self.rotation, rotary, of.dtype)[:, 0]
        return queries, _normalised(latents, self.norms[1], of.dtype), turned

    def pools(self) -> tuple[mx.array, mx.array]:
        """Return pools of zeros with two pages."""
        of, size = self.shape, 2 * self.shape.page_size
        pools = mx.zeros((1, size, of.rank), of.dtype), mx.zeros((1, size, of.dims), of.dtype)
        mx.eval(pools)
        return pools

    def written(self, kernels: LatentKernels, pools: tuple[mx.array, mx.array]) -> mx.array:
        """Return the queries; the pools are written in place."""
        queries, latents = (mx.array(norm).astype(self.shape.dtype) for norm in self.norms)
        return kernels.write(
            mx.array(self.projected).astype(self.shape.dtype),
            mx.array(self.rotation),
            (queries if self.normed else None, latents),
            *pools,
            mx.array(self.slots),
            traditional=self.traditional,
            epsilon=EPSILON,
        )

    def arrived(self, pools: tuple[mx.array, mx.array]) -> bool:
        """Return whether the pools hold the tokens, and zeros elsewhere."""
        there = self.slots >= 0
        for pool, tokens in zip(pools, self.expected()[1:], strict=True):
            whole = np.zeros(pool.shape[1:], np.float32)
            whole[self.slots[there]] = tokens[there]
            if not as_written(numbers(pool)[0], whole):
                return False
        return True


def check_latent(kernels: LatentKernels, *, traditional: bool) -> str | None:
    """Return None if the kernels work on this device, else the error."""
    return (
        _check_writes(kernels, traditional)
        or _check_steps(kernels, traditional)
        or _check_chunks(kernels, traditional)
    )


def check_expansion(expansion: Expansion, *, traditional: bool) -> str | None:
    """Return None if expanded latents give the results of absorbed queries, else the error."""
    problem = ExpansionProblem.of(expansion.shape, EXPANDED, traditional=traditional)
    found = numbers(problem.found(expansion))
    expected = problem.expected()
    off = difference(found[: len(expected)], expected)
    if off > TOLERANCE:
        return f"expanded latents differ from the reference by {off:.3g}"
    return None if np.isfinite(found).all() else "queries of padding become no numbers"


def _check_writes(kernels: LatentKernels, traditional: bool) -> str | None:
    slots = [2 * kernels.shape.page_size - 1, -1, 0]
    for normed in (False, True):
        problem = WriteProblem.of(kernels.shape, slots, traditional=traditional, normed=normed)
        pools = problem.pools()
        off = difference(numbers(problem.written(kernels, pools)), problem.expected()[0])
        if off > TOLERANCE:
            return f"normalised queries differ from the reference by {off:.3g}"
        if not problem.arrived(pools):
            return "latent vectors or rotated ones did not arrive in their pages, or others did"
    return None


def _check_steps(kernels: LatentKernels, traditional: bool) -> str | None:
    runs = [(1, length) for length in LENGTHS]
    problem = LatentProblem.of(kernels.shape, runs, traditional=traditional)
    out = kernels.attend(
        *problem.arrays(),
        mx.array(problem.lengths),
        scale=problem.scale,
        splits=kernels.plan(problem.lengths),
        traditional=traditional,
    )
    off = difference(numbers(out), problem.expected())
    return None if off <= TOLERANCE else f"attention differs from the reference by {off:.3g}"


def _check_chunks(kernels: LatentKernels, traditional: bool) -> str | None:
    problem = LatentProblem.of(kernels.shape, CHUNKS, traditional=traditional)
    out = kernels.attend_chunks(
        *problem.arrays(),
        kernels.chunk_plan(problem.runs),
        scale=problem.scale,
        traditional=traditional,
    )
    off = difference(numbers(out), problem.expected())
    return None if off <= TOLERANCE else f"chunks differ from the reference by {off:.3g}"


def _rotations(shape: LatentShape, tokens: int, traditional: bool) -> Floats:
    """Return (tokens, dims) rotations by random angles."""
    angles = np.random.default_rng(2).uniform(0, 6, size=(tokens, shape.dims // 2))
    parts = np.stack([np.cos(angles), np.sin(angles)], 2 if traditional else 1)
    return parts.reshape(tokens, shape.dims).astype(np.float32)


def _normalised(x: Floats, norm: Floats, dtype: mx.Dtype) -> Floats:
    """Return the rows normalised as MLX's own RMS norm does it."""
    return exact(exact(x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON), dtype) * norm, dtype)
