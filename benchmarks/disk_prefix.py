"""Prefixes on disk: the first token after a restart, and the pace of streams beside the disk.

Over HTTP. First: a server computes a long prefix (cold) and is stopped; the next one is asked
another question about it. Then: streams generate while somebody asks about long prefixes, one after
another. On the side with a disk these are written, as they are used a second time, and after a
restart they are read. On the side without, memory has them all along.

    python benchmarks/disk_prefix.py
    python benchmarks/disk_prefix.py --parts beside --gigabytes 2 --rounds 1     (10 minutes)
    python benchmarks/disk_prefix.py --shape 1b --memory 20 --parts restart       (on a GPU)

With `--gigabytes` the model is one that keeps much of each token, `wide`, so that a CPU computes as
much as that in a minute. With `--shape` it is one of gpu/synthetic.py, whose answers are only
compared with one another: a GPU may round in another way where a prompt is cut in another place.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent / "gpu"))

from folders import written

from checks import check_server
from harness import (
    DEMO,
    Ratio,
    find_model,
    gaps_around,
    parser,
    percentile,
    print_report,
    ratio,
    refuse,
)
from load_client import Answer
from prefix_reuse import QUESTIONS
from servers import Server, load, our_server
from workload import chat, text_of_tokens

STREAMS = 8
BEGIN = 1.5
"""Seconds after which the first prefix is asked about."""
SETTLED = 2.0
"""Seconds in which an idle server writes what is left."""
BLOCK, WIDE = 256, 1 << 15
"""Tokens of a block, and bytes of a token of the model `wide`."""
ENOUGH = 0.8
"""Part of all bytes that should have been moved while the streams were watched."""


def tell(doing: str) -> None:
    print(f"{time.strftime('%X')} {doing}", flush=True)


def question(server: Server, prefix: str, number: int) -> dict[str, Any]:
    return server.request(
        "/chat/completions",
        {
            "messages": [
                {"role": "system", "content": prefix},
                {"role": "user", "content": QUESTIONS[number]},
            ],
            "max_tokens": 16,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    )


def ask(server: Server, prefix: str, number: int) -> Answer:
    return load([question(server, prefix, number)])[0]


@contextmanager
def without_disk(chosen: argparse.Namespace, **settings: str) -> Iterator[Server]:
    """A server. On a GPU, and where two run at once, each needs to be told what memory it has.
    Drafts would end some of the streams early."""
    if chosen.memory is not None:
        settings["memory_limit_gb"] = str(chosen.memory)
    with our_server(chosen.folder, speculation="off", **settings) as server:
        yield server


@contextmanager
def with_disk(chosen: argparse.Namespace, folder: Path) -> Iterator[Server]:
    with without_disk(chosen, prefix_disk_gb="8", prefix_disk_dir=str(folder)) as server:
        yield server


def moved(server: Server, field: str) -> int:
    """Return the bytes that a server has read or written."""
    url = f"{server.base_url}/admin/models"
    with urllib.request.urlopen(url, timeout=30) as answer:
        models = json.load(answer)["data"]
    return sum(model["prefix_disk"][field] for model in models if model["prefix_disk"])


@dataclass(frozen=True, slots=True)
class Restart:
    """Seconds to the first text: computed, found in memory, and read from disk after a restart."""

    cold: float
    warm: float
    restarted: float
    cached: int


def restart(chosen: argparse.Namespace, folder: Path, prefix: str, number: int) -> Restart:
    expected = None
    if chosen.shape is None:
        tell(f"round {number}: the answer without a prefix cache")
        with without_disk(chosen, prefix_cache="false") as uncached:
            expected = ask(uncached, prefix, 1).text
    tell(f"round {number}: the first server")
    with with_disk(chosen, folder) as server:
        ask(server, "a short one", 0)
        # What a GPU compiles for long prompts is none of theirs.
        ask(server, f"another one: {prefix}", 0)
        cold, warm = ask(server, prefix, 0), ask(server, prefix, 1)
    tell(f"round {number}: cold {cold.first - cold.started:.3f} s; the next server")
    with with_disk(chosen, folder) as server:
        ask(server, "a short one", 0)
        again = ask(server, prefix, 1)
        nbytes = moved(server, "read_bytes")
    tell(f"round {number}: {again.first - again.started:.3f} s; {nbytes / 1e6:,.0f} MB were read")
    if expected is not None and not again.text == warm.text == expected:
        refuse(f"from disk the answer is {again.text!r}, without {expected!r}")
    tell(f"the answer from disk is {'' if again.text == warm.text else 'not '}the one from memory")
    firsts = [answer.first - answer.started for answer in (cold, warm, again)]
    return Restart(firsts[0], firsts[1], firsts[2], again.cached_tokens)


def gaps(
    server: Server, prefixes: list[str], chosen: argparse.Namespace, number: int
) -> list[float]:
    """The gaps of streams, in seconds, while somebody asks about one prefix after another."""
    streams = [
        server.request(
            "/chat/completions",
            {"messages": chat(40, 1000 * number + i), "max_tokens": chosen.tokens, "stream": True}
            | {"temperature": 0, "ignore_eos": True},
        )
        for i in range(STREAMS)
    ]
    visits = [
        question(server, prefix, 1) | {"after": BEGIN + chosen.apart * i}
        for i, prefix in enumerate(prefixes)
    ]
    answers = load([*streams, *visits])
    running, asked = answers[:STREAMS], answers[STREAMS:]
    begin, end = min(a.started for a in asked), max(a.ended for a in asked)
    if any(answer.ended < end for answer in running):
        refuse("the streams ended before the last prefix was read; give them more --tokens")
    # Where reading is not much faster than computing, much is computed while the rest is read.
    found = [answer.cached_tokens for answer in asked]
    if min(found) < BLOCK:
        tell(f"found only {found} tokens")
    first = max(answer.first for answer in running)
    _, meanwhile = gaps_around([a.arrivals for a in running], first, begin, end)
    return meanwhile


def watched(
    name: str, server: Server, prefixes: list[str], chosen: argparse.Namespace, number: int
) -> tuple[float, int]:
    """The 99th percentile of the streams' gaps, and the bytes that were moved meanwhile."""
    field = {"writing": "written_bytes", "reading": "read_bytes"}.get(name)
    before = 0 if field is None else moved(server, field)
    begun = time.perf_counter()
    found = worst(gaps(server, prefixes, chosen, number))
    nbytes = 0 if field is None else moved(server, field) - before
    took = time.perf_counter() - begun
    said = f"p99 gap {1e3 * found:.1f} ms, {nbytes / 1e6:,.0f} MB in {took:.0f} s"
    tell(f"round {number}, {name}: {said}")
    return found, nbytes


@dataclass(frozen=True, slots=True)
class Beside:
    """The 99th percentile of the streams' gaps, in seconds; the least bytes that were written, and
    read, while the streams were watched."""

    plain: list[float]
    writing: list[float]
    in_memory: list[float]
    reading: list[float]
    written: int
    read: int


def beside(chosen: argparse.Namespace, scratch: Path, prefixes: list[str]) -> Beside:
    sides = ("plain", "writing", "in memory", "reading")
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in sides}
    with without_disk(chosen) as without:
        tell("the prefixes are computed")
        for prefix in prefixes:
            ask(without, prefix, 0)
        for number in range(chosen.rounds):
            folder = scratch / f"beside-{number}"
            with with_disk(chosen, folder) as server:
                tell(f"round {number}: the prefixes are computed")
                for prefix in prefixes:
                    ask(server, prefix, 0)
                for name, side in (("plain", without), ("writing", server)):
                    found[name].append(watched(name, side, prefixes, chosen, number))
                time.sleep(SETTLED)
                nbytes = moved(server, "written_bytes")
            with with_disk(chosen, folder) as server:
                ask(server, "a short one", 0)
                for name, side in (("reading", server), ("in memory", without)):
                    found[name].append(watched(name, side, prefixes, chosen, number))
            shutil.rmtree(folder)
            for name in ("writing", "reading"):
                if (part := found[name][-1][1]) < ENOUGH * nbytes:
                    tell(f"{name}: only {part / 1e6:,.0f} of {nbytes / 1e6:,.0f} MB")
    p99 = {name: [value for value, _ in values] for name, values in found.items()}
    least = {name: min(nbytes for _, nbytes in values) for name, values in found.items()}
    return Beside(*(p99[name] for name in sides), least["writing"], least["reading"])


def worst(values: list[float]) -> float:
    return percentile(values, 0.99)


def ms(values: list[float]) -> str:
    return f"{1000 * Ratio(tuple(values)).median:,.1f}"


def options() -> argparse.Namespace:
    arguments = parser(__doc__, rounds=3)
    arguments.add_argument("--prefix", type=int, help="tokens of a prefix")
    arguments.add_argument("--prefixes", type=int, default=6, help="prefixes beside the streams")
    arguments.add_argument("--tokens", type=int, help="tokens of each stream")
    arguments.add_argument(
        "--seconds", type=float, help="in which prefixes are asked about beside the streams"
    )
    arguments.add_argument(
        "--parts", nargs="*", default=["restart", "beside"], choices=["restart", "beside"]
    )
    arguments.add_argument("--gigabytes", type=float, help="that are written, and read")
    arguments.add_argument("--shape", help="a model of gpu/synthetic.py, in bfloat16")
    arguments.add_argument("--memory", type=float, help="GB that each server may take")
    chosen = arguments.parse_args()
    if chosen.gigabytes is not None:
        chosen.model = "wide"
        chosen.prefix = chosen.prefix or 8 * BLOCK + 32
        each = chosen.prefix // BLOCK * BLOCK * WIDE
        chosen.prefixes = max(1, round(chosen.gigabytes * 1e9 / each))
        chosen.seconds = chosen.seconds or 30 * chosen.gigabytes
        chosen.tokens = chosen.tokens or 1800
    chosen.prefix, chosen.tokens = chosen.prefix or 8000, chosen.tokens or 900
    chosen.apart = 0.5 if chosen.seconds is None else chosen.seconds / chosen.prefixes
    return chosen


def main() -> None:
    chosen = options()
    if chosen.shape is None:
        with our_server(DEMO) as server:
            check_server(server)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        tell("the model is made")
        if chosen.shape is None:
            chosen.folder = find_model(chosen.model, scratch)
        else:
            chosen.model = chosen.shape
            chosen.folder = written(chosen.shape, scratch / chosen.shape)
        from mlx_lm.utils import load_tokenizer

        tokenizer = load_tokenizer(chosen.folder)

        def prefix(number: int) -> str:
            return text_of_tokens(tokenizer, chosen.prefix, number + 10)

        if "restart" in chosen.parts:
            report_restarts(
                chosen,
                [
                    restart(chosen, scratch / "restarts", prefix(number), number)
                    for number in range(chosen.rounds)
                ],
            )
        if "beside" in chosen.parts:
            prefixes = [prefix(100 + i) for i in range(chosen.prefixes)]
            report_beside(chosen, beside(chosen, scratch, prefixes))


def report_restarts(chosen: argparse.Namespace, restarts: list[Restart]) -> None:
    colds = [r.cold for r in restarts]
    rows = [
        ("from memory", [r.warm for r in restarts]),
        (f"from disk, {restarts[-1].cached:,} tokens", [r.restarted for r in restarts]),
    ]
    print_report(
        f"Prefix of {chosen.prefix} tokens after a restart: {chosen.model}",
        ["", "first token, ms", "÷ cold"],
        [
            ["cold", ms(colds), ""],
            *([name, ms(each), str(ratio(each, colds))] for name, each in rows),
        ],
    )


def report_beside(chosen: argparse.Namespace, found: Beside) -> None:
    rows = [
        (f"{found.written / 1e6:,.0f} MB written", found.plain, found.writing),
        (f"{found.read / 1e6:,.0f} MB read", found.in_memory, found.reading),
    ]
    print_report(
        f"{STREAMS} streams while prefixes are written, and read: {chosen.model}",
        ["", "p99 gap without, ms", "with, ms", "with ÷ without"],
        [[name, ms(one), ms(other), str(ratio(other, one))] for name, one, other in rows],
    )


if __name__ == "__main__":
    main()
