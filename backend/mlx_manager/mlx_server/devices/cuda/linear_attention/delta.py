"""The gated delta rule on NVIDIA GPUs: see delta.cu."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from mlx_manager.mlx_server.devices.cuda.attention.decode import MOST_QUERIES
from mlx_manager.mlx_server.devices.cuda.compiler.device import DEVICE_SOURCE, device_for
from mlx_manager.mlx_server.devices.cuda.compiler.launch import CudaKernel, CudaSource
from mlx_manager.mlx_server.devices.cuda.mapped import send
from mlx_manager.mlx_server.devices.kernel import (
    Argument,
    Constant,
    Kernel,
    KernelName,
    Size,
    Struct,
    Unsupported,
)
from mlx_manager.mlx_server.devices.states import (
    DeltaShape,
    DeltaWeights,
    StateShape,
    StateStore,
)

_FILE = Path(__file__).with_name("delta.cu")
DIMS = (32, 64, 128, 256)
TAPS = (2, 4, 8)
RELATE_WARPS = 4
THREADS = 256
CHUNK_THREADS = 64
# Rows of a head's matrix that a block has.
BLOCK_ROWS = 32
# Tokens of a piece, and pieces that a block has at a time.
PIECE = 16
_STAGES = 4
_RELATIONS = 2 * PIECE * PIECE
_FIGURES = 3 * PIECE


@dataclass(frozen=True, slots=True)
class StepForm:
    """Launch parameters for one token of a head: `warps` of a block, and `splits`, its blocks."""

    warps: int
    splits: int

    @staticmethod
    def of(shape: DeltaShape, rows: int) -> StepForm:
        """Return the parameters for a step of `rows`: with few rows, one block for each head.

        With 32 heads, 1 and 8 rows take 12.8 and 20.3 us so, and 22.9 and 18.4 us with a block for
        each 32 rows of a head's matrix (H100).
        """
        if rows * shape.value_heads <= _FEW_HEADS:
            return StepForm(16, 1)
        return StepForm(4, shape.value_dim // BLOCK_ROWS)


_FEW_HEADS = 128


@dataclass(frozen=True, slots=True)
class Texts:
    """Spans (consecutive tokens of one row) of a step with prompts in it.

    spans: (n, 5) int32, for each span: its first token in the step, number of tokens, slot,
    position of the first token, and number of its first piece. A slot of -1 is padding, which has
    no pieces. pieces: (m, 4) int32, for each piece of up to `PIECE` tokens of a span: its first
    token, number of tokens, the slot if it is the span's first piece, else -1, and the position of
    its first token.
    """

    spans: mx.array
    pieces: mx.array

    @staticmethod
    def of(
        counts: Sequence[int], slots: Sequence[int], positions: Sequence[int], tokens: int
    ) -> Texts:
        """Return the spans of a step of `tokens`, with one span after another and then padding.

        counts, slots, positions: tokens, slot and first position of each span.
        """
        # Add a last span for the padding; it may be empty.
        lengths = np.array([*counts, tokens - sum(counts)])
        firsts = np.cumsum([0, *lengths[:-1]])
        numbers = -(-np.array(counts) // PIECE)
        first_pieces = np.cumsum([0, *numbers])
        last = np.array([*slots, -1]), np.array([*positions, 0])
        spans = np.stack([firsts, lengths, *last, first_pieces], axis=1)
        own = np.repeat(np.arange(len(counts)), numbers)
        done = (np.arange(len(own)) - first_pieces[own]) * PIECE
        left = np.minimum(lengths[own] - done, PIECE)
        begun = np.where(done, -1, last[0][own])
        pieces = np.stack([firsts[own] + done, left, begun, last[1][own] + done], axis=1)
        return Texts(*(send(each.astype(np.int32)) for each in (spans, pieces)))


class DeltaKernels:
    """Launches of the gated delta rule for one shape."""

    def __init__(self, shape: DeltaShape) -> None:
        self.shape = shape
        self._steps: dict[StepForm, Kernel] = {}
        self._convolve = CudaKernel(convolve_source(shape))
        self._relate = CudaKernel(relate_source(shape))
        self._chunk = CudaKernel(chunk_source(shape))
        self._finish = CudaKernel(finish_source(shape))
        self._restore = CudaKernel(restore_source(shape))
        # Counters of each head's finished blocks; the kernel leaves every counter at 0.
        self._arrivals = mx.zeros((MOST_QUERIES * shape.value_heads,), mx.int32)
        mx.eval(self._arrivals)

    def step(
        self,
        heads: mx.array,
        weights: DeltaWeights,
        pool: Sequence[mx.array],
        lengths: mx.array,
        slots: mx.array,
    ) -> mx.array:
        """Compute one token of each row, (rows, values).

        heads: (rows, columns or more), output of the first product. pool: `ring` and `states` of a
        `StateStore`, written in place. lengths: (rows or more,) int32, tokens of each row including
        this token; 0 for padding. slots: (rows,) int32.
        """
        rows = heads.shape[0]
        if rows > MOST_QUERIES:
            raise ValueError(f"{rows} rows: the kernels take {MOST_QUERIES} at most")
        form = StepForm.of(self.shape, rows)
        if form not in self._steps:
            self._steps[form] = CudaKernel(step_source(self.shape, form))
        threads = form.warps * 32
        (out,) = self._steps[form](
            inputs=[heads, lengths, slots, *_arrays(weights), *pool, self._arrivals],
            grid=(rows * self.shape.value_heads * form.splits * threads, 1, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[(rows, self.shape.values)],
            output_dtypes=[self.shape.dtype],
        )
        return out

    def chunks(
        self, heads: mx.array, weights: DeltaWeights, store: StateStore, texts: Texts
    ) -> mx.array:
        """Compute all tokens of a step with prompts, (tokens, values); write `store` in place."""
        of, tokens = self.shape, heads.shape[0]
        (convolved,) = self._convolve(
            inputs=[heads, texts.pieces, weights.convolution, store.ring],
            grid=(_whole(texts.pieces.shape[0] * (2 * of.key_heads + of.value_heads) * 32), 1, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(tokens, of.channels)],
            output_dtypes=[of.dtype],
        )
        pieces = texts.pieces.shape[0] * of.value_heads
        relations, figures = self._relate(
            inputs=[convolved, heads, texts.pieces, weights.rates, weights.offsets],
            grid=(-(-pieces // RELATE_WARPS) * RELATE_WARPS * 32, 1, 1),
            threadgroup=(RELATE_WARPS * 32, 1, 1),
            output_shapes=[(pieces, _RELATIONS), (pieces, _FIGURES)],
            output_dtypes=[of.dtype, mx.float32],
        )
        y, store.written = self._chunk(
            inputs=[convolved, relations, figures, heads, texts.spans, store.ring, store.states],
            grid=(_blocks(of) * CHUNK_THREADS, texts.spans.shape[0], 1),
            threadgroup=(CHUNK_THREADS, 1, 1),
            output_shapes=[(tokens, of.values), (1,)],
            output_dtypes=[of.dtype, mx.int32],
        )
        (out,) = self._finish(
            inputs=[y, heads, weights.norm],
            grid=(_whole(tokens * of.value_heads * 32), 1, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(tokens, of.values)],
            output_dtypes=[of.dtype],
        )
        return out

    def restore(self, store: StateStore, slot: int, kept: list[mx.array]) -> None:
        """Restore a slot from a copy, in place; it is done once `store.written` is evaluated."""
        (store.written,) = self._restore(
            inputs=[*kept, mx.array([slot], mx.int32), store.ring, store.states],
            grid=(64 * THREADS, 1, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(1,)],
            output_dtypes=[mx.int32],
        )


class StateKernels(Protocol):
    """Kernels of one kind of layer with a recurrent state; states are written in place."""

    @property
    def shape(self) -> StateShape: ...

    def step(
        self,
        heads: mx.array,
        weights: Any,
        pool: Sequence[mx.array],
        lengths: mx.array,
        slots: mx.array,
    ) -> mx.array:
        """Compute one token of each row.

        heads: (rows, columns or more), output of the first product. pool: pool of a `StateStore`.
        lengths: (rows or more,) int32, tokens of each row including this token; 0 for padding.
        slots: (rows,) int32.
        """

    def chunks(self, heads: mx.array, weights: Any, store: StateStore, texts: Texts) -> mx.array:
        """Compute all tokens of a step with prompts in it."""

    def restore(self, store: StateStore, slot: int, kept: list[mx.array]) -> None:
        """Restore a slot from a copy, in place; it is done once `store.written` is evaluated."""


BuildDelta = Callable[[DeltaShape], "DeltaKernels | Unsupported"]


def build(shape: DeltaShape) -> DeltaKernels | Unsupported:
    """Return the kernels for `shape` on the default device; their first use compiles them."""
    served = unserved(shape)
    if served is not None:
        return Unsupported(served)
    device = device_for(shape.dtype)
    return device if isinstance(device, Unsupported) else DeltaKernels(shape)


def unserved(shape: DeltaShape) -> str | None:
    """Return why the kernels do not serve layers of these sizes; None if they do."""
    if shape.key_dim not in DIMS or shape.value_dim not in DIMS:
        return (
            f"heads of {shape.key_dim} and {shape.value_dim} elements: there are kernels of {DIMS}"
        )
    if shape.taps not in TAPS:
        return f"a convolution of {shape.taps} tokens: there are kernels of {TAPS}"
    return None


def _blocks(shape: DeltaShape) -> int:
    """Return the number of blocks for all heads of a row."""
    return shape.values // BLOCK_ROWS


def _whole(threads: int) -> int:
    return -(-threads // THREADS) * THREADS


def _arrays(weights: DeltaWeights) -> list[mx.array]:
    return [weights.convolution, weights.rates, weights.offsets, weights.norm]


def _weights(shape: DeltaShape, convolution: str | None, norm: str | None) -> Struct:
    kind = KernelName("DeltaWeights", (shape.dtype,))
    return Struct(kind, (convolution, "rates", "offsets", norm, shape.epsilon))


def _source(  # noqa: PLR0917
    shape: DeltaShape,
    function: str,
    constants: tuple[Constant, ...],
    arguments: tuple[Argument, ...],
    inputs: tuple[str, ...],
    outputs: tuple[str, ...] = ("out",),
    threads: int = THREADS,
    shared_memory: int = 0,
) -> CudaSource:
    """Return the declaration of a kernel that calls a function of the class `Delta`."""
    heads = (shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim)
    sizes = KernelName("DeltaShape", (shape.dtype, *heads, shape.taps, shape.grouped))
    return CudaSource(
        name=f"delta_{function}",
        files=(DEVICE_SOURCE, _FILE),
        within=KernelName("Delta", (sizes,)),
        function=function,
        constants=constants,
        arguments=arguments,
        inputs=inputs,
        outputs=outputs,
        shared_memory=shared_memory,
        bounds=(threads, 1),
    )


def step_source(shape: DeltaShape, form: StepForm) -> CudaSource:
    weights = _weights(shape, "convolution", "norm")
    pool = ("ring", "states", "arrivals")
    return _source(
        shape,
        "step",
        (form.warps, form.splits, shape.rounded),
        ("heads", Size("heads", 1), "lengths", "slots", weights, *pool, "out"),
        ("heads", "lengths", "slots", "convolution", "rates", "offsets", "norm", *pool),
        threads=form.warps * 32,
        shared_memory=4 * (2 * shape.key_dim + shape.value_dim // form.splits + shape.value_dim),
    )


def convolve_source(shape: DeltaShape) -> CudaSource:
    sizes = (Size("heads", 1), Size("pieces", 0))
    return _source(
        shape,
        "convolve",
        (),
        ("heads", sizes[0], "pieces", sizes[1], "convolution", "ring", "out"),
        ("heads", "pieces", "convolution", "ring"),
    )


def relate_source(shape: DeltaShape) -> CudaSource:
    outputs, sizes = ("relations", "figures"), (Size("heads", 1), Size("pieces", 0))
    weights = _weights(shape, None, None)
    return _source(
        shape,
        "relate",
        (shape.rounded,),
        ("convolved", "heads", sizes[0], "pieces", sizes[1], weights, *outputs),
        ("convolved", "heads", "pieces", "rates", "offsets"),
        outputs=outputs,
        threads=RELATE_WARPS * 32,
        shared_memory=4 * RELATE_WARPS * (PIECE * PIECE + 2 * PIECE),
    )


def chunk_source(shape: DeltaShape) -> CudaSource:
    before, after = ("convolved", "relations", "figures", "heads"), ("spans", "ring", "states")
    outputs = ("out", "written")
    of_token = 2 * (shape.key_dim + 8) + BLOCK_ROWS + 8
    stage = shape.dtype.size * (PIECE * of_token + _RELATIONS) + 4 * _FIGURES
    return _source(
        shape,
        "chunks",
        (),
        (*before, Size("heads", 1), *after, *outputs),
        (*before, *after),
        outputs=outputs,
        threads=CHUNK_THREADS,
        shared_memory=_STAGES * stage,
    )


def finish_source(shape: DeltaShape) -> CudaSource:
    sizes = (Size("heads", 1), Size("heads", 0))
    arguments = ("y", "heads", *sizes, "norm", shape.epsilon, "out")
    return _source(shape, "finish", (), arguments, ("y", "heads", "norm"))


def restore_source(shape: DeltaShape) -> CudaSource:
    inputs = ("kept_ring", "kept_state", "slot", "ring", "states")
    return _source(shape, "restore", (), (*inputs, "written"), inputs, ("written",))
