"""Paged decode attention on Apple GPUs, from attention.metal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mlx_manager.mlx_server.devices.attention.kernel import (
    AttentionShape,
    AttentionVariant,
    CodedShape,
    Lengths,
    Rotary,
)
from mlx_manager.mlx_server.devices.attention.launched import THREADS, LaunchedKernels
from mlx_manager.mlx_server.devices.attention.splits import Splits, plan
from mlx_manager.mlx_server.devices.attention.writer import PageWriter, Pools
from mlx_manager.mlx_server.devices.kernel import Argument, Kernel, KernelName, Size, Struct
from mlx_manager.mlx_server.devices.metal.launch import MetalSource, compiled_for_metal

_SOURCE = Path(__file__).with_name("attention.metal")
# Head sizes that are served: lanes hold a whole number of elements each.
HEAD_DIMS = (64, 72, 80, 96, 112, 128, 160, 192, 256, 512)
SIMDGROUPS = 4
# Most query heads of a block; fewer if heads are wide, since these take twice the registers and
# threadgroup memory.
MOST_HEADS = 4
MOST_WIDE_HEADS = 2
WIDE = 256
# Threadgroups worth having: some 16 for each of the up to 80 cores, four heads' registers deep.
BLOCKS_WANTED = 1024


def build(shape: AttentionShape) -> MetalKernels:
    return MetalKernels(shape)


def build_coded(of: CodedShape) -> MetalKernels:
    return MetalKernels(of.attention, of.group)


class MetalKernels(LaunchedKernels):
    """Metal kernels of decode attention; a separate launch merges the parts of a context."""

    _merges = True
    _pads = True

    def __init__(self, shape: AttentionShape, coded: int | None = None) -> None:
        super().__init__(shape, writer(shape.pools), coded)
        self._heads = heads_per_block(shape)
        self._blocks = shape.kv_heads * -(-shape.group // self._heads)
        self._kernels: dict[AttentionVariant, _Pair] = {}

    def plan(
        self, lengths: Lengths, *, window: int | None = None, table_rows: Lengths | None = None
    ) -> Splits:
        return plan(
            lengths,
            blocks_per_item=self._blocks,
            blocks_wanted=BLOCKS_WANTED,
            window=window,
            table_rows=table_rows,
        )

    def _rotation(self, rotary: Rotary) -> Kernel:
        return compiled_for_metal(rotate_source(self.shape, rotary))

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
        if variant not in self._kernels:
            self._kernels[variant] = _Pair.build(self.shape, variant)
        kernels = self._kernels[variant]
        figures = splits.work * self._blocks * self._heads if splits.divided else 1
        dim = self.shape.head_dim
        out, partial, partial_figures = kernels.attend(
            inputs=[*inputs, *sinks, *after],
            grid=(self._blocks * SIMDGROUPS * 32, splits.work, 1),
            threadgroup=(SIMDGROUPS * 32, 1, 1),
            output_shapes=[(1,) if splits.divided else shape, (figures * dim,), (figures * 2,)],
            output_dtypes=[self.shape.dtype, mx.float32, mx.float32],
        )
        if not splits.divided:
            return out
        (merged,) = kernels.merge(
            inputs=[partial, partial_figures, splits.items, *sinks],
            grid=(self.shape.q_heads * dim, splits.work, 1),
            threadgroup=(dim, 1, 1),
            output_shapes=[shape],
            output_dtypes=[self.shape.dtype],
        )
        return merged


def heads_per_block(shape: AttentionShape) -> int:
    return min(shape.group, MOST_HEADS if shape.head_dim <= WIDE else MOST_WIDE_HEADS)


@dataclass(frozen=True, slots=True)
class _Pair:
    attend: Kernel
    merge: Kernel

    @staticmethod
    def build(shape: AttentionShape, variant: AttentionVariant) -> _Pair:
        return _Pair(
            compiled_for_metal(attend_source(shape, variant)),
            compiled_for_metal(merge_source(shape, sinks=variant.sinks)),
        )


def attend_source(shape: AttentionShape, variant: AttentionVariant) -> MetalSource:
    dtype, dim, group = shape.dtype, shape.head_dim, shape.group
    features = (variant.window or 0, variant.softcap is not None, variant.sinks, variant.divided)
    match variant.rotary:
        case None:
            inputs: tuple[str, ...] = ("q",)
            after: tuple[str, ...] = ("written",)
            queries = Struct(KernelName("Ready", (dtype, dim, group)), ("q",))
        case rotary:
            inputs, after = ("qkv", "rotation", "q_norm", "k_norm"), ()
            queries = _fresh(shape, rotary, "newest")
    rest = ("table", "lengths", "items", "sinks")
    outputs = ("out", "partial", "partial_figures")
    pools: tuple[str, ...] = ("k_pool", "v_pool")
    keys: Argument
    values: Argument
    keys, values = pools
    match variant.coded:
        case None:
            pass
        case coded:
            pools, after = ("codes", "scales"), ()
            keys, values = (
                Struct(KernelName("Codes", (dim, coded)), (*pools, Size("codes", 1), before))
                for before in (0, shape.kv_heads)
            )
    return MetalSource(
        name="paged_attend",
        files=(_SOURCE,),
        function="attend",
        constants=(dtype, dim, group, shape.page_size, SIMDGROUPS, *features),
        scratch=KernelName("Shared", (dim, group, SIMDGROUPS)),
        newest=None if variant.rotary is None else (dtype, 2 * dim),
        arguments=(
            *(queries, keys, values, *rest, *outputs, "scratch"),
            *(Size(pools[0], 1), Size("table", 1)),
            *(variant.scale, variant.softcap or 1.0),
            *("threadgroup_position_in_grid", "threadgroups_per_grid"),
            *("thread_index_in_threadgroup", "simdgroup_index_in_threadgroup"),
            "thread_index_in_simdgroup",
        ),
        inputs=(*inputs, *pools, *rest, *after),
        outputs=outputs,
    )


def _fresh(shape: AttentionShape, rotary: Rotary, newest: str | None) -> Struct:
    """Return the q/k/v projections of a step."""
    flags = (rotary.traditional, rotary.epsilon is not None, rotary.gated, rotary.values)
    constants = (shape.dtype, shape.head_dim, shape.group, rotary.dims, *flags, rotary.alone)
    given = ("qkv", "rotation", "q_norm", "k_norm", rotary.epsilon or 0.0, newest)
    return Struct(KernelName("fresh", constants), given, called=True)


def merge_source(shape: AttentionShape, *, sinks: bool) -> MetalSource:
    return MetalSource(
        name="paged_merge",
        files=(_SOURCE,),
        function="merge_splits",
        constants=(shape.dtype, shape.head_dim, shape.group, sinks),
        arguments=(
            *("partial", "partial_figures", "items", "sinks", "out"),
            *("threadgroup_position_in_grid", "threadgroups_per_grid"),
            "thread_index_in_threadgroup",
        ),
        inputs=("partial", "partial_figures", "items", "sinks"),
        outputs=("out",),
    )


def writer(of: Pools) -> PageWriter:
    kernel = compiled_for_metal(write_source(of), ensure_row_contiguous=False)
    return PageWriter(kernel, of.kv_heads * of.widest, of.widest)


def write_source(of: Pools) -> MetalSource:
    return MetalSource(
        name="paged_write",
        files=(_SOURCE,),
        function="write_token",
        constants=(of.dtype, of.key_dim, of.value_dim),
        arguments=(
            *("k_pool", "v_pool", "k", "v", "slots", Size("k_pool", 1), Size("k", 2)),
            *("k_strides", "v_strides", "thread_position_in_grid", "written"),
        ),
        inputs=("k_pool", "v_pool", "k", "v", "slots"),
        outputs=("written",),
    )


def rotate_source(shape: AttentionShape, rotary: Rotary) -> MetalSource:
    pages = ("k_pool", "v_pool", "slots")
    return MetalSource(
        name="paged_rotate",
        files=(_SOURCE,),
        function="rotate_and_write",
        constants=(shape.dtype, shape.head_dim, shape.group),
        arguments=(
            *(_fresh(shape, rotary, None), *pages, Size("k_pool", 1), shape.kv_heads),
            *(Size("qkv", 0), "out", "thread_position_in_grid"),
        ),
        inputs=("qkv", "rotation", "q_norm", "k_norm", *pages),
        outputs=("out",),
    )


def rotate_threads(shape: AttentionShape, tokens: int) -> int:
    """Return the threads of the launch that `rotate_source` is for, in whole threadgroups. A head
    takes 16 threads, or 8 where its size is no multiple of 16."""
    heads, lanes = shape.q_heads + 2 * shape.kv_heads, 8 if shape.head_dim % 16 else 16
    return -(-tokens * heads * lanes // THREADS) * THREADS
