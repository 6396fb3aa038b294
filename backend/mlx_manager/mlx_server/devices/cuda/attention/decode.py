"""Paged decode attention on NVIDIA GPUs, from attention.cu, and what precedes it, from heads.cu."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_manager.mlx_server.devices.attention.kernel import (
    AttentionShape,
    AttentionVariant,
    CodedShape,
    Lengths,
    Rotary,
)
from mlx_manager.mlx_server.devices.attention.launched import THREADS, LaunchedKernels
from mlx_manager.mlx_server.devices.attention.splits import (
    MAX_SPLITS,
    TILE,
    BlockKind,
    Splits,
    plan,
)
from mlx_manager.mlx_server.devices.attention.writer import PageWriter, Pools
from mlx_manager.mlx_server.devices.cuda.compiler.device import (
    DEVICE_SOURCE,
    RESERVED_PER_BLOCK,
    CudaDevice,
    device_for,
)
from mlx_manager.mlx_server.devices.cuda.compiler.launch import CudaKernel, CudaSource
from mlx_manager.mlx_server.devices.kernel import (
    Argument,
    Constant,
    Kernel,
    KernelName,
    OptionalArgument,
    Size,
    Struct,
    Unsupported,
)

HEADS_SOURCE = Path(__file__).with_name("heads.cu")
_SOURCE = Path(__file__).with_name("attention.cu")

# Most query heads of a block: two columns of 8 of a matrix product. For wide heads registers have
# room for one column of the output.
MOST_HEADS = 16
MOST_WIDE_HEADS = 8
WIDE = 256
# Warps of a block, in order of preference: the most that fit with two stages are taken.
WARPS = (4, 3, 2, 1)
MOST_STAGES = 3
# Elements of a head that a thread writes.
PIECE = 8
# Waves: blocks wanted for each block that the device has room for at a time. If contexts are alike
# (the longest at most `ALIKE` times the average), one wave saves the start and end of every other
# block. Otherwise one wave would leave the end of a launch uneven.
WAVES = 2
WAVES_OF_ALIKE = 1
ALIKE = 1.25
# Average context, in tokens, up to which small blocks (few warps and stages) are faster: 64 rows of
# 144 tokens take 16 instead of 20 us a layer of an 8B, but of 640 tokens 52 instead of 49 (H200).
SHORT = 384
SMALL_WARPS = 2
SMALL_STAGES = 2
# Average context, in tokens, from which on tall blocks (many warps) are faster. With 4 096 tokens,
# 32 rows take 67.8 instead of 69.2 us a layer of a 1B, 48 rows 98.5 instead of 99.8, and 16 rows
# of an 8B 68.6 instead of 70. But 64 rows of 2 048 tokens of a 1B, whose blocks do not fit at a
# time, take 72.5 instead of 67.1 (H200).
LONG = 1024
TALL_WARPS = 8
TALL_STAGES = 2
# Tall blocks must fill more than this fraction of the blocks that the device has room for.
TALL_LEAST = 0.6
# Heads of one token that each thread works on in `rotate_and_write`.
HEADS_EACH = 4
MOST_QUERIES = 4096


def build(shape: AttentionShape) -> CudaAttention | Unsupported:
    device = device_for(shape.dtype)
    return device if isinstance(device, Unsupported) else CudaAttention(shape, device)


def build_coded(of: CodedShape) -> CudaAttention | Unsupported:
    if of.group % PIECE:
        return Unsupported(f"groups of {of.group} numbers")
    device = device_for(of.attention.dtype)
    return (
        device
        if isinstance(device, Unsupported)
        else CudaAttention(of.attention, device, coded=of.group)
    )


@dataclass(frozen=True, slots=True)
class CudaLaunch:
    """Warps of a block, shared-memory stages of a warp, and the figures that follow from them.

    fresh: offset of a fused step's own data in the block's `shared_memory` bytes. resident: blocks
    that run at a time on a multiprocessor. waves: waves of blocks that are wanted; if None, the
    contexts decide.
    """

    warps: int
    stages: int
    shared_memory: int
    fresh: int
    resident: int
    waves: int | None = None

    @staticmethod
    def of(
        shape: AttentionShape,
        device: CudaDevice,
        warps: int,
        stages: int,
        waves: int | None = None,
    ) -> CudaLaunch:
        heads, dim = heads_per_block(shape), shape.head_dim
        stage = 2 * TILE * ((dim // 8) | 1) * 8 * shape.dtype.size
        merge = warps * heads * (dim + 6) * 4
        weights = (heads * MAX_SPLITS + 1) * 4
        fresh = -(-max(warps * stages * stage, merge, weights) // 16) * 16
        memory = fresh + (heads * (dim + 8) + 2 * dim) * shape.dtype.size + (heads + 2) * 4
        resident = device.multiprocessor_memory // (memory + RESERVED_PER_BLOCK)
        return CudaLaunch(warps, stages, memory, fresh, max(resident, 1), waves)

    @staticmethod
    def choose(shape: AttentionShape, device: CudaDevice) -> CudaLaunch:
        """Choose warps and stages for `shape`.

        The stages are as many as leave room for two blocks on a multiprocessor, so that the start
        and end of one block overlap with the loads of the other; failing that, as many as fit. One
        warp with two stages fits on every device that `device_for` finds.
        """
        stages = range(MOST_STAGES, 1, -1)
        by_warps = [[CudaLaunch.of(shape, device, warps, n) for n in stages] for warps in WARPS]
        choices = next((of for of in by_warps if of[-1].fits(device)), by_warps[-1])
        fitting = [c for c in choices if c.fits(device)]
        shared = [c for c in fitting if c.resident >= 2]
        return (shared or fitting or choices[-1:])[0]

    def fits(self, device: CudaDevice) -> bool:
        return self.shared_memory <= device.block_memory

    def blocks(self, device: CudaDevice) -> int:
        """Return how many blocks the device has room for at a time."""
        return device.multiprocessors * self.resident


class CudaAttention(LaunchedKernels):
    """CUDA kernels of decode attention; the work list says whether a context is divided."""

    _merges = False
    _pads = False

    def __init__(
        self,
        shape: AttentionShape,
        device: CudaDevice,
        launch: CudaLaunch | None = None,
        *,
        coded: int | None = None,
    ) -> None:
        super().__init__(shape, writer(shape.pools), coded)
        self.launches = dict.fromkeys(BlockKind, launch) if launch else launches_of(shape, device)
        self._device = device
        self._heads = heads_per_block(shape)
        self._blocks = blocks_per_item(shape)
        self._kernels: dict[AttentionVariant, Kernel] = {}
        # Counters of each query's finished blocks; the kernel leaves every counter at 0.
        self._arrivals = mx.zeros((MOST_QUERIES * self._blocks,), mx.int32)
        mx.eval(self._arrivals)

    def plan(
        self, lengths: Lengths, *, window: int | None = None, table_rows: Lengths | None = None
    ) -> Splits:
        rooms = {form: of.blocks(self._device) for form, of in self.launches.items()}
        blocks = blocks_for(lengths, window, blocks_per_item=self._blocks, rooms=rooms)
        launch = self.launches[blocks]
        splits = plan(
            lengths,
            blocks_per_item=self._blocks,
            blocks_wanted=rooms[blocks] * (launch.waves or waves_for(lengths, window)),
            window=window,
            table_rows=table_rows,
        )
        return replace(splits, blocks=blocks)

    def _rotation(self, rotary: Rotary) -> Kernel:
        return CudaKernel(rotate_source(self.shape, rotary))

    def _rotation_threads(self, tokens: int) -> int:
        return rotate_threads(self.shape, tokens)

    def _launch(  # noqa: PLR0917
        self,
        variant: AttentionVariant,
        inputs: Sequence[mx.array],
        sinks: Sequence[mx.array],
        after: Sequence[mx.array],
        splits: Splits,
        shape: tuple[int, ...],
    ) -> mx.array:
        if shape[0] > MOST_QUERIES:
            raise ValueError(f"{shape[0]} queries: the kernels take {MOST_QUERIES} at most")
        figures = splits.work * self._blocks * self._heads if splits.divided else 1
        threads = self.launches[variant.blocks].warps * 32
        out, _ = self._kernel(variant)(
            inputs=[*inputs, *sinks, self._arrivals, *after],
            grid=(self._blocks * threads, splits.work, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[shape, (figures * (self.shape.head_dim + 2),)],
            output_dtypes=[self.shape.dtype, mx.float32],
        )
        return out

    def _kernel(self, variant: AttentionVariant) -> Kernel:
        # Looked up once: the host hashes a variant in each layer of a step.
        kernel = self._kernels.get(variant)
        if kernel is None:
            launch = self.launches[variant.blocks]
            kernel = CudaKernel(attend_source(self.shape, launch, variant))
            self._kernels[variant] = kernel
        return kernel


def heads_per_block(shape: AttentionShape) -> int:
    return min(shape.group, MOST_HEADS if shape.head_dim <= WIDE else MOST_WIDE_HEADS)


def blocks_per_item(shape: AttentionShape) -> int:
    return shape.kv_heads * -(-shape.group // heads_per_block(shape))


def launches_of(shape: AttentionShape, device: CudaDevice) -> dict[BlockKind, CudaLaunch]:
    usual = CudaLaunch.choose(shape, device)
    small = CudaLaunch.of(shape, device, SMALL_WARPS, SMALL_STAGES)
    tall = CudaLaunch.of(shape, device, TALL_WARPS, TALL_STAGES)
    return {
        BlockKind.USUAL: usual,
        BlockKind.SMALL: small if small.resident > usual.resident else usual,
        BlockKind.TALL: tall if tall.fits(device) else usual,
    }


def blocks_for(
    lengths: Lengths,
    window: int | None,
    *,
    blocks_per_item: int,
    rooms: Mapping[BlockKind, int],
) -> BlockKind:
    """Return the kind of blocks that is fastest for these contexts.

    rooms: for each kind, the blocks that the device has room for at a time.
    """
    seen = _seen(lengths, window)
    if len(seen) * blocks_per_item > rooms[BlockKind.USUAL] and bool(seen.mean() <= SHORT):
        return BlockKind.SMALL
    rows, room = np.count_nonzero(seen), rooms[BlockKind.TALL]
    whole = TALL_LEAST * room < rows * blocks_per_item <= room
    if whole and waves_for(lengths, window) == WAVES_OF_ALIKE and seen.sum() >= LONG * rows:
        return BlockKind.TALL
    return BlockKind.USUAL


def waves_for(lengths: Lengths, window: int | None) -> int:
    """Return the waves of blocks that contexts are cut for. Rows of padding do not count."""
    seen = _seen(lengths, window)
    alike = seen.max(initial=0) * np.count_nonzero(seen) <= ALIKE * seen.sum()
    return WAVES_OF_ALIKE if alike else WAVES


def _seen(lengths: Lengths, window: int | None) -> npt.NDArray[np.integer]:
    return np.asarray(lengths) if window is None else np.minimum(lengths, window)


def attend_source(
    shape: AttentionShape, launch: CudaLaunch, variant: AttentionVariant
) -> CudaSource:
    dtype = shape.dtype
    work = KernelName(
        "Attend",
        (
            *(dtype, shape.head_dim, shape.group, shape.page_size, launch.warps, launch.stages),
            *(variant.window or 0, variant.softcap is not None, variant.sinks, variant.coded or 0),
        ),
    )
    given: Argument
    match variant.rotary:
        case None:
            function, given = "run", "q"
            options: tuple[Constant, ...] = ()
            inputs: tuple[str, ...] = ("q",)
            after: tuple[str, ...] = ("written",)
        case rotary:
            function, given = "run_fused", _fresh(shape, rotary)
            inputs, after = ("qkv", "rotation", *_norms(rotary)), ()
            options = (*_kind(rotary), launch.fresh)
    pools: tuple[str, ...] = ("k_pool", "v_pool")
    kind = KernelName("Pages", (dtype,))
    if variant.coded is not None:
        pools, kind, after = ("codes", "scales"), KernelName("CodedPages"), ()
    pages = (*pools, "table", "lengths", "items")
    sizes = (Size(pools[0], 1), Size("table", 1))
    return CudaSource(
        name="paged_attend",
        files=(DEVICE_SOURCE, HEADS_SOURCE, _SOURCE),
        within=work,
        made=True,
        function=function,
        constants=options,
        arguments=(
            given,
            Struct(kind, (*pages, *sizes)),
            Struct(KernelName("Results", (dtype,)), ("out", "partial", "arrivals")),
            *(OptionalArgument("sinks"), variant.scale, variant.softcap or 1.0),
        ),
        inputs=(*inputs, *pages, *(("sinks",) if variant.sinks else ()), "arrivals", *after),
        outputs=("out", "partial"),
        shared_memory=launch.shared_memory,
    )


def _kind(rotary: Rotary) -> tuple[Constant, ...]:
    normed = rotary.epsilon is not None
    return rotary.dims, rotary.traditional, normed, rotary.gated, rotary.values


def _fresh(shape: AttentionShape, rotary: Rotary) -> Struct:
    kind = KernelName("Fresh", (shape.dtype,))
    norms = OptionalArgument("q_norm"), OptionalArgument("k_norm")
    return Struct(kind, ("qkv", "rotation", *norms, rotary.epsilon or 0.0))


def _norms(rotary: Rotary) -> tuple[str, ...]:
    """Return the names of the norms' weights among the inputs."""
    return () if rotary.epsilon is None else ("q_norm", "k_norm")


def writer(of: Pools) -> PageWriter:
    """Return the writer for heads that have a multiple of `PIECE` elements."""
    threads = -(-of.kv_heads * of.widest // PIECE // THREADS) * THREADS
    kernel = CudaKernel(write_source(of))
    return PageWriter(kernel, threads, THREADS)


def write_source(of: Pools) -> CudaSource:
    return CudaSource(
        name="paged_write",
        files=(DEVICE_SOURCE, HEADS_SOURCE, _SOURCE),
        function="write_tokens",
        constants=(of.dtype, of.key_dim, of.value_dim),
        arguments=(
            *("k_pool", "v_pool", "k", "v", "slots"),
            *(Size("k_pool", 1), Size("k", 1), Size("k", 2), "written"),
        ),
        inputs=("k_pool", "v_pool", "k", "v", "slots"),
        outputs=("written",),
    )


def rotate_source(shape: AttentionShape, rotary: Rotary) -> CudaSource:
    kv_heads = 0 if rotary.alone else shape.kv_heads
    sizes = (shape.head_dim, shape.q_heads, kv_heads, _lanes(shape), HEADS_EACH)
    pages = ("k_pool", "v_pool", "slots")
    return CudaSource(
        name="paged_rotate",
        files=(DEVICE_SOURCE, HEADS_SOURCE),
        within=KernelName("RotateAndWrite", (shape.dtype, *sizes, *_kind(rotary))),
        function="run",
        arguments=(_fresh(shape, rotary), *pages, Size("k_pool", 1), Size("qkv", 0), "queries"),
        inputs=("qkv", "rotation", *_norms(rotary), *pages),
        outputs=("queries",),
    )


def rotate_threads(shape: AttentionShape, tokens: int) -> int:
    """Return the threads of the launch that `rotate_source` is for, in whole blocks."""
    sets = -(-(shape.q_heads + 2 * shape.kv_heads) // HEADS_EACH)
    return -(-tokens * sets * _lanes(shape) // THREADS) * THREADS


def _lanes(shape: AttentionShape) -> int:
    """Return the threads that share a head, 16 elements each, rounded up to a power of two.

    So no head is divided between two warps.
    """
    return 1 << (shape.head_dim // 16 - 1).bit_length()
