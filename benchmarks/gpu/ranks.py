"""Decoding on one device and on several: tokens per second of 1, 32 and 128 rows, over HTTP.

    python benchmarks/gpu/ranks.py [--shapes 8b] [--bits 4] [--devices 1 2] [--rows 1 32 128]
        [--tokens 128] [--rounds 3] [--folder /tmp/race]

A server for each number of devices, one after the other; its model is spread over them. Each round
asks for all rows at once; their prompts are in the prefix cache by then. The rate is that of the
time in which all rows decode. The median of the rounds is told, and their range. The greedy answers
of one row, and of the first of each crowd, are compared with those of the first number of devices:
random weights have near ties, so some may part at a token.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE), str(HERE.parent.parent / "backend")]

from folders import written  # noqa: E402
from side import prompts_of  # noqa: E402

from load_client import Answer  # noqa: E402
from mlx_manager.mlx_server.utils.prefixes import alike  # noqa: E402
from servers import Server, load, our_server  # noqa: E402

PROMPT = 128


def asked(server: Server, rows: int, tokens: int) -> list[Answer]:
    """Return the answers to `rows` prompts that are asked at once."""
    common = {
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    prompts = prompts_of([PROMPT] * rows, rows)
    return load(
        [server.request("/completions", common | {"prompt": list(prompt)}) for prompt in prompts]
    )


def rate(answers: Sequence[Answer]) -> float:
    """Return the tokens per second while all rows decode, by the medians of the rows' first and
    last pieces."""
    first = statistics.median(answer.first for answer in answers)
    last = statistics.median(answer.ended for answer in answers)
    return sum(answer.tokens - 1 for answer in answers) / (last - first)


def likeness(one: str, other: str) -> str:
    """Return in words how far two answers are the same."""
    same = alike(one, other)
    return "the same text" if one == other else f"the same {same} of {len(one)} characters"


def measure(folder: Path, devices: int, options: argparse.Namespace) -> dict[int, list[float]]:
    rates: dict[int, list[float]] = {}
    settings = {"devices": str(devices), "max_rows": str(max(options.rows)), "speculation": "off"}
    with our_server(folder, **settings) as server:
        for rows in options.rows:
            # The first crowd fills the prefix cache, and compiles.
            found = [asked(server, rows, options.tokens) for _ in range(options.rounds + 1)]
            rates[rows] = [rate(each) for each in found[1:]]
            options.texts.setdefault((folder, rows), found[-1][0].text)
            same = likeness(options.texts[folder, rows], found[-1][0].text)
            middle = statistics.median(rates[rows])
            print(
                f"{folder.name}, {devices} device{'s' * (devices > 1)}, {rows:3} rows: "
                f"{middle:9.1f} tokens/s ({min(rates[rows]):.1f} to {max(rates[rows]):.1f}), "
                f"{1000 * rows / middle:.2f} ms a step, {same}",
                flush=True,
            )
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["8b"])
    parser.add_argument("--bits", type=int, default=None)
    parser.add_argument("--devices", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 32, 128])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/race"))
    options = parser.parse_args()
    options.texts = {}
    bits = [] if options.bits is None else [options.bits]
    for shape in options.shapes:
        name = "-".join([shape, *(f"{each}bit" for each in bits)])
        folder = written(shape, options.folder / name, *bits)
        found = {devices: measure(folder, devices, options) for devices in options.devices}
        first, *others = options.devices
        for devices in others:
            for rows in options.rows:
                gain = statistics.median(found[devices][rows]) / statistics.median(
                    found[first][rows]
                )
                print(f"{name}, {rows:3} rows: {devices} devices ÷ {first}: {gain:.2f}")


if __name__ == "__main__":
    main()
