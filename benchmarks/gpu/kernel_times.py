"""Time of each kernel in decode steps and in a prompt, by CUPTI through torch's profiler.

    python benchmarks/gpu/kernel_times.py [--shapes 1b qwen3.5-4b] [--layers 8] [--rows 1 8 32]
        [--prompt 2048 8192]

Random weights (synthetic.py), in bfloat16, run as the engine would (`choice.choose`). Needs PyTorch
with CUDA in the same interpreter, for its profiler alone.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE), str(HERE.parent.parent / "backend")]

import mlx.core as mx  # noqa: E402
from synthetic import SHAPES, make  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from harness import print_report  # noqa: E402
from mlx_manager.mlx_server.engine.kv.pages import PageTable  # noqa: E402
from mlx_manager.mlx_server.execution.attention.paged import Span  # noqa: E402
from mlx_manager.mlx_server.execution.forward import Chunk, Decode, Forward  # noqa: E402
from mlx_manager.mlx_server.execution.select import choose  # noqa: E402

PAGE = 32
# Steps before those that are measured: compiled ones come after 64 of a kind.
WARM, MEASURED = 80, 20
PAGES_OF_ROW = 8
KERNELS = 14


def various(tokens: int) -> list[int]:
    """Tokens that differ, so that routers send them to different experts."""
    return [number * 7919 % 32_000 for number in range(1, tokens + 1)]


def decode(forward: Forward, rows: int, steps: int) -> None:
    """Steps of rows that have some tokens already."""
    tables = [
        PageTable(list(range(row * PAGES_OF_ROW, (row + 1) * PAGES_OF_ROW))) for row in range(rows)
    ]
    tokens = mx.array(various(rows), mx.uint32)
    for step in range(steps):
        lengths = [PAGE + step] * rows
        logits = forward.run(Decode(list(range(rows)), tables, lengths, tokens), [])
        tokens = mx.argmax(logits[:rows], axis=-1).astype(mx.uint32)
        mx.async_eval(tokens)
    mx.eval(tokens)


def prompt(forward: Forward, tokens: int) -> None:
    span = Span(PageTable(list(range(tokens // PAGE))), tokens, tokens)
    logits = forward.run(None, [Chunk(-1, span, various(tokens), final=True)])
    forward.finish()
    mx.eval(logits, forward.state())
    forward.forget(-1)


def measured(run: Callable[[], None], steps: int) -> list[list[str]]:
    """Rows of a table: microseconds a step, and launches, of each kernel and of all."""
    began = time.perf_counter()
    run()
    wall = time.perf_counter() - began
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
    spent: defaultdict[str, float] = defaultdict(float)
    count: defaultdict[str, int] = defaultdict(int)
    for event in found.events():
        if event.device_type.name == "CUDA":
            name = event.name.removeprefix("void ").replace("mlx::core::cu::", "")[:60]
            spent[name] += event.device_time
            count[name] += 1
    table = [["all", f"{sum(spent.values()) / steps:,.1f}", f"{sum(count.values()) / steps:.1f}"]]
    table.append(["by the clock", f"{wall / steps * 1e6:,.1f}", ""])
    for name in sorted(spent, key=spent.__getitem__, reverse=True)[:KERNELS]:
        table.append([name, f"{spent[name] / steps:,.1f}", f"{count[name] / steps:.1f}"])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=["1b"])
    parser.add_argument("--layers", type=int, help="so many of them; a divisor of their pattern")
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 8, 32])
    parser.add_argument("--prompt", nargs="*", type=int, default=[2048], help="tokens")
    options = parser.parse_args()
    for shape in options.shapes:
        if options.layers is not None:
            SHAPES[shape]["num_hidden_layers"] = options.layers
        forward = choose(make(shape), PAGE)
        pages = max(
            PAGES_OF_ROW * max(options.rows, default=1), max(options.prompt, default=0) // PAGE
        )
        for store in forward.stores:
            store.resize(pages)
        columns = ["kernel", "us", "launches"]
        for rows in options.rows:
            decode(forward, rows, WARM)
            table = measured(partial(decode, forward, rows, MEASURED), MEASURED)
            print_report(f"{shape} ({forward.kind}): a step of {rows} rows", columns, table)
            for row in range(rows):
                forward.forget(row)
        for tokens in options.prompt:
            for _ in range(2):
                prompt(forward, tokens)
            table = measured(partial(prompt, forward, tokens), 1)
            print_report(f"{shape}: a prompt of {tokens} tokens", columns, table)


if __name__ == "__main__":
    main()
