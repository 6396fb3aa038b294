"""How a product is shared out among a device's blocks, and the source text that goes with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from mlx_manager.mlx_server.devices.cuda.compiler.device import DEVICE_SOURCE, CudaDevice
from mlx_manager.mlx_server.devices.cuda.compiler.hopper import (
    HOPPER_SOURCE,
    TILE_ALIGNMENT,
    GroupProduct,
    instructions,
)
from mlx_manager.mlx_server.devices.cuda.matmul.factors import Packed, Weight
from mlx_manager.mlx_server.devices.kernel import source

WIDTH = 64
"""Inputs that a stage holds of numbers of half precision: what a matrix has a multiple of."""

# Of a row's scales in a stage, and of its biases.
_TERMS = 16
_MOST_STAGES = 4
# Of stages, where one block has a multiprocessor to itself: enough to hide the memory's latency.
_STAGE_MEMORY = 168 * 1024
# By the tiles of a block: the warps and stages that go with them.
_IN_FLIGHT = {1: (8, 4), 2: (8, 3), 3: (4, 3), 4: (4, 4)}

# As measured on an H200: warps of a block for one row, stages of each, and how many warps of a
# multiprocessor have weights to read at least (NOTES 110).
_ROW_WARPS, _ROW_STAGES = 8, 2
_ROW_WARPS_AT_ONCE = 8

PARTS = ("weight", "scales", "biases")
"""Of a weight that is packed, if as floats the first two; others have the first alone."""

_WARPS_SOURCE = Path(__file__).with_name("products.cu")
_PLAIN_SOURCE = Path(__file__).with_name("plain.cu")
_PACKED_SOURCE = Path(__file__).with_name("packed.cu")
_ROW_SOURCE = Path(__file__).with_name("row.cu")
_GROUPS_SOURCE = Path(__file__).with_name("groups.cu")


@dataclass(frozen=True, slots=True)
class Packing:
    """How weights are packed: numbers of so many bits, groups of so many that share a scale, and
    how many a stage of the kernel holds of each row. `floats`: of mxfp4, how many a row has, as a
    block has the scales of its whole rows; 0 for integers."""

    bits: int
    group: int
    width: int
    floats: int = 0

    @staticmethod
    def of(weight: Weight) -> Packing | None:
        """None for numbers of half precision.

        Raises:
            ValueError: packed as the kernel does not know it; see `serves`.
        """
        if not isinstance(weight, Packed):
            return None
        found = Packing._found(weight)
        if found is None:
            kind = f"{weight.mode}, {weight.bits} bits in groups of {weight.group_size}"
            raise ValueError(f"{kind}: not served")
        return found

    @staticmethod
    def serves(weight: Packed) -> bool:
        """Whether the kernel knows how `weight` is packed."""
        return Packing._found(weight) is not None

    @staticmethod
    def _found(weight: Packed) -> Packing | None:
        bits, group, inputs = weight.bits, weight.group_size, weight.shape[1]
        if weight.mode == "mxfp4":
            return Packing(bits, group, WIDTH, inputs) if inputs % WIDTH == 0 else None
        if weight.mode != "affine" or bits not in (4, 8) or group not in (32, 64, 128):
            return None
        # 128 bytes of a row, or 64, or 32.
        widths = (1024 // bits, 512 // bits, 256 // bits)
        packings = (Packing(bits, group, width) for width in widths if inputs % width == 0)
        return next((packing for packing in packings if packing.is_whole), None)

    @property
    def is_whole(self) -> bool:
        """Whether a stage has whole groups, and as many columns as lanes read of the rows."""
        return self.width >= max(self.group, WIDTH)

    def narrower(self) -> Packing:
        """With half as much of each row in a stage, where that is whole."""
        half = replace(self, width=self.width // 2)
        return half if half.is_whole else self

    def for_one_row(self, inputs: int) -> Packing:
        """With more of each row of weights in a stage: 256 bytes, and as many scales as are copied
        at once, where that divides `inputs`."""
        width = min(2048 // self.bits, _TERMS // 2 * self.group)
        return replace(self, width=width) if inputs % width == 0 else self

    @property
    def row_bytes(self) -> int:
        """Of a stage, for each row of weights."""
        return self.width * self.bits // 8 + (0 if self.floats else 2 * _TERMS)

    @property
    def scales(self) -> int:
        """Bytes of each row's that a block has all the time."""
        return self.floats // self.group


def knows(weight: Weight) -> bool:
    """Whether warps can read `weight` as it is stored, whatever outputs a block gives."""
    if isinstance(weight, Packed):
        return Packing.serves(weight)
    return weight.shape[1] % WIDTH == 0


class ByWarps(ABC):
    """Warps that multiply each by itself. `by`: of the kernels' text, what does it."""

    __slots__ = ()

    by: ClassVar[str]
    # The rows are there when the launch begins; otherwise in chain.cu.
    awaited: ClassVar[str] = ", kernels::Awaited()"
    warps: int
    stages: int
    packing: Packing | None

    @property
    @abstractmethod
    def held(self) -> int:
        """Rows that a block may have."""

    @property
    @abstractmethod
    def share(self) -> int:
        """How the outputs, or the inputs of 16, are shared out."""

    @property
    @abstractmethod
    def outputs(self) -> int:
        """Of a block."""

    @property
    @abstractmethod
    def shared_memory(self) -> int: ...

    @property
    @abstractmethod
    def sources(self) -> tuple[Path, ...]: ...

    @property
    def gated(self) -> str:
        return f"{self.by}::gated"

    @property
    def threads(self) -> int:
        return self.warps * 32

    @property
    def constants(self) -> str:
        return f"{self.share}, {self.constants_in_common}"

    @property
    def constants_in_common(self) -> str:
        """Of all products of a chain."""
        return f"{self.held}, {self.warps}, {self.stages}"

    def size_of(self, array: str) -> tuple[str, str]:
        """A weight's outputs and inputs by its first array."""
        integers = "" if self.packing is None else f" * {32 // self.packing.bits}"
        return f"{array}_shape[0]", f"{array}_shape[1]{integers}"

    def weight(self, element: str) -> str:
        """The weight, made of its arrays."""
        return f"{self.weight_type(element)}{{{', '.join(self.weight_parts)}}}"

    def weight_type(self, element: str) -> str:
        """Of CUDA. element: the rows' type."""
        if self.packing is None:
            return f"kernels::Plain<{element}>"
        if self.packing.floats:
            return f"kernels::Microscaled<{element}, {self.packing.width}>"
        of = f"{self.packing.bits}, {self.packing.group}, {self.packing.width}"
        return f"kernels::Packed<{element}, {of}>"

    @property
    def weight_parts(self) -> tuple[str, ...]:
        """Names of a weight's arrays, in the order of `arrays_of`."""
        if self.packing is None:
            return PARTS[:1]
        return PARTS[:2] if self.packing.floats else PARTS

    def header(self, *more: Path) -> str:
        """more: sources after the product's own."""
        return source(*self.sources, *more)


@dataclass(frozen=True, slots=True)
class WarpForm(ByWarps):
    """Outputs of a block in tiles of 16, how many rows it may have, a multiple of 8, warps, stages
    of each warp's ring; how the weights are packed, if they are."""

    tiles: int
    rows: int
    warps: int
    stages: int
    packing: Packing | None = None

    by: ClassVar[str] = "FewRows"
    most_rows: ClassVar[int] = 32

    @property
    def held(self) -> int:
        return self.rows

    @property
    def share(self) -> int:
        return self.tiles

    @property
    def outputs(self) -> int:
        return self.tiles * 16

    @property
    def shared_memory(self) -> int:
        stages = self.warps * self.stages * self._stage_bytes(self.tiles, self.rows, self.packing)
        scales = 0 if self.packing is None else self.outputs * self.packing.scales
        merged = self.warps * self.rows * (self.outputs + 5) * 4
        return max(stages + scales, merged)

    @property
    def sources(self) -> tuple[Path, ...]:
        weights = _PLAIN_SOURCE if self.packing is None else _PACKED_SOURCE
        return DEVICE_SOURCE, weights, _WARPS_SOURCE

    @staticmethod
    def choose(
        outputs: int,
        rows: int,
        device: CudaDevice,
        packing: Packing | None = None,
        *,
        gated: bool = False,
    ) -> WarpForm:
        """As measured on an H200: as few outputs a block as leave it a multiprocessor to itself, as
        what waits for another block begins too late; where the most are too few for that, two
        blocks share one. More stages than these are slower. With up to 8 rows more tiles share the
        reading of the rows, and two blocks of four warps do better where blocks are neither few nor
        many. `gated`: a tile of gates needs one of ups beside it.
        """
        if packing is not None:
            return WarpForm._of_packed(rows, device, packing)
        if rows <= 8:
            return WarpForm._of_few_rows(outputs, device, gated=gated)
        held = 16 if rows <= 16 else 32
        tiles = next((n for n in _IN_FLIGHT if _shared_out(outputs, n, device, gated=gated)), None)
        if tiles is None:
            return WarpForm._fitting(4, held, 4, 2, device.block_memory)
        return WarpForm._fitting(tiles, held, *_IN_FLIGHT[tiles], device.block_memory)

    @staticmethod
    def _of_few_rows(outputs: int, device: CudaDevice, *, gated: bool) -> WarpForm:
        enough = outputs / 32 >= 0.66 * device.multiprocessors
        tiles = 2 if enough or gated else 1
        turns = outputs / (16 * tiles) / device.multiprocessors
        warps = 4 if 1 < turns < 5 else 8
        memory = min(_STAGE_MEMORY, device.block_memory)
        return WarpForm._fitting(tiles, 8, warps, _MOST_STAGES, memory)

    @staticmethod
    def _of_packed(rows: int, device: CudaDevice, packing: Packing) -> WarpForm:
        """As measured on an H200: four warps with two stages each, as many blocks as fit then. With
        many rows more tiles share the reading of those, where there is memory for that; else blocks
        have fewer of them."""
        held = next(held for held in (8, 16, 32) if rows <= held or held == 32)
        forms = [
            WarpForm(tiles, most, 4, 2, each)
            for most in (held, 16, 8)
            if most <= held
            for tiles in ((2,) if most <= 8 else (4, 2))
            for each in (packing, packing.narrower())
        ]
        return next(form for form in forms if form.shared_memory <= device.block_memory)

    @staticmethod
    def _fitting(tiles: int, rows: int, warps: int, stages: int, memory: int) -> WarpForm:
        """With fewer stages, or fewer warps, where `memory` has no room."""
        of_stage = WarpForm._stage_bytes(tiles, rows, None)
        while warps > 1 and memory < 2 * warps * of_stage:
            warps //= 2
        return WarpForm(tiles, rows, warps, max(2, min(stages, memory // (warps * of_stage))))

    @staticmethod
    def _stage_bytes(tiles: int, rows: int, packing: Packing | None) -> int:
        if packing is None:
            return (tiles * 16 + rows + 1) * WIDTH * 2
        return tiles * 16 * packing.row_bytes + (rows + 1) * packing.width * 2


@dataclass(frozen=True, slots=True)
class RowForm(ByWarps):
    """For one row and packed weights: how many of a block's warps share the inputs of 16 outputs,
    how many there are, stages of each one's ring; how the weights are packed, and their outputs and
    inputs: that the text says them saves the registers of addresses, so that more blocks fit."""

    split: int
    warps: int
    stages: int
    packing: Packing
    size: tuple[int, int]

    by: ClassVar[str] = "OneRow"

    @property
    def held(self) -> int:
        return 1

    @property
    def share(self) -> int:
        return self.split

    @property
    def outputs(self) -> int:
        return 16 * self.warps // self.split

    @property
    def shared_memory(self) -> int:
        inputs = self.size[1]
        sums = inputs // self.packing.group * 4
        merged = self.warps * 20 * 4
        stages = self.warps * self.stages * 16 * self.packing.row_bytes
        return inputs * 2 + sums + -sums % 16 + merged + stages

    @property
    def sources(self) -> tuple[Path, ...]:
        return DEVICE_SOURCE, _PACKED_SOURCE, _WARPS_SOURCE, _ROW_SOURCE

    def size_of(self, array: str) -> tuple[str, str]:
        outputs, inputs = self.size
        return str(outputs), str(inputs)

    @property
    def is_whole(self) -> bool:
        """Whether there are inputs for all warps."""
        return self.size[1] // self.packing.width >= self.split

    @staticmethod
    def choose(
        weights: Sequence[Weight], device: CudaDevice, packing: Packing
    ) -> tuple[RowForm, ...] | None:
        """For products that are launched together; None where a row does not fit.

        As few warps share 16 outputs as leave each multiprocessor several.
        """
        sizes = [size_of(weight) for weight in weights]
        splits = [_split(outputs, device) for outputs, _ in sizes]
        wider = {packing.for_one_row(inputs) for _, inputs in sizes}
        for each in (*wider, packing) if len(wider) == 1 else (packing,):
            forms = tuple(
                RowForm(split, _ROW_WARPS, _ROW_STAGES, each, size)
                for split, size in zip(splits, sizes, strict=True)
            )
            fit = all(form.shared_memory <= device.block_memory for form in forms)
            if fit and (each == packing or all(form.is_whole for form in forms)):
                return forms
        return None


@dataclass(frozen=True, slots=True)
class GroupForm:
    """Groups of four warps, each of which multiplies 64 weight rows, gates or ups, with up to
    `rows` rows."""

    groups: int
    rows: int

    stages: ClassVar[int] = 3
    most_rows: ClassVar[int] = 64
    gated: ClassVar[str] = "multiply_gated_by_groups"
    weight_parts: ClassVar[tuple[str, ...]] = PARTS[:1]
    awaited: ClassVar[str] = ""

    @property
    def held(self) -> int:
        return self.rows

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

    def weight(self, element: str) -> str:
        return self.weight_parts[0]

    def header(self, *more: Path) -> str:
        """more: sources after the product's own."""
        product = instructions([GroupProduct(self.rows)])
        return source(DEVICE_SOURCE) + product + source(HOPPER_SOURCE, _GROUPS_SOURCE, *more)

    @staticmethod
    def serves(weight: Weight, device: CudaDevice) -> bool:
        """Whether there are such for gates and ups that `weight` stands for."""
        whole = not isinstance(weight, Packed) and weight.shape[0] % 128 == 0
        return whole and device.multiplies_in_groups

    @staticmethod
    def choose(outputs: int, rows: int, device: CudaDevice) -> GroupForm:
        """As measured on an H200: with many rows more groups share the reading of the rows, unless
        too few blocks would be left."""
        if rows <= 32:
            return GroupForm(2, 32)
        enough = outputs % 256 == 0 and outputs / 256 >= 0.8 * device.multiprocessors
        return GroupForm(4 if enough else 2, 64)


Form = WarpForm | RowForm | GroupForm


def size_of(weight: Weight) -> tuple[int, int]:
    """Outputs and inputs."""
    outputs, inputs = weight.shape
    return outputs, inputs


def _split(outputs: int, device: CudaDevice) -> int:
    wanted = _ROW_WARPS_AT_ONCE * device.multiprocessors
    splits = (
        split
        for split in (1, 2, 4)
        if outputs // 16 * split >= wanted and outputs * split % (16 * _ROW_WARPS) == 0
    )
    return next(splits, _ROW_WARPS)


def _shared_out(outputs: int, tiles: int, device: CudaDevice, *, gated: bool) -> bool:
    """Whether blocks of so many tiles are a product's, and no more than multiprocessors."""
    whole = outputs % (16 * tiles) == 0 and not (gated and tiles % 2)
    return whole and outputs / (16 * tiles) <= device.multiprocessors
