"""Time to first token of one API key, alone and while another key floods the server, over HTTP.

The flood is `--streams` endless answers, more than the server decodes at once if you like. While it
runs, single requests come one after another: with a key of their own, and, to show what the keys
are worth, with the flood's. (If the flood has more streams than rows there are, that would wait for
its end, and is left out.)
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import load_client
from harness import ROOT, find_model, interleave, parser, percentile, print_report, ratio
from mlx_manager.mlx_server.services.keys import add_key
from servers import Server, our_server
from workload import chat

ENDLESS = 100_000
FLOOD_WORDS = 48
ROWS = 128
"""What the server decodes at once, by default."""


class Crowd:
    """A server, whose two keys are `flood` and `single`."""

    def __init__(
        self, server: Server, keys: Mapping[str, str], streams: int, words: int, probes: int
    ) -> None:
        self.server = server
        self.keys = keys
        self.streams = streams
        self.words = words
        self.probes = probes
        self._seed = 0

    def alone(self, _: int) -> list[float]:
        return self.probe("single")

    def flooded(self, key: str) -> list[float]:
        with self.flood():
            return self.probe(key)

    def probe(self, key: str) -> list[float]:
        """Seconds to the first token of requests that come one after another."""
        return [asyncio.run(self._first_token(key)) for _ in range(self.probes)]

    async def _first_token(self, key: str) -> float:
        request = self.request(self.words, 4)
        answer = await load_client.send(**request, key=self.keys[key])
        if answer.error or answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {answer.error}")
        return answer.first - answer.started

    def request(self, words: int, max_tokens: int) -> dict[str, Any]:
        self._seed += 1
        body = {
            "messages": chat(words, self._seed),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        return self.server.request("/chat/completions", body)

    @contextmanager
    def flood(self) -> Iterator[None]:
        """All streams of the flood run, or as many as do at once, until the end of the context."""
        requests = [
            self.request(FLOOD_WORDS, ENDLESS) | {"key": self.keys["flood"]}
            for _ in range(self.streams)
        ]
        client = subprocess.Popen(
            [sys.executable, str(ROOT / "benchmarks" / "load_client.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            assert client.stdin is not None
            client.stdin.write(json.dumps(requests).encode())
            client.stdin.close()
            self.wait_for(min(self.streams, ROWS), self.streams)
            yield
        finally:
            client.kill()
            client.wait()
            self.wait_for(0, 0)

    def wait_for(self, running: int, present: int) -> None:
        """Wait until so many rows run, and so many are there with those that wait."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            engine = self.engine()
            here = engine["running"] + engine["prefilling"] + engine["waiting"]
            if engine["running"] >= running and here >= present and (present or not here):
                return
            time.sleep(0.05)
        raise RuntimeError(f"the flood never came: {engine}")

    def engine(self) -> dict[str, Any]:
        url = self.server.base_url.removesuffix("/v1") + "/debug/memory"
        asked = urllib.request.Request(url, headers={"x-api-key": self.keys["single"]})
        with urllib.request.urlopen(asked, timeout=60) as response:
            [engine] = json.load(response)["engines"].values()
        found: dict[str, Any] = engine
        return found


def line(name: str, rounds: Sequence[list[float]], alone: Sequence[list[float]]) -> list[str]:
    every = [seconds for round_ in rounds for seconds in round_]
    medians = [statistics.median(round_) for round_ in rounds]
    return [
        name,
        f"{1000 * statistics.median(every):,.1f}",
        f"{1000 * percentile(every, 0.95):,.1f}",
        "" if rounds is alone else str(ratio(medians, [statistics.median(r) for r in alone])),
    ]


def main() -> None:
    arguments = parser(__doc__, rounds=5)
    arguments.add_argument("--streams", type=int, nargs="+", default=[64, 256], help="of the flood")
    arguments.add_argument("--words", type=int, nargs="+", default=[64, 512], help="of a prompt")
    arguments.add_argument("--probes", type=int, default=5, help="single requests a round")
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "keys.toml"
        keys = {name: add_key(file, name, {}) for name in ("flood", "single")}
        model = find_model(chosen.model, Path(scratch))
        for streams in chosen.streams:
            for words in chosen.words:
                with our_server(model, api_keys_file=str(file)) as server:
                    crowd = Crowd(server, keys, streams, words, chosen.probes)
                    sides = {
                        "alone": crowd.alone,
                        "a key of its own": lambda _, c=crowd: c.flooded("single"),
                    }
                    if streams < ROWS:
                        sides["the flood's key"] = lambda _, c=crowd: c.flooded("flood")
                    runs = interleave(sides, chosen.rounds)
                print_report(
                    f"{streams} streams of one key, then a prompt of {words} words: {chosen.model}",
                    ["first token, ms", "median", "p95", "÷ alone"],
                    [line(name, found, runs["alone"]) for name, found in runs.items()],
                )


if __name__ == "__main__":
    main()
