"""Products of few rows with the matrices of Llama shapes: ours, and MLX's, plain and packed.

    PYTHONPATH=backend python benchmarks/gpu/products.py [1b] [8b] [--rows 1 8] [--forms]

Microseconds of the device, by CUPTI through torch's profiler, each matrix read from memory (several
of a kind take turns). Ours are compared with the product in float32 first. `--forms` times every
form that a packed product might take, and prints the best of them beside the one that is chosen.
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

from mlx_manager.mlx_server.engine import products
from mlx_manager.mlx_server.engine.products import ProductKernels
from mlx_manager.mlx_server.engine.products.factors import Norm, Packed
from mlx_manager.mlx_server.engine.products.forms import Packing, WarpForm
from mlx_manager.mlx_server.utils.nvrtc import answer_mlx

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


@dataclass(frozen=True)
class Matrices:
    """Of one kind: several, so that each launch reads its own from memory."""

    plain: list[mx.array]
    packed: list[Packed]

    @staticmethod
    def random(kind: Kind, bits: int, group: int) -> Matrices:
        count = max(2, -(-COLD // (kind.outputs * kind.inputs * bits // 8)))
        plain, packed = [], []
        for _ in range(count):
            weight = mx.random.normal((kind.outputs, kind.inputs)) * kind.inputs**-0.5
            weight = weight.astype(mx.bfloat16)
            arrays = mx.quantize(weight, group, bits)
            mx.eval(arrays)
            packed.append(Packed(*arrays, group, bits))
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
    """Of the device, a launch."""
    mx.eval(launch(0))
    busy(0.02)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        mx.eval([launch(i) for i in range(LAUNCHES)])
        mx.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / LAUNCHES


def forms(kind: Kind, rows: int, packing: Packing, memory: int) -> Iterator[WarpForm]:
    held = next(held for held in (1, 8, 16, 32) if rows <= held or held == 32)
    for tiles, warps, stages in product((1, 2, 4, 8), (2, 4, 8), (2, 3)):
        form = WarpForm(tiles, held, warps, stages, packing)
        whole = kind.outputs % form.outputs == 0 and not (kind.gated and tiles == 1)
        if whole and form.shared_memory <= memory:
            yield form


def ours(
    kernels: ProductKernels, kind: Kind, weights: Sequence[mx.array | Packed], x: mx.array
) -> Callable[[WarpForm | None], Callable[[int], mx.array]]:
    norm = Norm(mx.ones((kind.inputs,), x.dtype), 1e-5) if kind.norm else None
    residual = mx.zeros((x.shape[0], kind.outputs), x.dtype) if kind.residual else None

    def in_form(form: WarpForm | None) -> Callable[[int], mx.array]:
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
                for form in forms(kind, rows, packing, device.block_memory):
                    if not off(launches(form)(0), wanted) < TOLERANCE:
                        raise SystemExit(f"{form} is off")
                    timed[form] = microseconds(launches(form))
                order = sorted(timed, key=timed.__getitem__)
                best = "; ".join(
                    f"{f.tiles}x{f.warps}x{f.stages} {timed[f]:.1f}" for f in order[:6]
                )
        figures = ", ".join(f"{name} {taken:.1f}" for name, taken in times.items())
        bound = kind.outputs * kind.inputs * (options.bits + 32 / options.group) / 8 / 4.3e6
        print(f"{kind.name:14} {rows:4} rows: {figures} (bytes: {bound:.1f}) {best}", flush=True)


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
    answer_mlx()
    kernels = products.build(mx.bfloat16)
    if not isinstance(kernels, ProductKernels):
        raise SystemExit(kernels.reason)
    for shape in options.shapes:
        print(shape)
        for kind in kinds_of(shape):
            if not options.kinds or kind.name in options.kinds:
                measure(kind, options, kernels)
                mx.clear_cache()


if __name__ == "__main__":
    main()
