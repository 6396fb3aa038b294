"""Expansion of latent vectors to keys and values of heads, for the queries of prompts' chunks.

With expanded keys and values the ordinary attention kernels are used. A pair of query and token
then takes as many multiplications a head as a key and a value have elements, half as many as with
absorbed queries and results (see `decoder.latent`). Before that, each visible token is multiplied
by all heads' matrices, once for all queries of a step; the results are in temporary pages for the
time of one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_manager.mlx_server.devices.cuda.attention.chunk_plan import ChunkPlan, QueryRun
from mlx_manager.mlx_server.devices.cuda.attention.chunks import ChunkKernels
from mlx_manager.mlx_server.devices.cuda.mapped import send
from mlx_manager.mlx_server.devices.cuda.mla.shape import LatentShape

# Estimated costs of a multiplication in attention to heads, of one in plain products, and of the
# launches. The unit is a multiplication in the absorbed form's attention (206 TFLOP/s on an H100).
ATTENDING = 0.6
MULTIPLYING = 0.35
START = 1e10
# Most bytes of a layer's expanded contexts; each queued layer has its own, and at least three are
# queued. They are 30 000 tokens of GLM 4.7 Flash's 20 heads of 256; longer contexts are attended as
# latents.
MOST_BYTES = 700_000_000
# Expanded tokens are padded to a multiple of this, so that buffers have few sizes and MLX can reuse
# them.
GRAIN = 512


@dataclass(frozen=True, slots=True)
class QueryTokens:
    """Consecutive tokens of one sequence in a step.

    queries: number of these tokens. length: tokens visible at their end. pages: (n,) pages of all
    visible tokens.
    """

    queries: int
    length: int
    pages: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Expanded:
    """Texts of a step whose latents are expanded, with each shared page only once.

    pages: (n,) int32, pages that are read. table: (texts, pages) int32, index in `pages` of each
    page of a text. plan: work list for the texts' queries, one text after another, then padding.
    bytes: memory that the expansion takes in a layer.
    """

    pages: mx.array
    table: mx.array
    plan: ChunkPlan
    bytes: int


class TurnQueries(Protocol):
    """Function that makes queries ready for attention to expanded keys.

    queries: (tokens, q_heads * (plain + dims)). rotation: (tokens, dims), rotates the last dims of
    each head. The result is (tokens, q_heads, 1, width), with zeros after each head's elements.
    """

    def __call__(self, queries: mx.array, rotation: mx.array, *, traditional: bool) -> mx.array: ...


class Expansion:
    """Attention to expanded keys and values of one shape.

    kernels: attention kernels for chunks of prompts. turn: makes the queries ready for them.
    """

    def __init__(self, shape: LatentShape, kernels: ChunkKernels, turn: TurnQueries) -> None:
        self.shape = shape
        self._kernels = kernels
        self._turn = turn
        self._width = kernels.shape.head_dim
        # Appended to each head's matrix: copies a rotated vector to its place in a key.
        self._behind = mx.array(np.eye(shape.dims, self._width, shape.plain)).astype(shape.dtype)
        mx.eval(self._behind)

    def of_heads(self, q_heads: int) -> Expansion:
        """Return the same for so many heads."""
        shape = replace(self.shape, q_heads=q_heads)
        return Expansion(shape, self._kernels.of_heads(q_heads), self._turn)

    @property
    def most_tokens(self) -> int:
        """Most tokens that are expanded."""
        return max(MOST_BYTES - self._matrix_bytes, 0) // self._token_bytes // GRAIN * GRAIN

    @property
    def most_bytes(self) -> int:
        """Bytes that a layer takes to expand `most_tokens`."""
        return self._bytes_of(self.most_tokens)

    def first_of(self, queries: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> int:
        """Return the index of the first text of a step that is expanded, as are all later texts.

        The index is the one that saves most time, among those with room for the expanded tokens. It
        is the number of texts if expansion saves no time.

        queries, lengths: (texts,), for each text; see `QueryTokens`.
        """
        size = self.shape.page_size
        tokens = np.cumsum((-(-lengths // size) * size)[::-1])[::-1]
        saved = np.cumsum(self._saved(queries, lengths)[::-1])[::-1] - START
        saved = np.where(-(-tokens // GRAIN) * GRAIN <= self.most_tokens, saved, 0)
        best = int(saved.argmax())
        return best if saved[best] > 0 else len(queries)

    def plan(self, texts: Sequence[QueryTokens], padding: int) -> Expanded:
        """Plan the expansion of `texts`, of which there is at least one.

        Padding queries attend to the longest text, so that their results are finite.
        """
        size = self.shape.page_size
        counts = [-(-text.length // size) for text in texts]
        read = [text.pages[:count] for text, count in zip(texts, counts, strict=True)]
        pages, places = np.unique(np.concatenate(read), return_inverse=True)
        table = np.zeros((len(texts), max(counts)), np.int32)
        runs, first = [], 0
        for row, own in enumerate(np.split(places.reshape(-1), np.cumsum(counts)[:-1])):
            table[row, : len(own)] = own
            text = texts[row]
            runs.append(QueryRun(first, text.queries, row, text.length - text.queries + 1))
            first += text.queries
        longest = max(range(len(texts)), key=lambda row: texts[row].length)
        most = texts[longest].length
        runs += [
            QueryRun(first + start, min(most, padding - start), longest, 1)
            for start in range(0, padding, most)
        ]
        grain = max(GRAIN // size, 1)
        whole = np.pad(pages, (0, -len(pages) % grain), mode="edge").astype(np.int32)
        taken = self._bytes_of(len(whole) * size)
        return Expanded(send(whole), send(table), self._kernels.plan(runs), taken)

    def attend(  # noqa: PLR0917
        self,
        queries: mx.array,
        rotation: mx.array,
        pool: tuple[mx.array, mx.array],
        pages: mx.array,
        matrices: tuple[mx.array, mx.array],
        of: Expanded,
        *,
        scale: float,
        traditional: bool,
    ) -> mx.array:
        """Attend the queries that `of` is planned for.

        Args:
            queries: (tokens, q_heads * (plain + dims)); the last dims of each are rotated here.
            rotation: (tokens, dims) float32, as `LatentKernels.write` takes it.
            pool: latent vectors and rotated ones; see `LatentKernels`.
            pages: pages of `of`, as an array that depends on the writes into them.
            matrices: of all heads: from queries to latents, (q_heads, rank, plain), and from
                latents to results, (q_heads, values, rank).

        Returns:
            (tokens, q_heads * values).
        """
        keys, values = self._expanded(pool, pages, matrices)
        heads = self._turn(queries, rotation, traditional=traditional)
        out = self._kernels.attend(heads, keys, values, of.table, of.plan, pages, scale=scale)
        return out[:, :, 0, : self.shape.values].reshape(queries.shape[0], -1)

    def _expanded(
        self, pool: tuple[mx.array, mx.array], pages: mx.array, matrices: tuple[mx.array, mx.array]
    ) -> tuple[mx.array, mx.array]:
        """Return the expanded keys and values, (q_heads, tokens, width) each."""
        of, width = self.shape, self._width
        latents, turned = (
            mx.take(part.reshape(-1, of.page_size, part.shape[-1]), pages, axis=0).reshape(
                1, -1, part.shape[-1]
            )
            for part in pool
        )
        absorb, expand = matrices
        ends = mx.broadcast_to(self._behind, (of.q_heads, *self._behind.shape))
        to_keys = mx.concatenate([_padded(absorb, 2, width), ends], axis=1)
        to_values = _padded(expand, 1, width).swapaxes(1, 2)
        return mx.concatenate([latents, turned], axis=2) @ to_keys, latents @ to_values

    def _saved(
        self, queries: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float64]:
        """Return the estimated multiplications that expanding each text saves; see `ATTENDING`."""
        of = self.shape
        pairs = queries * (lengths - (queries - 1) / 2)
        met = 2 * of.rank + of.dims
        absorbed = pairs * met + MULTIPLYING * queries * of.rank * (of.plain + of.values)
        expanded = ATTENDING * pairs * 2 * self._width + MULTIPLYING * lengths * met * self._width
        saved: npt.NDArray[np.float64] = of.q_heads * (absorbed - expanded)
        return saved

    def _bytes_of(self, tokens: int) -> int:
        """Return the bytes that a layer takes to expand so many tokens, matrices included."""
        return self._matrix_bytes + tokens * self._token_bytes

    @property
    def _token_bytes(self) -> int:
        """Bytes per token: keys and values; latent and rotated vectors, apart and joined."""
        of = self.shape
        numbers: int = 2 * of.q_heads * self._width + 2 * (of.rank + of.dims)
        return numbers * of.dtype.size

    @property
    def _matrix_bytes(self) -> int:
        """Bytes of both matrices: dense, padded, and joined with `_behind`."""
        of = self.shape
        return 3 * of.q_heads * (2 * of.rank + of.dims) * self._width * of.dtype.size


def _padded(x: mx.array, axis: int, width: int) -> mx.array:
    """Return `x`, padded with zeros to `width` along `axis`."""
    lacking = width - x.shape[axis]
    if not lacking:
        return x
    return mx.pad(x, [(0, lacking if i == axis else 0) for i in range(x.ndim)])
