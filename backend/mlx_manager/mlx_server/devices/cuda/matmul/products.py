"""Products of a step's few rows with a layer's large matrices, on NVIDIA GPUs.

Such a product takes as long as reading the matrix takes, and the operations around it (norm,
activation, residual) cost launches. These kernels read the matrix once at the memory's bandwidth
and do the other operations in the same launch. With many rows, every block's reading of the rows
costs more than the launches that it saves; then MLX multiplies, and gates.cu applies the activation
to its gates and ups.

There are three kernels. products.cu is for weights of half precision and for those that MLX has
packed into 4 or 8 bits. row.cu is for one row and packed weights, for which products.cu would spend
more time on the row than on the weights. groups.cu is for compute capability 9.0; there a norm is
applied by the launch that makes the rows, and not by every block that reads them.

Other launches build on these. With very few rows a step of a small model waits for launches, so
chain.cu joins four products of the first or second kind in one launch. The experts of a layer are
multiplied by the first kind, for any number of rows: route.cu and experts.cu; many rows by
warpgroups, if those are faster: group_experts.cu. If a layer norms a product's result before adding
it to the residual, sum.cu does both, and the norm before the next product. Latent attention has a
matrix for each head: by_head.cu.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mlx_manager.mlx_server.devices.cuda.compiler.device import (
    DEVICE_SOURCE,
    CudaDevice,
    device_for,
)
from mlx_manager.mlx_server.devices.cuda.compiler.launch import CudaKernels, CudaSource
from mlx_manager.mlx_server.devices.cuda.matmul.chain import Chain, ChainVariant, chain_source
from mlx_manager.mlx_server.devices.cuda.matmul.factors import (
    Activation,
    Link,
    Packed,
    RowNorm,
    Scaled,
    Weight,
    arrays_of,
)
from mlx_manager.mlx_server.devices.cuda.matmul.forms import (
    Form,
    GroupForm,
    Packing,
    RowForm,
    WarpForm,
    knows,
)
from mlx_manager.mlx_server.devices.cuda.matmul.sums import SumKernels
from mlx_manager.mlx_server.devices.cuda.mla.by_head import HeadKernels
from mlx_manager.mlx_server.devices.cuda.moe.experts import ExpertKernels
from mlx_manager.mlx_server.devices.kernel import (
    Argument,
    Constant,
    KernelName,
    OptionalArgument,
    Size,
    Struct,
    Unsupported,
)

# Fewest rows for which warpgroups, if there are any, multiply gates and ups, provided that these
# are too many for two blocks of warps a multiprocessor: 62 instead of 65 us for an 8B's with 32
# rows, but 24 instead of 21 for a 1B's (H200).
FEWEST_IN_GROUPS = 17
# More rows are multiplied by MLX.
MOST_ROWS_OF_PACKED = 128
_GATES_SOURCE = Path(__file__).with_name("gates.cu")
_GATES_THREADS = 256
# Elements that a thread takes.
_PIECE = 8


@dataclass(frozen=True, slots=True)
class MatmulVariant:
    """Constants of one kernel: one compilation for each.

    gated: activation, if the weight is of gates and ups. epsilon: epsilon of the norm, None for no
    norm. makers: number of blocks that have made the rows and done part of the norm, else 0; see
    `Scaled`. ahead: this product does part of the norm for the product that follows.
    """

    form: Form
    gated: Activation | None
    epsilon: float | None
    makers: int
    bias: bool
    residual: bool
    ahead: bool

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the kernel's inputs."""
        there = {
            "norm": self.epsilon is not None and not self.makers,
            "squares": self.makers > 0,
            "bias": self.bias,
            "residual": self.residual,
            "next_norm": self.ahead,
        }
        return (
            "x",
            *self.form.weight_parts,
            *(name for name, is_there in there.items() if is_there),
        )

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("out", "scaled_out", "squares_out") if self.ahead else ("out",)


def build(dtype: mx.Dtype) -> ProductKernels | Unsupported:
    """Return the kernels for rows and matrices of `dtype` on the default device."""
    device = device_for(dtype)
    return device if isinstance(device, Unsupported) else ProductKernels(dtype, device)


class ProductKernels:
    """Products of few rows, (rows, inputs), with matrices (outputs, inputs).

    Attributes:
        experts: kernels for a layer's experts, for any number of rows. sums: kernels that norm
            products and add them to a residual, for any number of rows. heads: kernels that
            multiply each head's rows with a matrix of its own.
    """

    def __init__(self, dtype: mx.Dtype, device: CudaDevice) -> None:
        self.experts = ExpertKernels(dtype, device)
        self.sums = SumKernels(dtype)
        self.heads = HeadKernels(dtype, device)
        self._dtype = dtype
        self._device = device
        self._kernel = CudaKernels(dtype)
        # Counters of a chain's finished blocks. Its launches run in order, and leave zeros.
        self._counters = mx.zeros((4,), mx.int32)
        mx.eval(self._counters)

    @staticmethod
    def serves(weight: Weight) -> bool:
        floats = isinstance(weight, Packed) and weight.mode != "affine"
        return weight.shape[0] % 64 == 0 and knows(weight) and not floats

    @staticmethod
    def serves_ahead(weight: Weight) -> bool:
        """Return whether `multiply_ahead` takes `weight`, if it is served.

        `multiply_ahead` needs an even number of blocks.
        """
        return weight.shape[0] % 128 == 0

    @staticmethod
    def most_rows(weight: Weight) -> int:
        """Return the most rows that `multiply` takes."""
        return MOST_ROWS_OF_PACKED if isinstance(weight, Packed) else WarpForm.most_rows

    def most_gated_rows(self, weight: Weight) -> int:
        """Return the most rows that `gated` takes."""
        if GroupForm.serves(weight, self._device):
            return GroupForm.most_rows
        return self.most_rows(weight)

    def multiply(
        self,
        x: mx.array | Scaled,
        weight: Weight,
        *,
        norm: RowNorm | None = None,
        bias: mx.array | None = None,
        residual: mx.array | None = None,
        form: WarpForm | RowForm | None = None,
    ) -> mx.array:
        """Return `norm(x) @ weight.T + bias + residual`, (rows, outputs).

        x: rows, or `Scaled` if the product that made them has done its part of the norm.
        """
        return self._multiply(_Factors(x, weight, norm, bias, residual), form)[0]

    def multiply_ahead(
        self,
        x: mx.array,
        weight: Weight,
        following: RowNorm,
        *,
        bias: mx.array | None = None,
        residual: mx.array | None = None,
        form: WarpForm | None = None,
    ) -> tuple[mx.array, Scaled]:
        """Return the result of `multiply`, and `Scaled` rows for the product after `following`."""
        factors = _Factors(x, weight, None, bias, residual, following.weight)
        out, scaled, squares = self._multiply(factors, form)
        return out, Scaled(scaled, squares)

    def gated(
        self,
        x: mx.array | Scaled,
        weight: Weight,
        *,
        norm: RowNorm | None = None,
        bias: mx.array | None = None,
        activation: Activation = Activation.SILU,
        form: Form | None = None,
    ) -> mx.array:
        """Return `activation` of gate and up, (rows, outputs / 2).

        Gate and up are the halves of `norm(x) @ weight.T + bias`.
        """
        outputs = weight.shape[0]
        factors = _Factors(x, weight, norm, bias)
        form = form or gated_form(weight, x.shape[0], self._device)
        return self._run(factors, form, outputs // 2, activation)[0]

    def gates_by_groups(self, weight: Weight, rows: int) -> bool:
        """Return whether `gated` uses groups.cu for so many rows.

        In groups.cu a norm costs more time than in the launch that makes the rows: 5 % of an 8B's
        step of 32 rows, but nothing of a 1B's, whose gates are by warps (H200).
        """
        if rows > self.most_rows(weight):
            return False
        return isinstance(gated_form(weight, rows, self._device), GroupForm)

    def gate(self, both: mx.array, activation: Activation = Activation.SILU) -> mx.array:
        """Return `activation` of gate and up, (rows, width), the halves of `both`.

        both: (rows, 2 * width), a product of more rows than `gated` takes, with a matrix that is
        served.
        """
        rows, width = both.shape[0], both.shape[1] // 2
        threads = rows * width // _PIECE
        (out,) = self._kernel(gate_source, activation)(
            inputs=[both],
            grid=(threads + -threads % _GATES_THREADS, 1, 1),
            threadgroup=(_GATES_THREADS, 1, 1),
            output_shapes=[(rows, width)],
            output_dtypes=[self._dtype],
        )
        return out

    def chain(self, links: Sequence[Link]) -> Chain | None:
        """Return the launch of all products between one layer's attention and the next layer's.

        The result is None if the weights are not all stored in one way.

        links: output projection, gates and ups, down projection, and, if a layer follows, its
            projection to queries, keys and values. All matrices must be served.
        """
        variants = ChainVariant.all_of(links, self._device)
        kernels = {variant.form: self._kernel(chain_source, variant) for variant in variants}
        return Chain(links, kernels, self._counters) if kernels else None

    def _form(self, factors: _Factors) -> WarpForm | RowForm:
        outputs, rows = factors.weight.shape[0], factors.x.shape[0]
        packing = Packing.of(factors.weight)
        one = None
        if factors.is_of_itself:
            one = one_row_form(factors.weight, packing, rows, self._device)
        return one or WarpForm.choose(outputs, rows, self._device, packing)

    def _multiply(self, factors: _Factors, form: WarpForm | RowForm | None) -> list[mx.array]:
        outputs = factors.weight.shape[0]
        form = form or self._form(factors)
        return self._run(factors, form, outputs, None)

    def _run(
        self, factors: _Factors, form: Form, width: int, gated: Activation | None
    ) -> list[mx.array]:
        """Launch a product; `width` is that of the result."""
        variant = factors.variant(form, gated)
        rows, blocks = factors.x.shape[0], factors.weight.shape[0] // form.outputs
        turns = -(-rows // form.held)
        shapes, dtypes = [(rows, width)], [self._dtype]
        if variant.ahead:
            shapes += [(rows, width), (rows, blocks)]
            dtypes += [self._dtype, mx.float32]
        return self._kernel(product_source, variant)(
            inputs=factors.arrays,
            grid=(blocks * turns * form.threads, 1, 1),
            threadgroup=(form.threads, 1, 1),
            output_shapes=shapes,
            output_dtypes=dtypes,
        )


@dataclass(frozen=True, slots=True)
class _Factors:
    """Inputs of a product.

    following: weights of the norm of the next product, if this product is to do part of that norm.
    """

    x: mx.array | Scaled
    weight: Weight
    norm: RowNorm | None = None
    bias: mx.array | None = None
    residual: mx.array | None = None
    following: mx.array | None = None

    @property
    def is_of_itself(self) -> bool:
        """Return whether the product does its norm alone, and no part of another product's norm."""
        return not isinstance(self.x, Scaled) and self.following is None

    @property
    def arrays(self) -> list[mx.array]:
        """Arrays in the order of `MatmulVariant.inputs`."""
        norm = None if self.norm is None else self.norm.weight
        rows, before = (
            (self.x.rows, self.x.squares) if isinstance(self.x, Scaled) else (self.x, norm)
        )
        may_be = (before, self.bias, self.residual, self.following)
        return [rows, *arrays_of(self.weight), *(array for array in may_be if array is not None)]

    def variant(self, form: Form, gated: Activation | None) -> MatmulVariant:
        return MatmulVariant(
            form,
            gated,
            None if self.norm is None else self.norm.epsilon,
            self.x.makers if isinstance(self.x, Scaled) else 0,
            self.bias is not None,
            self.residual is not None,
            self.following is not None,
        )


def one_row_form(
    weight: Weight, packing: Packing | None, rows: int, device: CudaDevice
) -> RowForm | None:
    """Return the form for one row and packed weights; None if it does not apply or fit."""
    if rows > 1 or packing is None:
        return None
    found = RowForm.choose([weight], device, packing)
    return found[0] if found else None


def gated_form(weight: Weight, rows: int, device: CudaDevice) -> Form:
    """Return the fastest form for gates and ups."""
    outputs, packing = weight.shape[0], Packing.of(weight)
    if packing is not None:
        one = one_row_form(weight, packing, rows, device)
        return one or WarpForm.choose(outputs, rows, device, packing, gated=True)
    if rows <= WarpForm.most_rows:
        by_warps = WarpForm.choose(outputs, rows, device, gated=True)
        all_at_once = outputs / by_warps.outputs <= 2 * device.multiprocessors
        if rows < FEWEST_IN_GROUPS or all_at_once or not GroupForm.serves(weight, device):
            return by_warps
    return GroupForm.choose(outputs, rows, device)


def product_source(dtype: mx.Dtype, variant: MatmulVariant) -> CudaSource:
    form, gated = variant.form, variant.gated
    by = KernelName(form.by)
    norm = KernelName("kNoNorm") if variant.epsilon is None else variant.makers
    constants: tuple[Constant, ...] = (dtype, *form.constants, norm, variant.bias)
    outputs, _ = form.size_of("weight", 1 if gated is None else 2)
    inputs = form.size_of("weight")[1] if isinstance(form, RowForm) else Size("x", 1)
    results: tuple[Argument, ...] = ("out",)
    if gated is None:
        constants = (by, *constants, variant.residual, variant.ahead)
        ahead = (
            OptionalArgument("next_norm"),
            OptionalArgument("scaled_out"),
            OptionalArgument("squares_out"),
        )
        results = (OptionalArgument("residual"), "out", Struct(None, ahead))
    else:
        constants = (by, KernelName(gated.value), *constants)
    return CudaSource(
        name="product",
        files=form.files,
        function="multiply" if gated is None else "gated",
        constants=constants,
        arguments=(
            *(
                "x",
                OptionalArgument("norm"),
                OptionalArgument("squares"),
                form.weight(dtype),
                OptionalArgument("bias"),
                *results,
            ),
            *(Size("x", 0), inputs, outputs, variant.epsilon or 0.0),
        ),
        inputs=variant.inputs,
        outputs=variant.outputs,
        shared_memory=form.shared_memory,
    )


def gate_source(_: mx.Dtype, activation: Activation) -> CudaSource:
    return CudaSource(
        name="gate",
        files=(DEVICE_SOURCE, _GATES_SOURCE),
        function="gate_rows",
        constants=(KernelName(activation.value),),
        arguments=("both", "out", Size("both", 0), Size("both", 1, over=2)),
        inputs=("both",),
        outputs=("out",),
    )
