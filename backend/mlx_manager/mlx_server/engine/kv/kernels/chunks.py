"""Attention of prompt chunks over pages on NVIDIA GPUs, from chunks.cu.

MLX's own attention is as fast, but its library (cuDNN) takes some 30 ms to prepare for each pair of
query and key counts that it has not met, and a server's prompts and chunks have any length.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import mlx.core as mx
import numpy as np

from mlx_manager.mlx_server.engine.kv.kernels.cuda import (
    DEVICE_SOURCE,
    HEADS_SOURCE,
    RESERVED_PER_BLOCK,
    TYPES,
    CudaDevice,
    device_for,
)
from mlx_manager.mlx_server.engine.kv.kernels.hopper import (
    HOPPER_SOURCE,
    TILE_ALIGNMENT,
    GroupProduct,
    instructions,
)
from mlx_manager.mlx_server.engine.kv.kernels.kernel import (
    AttentionShape,
    Kernel,
    KernelSource,
    Unsupported,
    Variant,
    bounded,
    compiled_for_cuda,
    flag,
    real,
    source,
)

_ROWS_SOURCES = (
    DEVICE_SOURCE,
    HEADS_SOURCE,
    Path(__file__).with_name("attention.cu"),
    Path(__file__).with_name("chunk_rows.cu"),
)
_SOURCE = Path(__file__).with_name("chunks.cu")
_GROUPS_SOURCE = Path(__file__).with_name("chunks_hopper.cu")


WARPS = 4


@dataclass(frozen=True, slots=True)
class WarpTiles:
    """A block of the kernel for any device: `warps` of 16 rows, and `tokens` to a tile."""

    warps: int
    tokens: int

    stages: ClassVar[int] = 2
    name: ClassVar[str] = "warps' products (mma)"

    @property
    def rows(self) -> int:
        return self.warps * 16

    @property
    def threads(self) -> int:
        return self.warps * 32

    def shared_memory(self, shape: AttentionShape) -> int:
        stride = ((shape.head_dim // 8) | 1) * 8
        return (self.rows + self.stages * 2 * self.tokens) * stride * shape.dtype.size

    def header(self, shape: AttentionShape) -> str:
        return source(*_ROWS_SOURCES, _SOURCE)

    def work(self, shape: AttentionShape, variant: Variant) -> str:
        """The type that does a block's work."""
        return f"AttendChunk<{_shared(shape)}, {self.warps}, {self.tokens}, {_options(variant)}>"


@dataclass(frozen=True, slots=True)
class GroupTiles:
    """A block of the kernel for compute capability 9.0: `groups` of warps of 64 rows, `tokens` to
    a tile, and as many tiles in `stages` of shared memory.

    A group's accumulators of scores and output are in registers, (tokens + head_dim) / 2 a thread,
    and beside them half of the former for the weights.
    """

    groups: int
    tokens: int
    stages: int = 2

    name: ClassVar[str] = "warpgroups' products (wgmma)"

    @property
    def rows(self) -> int:
        return self.groups * 64

    @property
    def threads(self) -> int:
        return self.groups * 128

    def shared_memory(self, shape: AttentionShape) -> int:
        width = -(-shape.head_dim // 64) * 64
        rows = self.rows + self.stages * 2 * self.tokens
        return rows * width * shape.dtype.size + TILE_ALIGNMENT

    def header(self, shape: AttentionShape) -> str:
        products = (
            GroupProduct(self.tokens),
            GroupProduct(shape.head_dim, a_in_registers=True, across=True),
        )
        device = source(DEVICE_SOURCE) + instructions(products) + source(HOPPER_SOURCE)
        return device + source(*_ROWS_SOURCES[1:], _GROUPS_SOURCE) + bounded(self.threads)

    def work(self, shape: AttentionShape, variant: Variant) -> str:
        """The type that does a block's work."""
        form = f"{self.groups}, {self.tokens}, {self.stages}"
        return (
            f"AttendChunkInGroups<{_shared(shape)}, {form}, {_options(variant)}, {shape.head_dim}>"
        )


Tiles = WarpTiles | GroupTiles


def _shared(shape: AttentionShape) -> str:
    return f"{TYPES[shape.dtype]}, {shape.head_dim}, {shape.group}, {shape.page_size}"


def _options(variant: Variant) -> str:
    return f"{variant.window or 0}, {flag(variant.softcap is not None)}, {flag(variant.sinks)}"


def tiles_for(shape: AttentionShape, device: CudaDevice) -> Tiles:
    """What serves `shape` best on `device`."""
    if device.multiplies_in_groups:
        return GroupTiles(2, 128 if shape.head_dim <= 128 else 64)
    # As many tokens as leave room for two blocks on a multiprocessor.
    half = device.multiprocessor_memory // 2 - RESERVED_PER_BLOCK
    choices = (WarpTiles(WARPS, tokens) for tokens in (64, 32))
    fitting = (tiles for tiles in choices if tiles.shared_memory(shape) <= half)
    return next(fitting, WarpTiles(WARPS, 16))


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
    return (
        device if isinstance(device, Unsupported) else ChunkKernels(shape, tiles_for(shape, device))
    )


class ChunkKernels:
    """Serves one shape; nothing is compiled before the first use."""

    def __init__(self, shape: AttentionShape, tiles: Tiles) -> None:
        self.shape = shape
        self.tiles = tiles
        self._kernels: dict[Variant, Kernel] = {}
        self._no_sinks = mx.zeros((1,), mx.float32)

    def plan(self, runs: Iterable[QueryRun]) -> mx.array:
        """(tiles, 4) int32: the runs cut into what a block takes, those that see most first."""
        return mx.array(tiles_of(self.shape, self.tiles, runs))

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
            grid=(self.shape.kv_heads * self.tiles.threads, tiles.shape[0], 1),
            threadgroup=(self.tiles.threads, 1, 1),
            output_shapes=[q.shape],
            output_dtypes=[self.shape.dtype],
        )
        return out

    def _kernel(self, variant: Variant) -> Kernel:
        if variant not in self._kernels:
            self._kernels[variant] = compiled_for_cuda(
                chunk_source(self.shape, self.tiles, variant)
            )
        return self._kernels[variant]


def tiles_of(shape: AttentionShape, form: Tiles, runs: Iterable[QueryRun]) -> np.ndarray:
    """See `ChunkKernels.plan`."""
    most = form.rows // shape.group
    tiles = [
        (run.first + start, min(most, run.count - start), run.row, run.length + start)
        for run in runs
        for start in range(0, run.count, most)
    ]
    tiles.sort(key=lambda tile: -tile[3])
    return np.array(tiles, np.int32)


def chunk_source(shape: AttentionShape, form: Tiles, variant: Variant) -> KernelSource:
    numbers = f"{real(variant.scale)}, {real(variant.softcap or 1.0)}"
    body = (
        "const int* mine = tiles + blockIdx.y * 4;\n"
        "kernels::Queries queries = {mine[0], mine[1], mine[2], mine[3]};\n"
        f"kernels::{form.work(shape, variant)} work(queries, k_pool, v_pool, table, "
        "k_pool_shape[1], table_shape[1]);\n"
        f"work.run(q, out, sinks, {numbers});"
    )
    return KernelSource(
        name="paged_chunks",
        header=form.header(shape),
        body=body,
        inputs=("q", "k_pool", "v_pool", "table", "tiles", "sinks", "written"),
        outputs=("out",),
        shared_memory=form.shared_memory(shape),
    )
