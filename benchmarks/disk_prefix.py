"""Prefixes on disk: the first token after a restart, and the pace of streams beside the disk.

Over HTTP. First: a server computes a long prefix (cold) and is stopped; the next one is asked
another question about it. Then: streams generate while somebody asks about long prefixes, one after
another. On the side with a disk these are written, as they are used a second time, and after a
restart they are read. On the side without, memory has them all along.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
APART = 0.5
"""Seconds between two prefixes."""
SETTLED = 2.0
"""Seconds in which an idle server writes what is left."""


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
def with_disk(model: Path, folder: Path) -> Iterator[Server]:
    settings = {"prefix_disk_gb": "8", "prefix_disk_dir": str(folder)}
    with our_server(model, **settings) as server:
        yield server


@dataclass(frozen=True, slots=True)
class Restart:
    """Seconds to the first text: computed, found in memory, and read from disk after a restart."""

    cold: float
    warm: float
    restarted: float
    cached: int


def restart(model: Path, folder: Path, prefix: str, expected: str) -> Restart:
    with with_disk(model, folder) as server:
        ask(server, "a short one", 0)
        cold, warm = ask(server, prefix, 0), ask(server, prefix, 1)
    with with_disk(model, folder) as server:
        ask(server, "a short one", 0)
        again = ask(server, prefix, 1)
    if not again.text == warm.text == expected:
        refuse(f"from disk the answer is {again.text!r}, without {expected!r}")
    firsts = [answer.first - answer.started for answer in (cold, warm, again)]
    return Restart(firsts[0], firsts[1], firsts[2], again.cached_tokens)


def gaps(server: Server, prefixes: list[str], tokens: int, number: int) -> list[float]:
    """The gaps of streams, in seconds, while somebody asks about one prefix after another."""
    streams = [
        server.request(
            "/chat/completions",
            {"messages": chat(40, 1000 * number + i), "max_tokens": tokens, "stream": True}
            | {"temperature": 0},
        )
        for i in range(STREAMS)
    ]
    visits = [
        question(server, prefix, 1) | {"after": BEGIN + APART * i}
        for i, prefix in enumerate(prefixes)
    ]
    answers = load([*streams, *visits])
    running, asked = answers[:STREAMS], answers[STREAMS:]
    begin, end = min(a.started for a in asked), max(a.ended for a in asked)
    if any(answer.ended < end for answer in running):
        refuse("the streams ended before the last prefix was read; give them more --tokens")
    if any(answer.cached_tokens < 1000 for answer in asked):
        refuse(f"found only {[answer.cached_tokens for answer in asked]} tokens")
    first = max(answer.first for answer in running)
    _, meanwhile = gaps_around([a.arrivals for a in running], first, begin, end)
    return meanwhile


@dataclass(frozen=True, slots=True)
class Beside:
    """The 99th percentile of the streams' gaps, in seconds; and the bytes on disk."""

    plain: list[float]
    writing: list[float]
    in_memory: list[float]
    reading: list[float]
    nbytes: int


def beside(model: Path, scratch: Path, prefixes: list[str], chosen: Any) -> Beside:
    found: dict[str, list[float]] = {"plain": [], "writing": [], "in memory": [], "reading": []}
    nbytes = 0
    with our_server(model) as without:
        for prefix in prefixes:
            ask(without, prefix, 0)
        for number in range(chosen.rounds):
            folder = scratch / f"beside-{number}"
            with with_disk(model, folder) as server:
                for prefix in prefixes:
                    ask(server, prefix, 0)
                for name, side in (("plain", without), ("writing", server)):
                    found[name].append(worst(gaps(side, prefixes, chosen.tokens, number)))
                time.sleep(SETTLED)
            with with_disk(model, folder) as server:
                ask(server, "a short one", 0)
                for name, side in (("reading", server), ("in memory", without)):
                    found[name].append(worst(gaps(side, prefixes, chosen.tokens, number)))
            nbytes = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    return Beside(found["plain"], found["writing"], found["in memory"], found["reading"], nbytes)


def worst(values: list[float]) -> float:
    return percentile(values, 0.99)


def ms(values: list[float]) -> str:
    return f"{1000 * Ratio(tuple(values)).median:,.1f}"


def main() -> None:
    arguments = parser(__doc__, rounds=3)
    arguments.add_argument("--prefix", type=int, default=8000, help="tokens of the prefix")
    arguments.add_argument("--prefixes", type=int, default=6, help="prefixes beside the streams")
    arguments.add_argument("--tokens", type=int, default=900, help="tokens of each stream")
    chosen = arguments.parse_args()
    with our_server(DEMO) as server:
        check_server(server)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        model = find_model(chosen.model, scratch)
        from mlx_lm.utils import load_tokenizer

        tokenizer = load_tokenizer(model)

        def prefix(number: int) -> str:
            return text_of_tokens(tokenizer, chosen.prefix, number + 10)

        restarts = []
        for number in range(chosen.rounds):
            with our_server(model, prefix_cache="false") as uncached:
                expected = ask(uncached, prefix(number), 1).text
            restarts.append(restart(model, scratch / "restarts", prefix(number), expected))
        print_report(
            f"Prefix of {chosen.prefix} tokens after a restart: {chosen.model}",
            ["", "first token, ms", "÷ cold"],
            [
                ["cold", ms([r.cold for r in restarts]), ""],
                [
                    "from memory",
                    ms([r.warm for r in restarts]),
                    str(ratio([r.warm for r in restarts], [r.cold for r in restarts])),
                ],
                [
                    f"from disk, {restarts[-1].cached:,} tokens",
                    ms([r.restarted for r in restarts]),
                    str(ratio([r.restarted for r in restarts], [r.cold for r in restarts])),
                ],
            ],
        )
        prefixes = [prefix(100 + i) for i in range(chosen.prefixes)]
        found = beside(model, scratch, prefixes, chosen)
        print_report(
            f"{STREAMS} streams while {found.nbytes / 1e6:,.0f} MB are written, and read: "
            f"{chosen.model}",
            ["", "p99 gap without, ms", "with, ms", "with ÷ without"],
            [
                [
                    "written",
                    ms(found.plain),
                    ms(found.writing),
                    str(ratio(found.writing, found.plain)),
                ],
                [
                    "read",
                    ms(found.in_memory),
                    ms(found.reading),
                    str(ratio(found.reading, found.in_memory)),
                ],
            ],
        )


if __name__ == "__main__":
    main()
