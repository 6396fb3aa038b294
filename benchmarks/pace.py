"""The pace of running streams while others arrive, in process.

Streams generate; then a long prompt arrives. How long do the streams stall, and what does the
newcomer pay for their pace? And a short request: how long until its first token, beside the
streams and alone? The gaps are those between the pieces of text that a stream's reader gets. Last,
with no streams: how long do short requests wait that come, one after the other, while the long
prompt is processed?
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from mlx_lm.generate import BatchGenerator

from checks import check_engine
from engines import MlxLm, OurEngine, Trace
from harness import find_model, gaps_around, interleave, parser, percentile, print_report, ratio
from workload import Row, prompt_of

SHORT = 64
IDLE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Arrival:
    """Seconds: gaps of the streams before and after the newcomer's arrival until its first token,
    and the newcomer's time to first token."""

    idle: list[float]
    stalled: list[float]
    first: float

    @property
    def idle_median(self) -> float:
        return statistics.median(self.idle)

    @property
    def worst(self) -> float:
        """The 99th percentile of the gaps while the newcomer's prompt is processed."""
        return percentile(self.stalled, 0.99)


@dataclass(frozen=True, slots=True)
class Meanwhile:
    """Seconds to the first token: of short prompts that came while a long one was processed, and of
    that."""

    short: list[float]
    long: float


def arrival(streams: Sequence[Trace], newcomer: Trace) -> Arrival:
    """Split the streams' gaps at the newcomer's submission. A gap that spans it is a stall."""
    begin, end = newcomer.started, newcomer.first
    running = max(stream.first for stream in streams)
    idle, stalled = gaps_around([stream.times for stream in streams], running, begin, end)
    return Arrival(idle, stalled, end - begin)


class Crowd:
    """Both engines with one model; `streams` rows run when the newcomer arrives."""

    def __init__(self, model: Path, streams: int, tokens: int) -> None:
        self.ours = OurEngine(model)
        self.theirs = MlxLm(model)
        self._streams = streams
        self._tokens = tokens

    def rows(self, newcomer: int, number: int) -> tuple[list[Row], Row]:
        base = 1000 * (number + 1)
        tokenizer = self.theirs.tokenizer
        streams = [
            Row(prompt_of(tokenizer, SHORT, base + index), self._tokens)
            for index in range(self._streams)
        ]
        return streams, Row(prompt_of(tokenizer, newcomer, base + self._streams), 4)

    def ours_arrival(self, length: int, number: int) -> Arrival:
        streams, newcomer = self.rows(length, number)
        return self.ours.run(self._ours_arrival(streams, newcomer))

    async def _ours_arrival(self, streams: Sequence[Row], newcomer: Row) -> Arrival:
        traces = [Trace() for _ in streams]
        async with asyncio.TaskGroup() as group:
            for row, trace in zip(streams, traces, strict=True):
                group.create_task(self.ours.answer(row, trace=trace))
            while any(len(t.times) < IDLE_TOKENS for t in traces):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            joined = await self.ours.answer(newcomer)
        return arrival(traces, joined)

    def their_arrival(self, length: int, number: int) -> Arrival:
        streams, newcomer = self.rows(length, number)
        generator = BatchGenerator(self.theirs.model)
        begin = time.perf_counter()
        ids = generator.insert(
            [list(row.prompt) for row in streams], max_tokens=[row.max_tokens for row in streams]
        )
        traces = {key: Trace(started=begin) for key in ids}
        joined: int | None = None
        while joined is None or not traces[joined].times:
            _, responses = generator.next()
            now = time.perf_counter()
            for response in responses:
                traces[response.uid].times.append(now)
            if joined is None and all(len(t.times) >= IDLE_TOKENS for t in traces.values()):
                (joined,) = generator.insert([list(newcomer.prompt)], max_tokens=[4])
                traces[joined] = Trace(started=time.perf_counter())
        generator.remove(list(traces))
        generator.close()
        return arrival([traces[key] for key in ids], traces[joined])

    def ours_meanwhile(self, length: int, number: int) -> Meanwhile:
        return self.ours.run(self._ours_meanwhile(length, number))

    async def _ours_meanwhile(self, length: int, number: int) -> Meanwhile:
        short, long = self.rows(length, number + 700)
        waits: list[float] = []
        processed = asyncio.create_task(self.ours.answer(long))
        for row in cycle(short):
            trace = await self.ours.answer(Row(row.prompt, 1))
            if processed.done():
                break
            waits.append(trace.first - trace.started)
        joined = await processed
        return Meanwhile(waits, joined.first - joined.started)

    def their_meanwhile(self, length: int, number: int) -> Meanwhile:
        short, long = self.rows(length, number + 700)
        prompts = cycle(list(row.prompt) for row in short)
        generator = BatchGenerator(self.theirs.model)
        begin = time.perf_counter()
        (whole,) = generator.insert([list(long.prompt)], max_tokens=[long.max_tokens])
        waits: list[float] = []
        coming, came = None, begin
        while True:
            if coming is None:
                (coming,) = generator.insert([next(prompts)], max_tokens=[1])
                came = time.perf_counter()
            _, responses = generator.next()
            now = time.perf_counter()
            first = {response.uid for response in responses}
            if whole in first:
                generator.close()
                return Meanwhile(waits or [now - came], now - begin)
            if coming in first:
                waits.append(now - came)
                coming = None

    def alone(self, length: int, number: int) -> float:
        """Our time to first token when nothing else runs."""
        _, newcomer = self.rows(length, number + 500)
        trace = self.ours.generate([newcomer])[0]
        return trace.first - trace.started


def stall_line(name: str, arrivals: Sequence[Arrival], alone: Sequence[float] | None) -> list[str]:
    return [
        name,
        f"{1000 * statistics.median(a.idle_median for a in arrivals):.2f}",
        f"{1000 * statistics.median(a.worst for a in arrivals):.2f}",
        str(ratio([a.worst for a in arrivals], [a.idle_median for a in arrivals])),
        f"{1000 * statistics.median(a.first for a in arrivals):,.0f}",
        "" if alone is None else str(ratio([a.first for a in arrivals], alone)),
    ]


def waiting_line(
    name: str, rounds: Sequence[Meanwhile], alone: Sequence[float] | None
) -> list[str]:
    return [
        name,
        f"{1000 * statistics.median(wait for each in rounds for wait in each.short):,.0f}",
        f"{1000 * max(wait for each in rounds for wait in each.short):,.0f}",
        f"{1000 * statistics.median(each.long for each in rounds):,.0f}",
        "" if alone is None else str(ratio([each.long for each in rounds], alone)),
    ]


def main() -> None:
    arguments = parser(__doc__, rounds=5)
    arguments.add_argument("--prompt", type=int, default=4000, help="tokens of the long prompt")
    arguments.add_argument("--streams", type=int, default=8, help="streams that are running")
    arguments.add_argument("--tokens", type=int, default=1500, help="generated a stream")
    chosen = arguments.parse_args()
    check_engine()
    with tempfile.TemporaryDirectory() as scratch:
        crowd = Crowd(find_model(chosen.model, Path(scratch)), chosen.streams, chosen.tokens)
        lines = []
        for length in (chosen.prompt, SHORT):
            runs = interleave(
                {
                    "ours": lambda n, length=length: crowd.ours_arrival(length, n),
                    "theirs": lambda n, length=length: crowd.their_arrival(length, n),
                },
                chosen.rounds,
            )
            alone = interleave(
                {"ours": lambda n, length=length: crowd.alone(length, n)}, chosen.rounds
            )
            lines += [
                stall_line(f"{length} tokens arrive, BatchGenerator", runs["theirs"], None),
                stall_line(f"{length} tokens arrive, ours", runs["ours"], alone["ours"]),
            ]
        print_report(
            f"{chosen.streams} running streams, a prompt arrives: {chosen.model}",
            [
                "",
                "idle gap, ms",
                "p99 gap while it is processed, ms",
                "p99 ÷ idle",
                "its first token, ms",
                "÷ alone",
            ],
            lines,
        )
        waits = interleave(
            {
                "BatchGenerator": lambda n: crowd.their_meanwhile(chosen.prompt, n),
                "ours": lambda n: crowd.ours_meanwhile(chosen.prompt, n),
            },
            chosen.rounds,
        )
        alone = interleave({"ours": lambda n: crowd.alone(chosen.prompt, n + 400)}, chosen.rounds)
        print_report(
            f"{SHORT} tokens, while {chosen.prompt} are processed and nobody streams: "
            f"{chosen.model}",
            ["first token, ms", "median", "largest", "of the long prompt", "÷ alone"],
            [waiting_line(name, rounds, alone.get(name)) for name, rounds in waits.items()],
        )
        crowd.ours.close()


if __name__ == "__main__":
    main()
