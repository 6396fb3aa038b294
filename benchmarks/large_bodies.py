"""What running streams notice of requests whose bodies are large, over HTTP.

Bodies come one after another while streams run: of `--megabytes`, each with as many values as fit
of one that has a limit (the model's context, or what the server counts), and of as many pieces as a
body may have. None is answered with tokens. The gaps are those between the pieces that a stream's
reader gets while the body is on its way or looked at.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import load_client
from harness import find_model, interleave, parser, print_report
from servers import Server, load, our_server
from workload import chat

TOKENS = 400
SETTLED = 0.3
"""Seconds until the streams run."""
MOST = 8_000
"""Pieces that a body may have, in round numbers."""
Body = tuple[str, dict[str, Any]]


def user(content: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4}


KINDS: Mapping[str, Callable[[int], Body]] = {
    "one text": lambda n: ("/chat/completions", user("word " * (n // 5))),
    "1 000 messages": lambda n: (
        "/chat/completions",
        user("") | {"messages": [{"role": "user", "content": "word " * (n // 5_000)}] * 1_000},
    ),
    "content parts": lambda n: (
        "/chat/completions",
        user([{"type": "text", "text": "w"}] * (n // 32)),
    ),
    "token ids": lambda n: ("/completions", {"prompt": [7] * (n // 3), "max_tokens": 4}),
    "tools": lambda n: (
        "/chat/completions",
        user("") | {"tools": [{"type": "function", "function": {"name": "f"}}] * (n // 53)},
    ),
    "input items": lambda n: (
        "/responses",
        {"input": [{"role": "user", "content": "w"}] * (n // 34)},
    ),
    "empty lists": lambda n: ("/chat/completions", {"messages": [[]] * (n // 4)}),
    "8 000 messages": lambda _: (
        "/chat/completions",
        user("") | {"messages": [{"role": "user", "content": "w"}] * MOST},
    ),
    "8 000 content parts": lambda _: (
        "/chat/completions",
        user([{"type": "text", "text": "w"}] * MOST),
    ),
    "8 000 tools": lambda _: (
        "/chat/completions",
        user("") | {"tools": [{"type": "function", "function": {"name": "f"}}] * MOST},
    ),
    "8 000 input items": lambda _: (
        "/responses",
        {"input": [{"role": "user", "content": "w"}] * MOST},
    ),
}


class Crowd:
    """A server on which `streams` run while something comes."""

    def __init__(self, server: Server, streams: int, nbytes: int) -> None:
        self._server = server
        self._streams = streams
        self._nbytes = nbytes

    def beside(self, kind: str) -> tuple[float, float]:
        """Seconds: the streams' longest gap while a body of that kind comes, and their median."""
        path, body = KINDS[kind](self._nbytes)
        with ThreadPoolExecutor(1) as aside:
            running = aside.submit(load, self._streaming())
            time.sleep(SETTLED)
            answer = asyncio.run(load_client.send(**self._server.request(path, body)))
            if answer.status not in (400, 413):
                raise RuntimeError(f"{kind}: status {answer.status}: {answer.error}")
            gaps = [pair for stream in running.result() for pair in pairwise(stream.arrivals)]
        meanwhile = [b - a for a, b in gaps if b > answer.started and a < answer.ended]
        if not meanwhile:
            raise RuntimeError("no figures: the streams ended before the body was there")
        return max(meanwhile), statistics.median(b - a for a, b in gaps)

    def _streaming(self) -> list[dict[str, Any]]:
        asked = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
        return [
            self._server.request("/chat/completions", {"messages": chat(24, seed), **asked})
            for seed in range(self._streams)
        ]


def main() -> None:
    arguments = parser(__doc__, rounds=3)
    arguments.add_argument("--streams", type=int, default=2, help="that run meanwhile")
    arguments.add_argument("--megabytes", type=float, default=15, help="of a body")
    chosen = arguments.parse_args()
    with (
        tempfile.TemporaryDirectory() as scratch,
        our_server(find_model(chosen.model, Path(scratch))) as server,
    ):
        crowd = Crowd(server, chosen.streams, int(chosen.megabytes * 1e6))
        found = interleave(
            {kind: lambda _, k=kind: crowd.beside(k) for kind in KINDS}, chosen.rounds
        )
    print_report(
        f"{chosen.streams} streams of {chosen.model} while a body of {chosen.megabytes:g} MB comes",
        ["of", "longest gap, ms: median of the rounds", "largest", "their median gap"],
        [
            [
                kind,
                f"{1e3 * statistics.median(worst for worst, _ in rounds):.0f}",
                f"{1e3 * max(worst for worst, _ in rounds):.0f}",
                f"{1e3 * statistics.median(step for _, step in rounds):.1f}",
            ]
            for kind, rounds in found.items()
        ],
    )


if __name__ == "__main__":
    main()
