"""Shape and interface that every implementation of paged decode attention shares.

The pools are written in place, so that a step does not copy them: MLX hands a kernel its inputs as
constant, and the kernel casts that away. The write returns a dummy array, which the attention takes
as an input; this dependency orders the two launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_manager.mlx_server.devices.attention.splits import BlockKind, Splits
from mlx_manager.mlx_server.devices.attention.writer import Pools

Lengths = Sequence[int] | npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes that a kernel is compiled for. `page_size` is a multiple of 16 tokens."""

    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: mx.Dtype

    @property
    def pools(self) -> Pools:
        return Pools(self.kv_heads, self.head_dim, self.head_dim, self.dtype)

    @property
    def group(self) -> int:
        """Query heads that share a key/value head."""
        return self.q_heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class Rotary:
    """Norm and rotation that a fused step applies to each head of q and k before attention.

    The first `dims` elements are rotated: pairs are neighbours when `traditional`, else half of
    `dims` apart. `epsilon` is that of an RMS norm over the head before the rotation, None for no
    norm. `gated`: a gate follows each head of q; attention skips it. `values`: heads of v are
    normed, too, without weights. `alone`: there are heads of q only, and the keys and values are
    another layer's; `attend_fused` does not support this.
    """

    dims: int
    traditional: bool
    epsilon: float | None
    gated: bool = False
    values: bool = False
    alone: bool = False


@dataclass(frozen=True, slots=True)
class AttentionVariant:
    """Constants of one attention kernel beside its shape: one compilation for each.

    `divided`: some context is split. `rotary`: norm and rotation of a fused step, None for a plain
    step. `coded`: numbers with one scale, of pages in 8 bits; None for other pages.
    """

    scale: float
    window: int | None
    softcap: float | None
    sinks: bool
    divided: bool
    rotary: Rotary | None = None
    blocks: BlockKind = BlockKind.USUAL
    coded: int | None = None


@dataclass(frozen=True, slots=True)
class CodedShape:
    """Sizes that attention over pages in 8 bits is compiled for. `dtype` of `attention` is that of
    queries and results. `group`: numbers with one scale."""

    attention: AttentionShape
    group: int


class CodedKernels(Protocol):
    """Attention of decode steps over pages in 8 bits, which it reads and MLX's operations write.

    Codes are (2 * kv_heads, pages * page_size, head_dim) int8, heads of keys before heads of
    values, and scales (2 * kv_heads, pages * page_size, head_dim / group) bfloat16. A number is its
    code times its scale.
    """

    shape: AttentionShape

    def plan(
        self, lengths: Lengths, *, window: int | None = None, table_rows: Lengths | None = None
    ) -> Splits:
        """Cut a step's work; see `PagedKernels.plan`."""

    def attend_codes(
        self,
        q: mx.array,
        codes: mx.array,
        scales: mx.array,
        table: mx.array,
        lengths: mx.array,
        *,
        scale: float,
        splits: Splits,
        window: int | None = None,
        softcap: float | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attend `q`; see `PagedKernels.attend`."""


class PagedKernels(Protocol):
    """Attention of decode steps over pages, and the writes into them.

    Pools are (kv_heads, pages * page_size, head_dim), slot = page * page_size + offset.
    """

    shape: AttentionShape

    def plan(
        self, lengths: Lengths, *, window: int | None = None, table_rows: Lengths | None = None
    ) -> Splits:
        """Cut a step's work; once a step for all layers with the same window.

        `lengths` are the same numbers that `attend` is given as an array. `table_rows` names the
        table row of each query where several queries share one.
        """

    def write(
        self, k_pool: mx.array, v_pool: mx.array, k: mx.array, v: mx.array, slots: mx.array
    ) -> mx.array:
        """Write `k` and `v`, (rows, kv_heads, tokens, head_dim), into the pools in place.

        `slots` is int32 of rows * tokens elements; a negative slot is skipped. The pools must be
        evaluated. Returns what `attend` takes as `dep`: (1,) int32, 0.
        """

    def rotate_and_write(  # noqa: PLR0917
        self,
        qkv: mx.array,
        rotations: mx.array,
        head_norms: tuple[mx.array, mx.array] | None,
        keys: mx.array,
        values: mx.array,
        slots: mx.array,
        *,
        rotary: Rotary,
    ) -> mx.array:
        """Normalise and rotate the heads of any tokens and write their KV pages, in one launch.

        This is all work between the q/k/v projections and attention. Norm and rotation are those of
        `attend_fused`, and so are `qkv`, `rotations` and `head_norms`, with a row for each token.
        Keys and values are written in place into the pools `keys` and `values`, which must be
        evaluated, at `slots`, (tokens,) int32, all different; a negative slot is skipped. There is
        at least one token, and `rotary.dims` is a multiple of 16 unless it is `traditional`.

        Returns the queries, (tokens, q_heads, 1, head_dim), of every token. A launch that takes
        these queries reads the pages after the write, since launches are ordered by the arrays they
        share.
        """

    def attend(  # noqa: PLR0917
        self,
        q: mx.array,
        k_pool: mx.array,
        v_pool: mx.array,
        table: mx.array,
        lengths: mx.array,
        dep: mx.array,
        *,
        scale: float,
        splits: Splits,
        window: int | None = None,
        softcap: float | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attend `q`, (queries, q_heads, 1, head_dim), each query over its row of pages.

        `table` is (rows, max_pages) int32 and `lengths` (queries,) int32, tokens visible
        including the query's own; length 0 gives zeros. `window` as `splits` was planned with.
        Scores are `softcap * tanh(scale * q @ k / softcap)`; `sinks`, (q_heads,), are logits that
        join each softmax's denominator.
        """

    def attend_fused(  # noqa: PLR0917
        self,
        qkv: mx.array,
        rotation: mx.array,
        norms: tuple[mx.array, mx.array] | None,
        k_pool: mx.array,
        v_pool: mx.array,
        table: mx.array,
        lengths: mx.array,
        *,
        rotary: Rotary,
        scale: float,
        splits: Splits,
        window: int | None = None,
        softcap: float | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Do all work between the q/k/v projections and the output projection, in one launch.

        `qkv` is (rows, (q_heads + 2 * kv_heads) * head_dim): the heads of q, then k, then v, and
        behind each head of q a gate, which is skipped, if `rotary` is `gated`. They are normalised
        by `norms`, (head_dim,) weights for q and for k, and rotated; the new token is written into
        its page, at `lengths - 1` of its row, and attended to. No two queries may share a row of
        `table`. A row of length 0 writes nothing.

        `rotation` is (rows, rotary.dims) float32: the rotation of a vector whose pairs are all
        (1, 0), so that it holds every pair's cosine and sine, times any factor of the rotation.

        Returns (rows, q_heads * head_dim).
        """
