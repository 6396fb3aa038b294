"""Cost of an all-reduce among ranks, in each way in which a step can have one.

    python benchmarks/gpu/all_reduce.py PLACE SECONDS [--hidden 4096] [--rows 1 32 128]

Run by ranks.py as one process a rank. PLACE is the rank's `devices.group.Membership` as JSON. A
line of JSON tells each stage as it begins, and rank 0's lines have the times in microseconds.
After SECONDS a rank that still runs writes where it is, and ends.

The ways: `alone`, evaluated one by one; `chained`, 64 in one graph, each divided by the number of
ranks; `compiled`, the same chain by mx.compile; `products`, a chain compiled with a product of
`hidden` by `hidden` before each, and `products only`, that without the all-reduces. `queued` of a
chain is the host's share: until all is queued.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "backend"))

import mlx.core as mx

from mlx_manager.mlx_server.devices.group import Membership, join, unrecorded
from mlx_manager.mlx_server.engine.thread import ready_device

CHAIN = 64
"""All-reduces of a chain, as many as a step of an 8B has."""
REPEATS = 20
Chain = Callable[[mx.array], mx.array]


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def chain(group: mx.distributed.Group | None, weight: mx.array | None, x: mx.array) -> mx.array:
    """Return `x` after 64 all-reduces; None of the group leaves them out."""
    for _ in range(CHAIN):
        if weight is not None:
            x = x @ weight
        if group is not None:
            x = mx.distributed.all_sum(x, group=group) * (1 / group.size())
    return x


def times(run: Chain, x: mx.array) -> tuple[float, float]:
    """Return the microseconds of a run, and of those until it was queued: medians."""
    queued, whole = [], []
    for number in range(REPEATS + 3):
        begun = time.perf_counter()
        found = run(x)
        mx.async_eval(found)
        handed = time.perf_counter()
        mx.eval(found)
        if number >= 3:
            queued.append(1e6 * (handed - begun))
            whole.append(1e6 * (time.perf_counter() - begun))
    return statistics.median(whole), statistics.median(queued)


def measure(group: mx.distributed.Group, rows: int, hidden: int) -> None:
    # Numbers that halves and sums leave as they are.
    x = mx.ones((rows, hidden), mx.bfloat16)
    weight = mx.eye(hidden, dtype=mx.bfloat16)
    mx.eval(x, weight)
    plain = partial(chain, group, None)
    ways: dict[str, tuple[Chain, int]] = {
        "alone": (partial(mx.distributed.all_sum, group=group), 1),
        "chained": (plain, CHAIN),
        "compiled": (mx.compile(plain), CHAIN),
        "products": (mx.compile(partial(chain, group, weight)), CHAIN),
        "products only": (mx.compile(partial(chain, None, weight)), CHAIN),
    }
    for name, (run, count) in ways.items():
        say(stage=f"{name}, {rows} rows", rank=group.rank())
        whole, queued = times(run, x)
        right = bool((run(x) == (group.size() if name == "alone" else 1)).all())
        if group.rank() == 0:
            each, host = round(whole / count, 1), round(queued / count, 1)
            say(way=name, rows=rows, each=each, queued=host, right=right)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("place", type=json.loads)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 32, 128])
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.seconds, exit=True)
    member = Membership(**options.place)
    ready_device()
    os.environ.update(unrecorded(member.backend))
    say(stage="device", rank=member.rank, device=str(mx.default_device()), mlx=mx.__version__)
    mx.eval(mx.ones(1) + 1)
    say(stage="joining", rank=member.rank)
    group = join(member)
    say(stage="joined", rank=group.rank(), size=group.size())
    for rows in options.rows:
        measure(group, rows, options.hidden)
    say(stage="done", rank=group.rank())
    # To take a group apart waits for all ranks.
    os._exit(0)


if __name__ == "__main__":
    main()
