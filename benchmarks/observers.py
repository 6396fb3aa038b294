"""What watching costs: streams of the embedded model, in process, unwatched and watched.

Watched means what a server always does with the timeline of each call (metrics, audit log and
access line), and the same with spans for OpenTelemetry, which a processor throws away. The timeline
and the engine's own counting can't be left out. The last lines are what each takes by itself for
one step of all streams, against that step; a busy machine does not blur them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from opentelemetry.sdk.trace import TracerProvider

from harness import interleave, parser, print_report, ratio
from mlx_manager.mlx_server.config import AuditLimits, MLXServerSettings
from mlx_manager.mlx_server.core import (
    GenerationRequest,
    Sampling,
    Started,
    StopRules,
    Text,
    TextDelta,
)
from mlx_manager.mlx_server.engine.statistics import Statistics
from mlx_manager.mlx_server.engine.stream import UNREAD
from mlx_manager.mlx_server.main import open_pool
from mlx_manager.mlx_server.observability.metrics import Metrics
from mlx_manager.mlx_server.observability.observer import Observer, Recorder
from mlx_manager.mlx_server.observability.tracing import SpanTracer
from mlx_manager.mlx_server.services.audit import AuditLog
from mlx_manager.mlx_server.services.inference import Inference, ModelPool
from mlx_manager.mlx_server.timeline import Timeline

MODEL = "mlx-manager/demo"
STEPS = 20_000


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens a second by the clock, and the CPU's seconds for them."""

    rate: float
    cpu: float


class Crowd:
    def __init__(self, loop: asyncio.Runner, pool: ModelPool, streams: int, tokens: int) -> None:
        self._loop = loop
        self._pool = pool
        self._streams = streams
        self._tokens = tokens

    def run(self, observers: Sequence[Observer], number: int) -> Run:
        clock, cpu = time.perf_counter(), time.process_time()
        self._loop.run(self._all(observers, number))
        clock, cpu = time.perf_counter() - clock, time.process_time() - cpu
        return Run(self._streams * self._tokens / clock, cpu)

    async def _all(self, observers: Sequence[Observer], number: int) -> None:
        calls = (self._one(observers, f"{number} {stream}") for stream in range(self._streams))
        await asyncio.gather(*calls)

    async def _one(self, observers: Sequence[Observer], prompt: str) -> None:
        request = GenerationRequest(
            MODEL,
            Text(prompt),
            Sampling(temperature=0),
            StopRules(ignore_eos=True),
            self._tokens,
        )
        await Inference(self._pool, observers).generate([request]).run(UNREAD)


def statistics_seconds(rows: int) -> float:
    """Return the seconds that an engine's statistics take in one step of so many rows."""
    statistics, before = Statistics(), [1.0] * rows
    start = time.process_time()
    for _ in range(STEPS):
        for _ in range(4):
            time.perf_counter()
        statistics.count_tokens(1.01, before)
        statistics.host.add(0.001)
    return (time.process_time() - start) / STEPS


def timeline_seconds(rows: int) -> float:
    """Return the seconds that a timeline takes in one step of so many calls of one row."""
    timeline, text = Timeline.of([GenerationRequest(MODEL, Text("x"))]), [TextDelta("text")]
    timeline.follow(0, [Started(1)], 1)
    start = time.process_time()
    for tokens in range(STEPS):
        timeline.follow(0, text, tokens)
    return rows * (time.process_time() - start) / STEPS


def main() -> None:
    arguments = parser(__doc__, rounds=7)
    arguments.add_argument("--streams", type=int, default=64)
    arguments.add_argument("--tokens", type=int, default=200)
    options = arguments.parse_args()
    with asyncio.Runner() as loop:
        opened = open_pool(MLXServerSettings())
        pool = loop.run(opened.__aenter__())
        metrics = Metrics(pool.figures, pool.offers)
        with closing(AuditLog(AuditLimits(), metrics.count_lost_records)) as audit:
            recorder = Recorder((metrics.count_call, audit.put))
            tracer = SpanTracer(TracerProvider().get_tracer("benchmark"))
            crowd = Crowd(loop, pool, options.streams, options.tokens)
            sides = {
                "unwatched": lambda number: crowd.run((), number),
                "watched": lambda number: crowd.run((recorder,), number),
                "with spans": lambda number: crowd.run((recorder, tracer), number),
            }
            runs = interleave(sides, options.rounds)
            alone = {
                "the engine's statistics": statistics_seconds(options.streams),
                "the timeline": timeline_seconds(options.streams),
            }
        loop.run(opened.__aexit__(None, None, None))
    plain = runs["unwatched"]
    rows = [
        [
            name,
            f"{sum(run.rate for run in found) / len(found):,.0f}",
            str(ratio([run.rate for run in found], [run.rate for run in plain])),
            str(ratio([run.cpu for run in found], [run.cpu for run in plain])),
        ]
        for name, found in runs.items()
    ]
    step = options.streams / (sum(run.rate for run in plain) / len(plain))
    for name, taken in alone.items():
        rows.append([name, f"{taken * 1e6:.1f} µs a step", f"{taken / step:.4f}", ""])
    columns = ("side", "tokens a second", "÷ unwatched", "CPU time ÷ unwatched")
    print_report(f"Watching {options.streams} streams of {options.tokens} tokens", columns, rows)


if __name__ == "__main__":
    main()
