"""How a product is shared out among a device's blocks, and the source text that goes with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from mlx_manager.mlx_server.engine.kernels.cuda import DEVICE_SOURCE, RESERVED_PER_BLOCK, CudaDevice
from mlx_manager.mlx_server.engine.kernels.hopper import (
    HOPPER_SOURCE,
    TILE_ALIGNMENT,
    GroupProduct,
    instructions,
)
from mlx_manager.mlx_server.engine.kernels.kernel import source

WIDTH = 64
"""Inputs that a stage holds: what the matrix's inputs must be a multiple of."""

MOST_STAGES = 4
# Of stages, where one block has a multiprocessor to itself: enough to hide the memory's latency.
STAGE_MEMORY = 168 * 1024

WARPS_SOURCE = Path(__file__).with_name("products.cu")
_GROUPS_SOURCE = Path(__file__).with_name("groups.cu")


@dataclass(frozen=True, slots=True)
class WarpForm:
    """Outputs of a block in tiles of 16, its rows in columns of 8, warps, stages of each warp's
    ring."""

    tiles: int
    columns: int
    warps: int
    stages: int

    most_rows: ClassVar[int] = 32
    gated: ClassVar[str] = "multiply_gated"
    # The block's, among those of its product, and that its rows are there: otherwise in chain.cu.
    place: ClassVar[str] = ", blockIdx.x, kernels::Awaited()"

    @property
    def outputs(self) -> int:
        """Of a block."""
        return self.tiles * 16

    @property
    def threads(self) -> int:
        return self.warps * 32

    @property
    def shared_memory(self) -> int:
        stages = self.warps * self.stages * self._stage_bytes(self.tiles, self.columns)
        merged = self.warps * self.columns * 8 * (self.tiles * 16 + 5) * 4
        return max(stages, merged)

    @property
    def constants(self) -> str:
        return f"{self.tiles}, {self.columns}, {self.warps}, {self.stages}"

    def header(self) -> str:
        return source(DEVICE_SOURCE, WARPS_SOURCE)

    @staticmethod
    def choose(outputs: int, rows: int, device: CudaDevice, fewest: int = 1) -> WarpForm:
        """As measured on an H200: more tiles share the reading of the rows, unless too few blocks
        would be left; eight warps keep more loads in flight where blocks are few, and start and end
        less often where they are very many; in between, two blocks of four warps do better. Of at
        least `fewest` tiles."""
        columns = 1 if rows <= 8 else 2 if rows <= 16 else 4
        least = {1: ((2, 0.66),), 2: ((2, 0.66),), 4: ((4, 0.66), (2, 0.45))}[columns]
        tiles = next(
            (n for n, part in least if outputs / (16 * n) >= part * device.multiprocessors), fewest
        )
        turns = outputs / (16 * tiles) / device.multiprocessors
        if columns == 4:
            warps = 4 if tiles == 4 else 8
            memory = device.block_memory if turns <= 1 else device.multiprocessor_memory // 2
            memory -= RESERVED_PER_BLOCK
        else:
            warps = 4 if turns > 1 and (turns < 5 or columns == 2) else 8
            memory = min(STAGE_MEMORY, device.block_memory)
        stages = memory // (warps * WarpForm._stage_bytes(tiles, columns))
        return WarpForm(tiles, columns, warps, max(2, min(stages, MOST_STAGES)))

    @staticmethod
    def _stage_bytes(tiles: int, columns: int) -> int:
        return (tiles * 16 + columns * 8 + 1) * WIDTH * 2


@dataclass(frozen=True, slots=True)
class GroupForm:
    """Groups of four warps, each of which multiplies 64 weight rows, gates or ups, with up to
    `rows` rows."""

    groups: int
    rows: int

    stages: ClassVar[int] = 3
    most_rows: ClassVar[int] = 64
    gated: ClassVar[str] = "multiply_gated_by_groups"
    place: ClassVar[str] = ""

    @property
    def outputs(self) -> int:
        """Of a block."""
        return self.groups * 64

    @property
    def threads(self) -> int:
        return self.groups * 128

    @property
    def shared_memory(self) -> int:
        stages = self.stages * (self.outputs + self.rows) * WIDTH * 2
        result = self.rows * (self.outputs + 5) * 4
        return max(stages, result) + TILE_ALIGNMENT

    @property
    def constants(self) -> str:
        return f"{self.groups}, {self.rows}, {self.stages}"

    def header(self) -> str:
        product = instructions([GroupProduct(self.rows)])
        return source(DEVICE_SOURCE) + product + source(HOPPER_SOURCE, _GROUPS_SOURCE)

    @staticmethod
    def choose(outputs: int, rows: int, device: CudaDevice) -> GroupForm:
        """As measured on an H200: with many rows more groups share the reading of the rows, unless
        too few blocks would be left."""
        if rows <= 32:
            return GroupForm(2, 32)
        enough = outputs % 256 == 0 and outputs / 256 >= 0.8 * device.multiprocessors
        return GroupForm(4 if enough else 2, 64)


Form = WarpForm | GroupForm
