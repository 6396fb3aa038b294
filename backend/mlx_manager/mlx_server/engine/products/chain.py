"""What lies between the attentions of two layers in one launch: see chain.cu."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mlx_manager.mlx_server.engine.kernels.cuda import DEVICE_SOURCE, TYPES
from mlx_manager.mlx_server.engine.kernels.kernel import Kernel, KernelSource, flag, real, source
from mlx_manager.mlx_server.engine.products.factors import Link
from mlx_manager.mlx_server.engine.products.forms import WARPS_SOURCE, WarpForm

MOST_ROWS = 8
"""For which one launch takes the device no longer than four, and the host less."""

PRODUCTS = ("output", "gate_up", "down", "qkv")
NORMED = ("gate_up", "qkv")
MADE = ("hidden", "gated", "result", "heads")
_SOURCE = Path(__file__).with_name("chain.cu")
# As measured on an H200. Two blocks fit a multiprocessor, so that one waits while another ends.
_FORM = WarpForm(tiles=1, columns=1, warps=8, stages=3)


@dataclass(frozen=True, slots=True)
class ChainVariant:
    """Constants of one kernel: one compilation for each. Whether there are `biases`, by product,
    and the `epsilons` of those that have norms."""

    form: WarpForm
    biases: tuple[bool, ...]
    epsilons: tuple[float, ...]

    @staticmethod
    def of(links: Sequence[Link]) -> ChainVariant:
        return ChainVariant(
            _FORM,
            tuple(link.bias is not None for link in links),
            tuple(link.norm.epsilon for link in links if link.norm is not None),
        )


class Chain:
    """The products from one layer's attention to the next one's; one launch."""

    most_rows = MOST_ROWS

    def __init__(self, links: Sequence[Link], kernel: Kernel, counters: mx.array) -> None:
        """
        links: of the output, of gates and ups, of the way down, and, if a layer follows, of its
            queries, keys and values. kernel: of their variant. counters: (4,) int32, zeros.
        """
        self._kernel = kernel
        self._weights: list[mx.array] = []
        for link in links:
            # What a product lacks is not read.
            bias = link.weight if link.bias is None else link.bias
            norm = link.weight if link.norm is None else link.norm.weight
            self._weights += [link.weight, bias, norm]
        self._weights.append(counters)
        widths = [link.weight.shape[0] for link in links]
        self._outputs = [widths[0], widths[1] // 2, *widths[2:]]
        threads = sum(width // _FORM.outputs for width in widths) * _FORM.threads
        self._launch = {"grid": (threads, 1, 1), "threadgroup": (_FORM.threads, 1, 1)}

    def __call__(self, attended: mx.array, residual: mx.array) -> list[mx.array]:
        """What the output gives, the gated, the layer's result, and the heads of the layer that
        follows, each (rows, outputs).

        attended: (rows, inputs of the output). residual: (rows, width).
        """
        return self._kernel(
            inputs=[attended, residual, *self._weights],
            output_shapes=[(attended.shape[0], outputs) for outputs in self._outputs],
            output_dtypes=[attended.dtype] * len(self._outputs),
            **self._launch,
        )


def chain_source(dtype: mx.Dtype, variant: ChainVariant) -> KernelSource:
    element, form, count = TYPES[dtype], variant.form, len(variant.biases)
    epsilons = iter(variant.epsilons)
    links = []
    for name in PRODUCTS[:count]:
        epsilon = real(next(epsilons) if name in NORMED else 0.0)
        of = f"{name}, {name}_bias, {name}_norm, {name}_shape[0], {name}_shape[1], {epsilon}"
        links.append(f"{{{of}}}")
    biases = ", ".join(flag(bias) for bias in (*variant.biases, False)[:4])
    made = MADE[:count]
    return KernelSource(
        name="chain",
        header=source(DEVICE_SOURCE, WARPS_SOURCE, _SOURCE),
        body=(
            f"const kernels::Link<{element}> links[] = {{{', '.join(links)}}};\n"
            f"kernels::chain_products<{element}, {form.constants}, {biases}>(attended, residual, "
            f"links, made, {', '.join((*made, 'result')[:4])}, attended_shape[0]);"
        ),
        inputs=(
            "attended",
            "residual",
            *(f"{name}{part}" for name in PRODUCTS[:count] for part in ("", "_bias", "_norm")),
            "made",
        ),
        outputs=made,
        shared_memory=form.shared_memory,
    )
