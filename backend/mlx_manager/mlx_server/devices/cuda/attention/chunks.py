"""Attention of prompt chunks over pages on NVIDIA GPUs, from chunks.cu or chunks_hopper.cu.

MLX's own attention is as fast, but its library (cuDNN) takes some 30 ms to prepare for each pair of
query and key counts that it has not met, and a server's prompts and chunks have any length.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import mlx.core as mx

from mlx_manager.mlx_server.devices.attention.kernel import AttentionShape, AttentionVariant
from mlx_manager.mlx_server.devices.cuda.attention.chunk_plan import (
    FIELDS,
    MOST_PARTS,
    ChunkPlan,
    QueryRun,
    cut,
)
from mlx_manager.mlx_server.devices.cuda.attention.chunk_tiles import (
    WARPS,
    Tiles,
    blocks_of,
    tiles_for,
)
from mlx_manager.mlx_server.devices.cuda.compiler.device import CudaDevice, device_for
from mlx_manager.mlx_server.devices.cuda.compiler.launch import CudaKernel, CudaSource
from mlx_manager.mlx_server.devices.kernel import Kernel, KernelName, Size, Struct, Unsupported

# Most elements of a head: a tile's output is kept in registers, up to 128 of a thread.
MOST_DIM = 256


def chunk_kernels(shape: AttentionShape) -> list[ChunkKernels] | Unsupported:
    """Return the kernels for queries of prompts' chunks on the default device, the best first."""
    if shape.group > WARPS * 16:
        return Unsupported(f"{shape.group} query heads a key/value head")
    if shape.head_dim > MOST_DIM:
        return Unsupported(f"heads of {shape.head_dim} elements: prompts' chunks are gathered")
    device = device_for(shape.dtype)
    if isinstance(device, Unsupported):
        return device
    return [ChunkKernels(shape, device, tiles) for tiles in tiles_for(shape, device)]


class ChunkKernels:
    """Kernels for one shape; nothing is compiled before the first use."""

    def __init__(self, shape: AttentionShape, device: CudaDevice, tiles: Tiles) -> None:
        self.shape = shape
        self.tiles = tiles
        self._device = device
        self._blocks = blocks_of(tiles, shape, device)
        # Counters of finished blocks of cut contexts; the kernel leaves every counter at 0.
        self._arrivals = mx.zeros((MOST_PARTS * shape.kv_heads,), mx.int32)
        self._no_sinks = mx.zeros((1,), mx.float32)
        mx.eval(self._arrivals, self._no_sinks)
        self._kernels: dict[AttentionVariant, Kernel] = {}

    def of_heads(self, kv_heads: int) -> ChunkKernels:
        """Return the same kernel for `kv_heads` key/value heads and their queries."""
        shape = replace(self.shape, q_heads=self.shape.group * kv_heads, kv_heads=kv_heads)
        return ChunkKernels(shape, self._device, self.tiles)

    def plan(self, runs: Iterable[QueryRun], window: int | None = None) -> ChunkPlan:
        """Cut a step's work; once a step for all layers with the same window."""
        return cut(runs, self._blocks, window)

    def attend(  # noqa: PLR0917
        self,
        q: mx.array,
        k_pool: mx.array,
        v_pool: mx.array,
        table: mx.array,
        plan: ChunkPlan,
        dep: mx.array,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attend the queries of `q`, (queries, q_heads, 1, head_dim), that are in `plan`.

        The rest of the result is not set. `window` must be that of the plan. For the other
        arguments see `PagedKernels.attend`.
        """
        variant = AttentionVariant(scale, window, softcap, sinks is not None, divided=False)
        limits = self._no_sinks if sinks is None else sinks.astype(mx.float32)
        figures = max(plan.parts * self.shape.kv_heads * self.tiles.rows, 1)
        out, _, _ = self._kernel(variant)(
            inputs=[q, k_pool, v_pool, table, plan.items, limits, self._arrivals, dep],
            grid=(self.shape.kv_heads * self.tiles.threads, plan.work, 1),
            threadgroup=(self.tiles.threads, 1, 1),
            output_shapes=[q.shape, (figures * self.shape.head_dim,), (figures * 2,)],
            output_dtypes=[self.shape.dtype, mx.float32, mx.float32],
        )
        return out

    def _kernel(self, variant: AttentionVariant) -> Kernel:
        if variant not in self._kernels:
            self._kernels[variant] = CudaKernel(chunk_source(self.shape, self.tiles, variant))
        return self._kernels[variant]


def chunk_source(shape: AttentionShape, form: Tiles, variant: AttentionVariant) -> CudaSource:
    results = KernelName("ChunkResults", (shape.dtype,))
    return CudaSource(
        name="paged_chunks",
        files=form.files(shape),
        function="attend_chunks",
        constants=(form.work(shape, variant), FIELDS),
        arguments=(
            *("q", "k_pool", "v_pool", "table", "items", Size("k_pool", 1), Size("table", 1)),
            Struct(results, ("out", "partial", "figures", "arrivals")),
            *("sinks", variant.scale, variant.softcap or 1.0),
        ),
        inputs=("q", "k_pool", "v_pool", "table", "items", "sinks", "arrivals", "written"),
        outputs=("out", "partial", "figures"),
        shared_memory=form.shared_memory(shape),
        bounds=form.bounds,
    )
