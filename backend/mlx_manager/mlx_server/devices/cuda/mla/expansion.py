"""Latent vectors made into keys and values of heads, for the queries of prompts' chunks.

A pair of query and token then takes as many multiplications a head as a key and a value have
numbers, which is half of what absorbed queries and results take (see `fused.latent`), by the
kernels that attend to heads. Before that each token that is seen is multiplied by all heads'
matrices, once for all queries of a step; what they give lies in pages of its own for as long as a
layer takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_manager.mlx_server.devices.cuda.attention.chunk_plan import ChunkPlan, QueryRun
from mlx_manager.mlx_server.devices.cuda.attention.chunks import ChunkKernels
from mlx_manager.mlx_server.devices.cuda.mapped import send
from mlx_manager.mlx_server.devices.cuda.mla.shape import LatentShape

# Estimates, in multiplications of the absorbed form's attention (206 TFLOP/s on an H100): what one
# takes of attention to heads, and of plain products, and what launches take besides (NOTES 133).
ATTENDING = 0.6
MULTIPLYING = 0.35
START = 1e10
# Of a layer's expanded contexts: layers that are queued have them each, three at least. It is
# 30 000 tokens of GLM 4.7 Flash's 20 heads of 256; longer contexts are attended as latents.
MOST_BYTES = 700_000_000
# Tokens that are expanded are a multiple of so many: few sizes, for which MLX has buffers when they
# come again.
GRAIN = 512


@dataclass(frozen=True, slots=True)
class Text:
    """A part of a step. queries: how many of its tokens. length: tokens visible at its end. pages:
    (n,) all pages that these lie in."""

    queries: int
    length: int
    pages: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Expanded:
    """Texts of a step whose latents are expanded: each page once, whoever shares it.

    pages: (n,) int32, those that are read. table: (texts, pages) int32, where they are among them.
    plan: of the texts' queries one after another, and of padding behind them. bytes: what a layer
    takes for it.
    """

    pages: mx.array
    table: mx.array
    plan: ChunkPlan
    bytes: int


class Turning(Protocol):
    """Makes heads of queries, (tokens, q_heads, 1, width), as they meet keys of heads, of
    queries (tokens, q_heads * (plain + dims)), whose ends `rotation` rotates, (tokens, dims); what
    there is room for behind them is 0."""

    def __call__(self, queries: mx.array, rotation: mx.array, *, traditional: bool) -> mx.array: ...


class Expansion:
    """Serves one shape, over kernels that attend to its heads, which `turn` makes of queries."""

    def __init__(self, shape: LatentShape, kernels: ChunkKernels, turn: Turning) -> None:
        self.shape = shape
        self._kernels = kernels
        self._turn = turn
        self._width = kernels.shape.head_dim
        # Behind each head's matrix: what takes rotated vectors to where a key has them.
        self._behind = mx.array(np.eye(shape.dims, self._width, shape.plain)).astype(shape.dtype)
        mx.eval(self._behind)

    @property
    def most_tokens(self) -> int:
        """That are expanded at most."""
        return max(MOST_BYTES - self._matrix_bytes, 0) // self._token_bytes // GRAIN * GRAIN

    @property
    def most_bytes(self) -> int:
        """That a layer takes for them."""
        return self._bytes_of(self.most_tokens)

    def first_of(self, queries: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> int:
        """The number of the first of a step's texts from which on they are expanded, so that this
        saves most of those that there is room for; as many as there are texts if it saves none.

        queries, lengths: of each text, (texts,); see `Text`.
        """
        size = self.shape.page_size
        tokens = np.cumsum((-(-lengths // size) * size)[::-1])[::-1]
        saved = np.cumsum(self._saved(queries, lengths)[::-1])[::-1] - START
        saved = np.where(-(-tokens // GRAIN) * GRAIN <= self.most_tokens, saved, 0)
        best = int(saved.argmax())
        return best if saved[best] > 0 else len(queries)

    def plan(self, texts: Sequence[Text], padding: int) -> Expanded:
        """There is at least one text. What queries of padding see is the longest one's, so that it
        is finite."""
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
        """Attention of the queries that `of` is for.

        Args:
            queries: (tokens, q_heads * (plain + dims)); the last dims of each are rotated here.
            rotation: (tokens, dims) float32, as `LatentKernels.write` takes it.
            pool: latent vectors and rotated ones; see `LatentKernels`.
            pages: those of `of`, when they have been written.
            matrices: of each head: what takes queries to latents, (q_heads, rank, plain), and
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
        """Keys and values, (q_heads, tokens, width) each."""
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
        """What is saved of each text if it is expanded."""
        of = self.shape
        pairs = queries * (lengths - (queries - 1) / 2)
        met = 2 * of.rank + of.dims
        absorbed = pairs * met + MULTIPLYING * queries * of.rank * (of.plain + of.values)
        expanded = ATTENDING * pairs * 2 * self._width + MULTIPLYING * lengths * met * self._width
        saved: npt.NDArray[np.float64] = of.q_heads * (absorbed - expanded)
        return saved

    def _bytes_of(self, tokens: int) -> int:
        """What a layer takes to expand so many, its matrices included."""
        return self._matrix_bytes + tokens * self._token_bytes

    @property
    def _token_bytes(self) -> int:
        """Of keys and values, and of what they are made of, by itself and joined."""
        of = self.shape
        numbers: int = 2 * of.q_heads * self._width + 2 * (of.rank + of.dims)
        return numbers * of.dtype.size

    @property
    def _matrix_bytes(self) -> int:
        """Of both matrices: dense, padded, and joined with what is behind."""
        of = self.shape
        return 3 * of.q_heads * (2 * of.rank + of.dims) * self._width * of.dtype.size


def _padded(x: mx.array, axis: int, width: int) -> mx.array:
    """`x` with zeros behind, so that it has a `width` of so many."""
    lacking = width - x.shape[axis]
    if not lacking:
        return x
    return mx.pad(x, [(0, lacking if i == axis else 0) for i in range(x.ndim)])
