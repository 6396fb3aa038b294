"""Over HTTP: this tree's server against another checkout's, with the same models, by turns.

Ready: from the start of the program to the first 200 of `/readyz`. Memory: resident bytes of all
of a server's processes once it is ready, shared pages counted once. Streams start together, each a
chat of its own, greedy, of the same number of tokens. Two models: half of the streams on each. Long
prompt: gaps between the pieces of streams under way while a prompt of that many tokens arrives.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from harness import ROOT, find_model, interleave, parser, percentile, print_report, ratio
from load_client import Answer
from servers import Server, end_group, free_port, is_healthy, load, time_to_first, tokens_per_second

LONG = 4000
BESIDE = 8
STREAMED = 400
"""Tokens of the streams under way, which outlast the long prompt."""
WORDS = "What the river brings is what the hills have lost, one grain of sand at a time."


@dataclass(frozen=True, slots=True)
class Tree:
    """A running server of a checkout: seconds until it was ready, and its memory then."""

    server: Server
    ready: float
    memory: int


@contextmanager
def serving(root: Path, models: Path, memory_limit: float | None) -> Iterator[Tree]:
    """The server of the checkout in `root`, with this checkout's Python and libraries.

    memory_limit: GB; None: by the device.
    """
    port = free_port()
    paths = [str(root / "backend"), *filter(None, [os.environ.get("PYTHONPATH")])]
    limited = {} if memory_limit is None else {"MLX_SERVER_MEMORY_LIMIT_GB": str(memory_limit)}
    environment = limited | {
        "PYTHONPATH": os.pathsep.join(paths),
        "MLX_SERVER_MODEL": str(models / "one"),
        "MLX_SERVER_MODELS_DIR": str(models),
        "MLX_SERVER_HF_CACHE": "false",
        "MLX_SERVER_PORT": str(port),
        "MLX_SERVER_LOG_LEVEL": "warning",
    }
    begun = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "mlx_manager.mlx_server.main"],
        stdout=subprocess.DEVNULL,
        env=os.environ | environment,
        start_new_session=True,
    )
    try:
        if not is_healthy(f"http://127.0.0.1:{port}/readyz", process):
            sys.exit(f"the server of {root} did not start")
        ready = time.perf_counter() - begun
        yield Tree(Server(root.name, f"http://127.0.0.1:{port}/v1"), ready, memory(process.pid))
    finally:
        process.terminate()
        try:
            process.wait(20)
        finally:
            end_group(process)


def memory(pid: int) -> int:
    """Return the bytes of a process and its children, each shared page by its share."""
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    if not listed.exists():
        return 0
    own = Path(f"/proc/{pid}/smaps_rollup").read_text()
    shares = [int(line.split()[1]) * 1024 for line in own.splitlines() if line.startswith("Pss:")]
    # Threads start children, too.
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = {int(child) for task in tasks for child in (task / "children").read_text().split()}
    return sum(shares) + sum(map(memory, children))


def chats(
    server: Server, models: Sequence[str], streams: int, tokens: int, tag: str
) -> list[Answer]:
    bodies = [
        {
            "model": models[number % len(models)],
            "messages": [{"role": "user", "content": f"{tag} {number}: {WORDS}"}],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for number in range(streams)
    ]
    return load([server.request("/chat/completions", body) for body in bodies])


def beside_long(server: Server, model: str, tokens: int, tag: str) -> float:
    """Return the 99th percentile of the gaps, in seconds, while the long prompt is processed."""
    short = {
        "model": model,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    requests = [
        server.request(
            "/chat/completions",
            short | {"messages": [{"role": "user", "content": f"{tag} {number}: {WORDS}"}]},
        )
        for number in range(BESIDE)
    ]
    text = f"{tag} " + WORDS * (LONG // 18)
    long = short | {"max_tokens": 1, "messages": [{"role": "user", "content": text}]}
    requests.append(server.request("/chat/completions", long) | {"after": 0.3})
    answers = load(requests)
    arrived = answers[-1]
    gaps = [
        later - earlier
        for answer in answers[:-1]
        for earlier, later in zip(answer.arrivals, answer.arrivals[1:], strict=False)
        if arrived.started <= later and earlier <= arrived.ended
    ]
    return percentile(gaps, 0.99)


def main() -> None:
    options = parser(__doc__, rounds=5)
    options.add_argument("--other", type=Path, required=True, help="root of another checkout")
    options.add_argument("--tokens", type=int, default=128)
    options.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    options.add_argument("--starts", type=int, default=2, help="further starts that are timed")
    options.add_argument("--models", type=int, choices=[1, 2], default=2)
    options.add_argument("--memory", type=float, help="GB of each server: two share a GPU")
    chosen = options.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        source = find_model(chosen.model, folder)
        for name in ("one", "two"):
            shutil.copytree(source, folder / "served" / name, copy_function=os.link)
        report(chosen, folder / "served", stack)


def report(chosen: argparse.Namespace, models: Path, stack: ExitStack) -> None:
    roots = {"this tree": ROOT, "the other": chosen.other.resolve()}
    started: dict[str, list[Tree]] = {name: [] for name in roots}
    for _ in range(chosen.starts):
        for name, root in roots.items():
            with serving(root, models, chosen.memory) as tree:
                started[name].append(tree)
    trees = {
        name: stack.enter_context(serving(root, models, chosen.memory))
        for name, root in roots.items()
    }
    one = str(models / "one")
    both = [n for n in chosen.streams if n > 1 and chosen.models == 2]
    for name, tree in trees.items():
        started[name].append(tree)
    rows = [
        compared("ready, s", [[tree.ready for tree in each] for each in started.values()]),
        compared("memory, MB", [[tree.memory / 2**20 for tree in t] for t in started.values()]),
    ]
    for label, named, streams in [
        *((f"{n} streams", [one], n) for n in chosen.streams),
        *((f"{n} streams, two models", [one, "two"], n) for n in both),
    ]:

        def ask(tree: Tree, number: int, named=named, streams=streams, label=label) -> list[Answer]:
            return chats(tree.server, named, streams, chosen.tokens, f"{label} {number}")

        sides = {name: partial(ask, tree) for name, tree in trees.items()}
        found = interleave(sides, chosen.rounds).values()
        rows.append(
            compared(f"{label}: tokens/s", [list(map(tokens_per_second, a)) for a in found])
        )
        rows.append(compared(f"{label}: first token, ms", [list(map(first_ms, a)) for a in found]))

    def gap(tree: Tree, number: int) -> float:
        return 1000 * beside_long(tree.server, one, STREAMED, str(number))

    gaps = interleave({name: partial(gap, tree) for name, tree in trees.items()}, chosen.rounds)
    rows.append(compared(f"p99 gap beside {LONG} tokens, ms", list(gaps.values())))
    print_report("Two trees", ["", *roots, "ratio"], rows)


def compared(title: str, values: Sequence[Sequence[float]]) -> list[str]:
    """Return a row of the report: both medians, and their ratio."""
    ours, theirs = values
    figures = [f"{statistics.median(side):,.2f}" for side in values]
    return [title, *figures, str(ratio(ours, theirs))]


def first_ms(answers: Sequence[Answer]) -> float:
    return 1000 * time_to_first(answers)


if __name__ == "__main__":
    main()
