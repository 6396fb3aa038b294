"""Over HTTP: our server against `mlx_lm.server`, and any other that is already running.

Streams start together, each a chat of its own whose prompt no cache has seen, greedy, of the same
number of tokens. The peer gets the same BLAS, a listen backlog of 1 024 and as many decode slots
as there are streams; `--as-installed` gives it the backlog alone. `--url` adds a server that speaks
OpenAI's chat completions and serves the model of `--model` (repeatable).
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checks import check_server
from engines import OurEngine, whole_rate
from harness import DEMO, find_model, interleave, parser, print_report, ratio, refuse, wanted
from load_client import Answer
from servers import (
    Server,
    first_model,
    load,
    mlx_lm_server,
    our_server,
    time_to_first,
    tokens_per_second,
)
from workload import Row, text_of_tokens

SHORT, LONG = 48, 1000
MOST_STREAMS = 64


@dataclass(frozen=True, slots=True)
class Scenario:
    """Streams whose messages have these numbers of tokens."""

    name: str
    lengths: tuple[int, ...]


def scenarios(short: int) -> list[Scenario]:
    return [
        Scenario("1 stream", (short,)),
        *(Scenario(f"{n} streams", (short,) * n) for n in (4, 16, MOST_STREAMS)),
        Scenario(f"1 stream of {LONG} tokens, 15 of {short}", (LONG, *(short,) * 15)),
    ]


class Comparison:
    """Several servers of one model, and the engine in this process."""

    def __init__(
        self, model: Path, servers: Sequence[Server], tokens: int, rounds: int, *, cold: bool
    ) -> None:
        from mlx_lm.utils import load_tokenizer

        self._tokenizer = load_tokenizer(model)
        self._model = model
        self._servers = servers
        self._tokens = tokens
        self._rounds = rounds
        self._cold = cold

    def chats(self, scenario: Scenario, number: int) -> list[list[dict[str, Any]]]:
        return [
            [
                {
                    "role": "user",
                    "content": text_of_tokens(self._tokenizer, n, 1000 * (number + 1) + i),
                }
            ]
            for i, n in enumerate(scenario.lengths)
        ]

    def answer(self, server: Server, chats: Sequence[list[dict[str, Any]]]) -> list[Answer]:
        found = load(
            [
                server.request(
                    "/chat/completions",
                    {
                        "messages": messages,
                        "max_tokens": self._tokens,
                        "temperature": 0,
                        "stream": True,
                        "stream_options": {"include_usage": True},
                    },
                )
                for messages in chats
            ]
        )
        for answer in found:
            if answer.tokens != self._tokens:
                refuse(
                    f"{server.name} ended an answer after {answer.tokens} of {self._tokens} tokens "
                    f"({answer.finish_reason}): {answer.text[-60:]!r}"
                )
        return found

    def run(self, scenario: Scenario) -> list[list[str]]:
        """The table's lines for one scenario: a line a peer."""
        answers = interleave(
            {
                server.name: lambda n, server=server: self.answer(server, self.chats(scenario, n))
                for server in self._servers
            },
            self._rounds,
            cold=self._cold,
        )
        speed = {name: [tokens_per_second(f) for f in runs] for name, runs in answers.items()}
        first = {name: [time_to_first(f) for f in runs] for name, runs in answers.items()}
        ours = self._servers[0].name
        return [
            [
                scenario.name,
                peer.name,
                f"{statistics.median(speed[peer.name]):,.0f}",
                f"{statistics.median(speed[ours]):,.0f}",
                str(ratio(speed[ours], speed[peer.name])),
                f"{1000 * statistics.median(first[peer.name]):,.0f}",
                f"{1000 * statistics.median(first[ours]):,.0f}",
            ]
            for peer in self._servers[1:]
        ]

    def against_the_engine(self) -> list[list[str]]:
        """Cost of HTTP: the same rows through the server and in this process."""
        scenario = Scenario("", (SHORT,) * MOST_STREAMS)
        engine = OurEngine(self._model)

        def in_process(number: int) -> float:
            rows = [
                Row(self.render(messages), self._tokens)
                for messages in self.chats(scenario, number)
            ]
            return whole_rate(engine.generate(rows))

        server = self._servers[0]
        runs = interleave(
            {
                "http": lambda n: tokens_per_second(self.answer(server, self.chats(scenario, n))),
                "process": in_process,
            },
            self._rounds,
        )
        engine.close()
        return [
            [
                f"{MOST_STREAMS} streams",
                f"{statistics.median(runs['process']):,.0f}",
                f"{statistics.median(runs['http']):,.0f}",
                str(ratio(runs["http"], runs["process"])),
            ]
        ]

    def render(self, messages: list[dict[str, Any]]) -> tuple[int, ...]:
        return tuple(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True))


def main() -> None:
    arguments = parser(__doc__, rounds=5)
    arguments.add_argument("--tokens", type=int, default=128, help="generated a stream")
    arguments.add_argument("--message", type=int, default=SHORT, help="tokens of a short message")
    arguments.add_argument("--cold", action="store_true", help="no round that warms up")
    arguments.add_argument("--as-installed", action="store_true", help="leave the peer as it is")
    arguments.add_argument("--url", action="append", default=[], help="a server's .../v1")
    arguments.add_argument("--only", action="append", default=[], help="a table's line by name")
    chosen = arguments.parse_args()
    with our_server(DEMO) as server:
        check_server(server)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        model = find_model(chosen.model, Path(scratch))
        servers = [
            stack.enter_context(our_server(model)),
            stack.enter_context(mlx_lm_server(model, MOST_STREAMS, chosen.as_installed)),
            *(Server(url, url.rstrip("/"), first_model(url)) for url in chosen.url),
        ]
        comparison = Comparison(model, servers, chosen.tokens, chosen.rounds, cold=chosen.cold)
        lines: list[list[str]] = []
        try:
            for scenario in scenarios(chosen.message):
                if wanted(scenario.name, chosen.only):
                    lines += comparison.run(scenario)
        finally:
            # What was measured before something went wrong is as good as it would be otherwise.
            print_report(
                f"Over HTTP: {chosen.model}, {chosen.tokens} tokens a stream",
                ["load", "peer", "its tok/s", "ours", "ratio", "its first token, ms", "ours"],
                lines,
            )
        if wanted("in process", chosen.only):
            print_report(
                f"HTTP against the engine in process: {chosen.model}",
                ["load", "in process, tok/s", "over HTTP", "ratio"],
                comparison.against_the_engine(),
            )


if __name__ == "__main__":
    main()
