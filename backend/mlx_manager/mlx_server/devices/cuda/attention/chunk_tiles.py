"""Tile sizes of the two kernels that attend prompts' chunks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from mlx_manager.mlx_server.devices.attention.kernel import AttentionShape, AttentionVariant
from mlx_manager.mlx_server.devices.cuda.attention.chunk_plan import Blocks
from mlx_manager.mlx_server.devices.cuda.attention.decode import HEADS_SOURCE
from mlx_manager.mlx_server.devices.cuda.compiler.device import (
    DEVICE_SOURCE,
    RESERVED_PER_BLOCK,
    CudaDevice,
)
from mlx_manager.mlx_server.devices.cuda.compiler.hopper import (
    HOPPER_SOURCE,
    TILE_ALIGNMENT,
    GroupProduct,
    instructions,
)
from mlx_manager.mlx_server.devices.kernel import Constant, KernelName

_ROWS_SOURCES = (
    DEVICE_SOURCE,
    HEADS_SOURCE,
    Path(__file__).with_name("attention.cu"),
    Path(__file__).with_name("chunk_rows.cu"),
)
_SOURCE = Path(__file__).with_name("chunks.cu")
_GROUPS_SOURCE = Path(__file__).with_name("chunks_hopper.cu")


WARPS = 4
MEETING = 8


@dataclass(frozen=True, slots=True)
class WarpTiles:
    """Block of the kernel for any device: `warps` of 16 rows each, and tiles of `tokens`."""

    warps: int
    tokens: int

    stages: ClassVar[int] = 2
    name: ClassVar[str] = "warps' products (mma)"
    bounds: ClassVar[None] = None

    @property
    def rows(self) -> int:
        return self.warps * 16

    @property
    def threads(self) -> int:
        return self.warps * 32

    def shared_memory(self, shape: AttentionShape) -> int:
        stride = ((shape.head_dim // 8) | 1) * 8
        return (self.rows + self.stages * 2 * self.tokens) * stride * shape.dtype.size

    def at_once(self, shape: AttentionShape, device: CudaDevice) -> int:
        """Blocks that run at a time."""
        memory = self.shared_memory(shape) + RESERVED_PER_BLOCK
        return device.multiprocessors * max(device.multiprocessor_memory // memory, 1)

    def files(self, shape: AttentionShape) -> tuple[Path | str, ...]:
        return *_ROWS_SOURCES, _SOURCE

    def work(self, shape: AttentionShape, variant: AttentionVariant) -> KernelName:
        """The type that does a block's work."""
        sizes = (self.warps, self.tokens)
        return KernelName("AttendChunk", (*_shared(shape), *sizes, *_options(variant)))


@dataclass(frozen=True, slots=True)
class GroupTiles:
    """Block of the kernel for compute capability 9.0.

    groups: groups of four warps, with 64 rows each. tokens: tokens of a tile. stages: tiles of keys
    and of values in shared memory.

    A group's accumulators of scores and output are in registers, (tokens + head_dim) / 2 a thread,
    and in addition tokens / 4 registers hold the weights.
    """

    groups: int
    tokens: int
    stages: int = 2

    name: ClassVar[str] = "warpgroups' products (wgmma)"

    @property
    def bounds(self) -> tuple[int, int]:
        return self.threads, 1

    @property
    def rows(self) -> int:
        return self.groups * 64

    @property
    def threads(self) -> int:
        return self.groups * 128

    def shared_memory(self, shape: AttentionShape) -> int:
        width = -(-shape.head_dim // 64) * 64
        rows = self.rows + self.stages * 2 * self.tokens
        return rows * width * shape.dtype.size + TILE_ALIGNMENT + MEETING

    def at_once(self, shape: AttentionShape, device: CudaDevice) -> int:
        """Blocks that run at a time: registers leave room for one on a multiprocessor."""
        return device.multiprocessors

    def files(self, shape: AttentionShape) -> tuple[Path | str, ...]:
        products = (
            GroupProduct(self.tokens),
            GroupProduct(shape.head_dim, a_in_registers=True, across=True),
        )
        device = (DEVICE_SOURCE, instructions(products), HOPPER_SOURCE)
        return *device, *_ROWS_SOURCES[1:], _GROUPS_SOURCE

    def work(self, shape: AttentionShape, variant: AttentionVariant) -> KernelName:
        """The type that does a block's work."""
        sizes = (self.groups, self.tokens, self.stages)
        constants = (*_shared(shape), *sizes, *_options(variant), shape.head_dim)
        return KernelName("AttendChunkInGroups", constants)


Tiles = WarpTiles | GroupTiles


def blocks_of(tiles: Tiles, shape: AttentionShape, device: CudaDevice) -> Blocks:
    at_once = tiles.at_once(shape, device)
    return Blocks(tiles.rows // shape.group, tiles.tokens, shape.kv_heads, at_once)


def _shared(shape: AttentionShape) -> tuple[Constant, ...]:
    return shape.dtype, shape.head_dim, shape.group, shape.page_size


def _options(variant: AttentionVariant) -> tuple[Constant, ...]:
    return variant.window or 0, variant.softcap is not None, variant.sinks


def _in_groups(head_dim: int) -> GroupTiles:
    """Return the fastest tiles for heads of this size, as measured on an H200."""
    if head_dim <= 64:
        return GroupTiles(2, 64, 3)
    return GroupTiles(2, 96, 4) if head_dim <= 128 else GroupTiles(2, 64)


def tiles_for(shape: AttentionShape, device: CudaDevice) -> list[Tiles]:
    """Return the tiles that serve `shape` on `device`, the best first."""
    # Take as many tokens as leave room for two blocks on a multiprocessor.
    half = device.multiprocessor_memory // 2 - RESERVED_PER_BLOCK
    choices = (WarpTiles(WARPS, tokens) for tokens in (64, 32))
    fitting = (tiles for tiles in choices if tiles.shared_memory(shape) <= half)
    found: list[Tiles] = [next(fitting, WarpTiles(WARPS, 16))]
    if device.multiplies_in_groups:
        found.insert(0, _in_groups(shape.head_dim))
    return found
