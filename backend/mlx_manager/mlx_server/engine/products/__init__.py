"""Products of a step's few rows with a layer's large matrices, on NVIDIA GPUs.

Such a product takes as long as reading the matrix takes, and what stands around it (norm,
activation, residual) costs launches. These kernels read the matrix once at the memory's pace and do
the rest on the way; with many rows, reading the rows themselves in every block costs more than the
launches that it saves. There are two: products.cu, and groups.cu for compute capability 9.0.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_manager.mlx_server.engine.kernels.cuda import TYPES, CudaDevice, device_for
from mlx_manager.mlx_server.engine.kernels.kernel import (
    Kernel,
    KernelSource,
    Unsupported,
    compiled_for_cuda,
    flag,
    real,
)
from mlx_manager.mlx_server.engine.products.forms import WIDTH, Form, GroupForm, WarpForm

# From so many rows on gates and ups are multiplied by warpgroups where there are any: 63 instead of
# some 67 us for an 8B's with 32 rows (H200).
FEWEST_IN_GROUPS = 17


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm of the rows before the product; `weight` is (inputs,)."""

    weight: mx.array
    epsilon: float


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
    """Products of few rows, (rows, inputs), with matrices (outputs, inputs).

    Attributes:
        most_rows, most_gated_rows: how many `multiply` and `gated` take.
    """

    most_rows = WarpForm.most_rows

    def __init__(self, dtype: mx.Dtype, device: CudaDevice) -> None:
        in_groups = device.multiplies_in_groups
        self.most_gated_rows = (GroupForm if in_groups else WarpForm).most_rows
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
        form: WarpForm | None = None,
    ) -> mx.array:
        """`norm(x) @ weight.T + bias + residual`, (rows, outputs)."""
        outputs = weight.shape[0]
        form = form or WarpForm.choose(outputs, x.shape[0], self._device)
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
        form = form or gated_form(outputs, x.shape[0], self._device)
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
        form = variant.form
        (out,) = self._kernels[variant](
            inputs=[
                x,
                self._none if norm is None else norm.weight,
                weight,
                self._none if bias is None else bias,
                self._none if residual is None else residual,
            ],
            grid=(weight.shape[0] // form.outputs * form.threads, 1, 1),
            threadgroup=(form.threads, 1, 1),
            output_shapes=[(x.shape[0], outputs)],
            output_dtypes=[self._dtype],
        )
        return out


def gated_form(outputs: int, rows: int, device: CudaDevice) -> Form:
    """What is fastest for gates and ups, `outputs` together."""
    if device.multiplies_in_groups and rows >= FEWEST_IN_GROUPS:
        return GroupForm.choose(outputs, rows, device)
    # A tile of gates needs one of ups beside it.
    return WarpForm.choose(outputs, rows, device, fewest=2)


def product_source(dtype: mx.Dtype, variant: Variant) -> KernelSource:
    form = variant.form
    normed, biased = flag(variant.epsilon is not None), flag(variant.bias)
    constants = f"{TYPES[dtype]}, {form.constants}, {normed}, {biased}"
    sizes = f"x_shape[0], x_shape[1], %s, {real(variant.epsilon or 0.0)}"
    if variant.gated:
        body = (
            f"kernels::{form.gated}<{constants}>"
            f"(x, norm, weight, bias, out, {sizes % 'weight_shape[0] / 2'});"
        )
    else:
        body = (
            f"kernels::multiply_rows<{constants}, {flag(variant.residual)}>"
            f"(x, norm, weight, bias, residual, out, {sizes % 'weight_shape[0]'});"
        )
    return KernelSource(
        name="product",
        header=form.header(),
        body=body,
        inputs=("x", "norm", "weight", "bias", "residual"),
        outputs=("out",),
        shared_memory=form.shared_memory,
    )
