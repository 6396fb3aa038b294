"""Gated short convolutions on NVIDIA GPUs: see short.cu."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx

from mlx_manager.mlx_server.devices.cuda.compiler.device import DEVICE_SOURCE, device_for
from mlx_manager.mlx_server.devices.cuda.compiler.launch import CudaKernel, CudaSource
from mlx_manager.mlx_server.devices.cuda.linear_attention.delta import Texts
from mlx_manager.mlx_server.devices.kernel import Argument, KernelName, Size, Unsupported
from mlx_manager.mlx_server.devices.states import ShortShape, StateStore

_FILE = Path(__file__).with_name("short.cu")
# Taps that are tested; the kernel would serve any number.
TAPS = (2, 3, 4)
# Channels of a thread.
EACH = 4
# Threads of a block: few, so that one row has several blocks.
THREADS = 128


class ShortKernels:
    """Launches of the gated short convolution for one shape."""

    def __init__(self, shape: ShortShape) -> None:
        self.shape = shape
        self._step = CudaKernel(step_source(shape))
        self._chunks = CudaKernel(chunks_source(shape))
        self._restore = CudaKernel(restore_source(shape))

    def step(
        self,
        heads: mx.array,
        weights: mx.array,
        pool: Sequence[mx.array],
        lengths: mx.array,
        slots: mx.array,
    ) -> mx.array:
        """Compute one token of each row, (rows, channels).

        heads: (rows, columns or more), output of the first product. weights: (taps, channels).
        pool: pool of a `StateStore`, written in place. lengths: (rows or more,) int32, tokens of
        each row including this token; 0 for padding. slots: (rows,) int32.
        """
        rows = heads.shape[0]
        (out,) = self._step(
            inputs=[heads, lengths, slots, weights, *pool],
            grid=(threads_for(self.shape, rows), 1, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(rows, self.shape.channels)],
            output_dtypes=[self.shape.dtype],
        )
        return out

    def chunks(
        self, heads: mx.array, weights: mx.array, store: StateStore, texts: Texts
    ) -> mx.array:
        """Compute all tokens of a step with prompts, (tokens, channels); write `store` in place."""
        of = self.shape
        out, store.written = self._chunks(
            inputs=[heads, texts.spans, texts.pieces, weights, store.ring],
            grid=(threads_for(of, texts.pieces.shape[0]), 1, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(heads.shape[0], of.channels), (1,)],
            output_dtypes=[of.dtype, mx.int32],
        )
        return out

    def restore(self, store: StateStore, slot: int, kept: list[mx.array]) -> None:
        """Restore a slot from a copy, in place; it is done once `store.written` is evaluated."""
        (store.written,) = self._restore(
            inputs=[*kept, mx.array([slot], mx.int32), store.ring],
            grid=(threads_for(self.shape, 1), 1, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(1,)],
            output_dtypes=[mx.int32],
        )


BuildShort = Callable[[ShortShape], "ShortKernels | Unsupported"]


def build(shape: ShortShape) -> ShortKernels | Unsupported:
    """Return the kernels for `shape` on the default device; their first use compiles them."""
    served = unserved(shape)
    if served is not None:
        return Unsupported(served)
    device = device_for(shape.dtype)
    return device if isinstance(device, Unsupported) else ShortKernels(shape)


def unserved(shape: ShortShape) -> str | None:
    """Return why the kernels do not serve layers of these sizes; None if they do."""
    if shape.taps not in TAPS:
        return f"a convolution of {shape.taps} tokens: there are kernels of {TAPS}"
    if shape.channels % EACH:
        return f"a convolution of {shape.channels} channels: kernels take multiples of {EACH}"
    return None


def threads_for(shape: ShortShape, count: int) -> int:
    """Return the threads for all channels of so many rows or pieces, in whole blocks."""
    return -(-count * (shape.channels // EACH) // THREADS) * THREADS


def step_source(shape: ShortShape) -> CudaSource:
    inputs = ("heads", "lengths", "slots", "weights", "ring")
    arguments = ("heads", Size("heads", 1), Size("heads", 0), *inputs[1:], "out")
    return _source(shape, "step", arguments, inputs)


def chunks_source(shape: ShortShape) -> CudaSource:
    inputs = ("heads", "spans", "pieces", "weights", "ring")
    sizes = (Size("heads", 1), Size("spans", 0), Size("pieces", 0))
    arguments = (
        *("heads", sizes[0], "spans", sizes[1], "pieces", sizes[2]),
        *("weights", "ring", "out", "written"),
    )
    return _source(shape, "chunks", arguments, inputs, ("out", "written"))


def restore_source(shape: ShortShape) -> CudaSource:
    inputs = ("kept", "slot", "ring")
    return _source(shape, "restore", (*inputs, "written"), inputs, ("written",))


def _source(
    shape: ShortShape,
    function: str,
    arguments: tuple[Argument, ...],
    inputs: tuple[str, ...],
    outputs: tuple[str, ...] = ("out",),
) -> CudaSource:
    """Return the declaration of a kernel that calls a function of the class `Short`."""
    return CudaSource(
        name=f"short_{function}",
        files=(DEVICE_SOURCE, _FILE),
        within=KernelName("Short", (shape.dtype, shape.channels, shape.taps)),
        function=function,
        arguments=arguments,
        inputs=inputs,
        outputs=outputs,
        bounds=(THREADS, 1),
    )
