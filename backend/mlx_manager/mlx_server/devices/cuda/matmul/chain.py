"""Four products between the attentions of two layers in one launch: see chain.cu."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx

from mlx_manager.mlx_server.devices.cuda.compiler.device import CudaDevice
from mlx_manager.mlx_server.devices.cuda.compiler.launch import CudaSource
from mlx_manager.mlx_server.devices.cuda.matmul.factors import Activation, Link, arrays_of
from mlx_manager.mlx_server.devices.cuda.matmul.forms import (
    ByWarps,
    Packing,
    RowForm,
    WarpForm,
    size_of,
)
from mlx_manager.mlx_server.devices.kernel import Kernel, KernelName, OptionalArgument, Size, Struct

MOST_ROWS = 8
"""Most rows for which one launch takes the device no longer than four, and the host less."""

PRODUCTS = ("output", "gate_up", "down", "qkv")
NORMED = ("gate_up", "qkv")
MADE = ("between", "result", "heads")
_SOURCE = Path(__file__).with_name("chain.cu")


@dataclass(frozen=True, slots=True)
class ChainForm:
    """Forms of a chain's products, which are alike except for their `share`."""

    products: tuple[ByWarps, ...]

    @property
    def any(self) -> ByWarps:
        """One of the forms, for the constants that all products have in common."""
        return self.products[0]

    @property
    def shared_memory(self) -> int:
        return max(form.shared_memory for form in self.products)

    @property
    def constants(self) -> tuple[int, ...]:
        shares = [form.share for form in self.products]
        # Without a fourth product, the kernel still takes a constant for it.
        shares += shares[:1] * (len(PRODUCTS) - len(shares))
        return *shares, *self.any.constants_in_common

    def blocks(self, outputs: Sequence[int]) -> int:
        """Return the blocks of a launch for products of so many outputs."""
        return sum(of // form.outputs for of, form in zip(outputs, self.products, strict=True))


# As measured on an H200. Two blocks fit a multiprocessor, so that one waits while another ends.
_PLAIN = WarpForm(tiles=1, rows=MOST_ROWS, warps=8, stages=3)
_PACKED = WarpForm(tiles=1, rows=MOST_ROWS, warps=4, stages=2)


@dataclass(frozen=True, slots=True)
class ChainVariant:
    """Constants of one kernel: one compilation for each.

    sizes: outputs and inputs of each product; as constants they cost the host no time at a launch.
    biases: for each product, whether it has a bias. epsilons: epsilons of the products' norms, for
    those that have one. activation: activation of gates and ups.
    """

    form: ChainForm
    sizes: tuple[tuple[int, int], ...]
    biases: tuple[bool, ...]
    epsilons: tuple[float, ...]
    activation: Activation = Activation.SILU

    @staticmethod
    def all_of(links: Sequence[Link], device: CudaDevice) -> list[ChainVariant]:
        """Return the variants for `links`, those for fewest rows first.

        There are none if the weights are not all stored in one way.
        """
        packing, *others = {Packing.of(link.weight) for link in links}
        if others:
            return []
        sizes = tuple(size_of(link.weight) for link in links)
        biases = tuple(link.bias is not None for link in links)
        epsilons = tuple(link.norm.epsilon for link in links if link.norm is not None)
        activation = links[PRODUCTS.index("gate_up")].activation
        forms = _forms(links, device, packing)
        return [ChainVariant(form, sizes, biases, epsilons, activation) for form in forms]


def _forms(
    links: Sequence[Link], device: CudaDevice, packing: Packing | None
) -> Iterator[ChainForm]:
    if packing is None:
        yield ChainForm((_PLAIN,) * len(links))
        return
    of_one_row = RowForm.choose([link.weight for link in links], device, packing)
    if of_one_row is not None:
        yield ChainForm(of_one_row)
    # Gates and ups have enough outputs for blocks of two tiles.
    few = replace(_PACKED, packing=packing)
    tiles = [2 if name == "gate_up" else 1 for name in PRODUCTS]
    yield ChainForm(tuple(replace(few, tiles=each) for each in tiles[: len(links)]))


class Chain:
    """Products from one layer's attention to the next layer's, in one launch."""

    most_rows = MOST_ROWS

    def __init__(
        self, links: Sequence[Link], kernels: Mapping[ChainForm, Kernel], counters: mx.array
    ) -> None:
        """Store the weights of the chain.

        links: output projection, gates and ups, down projection, and, if a layer follows, its
            projection to queries, keys and values. kernels: kernels of the links' variants.
            counters: (4,) int32, zeros.
        """
        self._weights = [array for link in links for array in arrays_of_link(link)]
        self._weights.append(counters)
        widths = [link.weight.shape[0] for link in links]
        self._outputs = [widths[0] + widths[1] // 2, *widths[2:]]
        self._kernels = [(form, kernel, form.blocks(widths)) for form, kernel in kernels.items()]

    def __call__(self, attended: mx.array, residual: mx.array) -> list[mx.array]:
        """Return what the products make, each (rows, numbers).

        First what lies between the output projection and the layer's result: all rows of the
        projection with the residual, then all gated ones. One array has both, since each array
        costs the host time. Then the layer's result, and, if a layer follows, its heads.

        attended: (rows, inputs of the output projection). residual: (rows, width).
        """
        rows = attended.shape[0]
        form, kernel, blocks = next(each for each in self._kernels if each[0].any.held >= rows)
        threads = form.any.threads
        return kernel(
            inputs=[attended, residual, *self._weights],
            grid=(blocks * threads, 1, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[(rows, outputs) for outputs in self._outputs],
            output_dtypes=[attended.dtype] * len(self._outputs),
        )


def arrays_of_link(link: Link) -> list[mx.array]:
    """Return the arrays of a link in the order of `inputs_of`."""
    norm = None if link.norm is None else link.norm.weight
    may_be = [array for array in (link.bias, norm) if array is not None]
    return [*arrays_of(link.weight), *may_be]


def inputs_of(name: str, form: ByWarps, *, bias: bool, norm: bool) -> list[str]:
    """Return the names of a product's inputs."""
    there = [part for part, is_there in (("bias", bias), ("norm", norm)) if is_there]
    return [f"{name}_{part}" for part in (*form.weight_parts, *there)]


def chain_source(dtype: mx.Dtype, variant: ChainVariant) -> CudaSource:
    alike, count = variant.form.any, len(variant.sizes)
    kind = KernelName("Link", (dtype, alike.weight_type(dtype)))
    epsilons = iter(variant.epsilons)
    links, inputs = [], ["attended", "residual"]
    products = zip(PRODUCTS, variant.sizes, variant.biases, variant.form.products, strict=False)
    for name, size, bias, form in products:
        norm = name in NORMED
        inputs += inputs_of(name, form, bias=bias, norm=norm)
        given = (OptionalArgument(f"{name}_bias"), OptionalArgument(f"{name}_norm"), *size)
        weight = form.weight(dtype, f"{name}_")
        links.append(Struct(kind, (weight, *given, next(epsilons) if norm else 0.0)))
    made = MADE[: count - 1]
    return CudaSource(
        name="chain",
        files=(*alike.files, _SOURCE),
        function="chain_products",
        constants=(
            *(KernelName(alike.by), KernelName(variant.activation.value), dtype),
            *(*variant.form.constants, *(*variant.biases, False)[:4]),
        ),
        arguments=(
            *("attended", "residual", Struct(None, tuple(links)), "made"),
            *(*made, *(() if count == len(PRODUCTS) else ("result",)), Size("attended", 0)),
        ),
        inputs=(*inputs, "made"),
        outputs=made,
        shared_memory=variant.form.shared_memory,
    )
