"""Host time of a decode step's launches, by how their code comes to MLX.

    PYTHONPATH=backend python benchmarks/gpu/launches.py [1b] [--loads "1 x 128" "64 x 128"]
        [--ways compressed "machine code" empty "empty, by text"]

MLX hashes the code, or the text, of a kernel in every step (`CustomKernel::eval_gpu`), and copies
it in a step that is not compiled. `compressed` is what a server has, `machine code` is the same
before NVIDIA's library compresses it. `empty` kernels have the same arrays and no code: the least
that the launches take. `empty, by text` are compiled by MLX from a text of `TEXT` characters.

For each load the bytes of code of a launch, and in microseconds a launch: making a step and
queueing it, put together by Python and compiled. Then what a new kind of step takes in all, in
milliseconds: put together, while it is compiled, and compiled.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
from fused_decode import STEPS, Batch, built, plainly, time_steps
from loads import lengths_of
from mlx import nn
from synthetic import make

from mlx_manager.mlx_server.devices.cuda.attention import decode, opening
from mlx_manager.mlx_server.devices.cuda.compiler import launch
from mlx_manager.mlx_server.devices.cuda.compiler.fatbin import fatbin
from mlx_manager.mlx_server.devices.cuda.compiler.launch import CudaKernel, CudaSource
from mlx_manager.mlx_server.devices.cuda.compiler.nvrtc import nvrtc
from mlx_manager.mlx_server.devices.cuda.graphs import keep_kernels, record_whole_steps
from mlx_manager.mlx_server.execution.compiled import STEPS_BEFORE_COMPILING, Compile
from mlx_manager.mlx_server.execution.decoder.decoder import FusedDecoder
from mlx_manager.mlx_server.execution.decoder.layers import Step

# Characters of a text that has a kernel's parameters, and includes the rest.
TEXT = 1000
COMPRESSED, PLAIN, EMPTY, BY_TEXT = WAYS = ("compressed", "machine code", "empty", "empty, by text")
_CODE: dict[tuple[str, str], bytes] = {}


class Code:
    """Code of kernels that comes in a way of its own; stands in for `CompiledCode`."""

    def __init__(self, way: str) -> None:
        self._way = way

    def of(self, text: str, architecture: str) -> bytes:
        key = self._way, text
        if key not in _CODE:
            _CODE[key] = self._made(text, architecture)
        return _CODE[key]

    def _made(self, text: str, architecture: str) -> bytes:
        if self._way == EMPTY:
            text = text[: text.index("{", text.rindex('extern "C"'))] + "{}\n"
        code, library = nvrtc().compile(text, architecture), fatbin()
        if self._way == PLAIN or library is None:
            return code
        return library.compressed(code, architecture)


class ByText:
    """An empty kernel that MLX compiles from a text; stands in for `CudaKernel`."""

    def __init__(self, source: CudaSource, **_: Any) -> None:
        parameters = 50 * (len(source.inputs) + len(source.outputs))
        self._kernel = mx.fast.cuda_kernel(
            name=source.unique_name,
            input_names=source.inputs,
            output_names=source.outputs,
            source=f"// {'a' * max(TEXT - parameters, 0)}\n",
            shared_memory=source.shared_memory,
        )

    def __call__(self, **how: Any) -> list[mx.array]:
        found: list[mx.array] = self._kernel(**how)
        return found


class Counted:
    """`mx.fast.precompiled_cuda_kernel` that counts its calls, and their bytes of code."""

    def __init__(self, launch: Callable[..., list[mx.array]]) -> None:
        self.calls = self.bytes = 0
        self._launch = launch

    def __call__(self, **how: Any) -> list[mx.array]:
        self.calls += 1
        self.bytes += len(how["compiled_source"])
        return self._launch(**how)


@contextmanager
def coming(way: str) -> Iterator[None]:
    """Have the kernels that are built in this context come in a way."""
    code, kernel = launch.compiled_code, CudaKernel
    places: Any = (launch, decode, opening)
    launch.compiled_code = lambda: Code(way)  # type: ignore[assignment, return-value]
    try:
        for module in places:
            module.CudaKernel = ByText if way == BY_TEXT else kernel
        yield
    finally:
        launch.compiled_code = code
        for module in places:
            module.CudaKernel = kernel


def first_step(batch: Batch, decoder: FusedDecoder) -> Step:
    rows = len(batch.lengths)
    before = mx.array(batch.lengths.astype(np.int32)) * 1
    plan = decoder.plan(batch.lengths + 1)
    return Step(mx.full((rows,), 5, mx.uint32), before, batch.table, batch.pools, plan)


def counted(model: nn.Module, batch: Batch, way: str) -> tuple[int, float]:
    """Return the number of our launches in a step, and the bytes of code of a launch."""
    if way == BY_TEXT:
        return counted(model, batch, EMPTY)[0], TEXT
    original = mx.fast.precompiled_cuda_kernel
    counter = Counted(original)
    with coming(way):
        decoder = built(model, compile=plainly)
        mx.fast.precompiled_cuda_kernel = counter
        try:
            mx.eval(decoder.run(first_step(batch, decoder)))
        finally:
            mx.fast.precompiled_cuda_kernel = original
    return counter.calls, counter.bytes / counter.calls


def host_time(model: nn.Module, batch: Batch, way: str, compile: Compile) -> tuple[float, float]:
    """Return the seconds of making a step, and of queueing it."""
    with coming(way):
        timing = time_steps(built(model, compile=compile), batch)
    return timing.make, timing.queue


def new_kind(model: nn.Module, batch: Batch) -> tuple[float, float, float]:
    """Return the median seconds of a step that is put together, those of the one that is compiled,
    and the median of those behind it."""
    decoder = built(model)
    step = first_step(batch, decoder)
    taken = []
    for _ in range(2 * STEPS_BEFORE_COMPILING):
        begun = time.perf_counter()
        mx.eval(decoder.run(step))
        taken.append(time.perf_counter() - begun)
    most = STEPS_BEFORE_COMPILING
    return float(np.median(taken[:most])), taken[most], float(np.median(taken[most + 1 :]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", nargs="?", default="1b")
    parser.add_argument("--loads", nargs="*", default=["1 x 128", "64 x 128"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=[COMPRESSED, PLAIN, EMPTY])
    options = parser.parse_args()
    record_whole_steps()
    keep_kernels()
    info = mx.device_info()
    print(info["device_name"], info["architecture"], "mlx", mx.__version__, f"{STEPS} steps")
    model = make(options.shape)
    for load in options.loads:
        batch = Batch.random(options.shape, lengths_of(load))
        counts = {way: counted(model, batch, way) for way in options.ways}
        for number in range(options.rounds):
            for way in options.ways[:: 1 if number % 2 else -1]:
                calls, size = counts[way]
                told = [f"{load:9} {way:14} {calls} launches of {size:6.0f} bytes:"]
                for name, compile in (("put together", plainly), ("compiled", mx.compile)):
                    times = host_time(model, batch, way, compile)
                    making, queueing = (each / calls * 1e6 for each in times)
                    told.append(f"{name} {making:5.2f} + {queueing:5.2f} us;")
                print(*told, flush=True)
        whole = ", ".join(f"{each * 1e3:.2f}" for each in new_kind(model, batch))
        print(f"{load:9} a step put together, while compiled, compiled: {whole} ms", flush=True)
        del batch
        mx.clear_cache()


if __name__ == "__main__":
    main()
