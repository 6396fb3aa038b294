"""What lies between the attentions of two layers in one launch: see chain.cu."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx

from mlx_manager.mlx_server.engine.kernels.cuda import TYPES
from mlx_manager.mlx_server.engine.kernels.kernel import Kernel, KernelSource, flag, real, source
from mlx_manager.mlx_server.engine.products.factors import Link, arrays_of
from mlx_manager.mlx_server.engine.products.forms import Packing, WarpForm

MOST_ROWS = 8
"""For which one launch takes the device no longer than four, and the host less."""

PRODUCTS = ("output", "gate_up", "down", "qkv")
NORMED = ("gate_up", "qkv")
MADE = ("hidden", "gated", "result", "heads")
_SOURCE = Path(__file__).with_name("chain.cu")
# As measured on an H200, by how many rows there are. Two blocks fit a multiprocessor, so that one
# waits while another ends.
_FORMS = [WarpForm(tiles=1, rows=MOST_ROWS, warps=8, stages=3)]
_PACKED_FORMS = [
    WarpForm(tiles=2, rows=1, warps=4, stages=2),
    WarpForm(tiles=1, rows=MOST_ROWS, warps=4, stages=2),
]


@dataclass(frozen=True, slots=True)
class ChainVariant:
    """Constants of one kernel: one compilation for each. Whether there are `biases`, by product,
    and the `epsilons` of those that have norms."""

    form: WarpForm
    biases: tuple[bool, ...]
    epsilons: tuple[float, ...]

    @staticmethod
    def all_of(links: Sequence[Link]) -> list[ChainVariant]:
        """Those for few rows first; none where the weights are not all stored in one way."""
        packing, *others = {Packing.of(link.weight) for link in links}
        if others:
            return []
        forms = _FORMS if packing is None else _PACKED_FORMS
        biases = tuple(link.bias is not None for link in links)
        epsilons = tuple(link.norm.epsilon for link in links if link.norm is not None)
        return [ChainVariant(replace(form, packing=packing), biases, epsilons) for form in forms]


class Chain:
    """The products from one layer's attention to the next one's; one launch."""

    most_rows = MOST_ROWS

    def __init__(
        self, links: Sequence[Link], kernels: Mapping[WarpForm, Kernel], counters: mx.array
    ) -> None:
        """
        links: of the output, of gates and ups, of the way down, and, if a layer follows, of its
            queries, keys and values. kernels: of their variants. counters: (4,) int32, zeros.
        """
        self._kernels = kernels
        self._weights = [array for link in links for array in arrays_of_link(link)]
        self._weights.append(counters)
        widths = [link.weight.shape[0] for link in links]
        self._width = sum(widths)
        self._outputs = [widths[0], widths[1] // 2, *widths[2:]]

    def __call__(self, attended: mx.array, residual: mx.array) -> list[mx.array]:
        """What the output gives, the gated, the layer's result, and the heads of the layer that
        follows, each (rows, outputs).

        attended: (rows, inputs of the output). residual: (rows, width).
        """
        rows = attended.shape[0]
        form = next(form for form in self._kernels if form.rows >= rows)
        return self._kernels[form](
            inputs=[attended, residual, *self._weights],
            grid=(self._width // form.outputs * form.threads, 1, 1),
            threadgroup=(form.threads, 1, 1),
            output_shapes=[(rows, outputs) for outputs in self._outputs],
            output_dtypes=[attended.dtype] * len(self._outputs),
        )


def arrays_of_link(link: Link) -> list[mx.array]:
    """In the order of `inputs_of`."""
    norm = None if link.norm is None else link.norm.weight
    may_be = [array for array in (link.bias, norm) if array is not None]
    return [*arrays_of(link.weight), *may_be]


def inputs_of(name: str, form: WarpForm, *, bias: bool, norm: bool) -> list[str]:
    """Names of what a product takes."""
    there = [part for part, is_there in (("bias", bias), ("norm", norm)) if is_there]
    return [f"{name}_{part}" for part in (*form.weight_parts, *there)]


def chain_source(dtype: mx.Dtype, variant: ChainVariant) -> KernelSource:
    element, form, count = TYPES[dtype], variant.form, len(variant.biases)
    epsilons = iter(variant.epsilons)
    links, inputs = [], ["attended", "residual"]
    for name, bias in zip(PRODUCTS, variant.biases, strict=False):
        norm = name in NORMED
        own = inputs_of(name, form, bias=bias, norm=norm)
        inputs += own
        weight = ", ".join(own[: len(form.weight_parts)])
        may_be = [f"{name}_{part}" for part in ("bias", "norm")]
        given = ", ".join(each if each in own else "nullptr" for each in may_be)
        shape = f"{own[0]}_shape[0], {own[0]}_shape[1]{form.inputs_a_word}"
        links.append(f"{{{{{weight}}}, {given}, {shape}, {real(next(epsilons) if norm else 0.0)}}}")
    biases = ", ".join(flag(bias) for bias in (*variant.biases, False)[:4])
    made = MADE[:count]
    link = f"kernels::Link<{element}, {form.weight_type(element)}>"
    return KernelSource(
        name="chain",
        header=source(*form.sources, _SOURCE),
        body=(
            f"const {link} links[] = {{{', '.join(links)}}};\n"
            f"kernels::chain_products<{element}, {form.constants}, {biases}>(attended, residual, "
            f"links, made, {', '.join((*made, 'result')[:4])}, attended_shape[0]);"
        ),
        inputs=(*inputs, "made"),
        outputs=made,
        shared_memory=form.shared_memory,
    )
