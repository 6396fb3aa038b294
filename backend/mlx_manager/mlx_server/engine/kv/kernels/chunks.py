"""Attention of prompt chunks over pages on NVIDIA GPUs, from chunks.cu.

MLX's own attention is as fast, but its library (cuDNN) takes some 30 ms to prepare for each pair of
query and key counts that it has not met, and a server's prompts and chunks have any length.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_manager.mlx_server.engine.kv.kernels.cuda import (
    DEVICE_SOURCE,
    HEADS_SOURCE,
    TYPES,
    CudaDevice,
    device_for,
)
from mlx_manager.mlx_server.engine.kv.kernels.kernel import (
    AttentionShape,
    Kernel,
    KernelSource,
    Unsupported,
    Variant,
    compiled_for_cuda,
    flag,
    real,
    source,
)

_SOURCES = (
    DEVICE_SOURCE,
    HEADS_SOURCE,
    Path(__file__).with_name("attention.cu"),
    Path(__file__).with_name("chunks.cu"),
)
WARPS = 4
STAGES = 2


@dataclass(frozen=True, slots=True)
class QueryRun:
    """Consecutive queries of one sequence.

    first: the number of the first among the step's queries. row: of the page table. length: tokens
    that the first sees, itself included; each one sees a token more than the one before.
    """

    first: int
    count: int
    row: int
    length: int


def build_chunks(shape: AttentionShape) -> ChunkKernels | Unsupported:
    """What attends the queries of prompts' chunks; elsewhere MLX's own attention does."""
    if shape.group > WARPS * 16:
        return Unsupported(f"{shape.group} query heads a key/value head")
    device = device_for(shape.dtype)
    return device if isinstance(device, Unsupported) else ChunkKernels(shape, device)


def tokens_of(shape: AttentionShape, device: CudaDevice) -> int:
    """Tokens of a tile: as many as leave room for two blocks on a multiprocessor."""
    half = device.multiprocessor_memory // 2 - 1024
    return next((n for n in (64, 32) if shared_memory(shape, n) <= half), 16)


def shared_memory(shape: AttentionShape, tokens: int) -> int:
    stride = ((shape.head_dim // 8) | 1) * 8
    return (WARPS * 16 + STAGES * 2 * tokens) * stride * shape.dtype.size


class ChunkKernels:
    """Serves one shape; nothing is compiled before the first use."""

    def __init__(self, shape: AttentionShape, device: CudaDevice) -> None:
        self.shape = shape
        self.tokens = tokens_of(shape, device)
        self._kernels: dict[Variant, Kernel] = {}
        self._no_sinks = mx.zeros((1,), mx.float32)

    def plan(self, runs: Iterable[QueryRun]) -> mx.array:
        """(tiles, 4) int32: the runs cut into what a block takes, those that see most first."""
        return mx.array(tiles_of(self.shape, runs))

    def attend(  # noqa: PLR0917
        self,
        q: mx.array,
        k_pool: mx.array,
        v_pool: mx.array,
        table: mx.array,
        tiles: mx.array,
        dep: mx.array,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attention of `q`, (queries, q_heads, 1, head_dim), of those queries that are in `tiles`.

        The rest of the result is not set. For the other arguments see `PagedKernels.attend`.
        """
        variant = Variant(scale, window, softcap, sinks is not None, divided=False)
        limits = self._no_sinks if sinks is None else sinks.astype(mx.float32)
        (out,) = self._kernel(variant)(
            inputs=[q, k_pool, v_pool, table, tiles, limits, dep],
            grid=(self.shape.kv_heads * WARPS * 32, tiles.shape[0], 1),
            threadgroup=(WARPS * 32, 1, 1),
            output_shapes=[q.shape],
            output_dtypes=[self.shape.dtype],
        )
        return out

    def _kernel(self, variant: Variant) -> Kernel:
        if variant not in self._kernels:
            self._kernels[variant] = compiled_for_cuda(
                chunk_source(self.shape, self.tokens, variant)
            )
        return self._kernels[variant]


def tiles_of(shape: AttentionShape, runs: Iterable[QueryRun]) -> np.ndarray:
    """See `ChunkKernels.plan`."""
    most = WARPS * 16 // shape.group
    tiles = [
        (run.first + start, min(most, run.count - start), run.row, run.length + start)
        for run in runs
        for start in range(0, run.count, most)
    ]
    tiles.sort(key=lambda tile: -tile[3])
    return np.array(tiles, np.int32)


def chunk_source(shape: AttentionShape, tokens: int, variant: Variant) -> KernelSource:
    element = TYPES[shape.dtype]
    constants = (
        f"{element}, {shape.head_dim}, {shape.group}, {shape.page_size}, {WARPS}, {tokens}, "
        f"{variant.window or 0}, {flag(variant.softcap is not None)}, {flag(variant.sinks)}"
    )
    numbers = f"{real(variant.scale)}, {real(variant.softcap or 1.0)}"
    body = (
        "const int* mine = tiles + blockIdx.y * 4;\n"
        "kernels::Queries queries = {mine[0], mine[1], mine[2], mine[3]};\n"
        f"kernels::AttendChunk<{constants}> work(queries, k_pool, v_pool, table, "
        "k_pool_shape[1], table_shape[1]);\n"
        f"work.run(q, out, sinks, {numbers});"
    )
    return KernelSource(
        name="paged_chunks",
        header=source(*_SOURCES),
        body=body,
        inputs=("q", "k_pool", "v_pool", "table", "tiles", "sinks", "written"),
        outputs=("out",),
        shared_memory=shared_memory(shape, tokens),
    )
