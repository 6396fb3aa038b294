"""Paged decode attention on NVIDIA GPUs, from attention.cu."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_manager.mlx_server.engine.kv.kernels.kernel import (
    AttentionShape,
    Kernel,
    KernelSource,
    Lengths,
    Rotary,
    Unsupported,
    Variant,
    flag,
    real,
    source,
)
from mlx_manager.mlx_server.engine.kv.kernels.splits import MAX_SPLITS, TILE, Splits, plan

_TYPES: dict[Any, str] = {mx.bfloat16: "__nv_bfloat16", mx.float16: "__half"}

WARPS = 4
MOST_STAGES = 4
# Blocks wanted on each multiprocessor in turn: the more, the evener the end of a launch.
WAVES = 4
RESERVED_PER_BLOCK = 1024


def build(shape: AttentionShape) -> CudaKernels | Unsupported:
    if shape.dtype not in _TYPES:
        return Unsupported(f"{shape.dtype} pages: the CUDA kernels serve bfloat16 and float16")
    info = mx.device_info()
    capability = (
        int(str(info["compute_capability_major"])),
        int(str(info["compute_capability_minor"])),
    )
    if capability < (8, 0):
        return Unsupported(f"{info['architecture']}: the CUDA kernels need sm_80 or later")
    return CudaKernels(shape, cuda_device(capability))


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """Shared memory in bytes that a block and a multiprocessor have."""

    multiprocessors: int
    block_memory: int
    multiprocessor_memory: int


def cuda_device(capability: tuple[int, int]) -> CudaDevice:
    """Limits by compute capability (CUDA C++ Programming Guide, technical specifications)."""
    large = {(8, 0): 164, (8, 7): 164, (9, 0): 228, (10, 0): 228, (10, 3): 228, (11, 0): 228}
    kib = large.get(capability, 100)
    return CudaDevice(_multiprocessors(), (kib - 1) * 1024, kib * 1024)


@cache
def _multiprocessors() -> int:
    kernel: Kernel = mx.fast.cuda_kernel(  # type: ignore[assignment]
        name="paged_multiprocessors",
        input_names=["unused"],
        output_names=["count"],
        source='unsigned n; asm("mov.u32 %0, %%nsmid;" : "=r"(n)); count[0] = n;',
    )
    (count,) = kernel(
        inputs=[mx.zeros((1,), mx.int32)],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.int32],
    )
    return int(np.array(count)[0])


@dataclass(frozen=True, slots=True)
class CudaLaunch:
    """Warps a block, shared-memory stages a warp, and what follows from them."""

    warps: int
    stages: int
    shared_memory: int
    resident: int
    waves: int = WAVES

    @staticmethod
    def of(
        shape: AttentionShape, device: CudaDevice, warps: int, stages: int, waves: int = WAVES
    ) -> CudaLaunch:
        heads = min(shape.group, 16)
        stage = 2 * TILE * ((shape.head_dim // 8) | 1) * 8 * shape.dtype.size
        merge = warps * heads * (shape.head_dim + 6) * 4
        weights = (heads * MAX_SPLITS + 1) * 4
        memory = max(warps * stages * stage, merge, weights)
        resident = device.multiprocessor_memory // (memory + RESERVED_PER_BLOCK)
        return CudaLaunch(warps, stages, memory, max(resident, 1), waves)

    @staticmethod
    def choose(shape: AttentionShape, device: CudaDevice) -> CudaLaunch:
        """As many stages as leave room for two blocks on a multiprocessor, so that one's start
        and end hide behind the other's loads; failing that, as many as fit."""
        choices = [CudaLaunch.of(shape, device, WARPS, n) for n in range(MOST_STAGES, 1, -1)]
        fitting = [c for c in choices if c.shared_memory <= device.block_memory]
        shared = [c for c in fitting if c.resident >= 2]
        return (shared or fitting or choices[-1:])[0]


class CudaKernels:
    """The CUDA kernels; see `PagedKernels`."""

    def __init__(
        self, shape: AttentionShape, device: CudaDevice, launch: CudaLaunch | None = None
    ) -> None:
        self.shape = shape
        self.launch = launch or CudaLaunch.choose(shape, device)
        self._blocks = shape.kv_heads * -(-shape.group // 16)
        self._wanted = device.multiprocessors * self.launch.resident * self.launch.waves
        self._kernels: dict[Variant, Kernel] = {}
        self._write = _compiled(write_source(shape), ensure_row_contiguous=False)
        # Blocks of a query that have arrived; the kernel leaves every counter at 0.
        self._arrivals = mx.zeros((0,), mx.int32)
        self._no_sinks = mx.zeros((1,), mx.float32)
        self._no_norm = mx.zeros((1,), shape.dtype)

    def plan(
        self, lengths: Lengths, *, window: int | None = None, table_rows: Lengths | None = None
    ) -> Splits:
        return plan(
            lengths,
            blocks_per_item=self._blocks,
            blocks_wanted=self._wanted,
            window=window,
            table_rows=table_rows,
        )

    def write(
        self, k_pool: mx.array, v_pool: mx.array, k: mx.array, v: mx.array, slots: mx.array
    ) -> mx.array:
        rows, heads, tokens, dim = k.shape
        (dep,) = self._write(
            inputs=[k_pool, v_pool, k, v, slots],
            grid=(-(-heads * dim // 8 // 128) * 128, rows * tokens, 1),
            threadgroup=(128, 1, 1),
            output_shapes=[(1,)],
            output_dtypes=[mx.int32],
        )
        return dep

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
        variant = Variant(scale, window, softcap, sinks is not None, splits.divided)
        pages = [k_pool, v_pool, table, lengths, splits.items]
        return self._launch(variant, [q, *pages, self._logits(sinks)], [dep], splits, q.shape)

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
        variant = Variant(scale, window, softcap, sinks is not None, splits.divided, rotary)
        fresh = [qkv, rotation, *(norms or (self._no_norm, self._no_norm))]
        pages = [k_pool, v_pool, table, lengths, splits.items]
        shape = (qkv.shape[0], self.shape.q_heads * self.shape.head_dim)
        return self._launch(variant, [*fresh, *pages, self._logits(sinks)], [], splits, shape)

    def _launch(
        self,
        variant: Variant,
        inputs: list[mx.array],
        after: list[mx.array],
        splits: Splits,
        shape: tuple[int, ...],
    ) -> mx.array:
        figures = splits.work * self._blocks * min(self.shape.group, 16) if splits.divided else 1
        out, _, _ = self._kernel(variant)(
            inputs=[*inputs, self._counters(shape[0] * self._blocks), *after],
            grid=(self._blocks * self.launch.warps * 32, splits.work, 1),
            threadgroup=(self.launch.warps * 32, 1, 1),
            output_shapes=[shape, (figures * self.shape.head_dim,), (figures * 2,)],
            output_dtypes=[self.shape.dtype, mx.float32, mx.float32],
        )
        return out

    def _logits(self, sinks: mx.array | None) -> mx.array:
        return self._no_sinks if sinks is None else sinks.astype(mx.float32)

    def _counters(self, count: int) -> mx.array:
        if self._arrivals.size < count:
            self._arrivals = mx.zeros((2 * count,), mx.int32)
            mx.eval(self._arrivals)
        return self._arrivals

    def _kernel(self, variant: Variant) -> Kernel:
        if variant not in self._kernels:
            self._kernels[variant] = _compiled(attend_source(self.shape, self.launch, variant))
        return self._kernels[variant]


def attend_source(shape: AttentionShape, launch: CudaLaunch, variant: Variant) -> KernelSource:
    constants = (
        f"{_TYPES[shape.dtype]}, {shape.head_dim}, {shape.group}, {shape.page_size}, "
        f"{launch.warps}, {launch.stages}, {variant.window or 0}, "
        f"{flag(variant.softcap is not None)}, {flag(variant.sinks)}"
    )
    element = _TYPES[shape.dtype]
    numbers = f"{real(variant.scale)}, {real(variant.softcap or 1.0)}"
    match variant.rotary:
        case None:
            inputs: tuple[str, ...] = ("q",)
            after: tuple[str, ...] = ("written",)
            call = f"work.run(q, pages, results, sinks, {numbers});"
        case Rotary(dims, traditional, epsilon):
            inputs, after = ("qkv", "rotation", "q_norm", "k_norm"), ()
            options = f"{dims}, {flag(traditional)}, {flag(epsilon is not None)}"
            call = (
                f"paged::Fresh<{element}> fresh = {{qkv, rotation, q_norm, k_norm, "
                f"{real(epsilon or 0.0)}}};\n"
                f"work.run_fused<{options}>(fresh, pages, results, sinks, {numbers});"
            )
    body = (
        f"paged::Pages<{element}> pages = {{k_pool, v_pool, table, lengths, items, "
        "k_pool_shape[1], table_shape[1]};\n"
        f"paged::Results<{element}> results = {{out, partial, partial_figures, arrivals}};\n"
        f"paged::Attend<{constants}> work;\n{call}"
    )
    pages = ("k_pool", "v_pool", "table", "lengths", "items", "sinks", "arrivals")
    return KernelSource(
        name="paged_attend",
        header=source("attention.cu"),
        body=body,
        inputs=(*inputs, *pages, *after),
        outputs=("out", "partial", "partial_figures"),
        shared_memory=launch.shared_memory,
    )


def write_source(shape: AttentionShape) -> KernelSource:
    body = (
        f"paged::write_token<{_TYPES[shape.dtype]}, {shape.head_dim}>(k_pool, v_pool, k, v, "
        "slots, k_pool_shape[1], k_shape[1], k_shape[2], k_strides, v_strides);\n"
        "if (blockIdx.x + blockIdx.y + threadIdx.x == 0) written[0] = 1;"
    )
    return KernelSource(
        name="paged_write",
        header=source("attention.cu"),
        body=body,
        inputs=("k_pool", "v_pool", "k", "v", "slots"),
        outputs=("written",),
    )


def _compiled(text: KernelSource, *, ensure_row_contiguous: bool = True) -> Kernel:
    kernel: Kernel = mx.fast.cuda_kernel(  # type: ignore[assignment]
        name=text.unique_name,
        input_names=list(text.inputs),
        output_names=list(text.outputs),
        source=text.body,
        header=text.header,
        ensure_row_contiguous=ensure_row_contiguous,
        shared_memory=text.shared_memory,
    )
    return kernel
