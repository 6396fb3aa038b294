"""Products of few rows with a matrix of each head, on NVIDIA GPUs: see by_head.cu."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx

from mlx_manager.mlx_server.devices.cuda.compiler.device import CudaDevice
from mlx_manager.mlx_server.devices.cuda.compiler.launch import CudaKernels, CudaSource
from mlx_manager.mlx_server.devices.cuda.matmul.factors import Weight, arrays_of
from mlx_manager.mlx_server.devices.cuda.matmul.forms import WIDTH, Packing, WarpForm, knows
from mlx_manager.mlx_server.devices.kernel import Size

_SOURCE = Path(__file__).with_name("by_head.cu")


@dataclass(frozen=True, slots=True)
class HeadVariant:
    """Constants of one kernel.

    heads: number of heads. rows_first: the input is (rows, heads * n) and the result (heads, rows,
    outputs); otherwise the input is (heads, rows, inputs) and the result (rows, heads * outputs).
    """

    form: WarpForm
    heads: int
    rows_first: bool


class HeadKernels:
    """Products of few rows of each head with a matrix of its own.

    Matrices are one weight, (heads * outputs, inputs), one below the other.
    """

    def __init__(self, dtype: mx.Dtype, device: CudaDevice) -> None:
        self._dtype = dtype
        self._device = device
        self._kernel = CudaKernels(dtype)

    @staticmethod
    def serves(weight: Weight, heads: int) -> bool:
        return knows(weight) and weight.shape[0] // heads % 64 == 0

    def of_rows(self, x: mx.array, weight: Weight, heads: int) -> mx.array:
        """Return (heads, rows, outputs) for `x`, (rows, heads * n).

        Of each head the first numbers are taken, as many as the matrices have inputs; n is a
        multiple of 8.
        """
        rows, outputs = x.shape[0], weight.shape[0] // heads
        return self._multiply(x, weight, rows, heads, (heads, rows, outputs), rows_first=True)

    def to_rows(self, x: mx.array, weight: Weight) -> mx.array:
        """Return (rows, heads * outputs) for `x`, (heads, rows, inputs)."""
        heads, rows, _ = x.shape
        return self._multiply(x, weight, rows, heads, (rows, weight.shape[0]), rows_first=False)

    def _multiply(
        self,
        x: mx.array,
        weight: Weight,
        rows: int,
        heads: int,
        shape: tuple[int, ...],
        *,
        rows_first: bool,
    ) -> mx.array:
        form = head_form(weight, heads, rows, self._device)
        blocks = weight.shape[0] // form.outputs * -(-rows // form.held)
        (out,) = self._kernel(head_source, HeadVariant(form, heads, rows_first))(
            inputs=[x, *arrays_of(weight)],
            grid=(blocks * form.threads, 1, 1),
            threadgroup=(form.threads, 1, 1),
            output_shapes=[shape],
            output_dtypes=[self._dtype],
        )
        return out


def head_form(weight: Weight, heads: int, rows: int, device: CudaDevice) -> WarpForm:
    """Return the form for one matrix of so many outputs, adapted to heads.

    There are no more warps than the inputs have stages, and each head has whole blocks.
    """
    outputs, inputs = weight.shape
    packing = Packing.of(weight)
    form = WarpForm.choose(outputs, rows, device, packing)
    stages = inputs // (WIDTH if packing is None else packing.width)
    warps = min(form.warps, 1 << (stages - 1).bit_length())
    tiles = form.tiles if outputs // heads % form.outputs == 0 else 2
    return replace(form, warps=warps, tiles=tiles)


def head_source(dtype: mx.Dtype, variant: HeadVariant) -> CudaSource:
    form = variant.form
    lines, inputs = form.size_of("weight")
    rows, width = (0, 1) if variant.rows_first else (1, 2)
    return CudaSource(
        name="heads_product",
        files=(*form.files, _SOURCE),
        function="multiply_heads",
        constants=(dtype, *form.constants, variant.heads, variant.rows_first),
        arguments=(
            *("x", form.weight(dtype), "out", Size("x", rows), Size("x", width)),
            *(inputs, lines),
        ),
        inputs=("x", *form.weight_parts),
        outputs=("out",),
        shared_memory=form.shared_memory,
    )
