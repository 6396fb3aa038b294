"""Keys and values in 8 bits against 16: the rows that run at once in the same memory, and the time
of a decode step.

In process, each side in a process of its own. First more rows than fit are submitted at once, under
a limit that leaves `--pages` GB beside the weights: how many run at the same time. Then, without
the limit, `--rows` of `--prompt` tokens decode together.

    python benchmarks/kv_bits.py
    python benchmarks/kv_bits.py --shape 1b --memory 40 --pages 2 --crowd 160      (on a GPU)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent / "gpu"))

from folders import written

from engines import OurEngine, decode_rate
from harness import find_model, interleave, parser, print_report, ratio
from mlx_manager.mlx_server.config import EngineLimits, PoolLimits
from workload import Row, prompt_of

BITS = (16, 8)


@dataclass(frozen=True, slots=True)
class Found:
    """Figures of one side. most: rows that ran at once. step: seconds. token_bytes: of a token in
    pages. kind: how the model is run."""

    most: int
    step: float
    token_bytes: float
    kind: str


def rows_of(engine: OurEngine, count: int, prompt: int, tokens: int, seed: int) -> list[Row]:
    tokenizer = engine.loaded.tokenizer
    return [Row(prompt_of(tokenizer, prompt, seed + i), tokens) for i in range(count)]


async def crowd(engine: OurEngine, rows: list[Row]) -> int:
    """Return how many of the rows ran at once."""
    most = 0
    work = asyncio.gather(*(engine.answer(row) for row in rows))
    while not work.done():
        await asyncio.sleep(0.002)
        most = max(most, (await engine.thread.call(engine.backend.stats)).running)
    await work
    return most


def measure(chosen: argparse.Namespace) -> Found:
    limits = EngineLimits(kv_bits=chosen.side, prefix_cache=False, max_rows=chosen.crowd)
    total = None if chosen.memory is None else int(chosen.memory * 1e9)
    engine = OurEngine(Path(chosen.model), PoolLimits(memory_limit=total), limits)
    try:
        rows = rows_of(engine, chosen.rows, chosen.prompt, chosen.tokens, 1)
        # The first time compiles.
        engine.generate(rows_of(engine, chosen.rows, chosen.prompt, 24, 500))
        step = chosen.rows / decode_rate(engine.generate(rows))
        stats = engine.backend.stats()
        engine.run(engine.thread.call(lambda: shrink(engine, chosen.pages)))
        rows = rows_of(engine, chosen.crowd, chosen.prompt, chosen.tokens, 1000)
        most = engine.run(crowd(engine, rows))
        return Found(most, step, stats.page_bytes / stats.page_size, stats.forward)
    finally:
        engine.close()


def shrink(engine: OurEngine, gigabytes: float) -> None:
    """Leave so much for pages beside what is promised to others. On the MLX thread."""
    engine.backend.drop_prefixes()
    ledger = engine.ledger
    others = sum(
        nbytes
        for line, nbytes in ledger.figures().items()
        if ":" in line and not line.startswith("pages:")
    )
    ledger.extend(others + int(gigabytes * 1e9) - ledger.limit)


def in_a_process(chosen: argparse.Namespace, folder: Path, bits: int) -> Found:
    command = [sys.executable, __file__, "--side", str(bits), "--model", str(folder)]
    for name in ("rows", "crowd", "prompt", "tokens", "pages", "memory"):
        if (value := getattr(chosen, name)) is not None:
            command += [f"--{name}", str(value)]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = Found(**json.loads(finished.stdout.splitlines()[-1]))
    print(f"{time.strftime('%X')} {bits} bits: {found}", flush=True)
    return found


def main() -> None:
    arguments = parser(__doc__, rounds=1)
    arguments.add_argument("--rows", type=int, default=16, help="rows whose steps are timed")
    arguments.add_argument("--crowd", type=int, default=96, help="rows that do not all fit")
    arguments.add_argument("--prompt", type=int, default=500, help="tokens of a prompt")
    arguments.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    arguments.add_argument("--pages", type=float, default=0.1, help="GB for pages")
    arguments.add_argument("--memory", type=float, help="GB that the engine may take")
    arguments.add_argument("--shape", help="a model of gpu/synthetic.py, in bfloat16")
    arguments.add_argument("--side", type=int, choices=BITS, help="measure one side, as JSON")
    chosen = arguments.parse_args()
    if chosen.side:
        print(json.dumps(asdict(measure(chosen))), flush=True)
        return
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        if chosen.shape is None:
            folder = find_model(chosen.model, scratch)
        else:
            chosen.model, folder = chosen.shape, written(chosen.shape, scratch / chosen.shape)
        sides = {bits: (lambda _, bits=bits: in_a_process(chosen, folder, bits)) for bits in BITS}
        found = interleave(sides, chosen.rounds, cold=True)
    many, few = found[8], found[16]
    print_report(
        f"Keys and values in 8 bits: {chosen.model}, prompts of {chosen.prompt} tokens",
        ["", "16 bits", "8 bits", "8 ÷ 16"],
        [
            line("bytes of a token", [f.token_bytes for f in few], [f.token_bytes for f in many]),
            line(
                f"rows at once in {chosen.pages} GB",
                [f.most for f in few],
                [f.most for f in many],
            ),
            line(
                f"a step of {chosen.rows} rows, ms",
                [1e3 * f.step for f in few],
                [1e3 * f.step for f in many],
            ),
            ["run", few[0].kind, many[0].kind, ""],
        ],
    )


def line(name: str, few: list[float], many: list[float]) -> list[str]:
    return [name, f"{few[-1]:,.1f}", f"{many[-1]:,.1f}", str(ratio(many, few))]


if __name__ == "__main__":
    main()
