"""Products of a step's few rows with a layer's large matrices, on NVIDIA GPUs.

Such a product takes as long as reading the matrix takes, and what stands around it (norm,
activation, residual) costs launches. These kernels read the matrix once at the memory's pace, for
up to `MOST_ROWS` rows, and do the rest on the way; with more rows, reading the rows themselves in
every block costs more than the launches that it saves. See products.cu.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mlx_manager.mlx_server.engine.kv.kernels import Unsupported
from mlx_manager.mlx_server.engine.kv.kernels.cuda import (
    DEVICE_SOURCE,
    RESERVED_PER_BLOCK,
    TYPES,
    CudaDevice,
    device_for,
)
from mlx_manager.mlx_server.engine.kv.kernels.kernel import (
    Kernel,
    KernelSource,
    compiled_for_cuda,
    flag,
    real,
    source,
)

MOST_ROWS = 32
WIDTH = 64
"""Inputs that a stage holds: what the matrix's inputs must be a multiple of."""

MOST_STAGES = 4
# Of stages, where one block has a multiprocessor to itself: enough to hide the memory's latency.
STAGE_MEMORY = 168 * 1024

_SOURCE = Path(__file__).with_name("products.cu")


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm of the rows before the product; `weight` is (inputs,)."""

    weight: mx.array
    epsilon: float


@dataclass(frozen=True, slots=True)
class Form:
    """How a product is shared out: outputs of a block in tiles of 16, its rows in columns of 8,
    warps, stages of each warp's ring."""

    tiles: int
    columns: int
    warps: int
    stages: int

    @property
    def shared_memory(self) -> int:
        stages = self.warps * self.stages * self._stage_bytes(self.tiles, self.columns)
        merged = self.warps * self.columns * 8 * (self.tiles * 16 + 5) * 4
        return max(stages, merged)

    @staticmethod
    def choose(outputs: int, rows: int, device: CudaDevice, fewest: int = 1) -> Form:
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
        stages = memory // (warps * Form._stage_bytes(tiles, columns))
        return Form(tiles, columns, warps, max(2, min(stages, MOST_STAGES)))

    @staticmethod
    def _stage_bytes(tiles: int, columns: int) -> int:
        return (tiles * 16 + columns * 8 + 1) * WIDTH * 2


@dataclass(frozen=True, slots=True)
class Variant:
    """Constants of one kernel: one compilation for each. `epsilon` None for no norm."""

    form: Form
    gated: bool
    epsilon: float | None
    bias: bool
    residual: bool


def build(dtype: mx.Dtype) -> ProductKernels | Unsupported:
    """The kernels for rows and matrices of `dtype` on the default device."""
    device = device_for(dtype)
    return device if isinstance(device, Unsupported) else ProductKernels(dtype, device)


class ProductKernels:
    """Products of up to `MOST_ROWS` rows, (rows, inputs), with matrices (outputs, inputs)."""

    def __init__(self, dtype: mx.Dtype, device: CudaDevice) -> None:
        self._dtype = dtype
        self._device = device
        self._kernels: dict[Variant, Kernel] = {}
        self._none = mx.zeros((1,), dtype)

    @staticmethod
    def serves(weight: mx.array) -> bool:
        outputs, inputs = weight.shape
        return outputs % 128 == 0 and inputs % WIDTH == 0

    def multiply(
        self,
        x: mx.array,
        weight: mx.array,
        *,
        norm: Norm | None = None,
        bias: mx.array | None = None,
        residual: mx.array | None = None,
        form: Form | None = None,
    ) -> mx.array:
        """`norm(x) @ weight.T + bias + residual`, (rows, outputs)."""
        outputs = weight.shape[0]
        form = form or Form.choose(outputs, x.shape[0], self._device)
        epsilon = None if norm is None else norm.epsilon
        variant = Variant(form, False, epsilon, bias is not None, residual is not None)
        return self._run(variant, x, weight, norm, bias, residual, outputs)

    def gated(
        self,
        x: mx.array,
        weight: mx.array,
        *,
        norm: Norm | None = None,
        bias: mx.array | None = None,
        form: Form | None = None,
    ) -> mx.array:
        """`silu(gate) * up`, (rows, outputs / 2): the halves of `norm(x) @ weight.T + bias`."""
        outputs = weight.shape[0]
        if form is None:
            # A tile of gates needs one of ups beside it.
            form = Form.choose(outputs, x.shape[0], self._device, fewest=2)
        epsilon = None if norm is None else norm.epsilon
        variant = Variant(form, True, epsilon, bias is not None, residual=False)
        return self._run(variant, x, weight, norm, bias, None, outputs // 2)

    def _run(  # noqa: PLR0917
        self,
        variant: Variant,
        x: mx.array,
        weight: mx.array,
        norm: Norm | None,
        bias: mx.array | None,
        residual: mx.array | None,
        outputs: int,
    ) -> mx.array:
        if variant not in self._kernels:
            self._kernels[variant] = compiled_for_cuda(product_source(self._dtype, variant))
        threads = variant.form.warps * 32
        blocks = weight.shape[0] // (16 * variant.form.tiles)
        (out,) = self._kernels[variant](
            inputs=[
                x,
                self._none if norm is None else norm.weight,
                weight,
                self._none if bias is None else bias,
                self._none if residual is None else residual,
            ],
            grid=(blocks * threads, 1, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[(x.shape[0], outputs)],
            output_dtypes=[self._dtype],
        )
        return out


def product_source(dtype: mx.Dtype, variant: Variant) -> KernelSource:
    form = variant.form
    shape = f"{form.tiles}, {form.columns}, {form.warps}, {form.stages}"
    flags = f"{flag(variant.epsilon is not None)}, {flag(variant.bias)}"
    sizes = f"x_shape[0], x_shape[1], %s, {real(variant.epsilon or 0.0)}"
    if variant.gated:
        body = (
            f"kernels::multiply_gated<{TYPES[dtype]}, {shape}, {flags}>"
            f"(x, norm, weight, bias, out, {sizes % 'weight_shape[0] / 2'});"
        )
    else:
        body = (
            f"kernels::multiply_rows<{TYPES[dtype]}, {shape}, {flags}, {flag(variant.residual)}>"
            f"(x, norm, weight, bias, residual, out, {sizes % 'weight_shape[0]'});"
        )
    return KernelSource(
        name="product",
        header=source(DEVICE_SOURCE, _SOURCE),
        body=body,
        inputs=("x", "norm", "weight", "bias", "residual"),
        outputs=("out",),
        shared_memory=form.shared_memory,
    )
