"""Tokens a second that the HTTP rim alone can carry: no model, no mlx.

A stand-in engine hands every stream one token a step, as the real one does, and takes the next
step as soon as all streams have taken the last, at the earliest `--step` seconds later.
`--in-process` runs the application against a `send` that counts; otherwise a server process is
measured over loopback by a client process that reads bytes and counts events, which is about what
the cheapest real client costs. Of the server it says how long it is from the first request at the
engine to the last, all of them sent at once, and what processor time a token takes, its system
calls included, from the first token to the last.

    python benchmarks/http_rim.py [--streams 64] [--tokens 500] [--step 0.003] [--path messages]
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import multiprocessing
import pstats
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import uvicorn
import uvloop

from mlx_manager.mlx_server.api.http.listener import configuration
from mlx_manager.mlx_server.config import DEMO_MODEL, MLXServerSettings
from mlx_manager.mlx_server.core import (
    Finished,
    GenerationRequest,
    Overlay,
    Push,
    Started,
    TextDelta,
    Usage,
)
from mlx_manager.mlx_server.engine.stream import LoopRow, Outbox
from mlx_manager.mlx_server.main import create_app
from servers import free_port

PIECES = (" the", " answer", ", and", " é", "\n")
MESSAGE = {"messages": [{"role": "user", "content": "Say something."}]}
BODIES = {
    "chat/completions": MESSAGE,
    "completions": {"prompt": "Say something."},
    "messages": {**MESSAGE, "model": DEMO_MODEL, "max_tokens": 10_000},
    "responses": {"input": "Say something.", "store": False},
}
BESIDE = {"chat/completions": 3, "completions": 2, "messages": 5, "responses": 8}
"""Events of an answer that are no token's."""
READING = 4
"""Turns of the event loop in which a step is read that has not been written at once."""


@dataclass
class StandInEngine:
    """Gives each of `streams` streams `tokens` tokens, all streams in step, `pause` seconds apart
    at least."""

    streams: int
    tokens: int
    pause: float = 0.0
    waiting: list[LoopRow] = field(default_factory=list)
    first: float = 0.0
    spent: list[float] = field(default_factory=list)

    async def generate(self, request: GenerationRequest, push: Push) -> None:
        row = LoopRow(push)
        if not self.waiting:
            self.first = time.perf_counter()
        self.waiting.append(row)
        if len(self.waiting) == self.streams:
            within = 1e3 * (time.perf_counter() - self.first)
            print(f"{self.streams} requests are with the engine within {within:.1f} ms", flush=True)
            rows, self.waiting = self.waiting, []
            self.task = asyncio.create_task(self._run(rows))
        await row.over(lambda: None)

    async def _run(self, rows: list[LoopRow]) -> None:
        outbox = Outbox()
        for row in rows:
            outbox.put(row, [Started(8)])
        await _delivered(outbox)
        began = time.process_time()
        for step in range(self.tokens):
            for index, row in enumerate(rows):
                outbox.put(row, [TextDelta(PIECES[(step + index) % len(PIECES)])])
            await _delivered(outbox, self.pause)
        self.spent.append((time.process_time() - began) / (self.tokens * self.streams))
        print(f"{1e6 * self.spent[-1]:.2f} us of the server's processor time a token", flush=True)
        for row in rows:
            outbox.put(row, [Finished("length", Usage(8, self.tokens))])
        outbox.flush()


async def _delivered(outbox: Outbox, pause: float = 0.0) -> None:
    """Deliver a step. Whoever reads it, where it is not written at once, does so meanwhile."""
    outbox.flush()
    await asyncio.sleep(pause)
    for _ in range(READING):
        await asyncio.sleep(0)


@dataclass
class StandInPool:
    backend: StandInEngine
    id: str = DEMO_MODEL

    def resolve(self, model_id: str | None) -> str:
        return self.id

    def is_loaded(self, model_id: str) -> bool:
        return True

    async def sees(self, model_id: str) -> bool:
        return False

    def overlay(self, model_id: str) -> Overlay:
        return Overlay()

    def sampling(self, model_id: str) -> dict[str, float]:
        return {}

    async def complete(self) -> None:
        """There is nothing to make ahead."""

    @asynccontextmanager
    async def lease(self, model_id: str, kind: str | None = None) -> AsyncIterator[StandInPool]:
        yield self


def request_body(path: str) -> bytes:
    return json.dumps({**BODIES[path], "stream": True}).encode()


async def in_process(streams: int, tokens: int, path: str) -> float:
    """Seconds for all streams, the application called directly."""
    app = create_app(pool=StandInPool(StandInEngine(streams, tokens)))
    body = request_body(path)
    events = 0

    class Chunks:
        def are_taken(self) -> bool:
            return True

        def write(self, data: bytes) -> None:
            nonlocal events
            events += data.count(b"data: ")

    async def call() -> None:
        inbox = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, object]:
            if inbox:
                return inbox.pop()
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: dict[str, object]) -> None:
            nonlocal events
            events += message.get("body", b"").count(b"data: ")

        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": f"/v1/{path}",
            "raw_path": f"/v1/{path}".encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "state": {"chunks": Chunks()},
        }
        await app(scope, receive, send)

    async with app.router.lifespan_context(app):
        await app.state.server.started.wait()
        start = time.perf_counter()
        await asyncio.gather(*[call() for _ in range(streams)])
        seconds = time.perf_counter() - start
    assert events == streams * (tokens + BESIDE[path]), events
    return seconds


def serve(engine: StandInEngine, port: int, profile: bool) -> None:
    app = create_app(pool=StandInPool(engine))
    server = uvicorn.Server(configuration(app, MLXServerSettings(port=port)))
    if not profile:
        server.run()
        return
    profiler = cProfile.Profile()
    profiler.runcall(server.run)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(35)


def read_streams(streams: int, tokens: int, rounds: int, port: int, path: str) -> None:
    uvloop.run(_read_streams(streams, tokens, rounds, port, path))


async def _read_streams(streams: int, tokens: int, rounds: int, port: int, path: str) -> None:
    body = request_body(path)
    head = (
        f"POST /v1/{path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        "connection: close\r\n\r\n"
    )

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + body)
        count, tail = 0, b""
        while data := await reader.read(2**18):
            data = tail + data
            count += data.count(b"data: ")
            tail = data[-5:] if not data.endswith(b"data: ") else b""
        writer.close()
        return count

    rates = []
    for _ in range(rounds):
        start = time.perf_counter()
        counts = await asyncio.gather(*[one() for _ in range(streams)])
        seconds = time.perf_counter() - start
        assert counts == [tokens + BESIDE[path]] * streams, counts
        rates.append(streams * tokens / seconds)
    report("over loopback", rates)


def report(what: str, rates: list[float]) -> None:
    listed = ", ".join(f"{rate:,.0f}" for rate in rates)
    print(f"{what}: best {max(rates):,.0f} tokens/s of {listed}", flush=True)


def wait_for(port: int) -> None:
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--step", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--path", choices=BODIES, default="chat/completions")
    parser.add_argument("--in-process", action="store_true")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    if args.in_process:
        profiler = cProfile.Profile()
        if args.profile:
            profiler.enable()
        rates = []
        for _ in range(args.rounds):
            seconds = uvloop.run(in_process(args.streams, args.tokens, args.path))
            rates.append(args.streams * args.tokens / seconds)
        report("in process", rates)
        if args.profile:
            profiler.disable()
            pstats.Stats(profiler).sort_stats("tottime").print_stats(35)
        return
    spawn = multiprocessing.get_context("spawn")
    port = free_port()
    engine = StandInEngine(args.streams, args.tokens, args.step)
    server = spawn.Process(target=serve, args=(engine, port, args.profile))
    server.start()
    try:
        wait_for(port)
        client = spawn.Process(
            target=read_streams, args=(args.streams, args.tokens, args.rounds, port, args.path)
        )
        client.start()
        client.join()
    finally:
        server.terminate()
        server.join()


if __name__ == "__main__":
    main()
