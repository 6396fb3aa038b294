"""Division of a product among a device's blocks, and the kernel's constants for each kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import mlx.core as mx

from mlx_manager.mlx_server.devices.cuda.compiler.device import DEVICE_SOURCE, CudaDevice
from mlx_manager.mlx_server.devices.cuda.compiler.hopper import (
    HOPPER_SOURCE,
    TILE_ALIGNMENT,
    GroupProduct,
    instructions,
)
from mlx_manager.mlx_server.devices.cuda.matmul.factors import Packed, Weight
from mlx_manager.mlx_server.devices.kernel import Argument, KernelName, Size, Struct

WIDTH = 64
"""Inputs of a stage for weights of half precision; a matrix must have a multiple of them."""

# Bytes of a row's scales in a stage, and of its biases.
_TERMS = 16
_MOST_STAGES = 4
# Bytes of stages, if one block has a multiprocessor to itself: enough to hide the memory's latency.
_STAGE_MEMORY = 168 * 1024
# Warps and stages of a block, by its tiles.
_IN_FLIGHT = {1: (8, 4), 2: (8, 3), 3: (4, 3), 4: (4, 4)}

# Measured on an H200: warps of a block for one row, stages of each warp, and the fewest warps of a
# multiprocessor that should have weights to read.
_ROW_WARPS, _ROW_STAGES = 8, 2
_ROW_WARPS_AT_ONCE = 8

PARTS = ("weight", "scales", "biases")
"""Names of a packed weight's arrays. Weights packed as floats have the first two, dense ones only
the first."""

_WARPS_SOURCE = Path(__file__).with_name("products.cu")
_PLAIN_SOURCE = Path(__file__).with_name("plain.cu")
_PACKED_SOURCE = Path(__file__).with_name("packed.cu")
_ROW_SOURCE = Path(__file__).with_name("row.cu")
_GROUPS_SOURCE = Path(__file__).with_name("groups.cu")


@dataclass(frozen=True, slots=True)
class Packing:
    """Packing of a weight.

    bits: bits of a number. group: numbers that share a scale. width: numbers of each row that a
    stage of the kernel holds. floats: for mxfp4 the numbers of a row, since a block holds the
    scales of its whole rows; 0 for integers.
    """

    bits: int
    group: int
    width: int
    floats: int = 0

    @staticmethod
    def of(weight: Weight) -> Packing | None:
        """Return the packing of `weight`; None for half precision.

        Raises:
            ValueError: the kernel does not support this packing; see `serves`.
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
        """Return whether the kernel supports the packing of `weight`."""
        return Packing._found(weight) is not None

    @staticmethod
    def _found(weight: Packed) -> Packing | None:
        bits, group, inputs = weight.bits, weight.group_size, weight.shape[1]
        if weight.mode == "mxfp4":
            return Packing(bits, group, WIDTH, inputs) if inputs % WIDTH == 0 else None
        if weight.mode != "affine" or bits not in (4, 8) or group not in (32, 64, 128):
            return None
        # A stage holds 128 bytes of a row, or 64, or 32.
        widths = (1024 // bits, 512 // bits, 256 // bits)
        packings = (Packing(bits, group, width) for width in widths if inputs % width == 0)
        return next((packing for packing in packings if packing.is_whole), None)

    @property
    def is_whole(self) -> bool:
        """Return whether a stage holds whole groups, and at least `WIDTH` inputs, as lanes read."""
        return self.width >= max(self.group, WIDTH)

    def narrower(self) -> Packing:
        """Return the packing with half as much of each row in a stage, if that is whole."""
        half = replace(self, width=self.width // 2)
        return half if half.is_whole else self

    def for_one_row(self, inputs: int) -> Packing:
        """Return the packing with more of each row of weights in a stage, if that divides `inputs`.

        A stage then holds 256 bytes of a row, but no more scales than are copied at once.
        """
        width = min(2048 // self.bits, _TERMS // 2 * self.group)
        return replace(self, width=width) if inputs % width == 0 else self

    @property
    def row_bytes(self) -> int:
        """Bytes of a stage for each row of weights."""
        return self.width * self.bits // 8 + (0 if self.floats else 2 * _TERMS)

    @property
    def scales(self) -> int:
        """Bytes of each row's scales that a block holds throughout."""
        return self.floats // self.group


def knows(weight: Weight) -> bool:
    """Return whether warps can read `weight` as it is stored, whatever outputs a block has."""
    if isinstance(weight, Packed):
        return Packing.serves(weight)
    return weight.shape[1] % WIDTH == 0


class ByWarps(ABC):
    """Form of a product in which each warp multiplies on its own.

    by: type in the kernels' source that multiplies.
    """

    __slots__ = ()

    by: ClassVar[str]
    warps: int
    stages: int
    packing: Packing | None

    @property
    @abstractmethod
    def held(self) -> int:
        """Most rows of a block."""

    @property
    @abstractmethod
    def share(self) -> int:
        """Tiles of outputs of a block, or warps that share the inputs of 16 outputs."""

    @property
    @abstractmethod
    def outputs(self) -> int:
        """Outputs of a block."""

    @property
    @abstractmethod
    def shared_memory(self) -> int: ...

    @property
    @abstractmethod
    def files(self) -> tuple[Path, ...]: ...

    @property
    def threads(self) -> int:
        return self.warps * 32

    @property
    def constants(self) -> tuple[int, ...]:
        return self.share, *self.constants_in_common

    @property
    def constants_in_common(self) -> tuple[int, ...]:
        """Constants that all products of a chain have in common."""
        return self.held, self.warps, self.stages

    def size_of(self, array: str, over: int = 1) -> tuple[Argument, Argument]:
        """Return a weight's outputs, divided by `over`, and inputs; `array` is its first array."""
        integers = 1 if self.packing is None else 32 // self.packing.bits
        return Size(array, 0, over=over), Size(array, 1, times=integers)

    def weight(self, dtype: mx.Dtype, before: str = "") -> Struct:
        """Return the weight, made of its arrays. before: what the names of these begin with."""
        return Struct(self.weight_type(dtype), tuple(before + part for part in self.weight_parts))

    def weight_type(self, dtype: mx.Dtype) -> KernelName:
        """Return the CUDA type of the weight. dtype: type of the rows."""
        packing = self.packing
        if packing is None:
            return KernelName("Plain", (dtype,))
        if packing.floats:
            return KernelName("Microscaled", (dtype, packing.width))
        return KernelName("Packed", (dtype, packing.bits, packing.group, packing.width))

    @property
    def weight_parts(self) -> tuple[str, ...]:
        """Names of a weight's arrays, in the order of `arrays_of`."""
        if self.packing is None:
            return PARTS[:1]
        return PARTS[:2] if self.packing.floats else PARTS


@dataclass(frozen=True, slots=True)
class WarpForm(ByWarps):
    """Form for few rows.

    tiles: outputs of a block, in tiles of 16. rows: most rows of a block, a multiple of 8. warps:
    warps of a block. stages: stages of each warp's ring. packing: packing of the weights; None for
    half precision.
    """

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
    def files(self) -> tuple[Path, ...]:
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
        """Choose the fastest form, as measured on an H200.

        A block has as few outputs as still give every block a multiprocessor to itself, since
        blocks that wait for others begin too late. If even the most outputs are too few for that,
        two blocks share a multiprocessor. More stages than these are slower. With up to 8 rows more
        tiles share the reading of the rows, and two blocks of four warps are faster if blocks are
        neither few nor many.

        gated: the weight is of gates and ups; a tile of gates needs a tile of ups beside it.
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
        """Choose the fastest form for packed weights, as measured on an H200.

        A block has four warps with two stages each, and as many blocks run as fit. With many rows
        more tiles share the reading of the rows, if there is memory for that; else blocks have
        fewer rows.
        """
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
        """Return the form with fewer stages, or fewer warps, if `memory` bytes have no room."""
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
    """Form for one row and packed weights.

    split: warps of a block that share the inputs of 16 outputs. warps: warps of a block. stages:
    stages of each warp's ring. packing: packing of the weights. size: outputs and inputs of the
    weight; as constants in the source they save registers for addresses, so that more blocks fit.
    """

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
    def files(self) -> tuple[Path, ...]:
        return DEVICE_SOURCE, _PACKED_SOURCE, _WARPS_SOURCE, _ROW_SOURCE

    def size_of(self, array: str, over: int = 1) -> tuple[Argument, Argument]:
        outputs, inputs = self.size
        return outputs // over, inputs

    @property
    def is_whole(self) -> bool:
        """Return whether there are inputs for all warps that share them."""
        return self.size[1] // self.packing.width >= self.split

    @staticmethod
    def choose(
        weights: Sequence[Weight], device: CudaDevice, packing: Packing
    ) -> tuple[RowForm, ...] | None:
        """Choose the forms of products that are launched together; None if a row does not fit.

        As few warps share 16 outputs as still give each multiprocessor several warps.
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
    """Form with groups of four warps; each group multiplies 64 weight rows, gates or ups.

    groups: groups of a block. rows: most rows of a block.
    """

    groups: int
    rows: int

    stages: ClassVar[int] = 3
    most_rows: ClassVar[int] = 64
    by: ClassVar[str] = "ByGroups"
    weight_parts: ClassVar[tuple[str, ...]] = PARTS[:1]

    @property
    def held(self) -> int:
        return self.rows

    @property
    def outputs(self) -> int:
        """Outputs of a block."""
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
    def constants(self) -> tuple[int, ...]:
        return self.groups, self.rows, self.stages

    def size_of(self, array: str, over: int = 1) -> tuple[Argument, Argument]:
        """Return a weight's outputs, divided by `over`, and inputs."""
        return Size(array, 0, over=over), Size(array, 1)

    def weight(self, dtype: mx.Dtype) -> str:
        return self.weight_parts[0]

    @property
    def files(self) -> tuple[Path | str, ...]:
        product = instructions([GroupProduct(self.rows)])
        return DEVICE_SOURCE, product, HOPPER_SOURCE, _GROUPS_SOURCE

    @staticmethod
    def serves(weight: Weight, device: CudaDevice) -> bool:
        """Return whether the device has warpgroups and `weight`, gates and ups, fits them."""
        whole = not isinstance(weight, Packed) and weight.shape[0] % 128 == 0
        return whole and device.multiplies_in_groups

    @staticmethod
    def choose(outputs: int, rows: int, device: CudaDevice) -> GroupForm:
        """Choose the fastest form, as measured on an H200.

        With many rows more groups share the reading of the rows, unless that leaves too few blocks.
        """
        if rows <= 32:
            return GroupForm(2, 32)
        enough = outputs % 256 == 0 and outputs / 256 >= 0.8 * device.multiprocessors
        return GroupForm(4 if enough else 2, 64)


Form = WarpForm | RowForm | GroupForm


def size_of(weight: Weight) -> tuple[int, int]:
    """Return the outputs and inputs of a weight."""
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
    """Return whether blocks of `tiles` divide the outputs, and each has a multiprocessor."""
    whole = outputs % (16 * tiles) == 0 and not (gated and tiles % 2)
    return whole and outputs / (16 * tiles) <= device.multiprocessors
