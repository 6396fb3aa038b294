"""Products of few rows with the matrices of Llama shapes: ours, and MLX's, plain and packed.

    PYTHONPATH=backend python benchmarks/gpu/products.py [1b] [8b] [--rows 1 8] [--forms]

Microseconds of the device, by CUPTI through torch's profiler, each matrix read from memory (several
of a kind take turns). Ours are compared with the product in float32 first. `--forms` times every
form that a packed product might take, and prints the best of them beside the one that is chosen.
The kind `chain` is a layer's products from one attention to the next in one launch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import mlx.core as mx
import numpy as np
import torch
from synthetic import SHAPES, VOCABULARY

from mlx_manager.mlx_server.devices.cuda.compiler.launch import CudaKernel
from mlx_manager.mlx_server.devices.cuda.matmul import products
from mlx_manager.mlx_server.devices.cuda.matmul.chain import (
    Chain,
    ChainForm,
    ChainVariant,
    chain_source,
)
from mlx_manager.mlx_server.devices.cuda.matmul.factors import Link, Packed, RowNorm
from mlx_manager.mlx_server.devices.cuda.matmul.forms import (
    ByWarps,
    Packing,
    RowForm,
    WarpForm,
    size_of,
)
from mlx_manager.mlx_server.devices.cuda.matmul.products import ProductKernels

COLD = 200 * 2**20
"""Bytes of matrices that take turns, more than caches keep."""
LAUNCHES = 100
TOLERANCE = 1e-2


@dataclass(frozen=True)
class Kind:
    """One of a layer's products."""

    name: str
    outputs: int
    inputs: int
    gated: bool = False
    norm: bool = False
    residual: bool = False


def kinds_of(shape: str) -> list[Kind]:
    of = SHAPES[shape]
    width, inner = of["hidden_size"], of["intermediate_size"]
    heads = of["num_attention_heads"] * of["head_dim"]
    both = 2 * of["num_key_value_heads"] * of["head_dim"]
    return [
        Kind("q/k/v", heads + both, width, norm=True),
        Kind("output", width, heads, residual=True),
        Kind("gates and ups", 2 * inner, width, gated=True, norm=True),
        Kind("down", width, inner, residual=True),
        Kind("vocabulary", VOCABULARY, width, norm=True),
    ]


def random_weight(kind: Kind) -> mx.array:
    weight = mx.random.normal((kind.outputs, kind.inputs)) * kind.inputs**-0.5
    return weight.astype(mx.bfloat16)


def in_packs(weight: mx.array, bits: int, group: int) -> Packed:
    """Evaluated."""
    arrays = mx.quantize(weight, group, bits)
    mx.eval(arrays)
    return Packed(*arrays, group, bits)


@dataclass(frozen=True)
class Matrices:
    """Matrices of one kind, several, so that each launch reads its own from memory."""

    plain: list[mx.array]
    packed: list[Packed]

    @staticmethod
    def random(kind: Kind, bits: int, group: int) -> Matrices:
        count = max(2, -(-COLD // (kind.outputs * kind.inputs * bits // 8)))
        plain, packed = [], []
        for _ in range(count):
            weight = random_weight(kind)
            packed.append(in_packs(weight, bits, group))
            if len(plain) < max(2, COLD // weight.nbytes):
                plain.append(weight)
                mx.eval(weight)
        return Matrices(plain, packed)


def busy(seconds: float) -> None:
    """Keep the device at work: its clock falls while it has none."""
    x = mx.random.normal((4096, 4096)).astype(mx.bfloat16)
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        mx.eval([x @ x for _ in range(8)])


def microseconds(launch: Callable[[int], mx.array]) -> float:
    """Microseconds of the device for a launch."""
    mx.eval(launch(0))
    busy(0.02)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for i in range(LAUNCHES):
            # One by one: in one graph they would run beside each other.
            mx.async_eval(launch(i))
        mx.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / LAUNCHES


def forms(kind: Kind, rows: int, packing: Packing) -> Iterator[WarpForm | RowForm]:
    """Those to try."""
    if rows == 1:
        for each in {packing.for_one_row(kind.inputs), packing}:
            for split, stages in product((1, 2, 4, 8), (2, 3)):
                yield RowForm(split, 8, stages, each, (kind.outputs, kind.inputs))
    held = next(held for held in (8, 16, 32) if rows <= held or held == 32)
    for each in {packing, packing.narrower()}:
        for tiles, warps in product((1, 2, 4), (4, 8)):
            yield WarpForm(tiles, held, warps, 2, each)


def told(form: ByWarps) -> str:
    assert form.packing is not None
    how = "split by" if isinstance(form, RowForm) else "tiles"
    return f"{how} {form.share}, {form.warps} x {form.stages} of {form.packing.width}"


def ours(
    kernels: ProductKernels, kind: Kind, weights: Sequence[mx.array | Packed], x: mx.array
) -> Callable[[WarpForm | RowForm | None], Callable[[int], mx.array]]:
    norm = RowNorm(mx.ones((kind.inputs,), x.dtype), 1e-5) if kind.norm else None
    residual = mx.zeros((x.shape[0], kind.outputs), x.dtype) if kind.residual else None

    def in_form(form: WarpForm | RowForm | None) -> Callable[[int], mx.array]:
        def launch(i: int) -> mx.array:
            weight = weights[i % len(weights)]
            if kind.gated:
                return kernels.gated(x, weight, norm=norm, form=form)
            return kernels.multiply(x, weight, norm=norm, residual=residual, form=form)

        return launch

    return in_form


def plain_by_mlx(weights: Sequence[mx.array], x: mx.array, i: int) -> mx.array:
    return x @ weights[i % len(weights)].T


def packed_by_mlx(weights: Sequence[Packed], x: mx.array, i: int) -> mx.array:
    own = weights[i % len(weights)]
    of = {"group_size": own.group_size, "bits": own.bits}
    return mx.quantized_matmul(x, own.words, own.scales, own.biases, **of)


def reference(kind: Kind, weight: mx.array, x: mx.array) -> np.ndarray:
    wide = x.astype(mx.float32)
    if kind.norm:
        wide = mx.fast.rms_norm(wide, mx.ones((kind.inputs,)), 1e-5)
    with mx.stream(mx.cpu):
        out = np.array(wide) @ np.array(weight.astype(mx.float32)).T
    if kind.gated:
        gate, up = np.split(out, 2, axis=1)
        return gate / (1 + np.exp(-gate)) * up
    return out


def off(got: mx.array, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(np.array(got.astype(mx.float32)) - wanted) / np.linalg.norm(wanted))


def measure(kind: Kind, options: argparse.Namespace, kernels: ProductKernels) -> None:
    of = Matrices.random(kind, options.bits, options.group)
    packed = of.packed[0]
    stands_for = mx.dequantize(
        packed.words, packed.scales, packed.biases, packed.group_size, packed.bits
    )
    packing, device = Packing.of(packed), kernels._device
    for rows in options.rows:
        x = mx.random.normal((rows, kind.inputs)).astype(mx.bfloat16)
        mx.eval(x)
        times = {
            "MLX plain": microseconds(partial(plain_by_mlx, of.plain, x)),
            "MLX packed": microseconds(partial(packed_by_mlx, of.packed, x)),
        }
        if rows <= (kernels.most_gated_rows if kind.gated else kernels.most_rows)(of.plain[0]):
            times["ours plain"] = microseconds(ours(kernels, kind, of.plain, x)(None))
        best = ""
        if rows <= kernels.most_rows(packed):
            launches = ours(kernels, kind, of.packed, x)
            wanted = reference(kind, stands_for, x)
            wrong = off(launches(None)(0), wanted)
            if not wrong < TOLERANCE:
                raise SystemExit(f"{kind.name}, {rows} rows: off by {wrong:.2g}")
            times["ours packed"] = microseconds(launches(None))
            if options.forms:
                timed = {}
                for form in forms(kind, rows, packing):
                    if kind.outputs % form.outputs or form.shared_memory > device.block_memory:
                        continue
                    if not off(launches(form)(0), wanted) < TOLERANCE:
                        raise SystemExit(f"{form} is off")
                    timed[form] = microseconds(launches(form))
                order = sorted(timed, key=timed.__getitem__)
                best = "; ".join(f"{told(form)} {timed[form]:.1f}" for form in order[:8])
        figures = ", ".join(f"{name} {taken:.1f}" for name, taken in times.items())
        bound = kind.outputs * kind.inputs * (options.bits + 32 / options.group) / 8 / 4.3e6
        print(f"{kind.name:14} {rows:4} rows: {figures} (bytes: {bound:.1f}) {best}", flush=True)


# --- Four products in one launch -----------------------------------------------------------------


def chain_forms(rows: int, links: Sequence[Link], packing: Packing) -> Iterator[ChainForm]:
    """Those to try."""
    if rows == 1:
        sizes = [size_of(link.weight) for link in links]
        for each in {packing.for_one_row(sizes[0][1]), packing}:
            for splits, stages in product(((8, 1, 8, 4), (8, 2, 8, 8), (4, 1, 4, 2)), (2, 3)):
                shares = zip(splits, sizes, strict=True)
                yield ChainForm(tuple(RowForm(of, 8, stages, each, size) for of, size in shares))
    for tiles in ((1, 1, 1, 1), (2, 2, 2, 2), (1, 2, 1, 1)):
        yield ChainForm(tuple(WarpForm(of, 8, 4, 2, packing) for of in tiles))


def layer(kinds: Sequence[Kind], options: argparse.Namespace) -> list[Link]:
    links = []
    for kind in kinds:
        weight = in_packs(random_weight(kind), options.bits, options.group)
        norm = RowNorm(mx.ones((kind.inputs,), mx.bfloat16), 1e-5) if kind.norm else None
        links.append(Link(weight, None, norm))
    return links


def by_turns(chains: Sequence[Chain], x: mx.array, residual: mx.array, i: int) -> mx.array:
    return chains[i % len(chains)](x, residual)[-1]


def measure_chain(shape: str, options: argparse.Namespace, kernels: ProductKernels) -> None:
    order = ("output", "gates and ups", "down", "q/k/v")
    kinds = [next(kind for kind in kinds_of(shape) if kind.name == name) for name in order]
    layers = [layer(kinds, options) for _ in range(3)]
    packing, device = Packing.of(layers[0][0].weight), kernels._device
    for rows in (rows for rows in options.rows if rows <= Chain.most_rows):
        x, residual = (
            mx.random.normal((rows, width)).astype(mx.bfloat16)
            for width in (kinds[0].inputs, kinds[0].outputs)
        )
        chosen = [kernels.chain(links) for links in layers]
        wanted = [np.array(each.astype(mx.float32)) for each in chosen[0](x, residual)]
        timed = {"chosen": microseconds(partial(by_turns, chosen, x, residual))}
        for form in chain_forms(rows, layers[0], packing) if options.forms else ():
            if form.shared_memory > device.block_memory:
                continue
            sizes = tuple(size_of(link.weight) for link in layers[0])
            variant = ChainVariant(form, sizes, (False,) * 4, (1e-5,) * 2)
            kernel = {form: CudaKernel(chain_source(mx.bfloat16, variant))}
            chains = [Chain(links, kernel, kernels._counters) for links in layers]
            for mine, theirs in zip(chains[0](x, residual), wanted, strict=True):
                if not off(mine, theirs) < TOLERANCE:
                    raise SystemExit(f"{form} is off")
            name = f"{told(form.any)}, {[each.share for each in form.products]}"
            timed[name] = microseconds(partial(by_turns, chains, x, residual))
        figures = ", ".join(f"{name} {timed[name]:.1f}" for name in sorted(timed, key=timed.get))
        print(f"chain          {rows:4} rows: {figures}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", default=["1b", "8b"])
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 8, 16, 32, 64, 128])
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--kinds", nargs="*")
    parser.add_argument("--forms", action="store_true", help="try every form of packed products")
    options = parser.parse_args()
    info = mx.device_info()
    print(info["device_name"], "mlx", mx.__version__, f"{options.bits} bits by {options.group}")
    kernels = products.build(mx.bfloat16)
    if not isinstance(kernels, ProductKernels):
        raise SystemExit(kernels.reason)
    for shape in options.shapes:
        print(shape)
        for kind in kinds_of(shape):
            if not options.kinds or kind.name in options.kinds:
                measure(kind, options, kernels)
                mx.clear_cache()
        if not options.kinds or "chain" in options.kinds:
            measure_chain(shape, options, kernels)


if __name__ == "__main__":
    main()
