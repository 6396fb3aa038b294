"""Peak memory, and what of it are KV pages: one long prompt among short ones, in process.

Each side runs in a process of its own. "peak" is MLX's, less what it had once the model was
loaded; "resident" is the operating system's, over the whole run, model and interpreter included.
"""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.core as mx

from checks import check_engine
from engines import MlxLm, OurEngine
from harness import find_model, interleave, parser, print_report, ratio
from workload import Row, prompt_of

TOKENS = 128


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes; `overhead` is KV pages held ÷ bytes of live tokens, 0 where it was not read."""

    peak: int
    resident: int
    overhead: float = 0.0


def rows_of(tokenizer: object, lengths: Sequence[int], number: int) -> list[Row]:
    return [
        Row(prompt_of(tokenizer, length, 1000 * (number + 1) + index), TOKENS)
        for index, length in enumerate(lengths)
    ]


def resident() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def measure_ours(model: Path, lengths: Sequence[int], number: int) -> Footprint:
    engine = OurEngine(model)
    tokenizer = engine.loaded.tokenizer
    loaded = engine.run(engine.thread.call(mx.get_active_memory))
    engine.run(engine.thread.call(mx.reset_peak_memory))
    overheads = engine.run(watch(engine, rows_of(tokenizer, lengths, number)))
    usage = engine.run(engine.thread.call(engine.ledger.usage))
    engine.close()
    return Footprint(usage["peak"] - loaded, resident(), statistics.median(overheads))


async def watch(engine: OurEngine, rows: Sequence[Row]) -> list[float]:
    """Generate, and read the page figures between steps while rows run and no prompt waits."""
    overheads: list[float] = []
    work = asyncio.gather(*(engine.answer(row) for row in rows))
    while not work.done():
        await asyncio.sleep(0.002)
        stats = await engine.thread.call(engine.backend.stats)
        if stats.running and not stats.prefilling and not stats.waiting:
            overheads.append(stats.pages_held * stats.page_size / stats.tokens_live)
    await work
    return overheads


def measure_theirs(model: Path, lengths: Sequence[int], number: int) -> Footprint:
    peer = MlxLm(model)
    mx.eval(peer.model.parameters())
    loaded = mx.get_active_memory()
    mx.reset_peak_memory()
    peer.batch(rows_of(peer.tokenizer, lengths, number))
    return Footprint(mx.get_peak_memory() - loaded, resident())


def in_a_process(side: str, model: Path, lengths: Sequence[int], number: int) -> Footprint:
    command = [sys.executable, __file__, "--side", side, "--model", str(model)]
    command += ["--lengths", json.dumps(list(lengths)), "--number", str(number)]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Footprint(**json.loads(finished.stdout))


def main() -> None:
    arguments = parser(__doc__, rounds=3, model="demo-f32")
    arguments.add_argument("--long", type=int, default=4000, help="tokens of the long prompt")
    arguments.add_argument("--side", choices=["ours", "theirs"], help="measure one side, as JSON")
    arguments.add_argument("--lengths", type=json.loads, default=[], help="of --side, as JSON")
    arguments.add_argument("--number", type=int, default=0, help="of --side: the round")
    chosen = arguments.parse_args()
    if chosen.side:
        measure = measure_ours if chosen.side == "ours" else measure_theirs
        print(json.dumps(asdict(measure(Path(chosen.model), chosen.lengths, chosen.number))))
        return
    check_engine()
    with tempfile.TemporaryDirectory() as scratch:
        model = find_model(chosen.model, Path(scratch))
        lines = []
        for name, lengths in (
            ("16 rows of 64", [64] * 16),
            (f"1 row of {chosen.long}, 15 of 64", [chosen.long, *[64] * 15]),
        ):
            runs = interleave(
                {
                    side: lambda n, side=side, lengths=lengths: in_a_process(
                        side, model, lengths, n
                    )
                    for side in ("ours", "theirs")
                },
                chosen.rounds,
            )
            lines.append(line(name, runs["ours"], runs["theirs"]))
        print_report(
            f"Memory: {chosen.model}, {TOKENS} tokens a row",
            [
                "prompts",
                "peak beyond the weights, MB: mlx-lm",
                "ours",
                "ratio",
                "resident, MB: mlx-lm",
                "ours",
                "our pages ÷ live tokens",
            ],
            lines,
        )


def line(name: str, ours: Sequence[Footprint], theirs: Sequence[Footprint]) -> list[str]:
    def megabytes(values: Sequence[int]) -> str:
        return f"{statistics.median(values) / 1e6:,.0f}"

    return [
        name,
        megabytes([f.peak for f in theirs]),
        megabytes([f.peak for f in ours]),
        str(ratio([f.peak for f in ours], [f.peak for f in theirs])),
        megabytes([f.resident for f in theirs]),
        megabytes([f.resident for f in ours]),
        f"{statistics.median(f.overhead for f in ours):.2f}",
    ]


if __name__ == "__main__":
    main()
