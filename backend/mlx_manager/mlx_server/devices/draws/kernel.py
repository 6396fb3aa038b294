"""The kernel of draw.h as MLX's custom kernels take it, on NVIDIA and Apple GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx

from mlx_manager.mlx_server.devices.cuda.compiler import device as cuda
from mlx_manager.mlx_server.devices.cuda.compiler.launch import CudaKernel, CudaSource
from mlx_manager.mlx_server.devices.kernel import Argument, Kernel, KernelName, Size, Unsupported
from mlx_manager.mlx_server.devices.metal.launch import MetalSource, compiled_for_metal


@dataclass(frozen=True, slots=True)
class LaunchForm:
    """Launch parameters: threads of a block, and copies of the histogram bins among which the lanes
    of a warp are divided."""

    threads: int
    copies: int

    @property
    def constants(self) -> tuple[int, int]:
        return self.threads // 32, self.copies

    @property
    def shared_memory(self) -> int:
        """Bytes of `Scratch` in draw.h."""
        bins, numbers, arrays = 2 * 2048 * self.copies, 3, 4
        return 4 * (bins + numbers + arrays * (self.threads // 32))


ON_CUDA = LaunchForm(1024, 4)
ON_METAL = LaunchForm(256, 1)
"""On Metal a block has 32 KB of memory, and may have fewer than 1 024 threads, depending on its
registers."""

MOST_TOKENS = (1 << 20) - 1
"""Largest vocabulary: weights are summed in 32-bit integers, 12 bits of each weight at a time."""

INPUTS = ("logits", "parameters", "seeds", "drawn")
OUTPUTS = ("tokens", "following")

_TEXT = Path(__file__).with_name("draw.h")
_CUDA_FILES = (cuda.DEVICE_SOURCE, _TEXT.with_suffix(".cu"), _TEXT)
_DRAWN: tuple[Argument, ...] = (
    *("logits", Size("logits", 1), "parameters", Size("parameters", 0), "seeds", "drawn"),
    *("tokens", "following", "scratch"),
)


def build(dtype: mx.Dtype) -> DrawKernel | Unsupported:
    """Return the kernel for logits of `dtype` on the default device; its first use compiles it."""
    if mx.default_device().type != mx.gpu:
        return Unsupported("the default device is no GPU")
    if mx.metal.is_available():
        return DrawKernel(compiled_for_metal(metal_source(dtype)), ON_METAL.threads)
    device = cuda.cuda_device()
    if isinstance(device, Unsupported):
        return device
    best = CudaKernel(best_source(dtype))
    return DrawKernel(CudaKernel(cuda_source(dtype)), ON_CUDA.threads, best)


class DrawKernel:
    """Sampling of every row's token in one launch, with a block of `threads` for each row.

    best: kernel that finds every row's most likely token; None where MLX's argmax is as fast.
    """

    def __init__(self, kernel: Kernel, threads: int, best: Kernel | None = None) -> None:
        self._kernel = kernel
        self._best = best
        self._threads = threads

    def best(self, logits: mx.array) -> mx.array:
        """Return each row's most likely token, the first of equals: (rows,) uint32.

        logits: (rows, vocabulary).
        """
        if self._best is None:
            return mx.argmax(logits, axis=-1)
        rows = logits.shape[0]
        (tokens,) = self._best(
            inputs=[logits],
            grid=(rows * self._threads, 1, 1),
            threadgroup=(self._threads, 1, 1),
            output_shapes=[(rows,)],
            output_dtypes=[mx.uint32],
        )
        return tokens

    def draw(
        self, logits: mx.array, parameters: mx.array, seeds: mx.array, drawn: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Draw one token for each row.

        Args:
            logits: (rows, vocabulary), of `MOST_TOKENS` at most. Minus infinity excludes a token.
            parameters: (rows that draw, len(Parameter)) float32; later rows of `logits` are
                padding.
            seeds: (rows that draw, 2) uint32, the lower half first.
            drawn: (rows that draw,) uint32, tokens that each row has drawn before. Seeds and
                `drawn` decide the token: see `chances`.

        Returns:
            (rows,) uint32 tokens, and `drawn` for the next call.
        """
        rows = logits.shape[0]
        tokens, following = self._kernel(
            inputs=[logits, parameters, seeds, drawn],
            grid=(rows * self._threads, 1, 1),
            threadgroup=(self._threads, 1, 1),
            output_shapes=[(rows,), drawn.shape],
            output_dtypes=[mx.uint32, mx.uint32],
        )
        return tokens, following


def cuda_source(dtype: mx.Dtype, form: LaunchForm = ON_CUDA) -> CudaSource:
    return CudaSource(
        name="draw",
        files=_CUDA_FILES,
        bounds=(form.threads, 1),
        function="draw_row",
        constants=(dtype, *form.constants),
        scratch=KernelName("Scratch", form.constants),
        arguments=(*_DRAWN, "blockIdx.x", "threadIdx.x"),
        inputs=INPUTS,
        outputs=OUTPUTS,
        shared_memory=form.shared_memory,
    )


def best_source(dtype: mx.Dtype, form: LaunchForm = ON_CUDA) -> CudaSource:
    """Return the source of the kernel that finds the most likely token only.

    It takes some 7 us instead of MLX's 21 us for 128 000 tokens (H200).
    """
    form = replace(form, copies=1)
    return CudaSource(
        name="best",
        files=_CUDA_FILES,
        bounds=(form.threads, 1),
        function="best_of_row",
        constants=(dtype, *form.constants),
        scratch=KernelName("Scratch", form.constants),
        arguments=(
            *("logits", Size("logits", 1), "tokens", "scratch", "blockIdx.x", "threadIdx.x"),
        ),
        inputs=("logits",),
        outputs=("tokens",),
        shared_memory=form.shared_memory,
    )


def metal_source(dtype: mx.Dtype, form: LaunchForm = ON_METAL) -> MetalSource:
    return MetalSource(
        name="draw",
        files=(_TEXT.with_suffix(".metal"), _TEXT),
        function="draw_row",
        constants=(dtype, *form.constants),
        scratch=KernelName("Scratch", form.constants),
        arguments=(*_DRAWN, "threadgroup_position_in_grid.x", "thread_index_in_threadgroup"),
        inputs=INPUTS,
        outputs=OUTPUTS,
    )
