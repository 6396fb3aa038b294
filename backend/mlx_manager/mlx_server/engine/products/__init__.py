"""Products of a step's few rows with a layer's large matrices, on NVIDIA GPUs.

Such a product takes as long as reading the matrix takes, and what stands around it (norm,
activation, residual) costs launches. These kernels read the matrix once at the memory's pace and do
the rest on the way; with many rows, reading the rows themselves in every block costs more than the
launches that it saves. There are two: products.cu, and groups.cu for compute capability 9.0. With
very few rows launches are what a step of a small model waits for: chain.cu has four products of the
first kind in one. Many rows MLX multiplies; what stands behind its gates and ups is in gates.cu.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mlx_manager.mlx_server.engine.kernels.cuda import (
    DEVICE_SOURCE,
    TYPES,
    CudaDevice,
    device_for,
)
from mlx_manager.mlx_server.engine.kernels.kernel import (
    Kernel,
    KernelSource,
    Unsupported,
    compiled_for_cuda,
    flag,
    real,
    source,
)
from mlx_manager.mlx_server.engine.products.chain import Chain, ChainVariant, chain_source
from mlx_manager.mlx_server.engine.products.factors import Link, Norm
from mlx_manager.mlx_server.engine.products.forms import WIDTH, Form, GroupForm, WarpForm

# From so many rows on gates and ups are multiplied by warpgroups where there are any, if they are
# too many for two blocks of warps a multiprocessor: 62 instead of 65 us for an 8B's with 32 rows,
# but 24 instead of 21 for a 1B's (H200).
FEWEST_IN_GROUPS = 17
_GATES_SOURCE = Path(__file__).with_name("gates.cu")
_GATES_THREADS = 256
# Elements that a thread takes.
_PIECE = 8


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
        self._chains: dict[ChainVariant, Kernel] = {}
        self._gate = compiled_for_cuda(gate_source(dtype))
        self._none = mx.zeros((1,), dtype)
        # Of a chain's blocks; its launches follow each other, and leave zeros.
        self._counters = mx.zeros((4,), mx.int32)
        mx.eval(self._none, self._counters)

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

    def gate(self, both: mx.array) -> mx.array:
        """`silu(gate) * up`, (rows, width), the halves of `both`, (rows, 2 * width). For products
        of more rows than `gated` takes, with matrices that are served."""
        rows, width = both.shape[0], both.shape[1] // 2
        threads = rows * width // _PIECE
        (out,) = self._gate(
            inputs=[both],
            grid=(threads + -threads % _GATES_THREADS, 1, 1),
            threadgroup=(_GATES_THREADS, 1, 1),
            output_shapes=[(rows, width)],
            output_dtypes=[self._dtype],
        )
        return out

    def chain(self, links: Sequence[Link]) -> Chain:
        """What lies between the attention of a layer and that of the next, in one launch.

        links: of the output, of gates and ups, of the way down, and, if a layer follows, of its
            queries, keys and values. All of matrices that are served.
        """
        variant = ChainVariant.of(links)
        if variant not in self._chains:
            self._chains[variant] = compiled_for_cuda(chain_source(self._dtype, variant))
        return Chain(links, self._chains[variant], self._counters)

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
    if rows <= WarpForm.most_rows:
        by_warps = WarpForm.choose(outputs, rows, device, gated=True)
        all_at_once = outputs / by_warps.outputs <= 2 * device.multiprocessors
        if rows < FEWEST_IN_GROUPS or all_at_once or not device.multiplies_in_groups:
            return by_warps
    return GroupForm.choose(outputs, rows, device)


def product_source(dtype: mx.Dtype, variant: Variant) -> KernelSource:
    form = variant.form
    normed, biased = flag(variant.epsilon is not None), flag(variant.bias)
    constants = f"{TYPES[dtype]}, {form.constants}, {normed}, {biased}"
    sizes = f"x_shape[0], x_shape[1], %s, {real(variant.epsilon or 0.0)}"
    if variant.gated:
        body = (
            f"kernels::{form.gated}<{constants}>"
            f"(x, norm, weight, bias, out, {sizes % 'weight_shape[0] / 2'}{form.place});"
        )
    else:
        body = (
            f"kernels::multiply_rows<{constants}, {flag(variant.residual)}>"
            f"(x, norm, weight, bias, residual, out, {sizes % 'weight_shape[0]'}{form.place});"
        )
    return KernelSource(
        name="product",
        header=form.header(),
        body=body,
        inputs=("x", "norm", "weight", "bias", "residual"),
        outputs=("out",),
        shared_memory=form.shared_memory,
    )


def gate_source(dtype: mx.Dtype) -> KernelSource:
    place = "blockIdx.x * blockDim.x + threadIdx.x"
    return KernelSource(
        name="gate",
        header=source(DEVICE_SOURCE, _GATES_SOURCE),
        body=f"kernels::gate_rows(both, out, both_shape[0], both_shape[1] / 2, {place});",
        inputs=("both",),
        outputs=("out",),
    )
