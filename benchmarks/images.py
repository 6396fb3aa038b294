"""Pictures over HTTP: who is held up by one, how fast the next question about it is answered, and
our server against another one.

`--model` is the folder of a model that sees. First: eight text streams run, and a picture arrives.
How long are the streams' gaps until its first token, against those before? Then: how long until the
first token of a question about a new picture, and of another question about the same one? Last,
with `--other URL` (repeatable; `mlx_vlm_server.py` starts mlx-vlm's): so many streams start
together, each about a picture of its own that no cache has seen.
"""

from __future__ import annotations

import argparse
import base64
import io
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from harness import gaps_around, interleave, parser, percentile, print_report, ratio, refuse
from load_client import Answer
from servers import Server, first_model, load, our_server, time_to_first, tokens_per_second
from workload import text_of

BESIDE = 8
STREAMS = (1, 4, 8)
SHORT = 40
QUESTIONS = ("What is in this picture?", "Which colours does it have?")


def drawing(side: int, seed: int) -> str:
    """A picture of soft random colours, as a data URL. Every seed gives another one."""
    from PIL import Image

    small = np.random.default_rng(seed).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def seen(url: str, question: str) -> list[dict[str, Any]]:
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": question},
    ]
    return [{"role": "user", "content": parts}]


def read(words: int, seed: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text_of(words, seed)}]


def asked(
    server: Server, messages: list[dict[str, Any]], tokens: int, after: float = 0.0
) -> dict[str, Any]:
    """A greedy streaming request that is sent `after` seconds. It runs to `max_tokens` where the
    server lets an answer ignore its end."""
    body = {
        "messages": messages,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    return {**server.request("/chat/completions", body), "after": after}


def gaps(streams: Sequence[Answer], begin: float, end: float) -> tuple[list[float], list[float]]:
    """The streams' gaps before `begin`, once all run, and those until `end`."""
    running = max(stream.first for stream in streams)
    return gaps_around([stream.arrivals for stream in streams], running, begin, end)


def arrival(server: Server, side: int, tokens: int, after: float, number: int) -> list[float]:
    """Seconds: median and 99th percentile of the streams' gaps before a picture arrives, 99th
    percentile and largest of those until its first token, and the time to that."""
    base = 1000 * (number + 2)
    requests = [asked(server, read(SHORT, base + i), tokens) for i in range(BESIDE)]
    requests.append(asked(server, seen(drawing(side, base), QUESTIONS[0]), 4, after))
    *streams, newcomer = load(requests)
    if newcomer.started > min(stream.ended for stream in streams):
        refuse(f"the streams ended before the picture came: more than {tokens} --tokens are needed")
    idle, meanwhile = gaps(streams, newcomer.started, newcomer.first)
    if not idle or not meanwhile:
        refuse("the picture came before all streams ran: a longer --after is needed")
    if 2 * statistics.median(idle) < statistics.mean(idle):
        refuse("pieces come several at a time even before the picture: the machine is too busy")
    first = newcomer.first - newcomer.started
    worst = [percentile(values, 0.99) for values in (idle, meanwhile)]
    return [statistics.median(idle), *worst, max(meanwhile), first]


def questions(server: Server, side: int, number: int) -> list[float]:
    """Seconds to the first token of a question about a new picture, and of another about it."""
    picture = drawing(side, 7_000 + number)
    found = [load([asked(server, seen(picture, question), 4)])[0] for question in QUESTIONS]
    return [answer.first - answer.started for answer in found]


def crowd(server: Server, number: int, *, streams: int, side: int, tokens: int) -> list[Answer]:
    base = 100_000 + 1000 * (number + 2) + 10 * streams
    pictures = [drawing(side, base + index) for index in range(streams)]
    return load([asked(server, seen(picture, QUESTIONS[0]), tokens) for picture in pictures])


def milliseconds(values: Sequence[float]) -> str:
    return f"{1000 * statistics.median(values):,.1f}"


def compare(servers: Sequence[Server], side: int, tokens: int, rounds: int) -> list[list[str]]:
    """The table's lines: one for each number of streams and each other server."""
    lines = []
    for streams in STREAMS:
        ask = partial(crowd, streams=streams, side=side, tokens=tokens)
        answers = interleave({server.name: partial(ask, server) for server in servers}, rounds)
        speed = {name: [tokens_per_second(f) for f in runs] for name, runs in answers.items()}
        first = {name: [time_to_first(f) for f in runs] for name, runs in answers.items()}
        ours = servers[0].name
        lines += [
            [
                f"{streams} streams, a picture each",
                peer.name,
                f"{statistics.median(speed[peer.name]):,.1f}",
                f"{statistics.median(speed[ours]):,.1f}",
                str(ratio(speed[ours], speed[peer.name])),
                milliseconds(first[peer.name]),
                milliseconds(first[ours]),
                str(ratio(first[ours], first[peer.name])),
            ]
            for peer in servers[1:]
        ]
    return lines


def report_arrival(server: Server, chosen: argparse.Namespace) -> None:
    ask = partial(arrival, server, chosen.side, chosen.tokens, chosen.after)
    rounds = interleave({"ours": ask}, chosen.rounds)["ours"]
    idle, usual, worst, largest, first = zip(*rounds, strict=True)
    print_report(
        f"{BESIDE} text streams, a picture of {chosen.side} x {chosen.side} arrives: "
        f"{chosen.model}",
        [
            *("", "idle gap, ms", "p99 ÷ idle gap, nobody comes", "until its first token"),
            *("largest, ms", "its first token, ms"),
        ],
        [
            [
                *("ours", milliseconds(idle), str(ratio(usual, idle)), str(ratio(worst, idle))),
                *(milliseconds(largest), milliseconds(first)),
            ]
        ],
    )


def report_questions(server: Server, chosen: argparse.Namespace) -> None:
    ask = partial(questions, server, chosen.side)
    new, again = zip(*interleave({"ours": ask}, chosen.rounds)["ours"], strict=True)
    print_report(
        f"Two questions about a picture of {chosen.side} x {chosen.side}: {chosen.model}",
        ["", "first token of the first, ms", "of the second, ms", "ratio"],
        [["ours", milliseconds(new), milliseconds(again), str(ratio(again, new))]],
    )


def main() -> None:
    arguments = parser(__doc__, rounds=5, model="mlx-manager/demo")
    arguments.add_argument("--side", type=int, default=1024, help="pixels of a picture's side")
    arguments.add_argument("--tokens", type=int, default=400, help="generated a text stream")
    arguments.add_argument("--answer", type=int, default=64, help="generated about a picture")
    arguments.add_argument("--after", type=float, default=2.0, help="seconds until it arrives")
    arguments.add_argument("--other", action="append", default=[], help="a server's .../v1")
    arguments.add_argument("--only-others", action="store_true", help="only the last of the three")
    chosen = arguments.parse_args()
    with ExitStack() as stack:
        server = stack.enter_context(our_server(Path(chosen.model)))
        if not chosen.only_others:
            report_arrival(server, chosen)
            report_questions(server, chosen)
        servers = [server, *(Server(u, u.rstrip("/"), first_model(u)) for u in chosen.other)]
        if len(servers) > 1:
            print_report(
                f"A picture of {chosen.side} x {chosen.side} each: {chosen.model}, "
                f"{chosen.answer} tokens",
                ["load", "peer", "its tok/s", "ours", "ratio", "its first token, ms", "ours", "÷"],
                compare(servers, chosen.side, chosen.answer, chosen.rounds),
            )


if __name__ == "__main__":
    main()
