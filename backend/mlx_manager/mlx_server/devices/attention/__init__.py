"""GPU kernels of the paged engine: decode attention over pages, and the writes into them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

import mlx.core as mx

from mlx_manager.mlx_server.devices.attention.check import Features, check_chunks, self_check
from mlx_manager.mlx_server.devices.attention.kernel import AttentionShape, PagedKernels, Rotary
from mlx_manager.mlx_server.devices.attention.splits import TILE, BlockKind, Splits
from mlx_manager.mlx_server.devices.attention.writer import Pools, Writer
from mlx_manager.mlx_server.devices.cuda.attention import decode as cuda
from mlx_manager.mlx_server.devices.cuda.attention.chunk_plan import ChunkPlan, QueryRun
from mlx_manager.mlx_server.devices.cuda.attention.chunks import ChunkKernels, chunk_kernels
from mlx_manager.mlx_server.devices.cuda.compiler.device import device_for
from mlx_manager.mlx_server.devices.cuda.mla import latent
from mlx_manager.mlx_server.devices.cuda.mla.check import (
    check_expansion,
    check_latent,
)
from mlx_manager.mlx_server.devices.cuda.mla.expansion import Expanded, Expansion, Text, Turning
from mlx_manager.mlx_server.devices.cuda.mla.latent import LatentKernels, TurningKernels
from mlx_manager.mlx_server.devices.cuda.mla.shape import LatentShape
from mlx_manager.mlx_server.devices.kernel import Unsupported
from mlx_manager.mlx_server.devices.metal import attention as metal
from mlx_manager.mlx_server.devices.metal.order import LaunchOrder

__all__ = [
    "AttentionShape",
    "BlockKind",
    "ChunkKernels",
    "ChunkPlan",
    "Expanded",
    "Expansion",
    "Features",
    "KernelSet",
    "LatentKernels",
    "LatentShape",
    "PagedKernels",
    "Pools",
    "QueryRun",
    "Rotary",
    "Splits",
    "Text",
    "Turning",
    "Writer",
    "build",
    "build_chunks",
    "build_expansion",
    "build_latents",
    "build_writer",
    "check_chunks",
    "first_right",
    "self_check",
]

log = logging.getLogger(__name__)

BuildKernels = Callable[[AttentionShape], PagedKernels | Unsupported]
BuildLatents = Callable[..., "LatentKernels | Unsupported"]
BuildWriter = Callable[[Pools], Writer | Unsupported]
BuildChunks = Callable[[AttentionShape], ChunkKernels | Unsupported]

HEAD_DIMS = (64, 80, 96, 128, 256, 512)
"""Head sizes that every device's kernels serve."""
# Most threads of a block on Apple GPUs.
MOST_THREADS = 1024


def build(shape: AttentionShape) -> PagedKernels | Unsupported:
    """Return the kernels for `shape` on the default device; their first use compiles them."""
    on_metal = mx.metal.is_available()
    served = metal.HEAD_DIMS if on_metal else HEAD_DIMS
    if shape.head_dim not in served:
        return Unsupported(f"head size {shape.head_dim}: the kernels serve {served}")
    if shape.page_size % TILE:
        return Unsupported(f"page size {shape.page_size} is no multiple of {TILE}")
    if mx.default_device().type != mx.gpu:
        return Unsupported("the default device is no GPU")
    return metal.build(shape) if on_metal else cuda.build(shape)


def build_writer(of: Pools) -> Writer | Unsupported:
    """Return the writer for pages that no attention kernel reads, on the default device."""
    if mx.default_device().type != mx.gpu:
        return Unsupported("the default device is no GPU")
    if mx.metal.is_available():
        return (
            metal.writer(of) if of.widest <= MOST_THREADS else Unsupported(f"heads of {of.widest}")
        )
    if of.key_dim % cuda.PIECE or of.value_dim % cuda.PIECE:
        return Unsupported(f"heads of {of.key_dim} and {of.value_dim} elements")
    device = device_for(of.dtype)
    return device if isinstance(device, Unsupported) else cuda.writer(of)


def build_chunks(shape: AttentionShape) -> ChunkKernels | Unsupported:
    """Build and check the attention kernels for prompts' chunks on the default device.

    If they are `Unsupported`, MLX's own attention is used.
    """
    match chunk_kernels(shape):
        case Unsupported() as unsupported:
            return unsupported
        case kernels:
            return first_right(kernels)


def first_right(choices: Iterable[ChunkKernels]) -> ChunkKernels | Unsupported:
    """Return the first of `choices` that passes its check."""
    wrong = "there is no kernel"
    for kernels in choices:
        # Two heads are enough: blocks of all heads do the same, and the reference is slow.
        found = check_chunks(kernels.of_heads(2))
        if found is None:
            return kernels
        wrong = f"{kernels.tiles.name}: {found}"
        log.warning("prompts' chunks are not attended by %s", wrong)
    return Unsupported(wrong)


def build_latents(shape: LatentShape, *, traditional: bool) -> LatentKernels | Unsupported:
    """Build and check the kernels for attention to latent vectors on the default device.

    traditional: whether the pairs of a rotation are neighbours; see `Rotary`.
    """
    kernels = latent.build(shape)
    if isinstance(kernels, Unsupported):
        return kernels
    wrong = check_latent(kernels, traditional=traditional)
    if wrong is not None:
        return Unsupported(f"latent attention: {wrong}")
    match build_expansion(shape, traditional=traditional):
        case Unsupported(reason):
            log.info("prompts' latents are not expanded: %s", reason)
        case expansion:
            kernels.expansion = expansion
    return kernels


def build_expansion(shape: LatentShape, *, traditional: bool) -> Expansion | Unsupported:
    """Build and check the expansion of latent vectors for prompts; see `build_latents`."""
    kernels = build_chunks(shape.expanded)
    if isinstance(kernels, Unsupported):
        return kernels
    turn = TurningKernels(shape, kernels.shape.head_dim)
    # Two heads are enough for the check: all heads do the same, and the reference is slow.
    few = Expansion(replace(shape, q_heads=2), kernels.of_heads(2), turn)
    wrong = check_expansion(few, traditional=traditional)
    return Expansion(shape, kernels, turn) if wrong is None else Unsupported(wrong)


class KernelSet:
    """The kernels of one model: layers of the same shape share them.

    Attributes:
        order: order of the kernels' launches, in all layers.
    """

    def __init__(
        self,
        build: BuildKernels = build,
        build_chunks: BuildChunks = build_chunks,
        build_writer: BuildWriter = build_writer,
    ) -> None:
        self._build = build
        self._build_chunks = build_chunks
        self._build_writer = build_writer
        self.order = LaunchOrder()
        self._writers: dict[Pools, Writer | Unsupported] = {}
        self._built: dict[AttentionShape, PagedKernels | Unsupported] = {}
        self._chunks: dict[AttentionShape, ChunkKernels | Unsupported] = {}

    def find(self, shape: AttentionShape) -> PagedKernels | Unsupported:
        if shape not in self._built:
            self._built[shape] = self._build(shape)
        return self._built[shape]

    def writer(self, of: Pools) -> Writer | Unsupported:
        if of not in self._writers:
            self._writers[of] = self._build_writer(of)
        return self._writers[of]

    def chunks(self, shape: AttentionShape) -> ChunkKernels | Unsupported:
        """Return the kernels for chunks of prompts, built and checked on the first call only.

        Every layer of a step calls this.
        """
        if shape not in self._chunks:
            self._chunks[shape] = self._build_chunks(shape)
        return self._chunks[shape]

    def __getitem__(self, shape: AttentionShape) -> PagedKernels:
        """Return the kernels for `shape`.

        Raises:
            RuntimeError: there are none for this shape; the message says why.
        """
        match self.find(shape):
            case Unsupported(reason):
                raise RuntimeError(reason)
            case kernels:
                return kernels
