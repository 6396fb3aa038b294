"""What drawing tokens takes on a GPU: the kernel beside MLX's own operations, and the engine.

    python benchmarks/gpu/draws.py [--parts draws agreement engine] [--shapes 1b 8b] [--rounds 3]

draws: a draw of so many rows from 128 256 logits, by what the rows ask for; the device's time (what
it takes more when a draw follows a product that keeps it busy meanwhile) and the host's (to put the
draw together and to queue it). agreement: tokens of both ways from the same logits; where they
differ, the definition decides whether rounding may do that. engine: 32 rows, all greedy, of one
sampling, and each of its own; the last with the operations, too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE), str(HERE.parent.parent / "backend")]

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from folders import written  # noqa: E402
from side import LEAD, prompts_of  # noqa: E402
from synthetic import SHAPES, VOCABULARY  # noqa: E402

from engines import OurEngine, decode_rate  # noqa: E402
from harness import print_report, ratio  # noqa: E402
from mlx_manager.mlx_server.config import PoolLimits  # noqa: E402
from mlx_manager.mlx_server.core import Sampling  # noqa: E402
from mlx_manager.mlx_server.devices.cuda.compiler.launch import CudaKernel  # noqa: E402
from mlx_manager.mlx_server.devices.cuda.graphs import record_whole_steps  # noqa: E402
from mlx_manager.mlx_server.devices.draws import DrawKernel, checked  # noqa: E402
from mlx_manager.mlx_server.devices.draws.check import DrawProblem  # noqa: E402
from mlx_manager.mlx_server.devices.draws.kernel import LaunchForm, cuda_source  # noqa: E402
from mlx_manager.mlx_server.devices.kernel import Unsupported  # noqa: E402
from mlx_manager.mlx_server.engine import sampling  # noqa: E402
from mlx_manager.mlx_server.engine.sampling import SamplerState, SamplingBatch, sample_portably  # noqa: E402
from workload import Row  # noqa: E402

ROWS = (1, 32, 64, 128)
WAYS: dict[str, tuple[Sampling, ...]] = {
    "temperature": (Sampling(temperature=0.8),),
    "top_p": (Sampling(temperature=0.8, top_p=0.9),),
    "top_k": (Sampling(temperature=0.8, top_k=40),),
    "top_k, top_p": (Sampling(temperature=0.8, top_k=40, top_p=0.9),),
    "min_p": (Sampling(temperature=0.8, min_p=0.05),),
    "mixed": (
        Sampling(temperature=0.0),
        Sampling(temperature=0.7),
        Sampling(temperature=1.0, top_p=0.95),
        Sampling(temperature=0.6, top_k=20, top_p=0.95),
        Sampling(temperature=1.2, min_p=0.1),
    ),
}
CHAIN = 16
Draw = Callable[[mx.array, SamplingBatch, list[int]], mx.array]


def sampling_of(rows: int, ways: Sequence[Sampling], seed: int = 0) -> SamplingBatch:
    return SamplingBatch(
        [
            SamplerState.of(replace(ways[i % len(ways)], seed=1000 * seed + i), ())
            for i in range(rows)
        ]
    )


def logits_of(rows: int, spread: float, seed: int) -> mx.array:
    logits = mx.random.normal((rows, VOCABULARY), key=mx.random.key(seed)) * spread
    logits = logits.astype(mx.bfloat16)
    mx.eval(logits)
    return logits


def by_kernel(logits: mx.array, batch: SamplingBatch, drawn: list[int]) -> mx.array:
    kernel = checked(logits.dtype)
    if isinstance(kernel, Unsupported):
        raise SystemExit(f"there is no kernel: {kernel.reason}")
    return batch.draw(kernel, logits, drawn)


# --- What a draw takes --------------------------------------------------------------------------


def seconds(busy: mx.array, draws: Callable[[mx.array], list[mx.array]]) -> float:
    """Of a product that keeps the device busy, and of what is queued behind it."""
    product = busy @ busy
    for _ in range(3):
        product = product @ busy
    mx.synchronize()
    began = time.perf_counter()
    mx.async_eval(product)  # type: ignore[no-untyped-call]
    mx.eval(draws(product))
    mx.eval(product)
    return time.perf_counter() - began


def measure(
    draw: Draw, logits: mx.array, ways: Sequence[Sampling], chain: int
) -> tuple[float, float]:
    """The device's and the host's seconds of a draw."""
    rows = logits.shape[0]
    batch = sampling_of(rows, ways)
    busy = mx.random.normal((8192 if mx.default_device() == mx.gpu else 64,) * 2).astype(
        mx.bfloat16
    )
    mx.eval(busy, draw(logits, batch, [0] * rows))

    def several(_: mx.array) -> list[mx.array]:
        return [draw(logits, batch, [1 + i] * rows) for i in range(chain)]

    more = []
    for _ in range(21):
        without = seconds(busy, lambda product: [product])
        more.append(seconds(busy, several) - without)
    host = []
    for i in range(60):
        mx.synchronize()
        began = time.thread_time()
        mx.async_eval(draw(logits, batch, [1 + i] * rows))  # type: ignore[no-untyped-call]
        host.append(time.thread_time() - began)
    return statistics.median(more) / chain, statistics.median(host)


def in_form(form: LaunchForm) -> Draw:
    kernel = DrawKernel(CudaKernel(cuda_source(mx.bfloat16, form)), form.threads)
    return lambda logits, batch, drawn: batch.draw(kernel, logits, drawn)


def time_draws(forms: Sequence[LaunchForm]) -> None:
    table = []
    for rows in ROWS:
        logits = logits_of(rows, 2.0, rows)
        for name, ways in WAYS.items():
            # One draw by operations at a time: several would run beside each other.
            both = [measure(sample_portably, logits, ways, 1)]
            both += [measure(in_form(form), logits, ways, CHAIN) for form in forms]
            devices, hosts = ([f"{x * 1e6:,.0f}" for x in each] for each in zip(*both, strict=True))
            table.append([str(rows), name, *devices, *hosts[:2]])
            print(" | ".join(table[-1]), file=sys.stderr, flush=True)
    columns = ["rows", "asking for", "operations, device µs"]
    columns += [f"kernel, {form.threads} threads, {form.copies} copies" for form in forms]
    columns += ["operations, host µs", "kernel"]
    print_report("A draw from 128 256 logits, bf16", columns, table)


# --- Whether both draw the same -----------------------------------------------------------------


def compare(rounds: int) -> None:
    table = []
    for name, ways in WAYS.items():
        same = rounded = wrong = changed = 0
        for number in range(rounds):
            logits = logits_of(64, (0.3, 1.0, 3.0)[number % 3], number)
            batch, drawn = sampling_of(64, ways, number), [number] * 64
            tokens = np.array(by_kernel(logits, batch, drawn))
            changed += int((tokens != np.array(by_kernel(logits, batch, drawn))).sum())
            alone = SamplingBatch([batch.rows[5]])
            changed += int(np.array(by_kernel(logits[5:6], alone, [number]))[0] != tokens[5])
            theirs = np.array(sample_portably(logits, batch, drawn))
            exact = np.array(logits.astype(mx.float32))
            problem = DrawProblem(exact, batch.host, batch.chances(drawn))
            for row in np.flatnonzero(tokens != theirs).tolist():
                if problem.allows(row, int(tokens[row])):
                    rounded += 1
                else:
                    wrong += 1
            same += int((tokens == theirs).sum())
        table.append([name, str(same), str(rounded), str(wrong), str(changed)])
        print(" | ".join(table[-1]), file=sys.stderr, flush=True)
    columns = ["asking for", "same", "differ by rounding", "wrong", "not the same again or alone"]
    print_report("Tokens of the kernel beside those of operations", columns, table)


# --- In the engine ------------------------------------------------------------------------------


def rows_of(kind: str, prompts: Sequence[tuple[int, ...]], tokens: int) -> list[Row]:
    match kind:
        case "greedy":
            return [Row(prompt, tokens) for prompt in prompts]
        case "shared":
            return [Row(p, tokens, 0.8, 0.95, seed=i) for i, p in enumerate(prompts)]
    own = []
    for i, prompt in enumerate(prompts):
        top_k, min_p = (0, 20, 100, 0)[i % 4], (0.0, 0.0, 0.05, 0.02)[i % 4]
        heat, top_p = 0.5 + 0.03 * i, (0.9, 0.95, 1.0, 0.8)[i % 4] - 0.001 * (i // 4)
        own.append(Row(prompt, tokens, heat, top_p, i, top_k, min_p))
    return own


def drawn_by_operations(dtype: mx.Dtype) -> DrawKernel | Unsupported:
    return Unsupported("to compare")


def run_engine(shape: str, options: argparse.Namespace) -> None:
    engine = OurEngine(
        written(shape, options.folder / shape),
        PoolLimits(memory_limit=int(options.memory * 1e9), weights="keep"),
    )
    ways: dict[str, Any] = dict.fromkeys(["greedy", "shared", "own"], checked)
    ways["own, by operations"] = drawn_by_operations
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(-1, options.rounds):
        prompts = prompts_of([128] * options.rows, seed=500 + number)
        engine.generate([Row(prompt, LEAD) for prompt in prompts])
        for name in ways if number % 2 else reversed(ways):
            sampling.checked = ways[name]
            kind = name.split(",")[0]
            rate = decode_rate(engine.generate(rows_of(kind, prompts, options.tokens + LEAD)))
            print(shape, name, f"{rate:,.0f}", file=sys.stderr, flush=True)
            if number >= 0:
                rates[name].append(rate)
    sampling.checked = checked
    table = [
        [name, f"{statistics.median(found):,.0f}", str(ratio(found, rates["shared"]))]
        for name, found in rates.items()
    ]
    print_report(f"{options.rows} rows, {shape}, bf16", ["sampling", "tok/s", "÷ shared"], table)
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="*", default=["draws", "agreement", "engine"])
    parser.add_argument("--shapes", nargs="*", default=["1b", "8b"], choices=SHAPES)
    parser.add_argument("--rows", type=int, default=32, help="in the engine")
    forms = ["1024x1", "1024x4", "1024x8", "512x4"]
    parser.add_argument("--forms", nargs="*", default=forms, help="threads x copies of bins")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/race"))
    parser.add_argument("--memory", type=float, default=48, help="GB")
    options = parser.parse_args()
    record_whole_steps()
    if "draws" in options.parts:
        time_draws([LaunchForm(*map(int, form.split("x"))) for form in options.forms])
    if "agreement" in options.parts:
        compare(10 * options.rounds)
    if "engine" in options.parts:
        for shape in options.shapes:
            run_engine(shape, options)


if __name__ == "__main__":
    main()
