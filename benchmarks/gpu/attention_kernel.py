"""The CUDA attention kernel alone: is it right, and how near is it to the memory's bandwidth?

    PYTHONPATH=backend python benchmarks/gpu/attention_kernel.py [--tune] [--check]
    PYTHONPATH=backend ncu --clock-control none --graph-profiling node -k regex:paged_attend \\
        --metrics gpu__time_duration.sum,dram__bytes_read.sum \\
        python benchmarks/gpu/attention_kernel.py --once

Times are per launch, over chains of launches that each need the previous one's result, rotating
over enough layers that nothing is read from the cache; a chain is queued while the one before it
runs, so the host's share is hidden unless it is the longer one, and is given beside it. Bandwidth
counts the keys and values that a launch must read, and is set against a device-to-device copy's
(bytes read + bytes written).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from loads import lengths_of

from mlx_manager.mlx_server.devices.attention.check import AttentionFeatures, self_check
from mlx_manager.mlx_server.devices.attention.kernel import AttentionShape, Rotary
from mlx_manager.mlx_server.devices.attention.kinds import build
from mlx_manager.mlx_server.devices.attention.splits import Splits
from mlx_manager.mlx_server.devices.cuda.attention import decode as cuda
from mlx_manager.mlx_server.devices.cuda.compiler.device import CudaDevice, cuda_device
from mlx_manager.mlx_server.devices.kernel import Unsupported

BF16, F16 = mx.bfloat16, mx.float16
LLAMA_8B = AttentionShape(32, 8, 128, 16, BF16)
LLAMA_1B = AttentionShape(32, 8, 64, 16, BF16)
LOADS = [
    "1 x 128",
    "1 x 8192",
    "8 x 128",
    "64 x 128",
    "128 x 128",
    "64 x 512",
    "32 x 4096",
    "8192 + 31 x 64",
]
CHECKS = [
    (AttentionShape(32, 8, 64, 16, BF16), AttentionFeatures()),
    (AttentionShape(32, 8, 128, 32, BF16), AttentionFeatures()),
    (AttentionShape(8, 8, 80, 16, F16), AttentionFeatures()),
    (AttentionShape(24, 8, 96, 16, BF16), AttentionFeatures(softcap=30.0)),
    (AttentionShape(28, 4, 128, 16, F16), AttentionFeatures()),
    (AttentionShape(64, 8, 64, 16, BF16), AttentionFeatures(window=128, sinks=True)),
    (AttentionShape(64, 8, 64, 16, BF16), AttentionFeatures(sinks=True)),
    (AttentionShape(16, 8, 256, 16, BF16), AttentionFeatures(window=1024, softcap=50.0)),
    (AttentionShape(16, 1, 256, 16, BF16), AttentionFeatures()),
    (AttentionShape(20, 1, 128, 16, BF16), AttentionFeatures(softcap=50.0)),
    (AttentionShape(64, 4, 128, 16, F16), AttentionFeatures()),
    (AttentionShape(8, 2, 512, 16, BF16), AttentionFeatures()),
    (AttentionShape(32, 4, 512, 16, BF16), AttentionFeatures(window=1024)),
    (AttentionShape(16, 1, 512, 16, F16), AttentionFeatures(softcap=50.0, sinks=True)),
]
CACHE_BYTES = 256 << 20


@dataclass(frozen=True)
class Layers:
    """Pools of several layers and a step over them."""

    pools: list[tuple[mx.array, mx.array]]
    table: mx.array
    lengths: mx.array
    q: mx.array
    kv_bytes: int

    @staticmethod
    def random(shape: AttentionShape, lengths: Sequence[int]) -> Layers:
        counts = [-(-n // shape.page_size) for n in lengths]
        order = np.random.default_rng(0).permutation(sum(counts)).astype(np.int32)
        table = np.zeros((len(lengths), max(counts)), np.int32)
        for row, pages in enumerate(np.split(order, np.cumsum(counts)[:-1])):
            table[row, : len(pages)] = pages
        size = (shape.kv_heads, sum(counts) * shape.page_size, shape.head_dim)
        kv_bytes = 2 * sum(lengths) * shape.kv_heads * shape.head_dim * shape.dtype.size
        layers = max(2, -(-CACHE_BYTES // kv_bytes))
        pools = []
        for _ in range(min(layers, 64)):
            pools.append(tuple(mx.random.normal(size).astype(shape.dtype) for _ in range(2)))
            mx.eval(pools[-1])
        q = mx.random.normal((len(lengths), shape.q_heads, 1, shape.head_dim)).astype(shape.dtype)
        arrays = mx.array(table), mx.array(lengths, mx.int32), q
        mx.eval(arrays)
        return Layers(pools, *arrays, kv_bytes)


COPY = """
auto from = reinterpret_cast<const uint4*>(x);
auto to = reinterpret_cast<uint4*>(const_cast<T*>(y));
const long step = (long)gridDim.x * blockDim.x;
long i = (long)blockIdx.x * blockDim.x + threadIdx.x;
for (; i + 3 * step < COUNT; i += 4 * step) {
  uint4 a = from[i], b = from[i + step], c = from[i + 2 * step], d = from[i + 3 * step];
  to[i] = a; to[i + step] = b; to[i + 2 * step] = c; to[i + 3 * step] = d;
}
for (; i < COUNT; i += step) to[i] = from[i];
done[0] = 1;
"""


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of copies from one array into another."""
    x = mx.random.normal((1 << 30,)).astype(BF16)
    y = mx.zeros_like(x)
    mx.eval(x, y)
    kernel = mx.fast.cuda_kernel(
        name="bench_copy_into", input_names=["x", "y", "after"], output_names=["done"], source=COPY
    )
    times = 20

    def run() -> None:
        done = mx.zeros((1,), mx.int32)
        for _ in range(times):
            (done,) = kernel(
                inputs=[x, y, done],
                template=[("COUNT", x.nbytes // 16), ("T", BF16)],
                grid=(132 * 16 * 256, 1, 1),
                threadgroup=(256, 1, 1),
                output_shapes=[(1,)],
                output_dtypes=[mx.int32],
            )
        mx.eval(done)

    run()
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        run()
        taken.append((time.perf_counter() - start) / times)
    return 2 * x.nbytes / statistics.median(taken)


@dataclass(frozen=True)
class Timing:
    """Seconds a launch: in a pipeline, and the host's part alone."""

    launch: float
    host: float


def attention_timing(kernels: cuda.CudaAttention, lengths: Sequence[int], layers: Layers) -> Timing:
    splits = kernels.plan(lengths)
    mx.eval(splits.items)
    per_run, runs = 64, 8
    dep = mx.zeros((1,), mx.int32)
    mx.eval(attend(kernels, splits, layers, layers.q, dep, 4))
    mx.synchronize()
    start = time.perf_counter()
    q, pending = layers.q, []
    building = 0.0
    for _ in range(runs):
        began = time.perf_counter()
        q = attend(kernels, splits, layers, q, dep, per_run)
        mx.async_eval(q)
        building += time.perf_counter() - began
        pending.append(q)
        if len(pending) > 2:
            mx.eval(pending.pop(0))
    mx.eval(q)
    total = time.perf_counter() - start
    return Timing(total / runs / per_run, building / runs / per_run)


def attend(  # noqa: PLR0917
    kernels: cuda.CudaAttention,
    splits: Splits,
    layers: Layers,
    q: mx.array,
    dep: mx.array,
    times: int,
) -> mx.array:
    for i in range(times):
        keys, values = layers.pools[i % len(layers.pools)]
        q = kernels.attend(
            q,
            keys,
            values,
            layers.table,
            layers.lengths,
            dep,
            scale=kernels.shape.head_dim**-0.5,
            splits=splits,
        )
    return q


def once(loads: Sequence[str], device: CudaDevice) -> None:
    """One launch of each load after another, for a profiler."""
    for name, shape in (("8B", LLAMA_8B), ("1B", LLAMA_1B)):
        for load in loads:
            layers = Layers.random(shape, lengths_of(load))
            for waves in (1, 2, 4, 8, 16):
                chosen = cuda.CudaLaunch.choose(shape, device)
                launch = cuda.CudaLaunch.of(shape, device, chosen.warps, chosen.stages, waves)
                kernels = cuda.CudaAttention(shape, device, launch)
                splits = kernels.plan(lengths_of(load))
                dep = mx.zeros((1,), mx.int32)
                for _ in range(3):
                    mx.eval(attend(kernels, splits, layers, layers.q, dep, 1))
                print("profiled", name, load, launch, splits.work, layers.kv_bytes, flush=True)


def check() -> None:
    for i, (shape, features) in enumerate(CHECKS):
        kernels = build(shape)
        dims = shape.head_dim if i % 2 else shape.head_dim // 2 // 16 * 16
        rotary = Rotary(dims, traditional=i % 3 == 0, epsilon=1e-6 if i % 2 else None)
        wrong = (
            kernels.reason
            if isinstance(kernels, Unsupported)
            else self_check(kernels, features, rotary)
        )
        print("check", "ok   " if wrong is None else "WRONG", shape, features, rotary, wrong or "")


def launches(shape: AttentionShape, device: CudaDevice, tune: bool) -> list[cuda.CudaLaunch]:
    chosen = cuda.CudaLaunch.choose(shape, device)
    if not tune:
        return [chosen]
    grid = [
        cuda.CudaLaunch.of(shape, device, warps, stages, waves) for warps, stages, waves in TUNED
    ]
    return [chosen, *(launch for launch in grid if launch.shared_memory <= device.block_memory)]


TUNED = [
    (4, 2, 4), (4, 3, 1), (4, 3, 2), (4, 3, 4), (4, 3, 8), (4, 3, 16), (4, 4, 2), (4, 4, 8),
    (4, 6, 4), (2, 3, 4), (2, 4, 4), (2, 4, 8), (8, 2, 4), (8, 3, 4),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true", help="time other launch settings too")
    parser.add_argument("--check", action="store_true", help="check many shapes first")
    parser.add_argument("--once", action="store_true", help="one launch each, for a profiler")
    parser.add_argument("--loads", nargs="*", default=LOADS)
    options = parser.parse_args()
    info = mx.device_info()
    print(info["device_name"], info["architecture"], "mlx", mx.__version__)
    for shape in (LLAMA_8B, LLAMA_1B):
        kernels = build(shape)
        if isinstance(kernels, Unsupported):
            raise SystemExit(kernels.reason)
        wrong = self_check(kernels)
        if wrong is not None:
            raise SystemExit(wrong)
    if options.check:
        check()
    device = cuda_device()
    if isinstance(device, Unsupported):
        raise SystemExit(device.reason)
    if options.once:
        return once(options.loads, device)
    copy = copy_bandwidth()
    print(f"copy {copy / 1e12:.2f} TB/s")
    print(device)
    for name, shape in (("8B", LLAMA_8B), ("1B", LLAMA_1B)):
        for load in options.loads:
            lengths = lengths_of(load)
            layers = Layers.random(shape, lengths)
            for launch in launches(shape, device, options.tune and load in TUNED_LOADS):
                kernels = cuda.CudaAttention(shape, device, launch)
                timing = attention_timing(kernels, lengths, layers)
                rate = layers.kv_bytes / timing.launch
                print(
                    f"{name} {load:15} warps {launch.warps} stages {launch.stages} "
                    f"waves {launch.waves} resident {launch.resident} "
                    f"work {kernels.plan(lengths).work:4} {timing.launch * 1e6:8.1f} us "
                    f"host {timing.host * 1e6:5.1f} us "
                    f"{rate / 1e12:5.2f} TB/s {rate / copy:6.1%} of copy",
                    flush=True,
                )
            del layers
            mx.clear_cache()


TUNED_LOADS = ("32 x 4096", "64 x 512", "8192 + 31 x 64", "1 x 8192")


if __name__ == "__main__":
    main()
