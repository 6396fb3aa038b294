"""Paged decode attention by launches of compiled kernels: the part common to all devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import mlx.core as mx

from mlx_manager.mlx_server.devices.attention.kernel import (
    AttentionShape,
    AttentionVariant,
    Lengths,
    Rotary,
)
from mlx_manager.mlx_server.devices.attention.splits import Splits
from mlx_manager.mlx_server.devices.attention.writer import PageWriter
from mlx_manager.mlx_server.devices.kernel import Kernel

# Threads of a block that normalises, rotates and writes.
THREADS = 128


class LaunchedKernels(ABC):
    """Launches of the kernels; see `PagedKernels`, and `CodedKernels` where pages are in 8 bits.

    coded: numbers with one scale, of pages in 8 bits; None for other pages.
    """

    _merges: ClassVar[bool]
    """Flag: contexts that are divided have another kernel than those that are not."""
    _pads: ClassVar[bool]
    """Flag: norms and sinks that a layer does not have are handed over as zeros."""

    def __init__(self, shape: AttentionShape, writer: PageWriter, coded: int | None = None) -> None:
        self.shape = shape
        self.coded = coded
        self._writer = writer
        self._rotate: dict[Rotary, Kernel] = {}
        self._no_sinks = [mx.zeros((1,), mx.float32)] if self._pads else []
        self._no_norms = [mx.zeros((1,), shape.dtype)] * 2 if self._pads else []
        mx.eval(self._no_sinks, self._no_norms)

    @abstractmethod
    def plan(
        self, lengths: Lengths, *, window: int | None = None, table_rows: Lengths | None = None
    ) -> Splits: ...

    def write(
        self, k_pool: mx.array, v_pool: mx.array, k: mx.array, v: mx.array, slots: mx.array
    ) -> mx.array:
        return self._writer.write(k_pool, v_pool, k, v, slots)

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
        if rotary not in self._rotate:
            self._rotate[rotary] = self._rotation(rotary)
        tokens = qkv.shape[0]
        (queries,) = self._rotate[rotary](
            inputs=[qkv, rotations, *self._weights(head_norms), keys, values, slots],
            grid=(self._rotation_threads(tokens), 1, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(tokens, self.shape.q_heads, 1, self.shape.head_dim)],
            output_dtypes=[self.shape.dtype],
        )
        return queries

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
        variant = self._variant(scale, window, softcap, sinks, splits)
        pages = [k_pool, v_pool, table, lengths, splits.items]
        return self._launch(variant, [q, *pages], self._logits(sinks), [dep], splits, q.shape)

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
        variant = self._variant(scale, window, softcap, sinks, splits, rotary)
        fresh = [qkv, rotation, *self._weights(norms)]
        pages = [k_pool, v_pool, table, lengths, splits.items]
        shape = (qkv.shape[0], self.shape.q_heads * self.shape.head_dim)
        return self._launch(variant, [*fresh, *pages], self._logits(sinks), [], splits, shape)

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
        """Attend over pages in 8 bits; see `CodedKernels`. Only kernels that are `coded` do so."""
        variant = self._variant(scale, window, softcap, sinks, splits)
        pages = [codes, scales, table, lengths, splits.items]
        coded = replace(variant, coded=self.coded)
        return self._launch(coded, [q, *pages], self._logits(sinks), [], splits, q.shape)

    @abstractmethod
    def _rotation(self, rotary: Rotary) -> Kernel:
        """Compile the kernel of `rotate_and_write`, launched in blocks of `THREADS`."""

    @abstractmethod
    def _rotation_threads(self, tokens: int) -> int:
        """Return the threads of the launch of `rotate_and_write`: whole blocks."""

    @abstractmethod
    def _launch(  # noqa: PLR0917
        self,
        variant: AttentionVariant,
        inputs: Sequence[mx.array],
        sinks: Sequence[mx.array],
        after: Sequence[mx.array],
        splits: Splits,
        shape: tuple[int, ...],
    ) -> mx.array:
        """Attend; the result has the shape `shape`.

        inputs: queries, or the arrays that they are made from, and pages. sinks: one array, or none
        where the kernel takes none. after: results of launches that must precede this one.
        """

    def _variant(  # noqa: PLR0917
        self,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: mx.array | None,
        splits: Splits,
        rotary: Rotary | None = None,
    ) -> AttentionVariant:
        divided = self._merges and splits.divided
        return AttentionVariant(
            scale, window, softcap, sinks is not None, divided, rotary, splits.blocks
        )

    def _logits(self, sinks: mx.array | None) -> Sequence[mx.array]:
        return self._no_sinks if sinks is None else [sinks.astype(mx.float32)]

    def _weights(self, norms: tuple[mx.array, mx.array] | None) -> Sequence[mx.array]:
        return self._no_norms if norms is None else norms
