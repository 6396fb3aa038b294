"""A second request that shares a long prefix with an earlier one: time to first token.

Over HTTP, one request at a time. A round takes a prefix that no cache has seen, asks one question
about it (cold), then another (warm).
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checks import check_server
from harness import DEMO, find_model, interleave, parser, print_report, ratio, refuse
from load_client import Answer
from servers import Server, load, mlx_lm_server, our_server
from workload import text_of_tokens

# Longer than a page, as what people ask is.
QUESTIONS = (
    "Which page comes first? " + "Say it in one short sentence and quote the line. " * 4,
    "How many words are there? " + "Count them twice and tell if that was the same. " * 4,
)


@dataclass(frozen=True, slots=True)
class Visit:
    """A cold and a warm request; times to first text in seconds."""

    cold: float
    warm: float
    cached: int


def ask(server: Server, prefix: str, question: str) -> Answer:
    body: dict[str, Any] = {
        "messages": [
            {"role": "system", "content": prefix},
            {"role": "user", "content": question},
        ],
        "max_tokens": 16,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return load([server.request("/chat/completions", body)])[0]


def visit(server: Server, prefix: str) -> Visit:
    cold = ask(server, prefix, QUESTIONS[0])
    warm = ask(server, prefix, QUESTIONS[1])
    return Visit(cold.first - cold.started, warm.first - warm.started, warm.cached_tokens)


def check_reuse(server: Server, uncached: Server, prefix: str) -> None:
    """A reused prefix gives the answer that a server without prefix cache gives."""
    ask(server, prefix, QUESTIONS[0])
    found, wanted = (ask(s, prefix, QUESTIONS[1]).text for s in (server, uncached))
    if found != wanted:
        refuse(f"with a reused prefix the answer is {found!r}, without it {wanted!r}")


def main() -> None:
    arguments = parser(__doc__, rounds=5)
    arguments.add_argument("--prefix", type=int, default=4000, help="tokens of the shared prefix")
    chosen = arguments.parse_args()
    with our_server(DEMO) as server:
        check_server(server)
    with tempfile.TemporaryDirectory() as scratch:
        model = find_model(chosen.model, Path(scratch))
        from mlx_lm.utils import load_tokenizer

        tokenizer = load_tokenizer(model)

        def prefix(number: int) -> str:
            return text_of_tokens(tokenizer, chosen.prefix, number + 10)

        with our_server(model) as ours, mlx_lm_server(model, 1) as theirs:
            with our_server(model, prefix_cache="false") as uncached:
                check_reuse(ours, uncached, prefix(-2))
            runs = interleave(
                {
                    "mlx-manager": lambda n: visit(ours, prefix(n)),
                    "mlx_lm.server": lambda n: visit(theirs, prefix(n)),
                },
                chosen.rounds,
            )
        print_report(
            f"Prefix of {chosen.prefix} tokens, time to first token: {chosen.model}",
            ["server", "cold, ms", "warm, ms", "cached tokens", "warm ÷ cold"],
            [
                [
                    name,
                    f"{1000 * statistics.median(v.cold for v in visits):,.1f}",
                    f"{1000 * statistics.median(v.warm for v in visits):,.1f}",
                    f"{visits[-1].cached:,}",
                    str(ratio([v.warm for v in visits], [v.cold for v in visits])),
                ]
                for name, visits in runs.items()
            ],
        )


if __name__ == "__main__":
    main()
