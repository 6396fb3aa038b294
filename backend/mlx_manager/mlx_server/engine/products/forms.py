"""How a product is shared out among a device's blocks, and the source text that goes with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from mlx_manager.mlx_server.engine.kernels.cuda import DEVICE_SOURCE, CudaDevice
from mlx_manager.mlx_server.engine.kernels.hopper import (
    HOPPER_SOURCE,
    TILE_ALIGNMENT,
    GroupProduct,
    instructions,
)
from mlx_manager.mlx_server.engine.kernels.kernel import source

WIDTH = 64
"""Inputs that a stage holds: what the matrix's inputs must be a multiple of."""

_MOST_STAGES = 4
# Of stages, where one block has a multiprocessor to itself: enough to hide the memory's latency.
_STAGE_MEMORY = 168 * 1024
# By the tiles of a block: the warps and stages that go with them.
_IN_FLIGHT = {1: (8, 4), 2: (8, 3), 3: (4, 3), 4: (4, 4)}

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
    def choose(outputs: int, rows: int, device: CudaDevice, *, gated: bool = False) -> WarpForm:
        """As measured on an H200: as few outputs a block as leave it a multiprocessor to itself, as
        what waits for another block begins too late; where the most are too few for that, two
        blocks share one. More stages than these are slower. With up to 8 rows more tiles share the
        reading of the rows, and two blocks of four warps do better where blocks are neither few nor
        many. `gated`: a tile of gates needs one of ups beside it.
        """
        if rows <= 8:
            return WarpForm._of_few_rows(outputs, device, gated=gated)
        columns = 2 if rows <= 16 else 4
        tiles = next((n for n in _IN_FLIGHT if _shared_out(outputs, n, device, gated=gated)), None)
        if tiles is None:
            return WarpForm._fitting(4, columns, 4, 2, device.block_memory)
        return WarpForm._fitting(tiles, columns, *_IN_FLIGHT[tiles], device.block_memory)

    @staticmethod
    def _of_few_rows(outputs: int, device: CudaDevice, *, gated: bool) -> WarpForm:
        enough = outputs / 32 >= 0.66 * device.multiprocessors
        tiles = 2 if enough or gated else 1
        turns = outputs / (16 * tiles) / device.multiprocessors
        warps = 4 if 1 < turns < 5 else 8
        memory = min(_STAGE_MEMORY, device.block_memory)
        return WarpForm._fitting(tiles, 1, warps, _MOST_STAGES, memory)

    @staticmethod
    def _fitting(tiles: int, columns: int, warps: int, stages: int, memory: int) -> WarpForm:
        """With fewer stages, or fewer warps, where `memory` has no room."""
        of_stage = WarpForm._stage_bytes(tiles, columns)
        while warps > 1 and memory < 2 * warps * of_stage:
            warps //= 2
        return WarpForm(tiles, columns, warps, max(2, min(stages, memory // (warps * of_stage))))

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
        result = (self.rows * (self.outputs + 4) + self.threads) * 4
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


def _shared_out(outputs: int, tiles: int, device: CudaDevice, *, gated: bool) -> bool:
    """Whether blocks of so many tiles are a product's, and no more than multiprocessors."""
    whole = outputs % (16 * tiles) == 0 and not (gated and tiles % 2)
    return whole and outputs / (16 * tiles) <= device.multiprocessors
