"""GPU kernels of the paged engine: decode attention over pages, and the writes into them."""

from __future__ import annotations

from collections.abc import Callable

from mlx_manager.mlx_server.devices.attention.kernel import (
    AttentionShape,
    CodedKernels,
    CodedShape,
    PagedKernels,
)
from mlx_manager.mlx_server.devices.attention.kinds import (
    build,
    build_chunks,
    build_writer,
    checked_coded,
)
from mlx_manager.mlx_server.devices.attention.writer import PageWriter, Pools
from mlx_manager.mlx_server.devices.cuda.attention.chunks import ChunkKernels
from mlx_manager.mlx_server.devices.cuda.mla.latent import LatentKernels
from mlx_manager.mlx_server.devices.kernel import Unsupported
from mlx_manager.mlx_server.devices.metal.order import LaunchOrder

BuildKernels = Callable[[AttentionShape], PagedKernels | Unsupported]
BuildLatents = Callable[..., "LatentKernels | Unsupported"]
BuildWriter = Callable[[Pools], PageWriter | Unsupported]
BuildCoded = Callable[[CodedShape], CodedKernels | Unsupported]
BuildChunks = Callable[[AttentionShape], ChunkKernels | Unsupported]


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
        build_coded: BuildCoded = checked_coded,
    ) -> None:
        self._build = build
        self._build_chunks = build_chunks
        self._build_writer = build_writer
        self._build_coded = build_coded
        self.order = LaunchOrder()
        self._coded: dict[CodedShape, CodedKernels | Unsupported] = {}
        self._writers: dict[Pools, PageWriter | Unsupported] = {}
        self._built: dict[AttentionShape, PagedKernels | Unsupported] = {}
        self._chunks: dict[AttentionShape, ChunkKernels | Unsupported] = {}

    def find(self, shape: AttentionShape) -> PagedKernels | Unsupported:
        if shape not in self._built:
            self._built[shape] = self._build(shape)
        return self._built[shape]

    def writer(self, of: Pools) -> PageWriter | Unsupported:
        if of not in self._writers:
            self._writers[of] = self._build_writer(of)
        return self._writers[of]

    def coded(self, of: CodedShape) -> CodedKernels | Unsupported:
        """Return the kernels that attend over pages in 8 bits, built and checked on the first call
        only."""
        if of not in self._coded:
            self._coded[of] = self._build_coded(of)
        return self._coded[of]

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
