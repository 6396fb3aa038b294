"""Decode steps of random-weight Llama shapes through the fused decoder and the CUDA kernels.

    PYTHONPATH=backend python benchmarks/gpu/fused_decode.py [1b] [8b] [--apart] [--bits 4]
        [--plain]

A step's tokens are read by the host while the next step runs, as a server does it. Steps are
compiled, as a server's are once a kind of step has come often; with `--plain` they are not. The
bytes that a step must read (weights once, keys and values once) over a device-to-device copy's
bandwidth give the floor that the last column is a part of. With `--apart` each load is measured by
turns with what lies between two layers' attentions in one launch, and in four.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from loads import LOADS, lengths_of
from mlx import nn
from mlx.utils import tree_flatten
from synthetic import SHAPES, make

from mlx_manager.mlx_server.devices.cuda.matmul import products
from mlx_manager.mlx_server.devices.cuda.matmul.products import ProductKernels
from mlx_manager.mlx_server.devices.kernel import Unsupported
from mlx_manager.mlx_server.execution.compiled import STEPS_BEFORE_COMPILING, Compile
from mlx_manager.mlx_server.execution.decoder.check import check
from mlx_manager.mlx_server.execution.decoder.decoder import BuildProducts, FusedDecoder
from mlx_manager.mlx_server.execution.decoder.layers import Step

PAGE = 16
STEPS, WARM = 64, 12
REPLAN = 16
COPY_BANDWIDTH = 4.3e12


@dataclass(frozen=True)
class Batch:
    """Rows with random pages and room to grow by STEPS tokens."""

    lengths: np.ndarray
    table: mx.array
    pools: list[tuple[mx.array, mx.array]]

    @staticmethod
    def random(name: str, lengths: Sequence[int]) -> Batch:
        counts = [-(-(n + STEPS + 2) // PAGE) for n in lengths]
        order = np.random.default_rng(0).permutation(sum(counts)).astype(np.int32)
        table = np.zeros((len(lengths), max(counts)), np.int32)
        for row, pages in enumerate(np.split(order, np.cumsum(counts)[:-1])):
            table[row, : len(pages)] = pages
        of = SHAPES[name]
        size = (of["num_key_value_heads"], sum(counts) * PAGE, of["head_dim"])
        pools = []
        for _ in range(of["num_hidden_layers"]):
            pair = [(mx.random.normal(size) * 0.3).astype(mx.bfloat16) for _ in range(2)]
            mx.eval(pair)
            pools.append((pair[0], pair[1]))
        on_device = mx.array(table) * 1
        mx.eval(on_device)
        return Batch(np.asarray(lengths), on_device, pools)


@dataclass(frozen=True)
class Timing:
    """Seconds a step: in all, and of the host's making it, queueing it and waiting for tokens."""

    step: float
    make: float
    queue: float
    wait: float
    extra_bytes: int


def advance(decoder: FusedDecoder, step: Step) -> tuple[mx.array, mx.array]:
    """The tokens that follow, and the rows' lengths before them."""
    logits, before = decoder.run(step)
    return logits.argmax(-1), before


def time_steps(decoder: FusedDecoder, batch: Batch) -> Timing:
    rows = len(batch.lengths)
    tokens = mx.full((rows,), 5, mx.uint32)
    before = mx.array(batch.lengths.astype(np.int32)) * 1
    mx.eval(tokens, before)
    step = Step(tokens, before, batch.table, batch.pools, decoder.plan(batch.lengths + 1))
    for _ in range(STEPS_BEFORE_COMPILING + 1):
        mx.eval(decoder.run(step))
    mx.reset_peak_memory()
    used = mx.get_active_memory()
    parts = np.zeros(3)
    start = time.perf_counter()
    for i in range(STEPS):
        if i == WARM:
            mx.eval(tokens)
            parts[:] = 0
            start = time.perf_counter()
        began = time.perf_counter()
        if i % REPLAN == 0:
            splits = decoder.plan(batch.lengths + 1 + i)
        step = Step(tokens, before, batch.table, batch.pools, splits)
        following, before = advance(decoder, step)
        made = time.perf_counter()
        mx.async_eval(following, before)
        queued = time.perf_counter()
        tokens.tolist()
        parts += (made - began, queued - made, time.perf_counter() - queued)
        tokens = following
    mx.eval(tokens)
    taken = time.perf_counter() - start
    count = STEPS - WARM
    make, queue, wait = parts / count
    return Timing(taken / count, make, queue, wait, mx.get_peak_memory() - used)


class Apart(ProductKernels):
    """Each product in a launch of its own."""

    def chain(self, links):
        return None


def build_apart(dtype: mx.Dtype) -> ProductKernels | Unsupported:
    joined = products.build(dtype)
    return joined if isinstance(joined, Unsupported) else Apart(dtype, joined._device)


def plainly(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def built(
    model: nn.Module, build: BuildProducts = products.build, compile: Compile = mx.compile
) -> FusedDecoder:
    decoder = FusedDecoder.build(model, PAGE, products=build, compile=compile)
    mx.clear_cache()
    if not isinstance(decoder, FusedDecoder):
        raise SystemExit(decoder.reason)
    return decoder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", default=["1b", "8b"])
    parser.add_argument("--loads", nargs="*", default=[*LOADS, "1 x 8192"])
    parser.add_argument("--apart", action="store_true", help="compare with launches of their own")
    parser.add_argument("--bits", type=int, help="of the weights, in groups of 64; else bf16")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="compile no steps")
    options = parser.parse_args()
    compile = plainly if options.plain else mx.compile
    info = mx.device_info()
    print(info["device_name"], info["architecture"], "mlx", mx.__version__)
    for name in options.shapes:
        model = make(name)
        if options.bits is not None:
            nn.quantize(model, 64, options.bits)
            mx.eval(model.parameters())
            mx.clear_cache()
        decoders = {"": built(model, compile=compile)}
        wrong = check(decoders[""], model, PAGE)
        print(name, "logits", "as the module's" if wrong is None else wrong, flush=True)
        if options.apart:
            decoders["apart"] = built(model, build_apart, compile)
        weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
        for load in options.loads:
            lengths = lengths_of(load)
            batch = Batch.random(name, lengths)
            of = SHAPES[name]
            token_bytes = 4 * of["num_key_value_heads"] * of["head_dim"] * of["num_hidden_layers"]
            floor = (weights + sum(lengths) * token_bytes) / COPY_BANDWIDTH
            for number in range(options.rounds):
                for way in list(decoders)[:: 1 if number % 2 else -1]:
                    timing = time_steps(decoders[way], batch)
                    print(
                        f"{name} {load:15} {way:5} "
                        f"{timing.step * 1e3:7.3f} ms/step {len(lengths) / timing.step:8.0f} tok/s "
                        f"host {timing.make * 1e3:6.3f} + {timing.queue * 1e3:6.3f} ms, "
                        f"waits {timing.wait * 1e3:6.3f} ms "
                        f"extra {timing.extra_bytes / 2**30:5.2f} GiB "
                        f"floor {floor / timing.step:6.1%}",
                        flush=True,
                    )
            del batch
            mx.clear_cache()
        del model, decoders
        mx.clear_cache()


if __name__ == "__main__":
    main()
