"""The gated delta rule on NVIDIA GPUs: see delta.cu."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from mlx_manager.mlx_server.devices.cuda.attention.decode import MOST_QUERIES
from mlx_manager.mlx_server.devices.cuda.compiler.device import DEVICE_SOURCE, TYPES, device_for
from mlx_manager.mlx_server.devices.cuda.compiler.launch import CudaKernel
from mlx_manager.mlx_server.devices.cuda.mapped import send
from mlx_manager.mlx_server.devices.kernel import (
    Kernel,
    KernelSource,
    Unsupported,
    flag,
    real,
    source,
)
from mlx_manager.mlx_server.devices.states import (
    DeltaShape,
    DeltaWeights,
    StateShape,
    StateStore,
)

_SOURCE = Path(__file__).with_name("delta.cu")
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


def _delta(shape: DeltaShape) -> str:
    sizes = (
        f"{shape.key_heads}, {shape.value_heads}, {shape.key_dim}, {shape.value_dim}, {shape.taps}"
    )
    shaped = f"kernels::DeltaShape<{TYPES[shape.dtype]}, {sizes}, {flag(shape.grouped)}>"
    return f"kernels::Delta<{shaped}>::"


def _weights(shape: DeltaShape, convolution: str, norm: str) -> str:
    given = f"{convolution}, rates, offsets, {norm}, {real(shape.epsilon)}"
    return f"const kernels::DeltaWeights<{TYPES[shape.dtype]}> weights = {{{given}}};\n"


def _text(  # noqa: PLR0917
    name: str,
    body: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...] = ("out",),
    threads: int = THREADS,
    shared_memory: int = 0,
) -> KernelSource:
    header = source(DEVICE_SOURCE, _SOURCE)
    return KernelSource(name, header, body, inputs, outputs, shared_memory, (threads, 1))


def step_source(shape: DeltaShape, form: StepForm) -> KernelSource:
    body = (
        f"{_weights(shape, 'convolution', 'norm')}"
        f"{_delta(shape)}step<{form.warps}, {form.splits}, {flag(shape.rounded)}>(heads, "
        "heads_shape[1], lengths, slots, weights, ring, states, arrivals, out);"
    )
    return _text(
        "delta_step",
        body,
        (
            *("heads", "lengths", "slots"),
            *("convolution", "rates", "offsets", "norm", "ring", "states", "arrivals"),
        ),
        threads=form.warps * 32,
        shared_memory=4 * (2 * shape.key_dim + shape.value_dim // form.splits + shape.value_dim),
    )


def convolve_source(shape: DeltaShape) -> KernelSource:
    body = (
        f"{_delta(shape)}convolve(heads, heads_shape[1], pieces, pieces_shape[0], convolution, "
        "ring, out);"
    )
    return _text("delta_convolve", body, ("heads", "pieces", "convolution", "ring"))


def relate_source(shape: DeltaShape) -> KernelSource:
    body = (
        f"{_weights(shape, 'nullptr', 'nullptr')}"
        f"{_delta(shape)}relate<{flag(shape.rounded)}>(convolved, heads, heads_shape[1], pieces, "
        "pieces_shape[0], weights, relations, figures);"
    )
    return _text(
        "delta_relate",
        body,
        ("convolved", "heads", "pieces", "rates", "offsets"),
        outputs=("relations", "figures"),
        threads=RELATE_WARPS * 32,
        shared_memory=4 * RELATE_WARPS * (PIECE * PIECE + 2 * PIECE),
    )


def chunk_source(shape: DeltaShape) -> KernelSource:
    body = (
        f"{_delta(shape)}chunk(convolved, relations, figures, heads, heads_shape[1], spans, ring, "
        "states, out);\n"
        "if (blockIdx.x + blockIdx.y + threadIdx.x == 0) written[0] = 0;"
    )
    of_token = 2 * (shape.key_dim + 8) + BLOCK_ROWS + 8
    stage = shape.dtype.size * (PIECE * of_token + _RELATIONS) + 4 * _FIGURES
    return _text(
        "delta_chunk",
        body,
        ("convolved", "relations", "figures", "heads", "spans", "ring", "states"),
        outputs=("out", "written"),
        threads=CHUNK_THREADS,
        shared_memory=_STAGES * stage,
    )


def finish_source(shape: DeltaShape) -> KernelSource:
    body = (
        f"{_delta(shape)}finish(y, heads, heads_shape[1], heads_shape[0], norm, "
        f"{real(shape.epsilon)}, out);"
    )
    return _text("delta_finish", body, ("y", "heads", "norm"))


def restore_source(shape: DeltaShape) -> KernelSource:
    body = (
        f"{_delta(shape)}restore(kept_ring, kept_state, slot[0], ring, states);\n"
        "if (blockIdx.x + threadIdx.x == 0) out[0] = 0;"
    )
    return _text("delta_restore", body, ("kept_ring", "kept_state", "slot", "ring", "states"))
