"""Thousands of requests of every kind, and then: is the server what it was before?

Warms up with the same mix, waits until nothing is under way, notes memory, rows, pages, leases,
tasks and files, sends the requests, waits and compares. Ends with 1 if something is left, if an
answer had a status that its kind does not allow, or if a request hung.

    .venv/bin/python benchmarks/soak.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from harness import DEMO
from servers import our_server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
PATIENCE = 300.0
"""Seconds after which a request counts as hanging."""

QUESTIONS = (
    "How do I start the server?",
    "What is 17 + 25?",
    "Hello!",
    "Who are you?",
    "Write a JSON object with a name.",
    "What is the weather in Paris?",
    "How do I stop streaming?",
    "My name is Ada. What is my name?",
)
TOOL = {
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@dataclass
class Tally:
    """Ends of the requests, by kind; `wrong` are those that should not have ended so."""

    ended: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)

    def note(self, kind: str, outcome: str, allowed: bool) -> None:
        self.ended[f"{kind}: {outcome}"] += 1
        if not allowed:
            self.wrong[f"{kind}: {outcome}"] += 1


class Client:
    """Sends requests of one kind or another, and leaves some of them early."""

    def __init__(self, http: httpx.AsyncClient, chance: random.Random) -> None:
        self.http = http
        self.chance = chance
        self.kinds: Mapping[str, tuple[int, Callable[[], Awaitable[int | str]], set[int | str]]] = {
            "chat": (14, lambda: self.ask(CHAT, self.chat()), {200}),
            "chat streamed": (14, lambda: self.stream(CHAT, self.chat()), {200}),
            "completions": (6, lambda: self.ask(COMPLETIONS, self.text()), {200}),
            "completions streamed": (6, lambda: self.stream(COMPLETIONS, self.text()), {200}),
            "messages": (6, lambda: self.ask(MESSAGES, self.message()), {200}),
            "messages streamed": (6, lambda: self.stream(MESSAGES, self.message()), {200}),
            "responses": (6, lambda: self.ask(RESPONSES, self.response()), {200}),
            "responses streamed": (6, lambda: self.stream(RESPONSES, self.response()), {200}),
            "tools": (6, lambda: self.ask(CHAT, self.tools()), {200}),
            "structured": (6, lambda: self.ask(CHAT, self.structured()), {200}),
            "n=2": (5, lambda: self.stream(CHAT, self.chat() | {"n": 2}), {200}),
            "logprobs": (3, lambda: self.ask(CHAT, self.chat() | {"logprobs": True}), {200}),
            "left in the answer": (6, self.leave_early, {"left"}),
            "left in the prompt": (4, self.leave_prompt, {"left"}),
            "timed out": (2, lambda: self.ask(CHAT, self.endless() | {"timeout": 0.2}), {504}),
            "no JSON": (1, self.send_garbage, {400}),
            "out of range": (1, lambda: self.ask(CHAT, self.chat() | {"top_p": 7}), {422}),
            "no such model": (1, lambda: self.ask(CHAT, self.chat() | {"model": "x/y"}), {404}),
            "too long": (1, lambda: self.ask(CHAT, self.chat("word " * 20_000)), {400}),
        }

    async def one(self, tally: Tally) -> None:
        weights = [weight for weight, _, _ in self.kinds.values()]
        [kind] = self.chance.choices(list(self.kinds), weights)
        _, send, allowed = self.kinds[kind]
        try:
            async with asyncio.timeout(PATIENCE):
                outcome = await send()
        except TimeoutError:
            outcome = "hangs"
        except httpx.HTTPError as error:
            outcome = type(error).__name__
        tally.note(kind, str(outcome), outcome in allowed)

    # -- bodies --------------------------------------------------------------------------------

    def chat(self, text: str = "") -> dict[str, Any]:
        question = text or f"{self.chance.choice(QUESTIONS)} ({self.chance.randrange(1000)})"
        return {
            "messages": [{"role": "user", "content": question}],
            "max_tokens": self.chance.randrange(1, 40),
            "temperature": self.chance.choice([0, 0.7, 1]),
        }

    def endless(self) -> dict[str, Any]:
        return self.chat() | {"max_tokens": 4000, "ignore_eos": True}

    def text(self) -> dict[str, Any]:
        return {
            "prompt": self.chance.choice(QUESTIONS),
            "max_tokens": self.chance.randrange(1, 40),
            "stop": ["\n\n"],
            "echo": self.chance.random() < 0.3,
        }

    def message(self) -> dict[str, Any]:
        return {key: self.chat()[key] for key in ("messages", "max_tokens", "temperature")}

    def response(self) -> dict[str, Any]:
        return {"input": self.chance.choice(QUESTIONS), "max_output_tokens": 24}

    def tools(self) -> dict[str, Any]:
        return self.chat("What is the weather in Paris?") | {
            "tools": [{"type": "function", "function": TOOL}],
            "max_tokens": 60,
        }

    def structured(self) -> dict[str, Any]:
        form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
        return self.chat() | {"response_format": form, "max_tokens": 60}

    # -- ways of asking ------------------------------------------------------------------------

    async def ask(self, path: str, body: dict[str, Any]) -> int:
        return (await self.http.post(path, json=body)).status_code

    async def stream(self, path: str, body: dict[str, Any]) -> int | str:
        async with self.http.stream("POST", path, json=body | {"stream": True}) as response:
            text = (await response.aread()).decode()
        if response.status_code == 200 and '"error":{' in text:
            return "error event"
        return response.status_code

    async def leave_early(self) -> str:
        body = self.endless() | {"stream": True}
        async with self.http.stream("POST", CHAT, json=body) as response:
            lines = response.aiter_lines()
            for _ in range(self.chance.randrange(2, 20)):
                if await anext(lines, None) is None:
                    return f"{response.status_code}, ended early"
        return "left"

    async def leave_prompt(self) -> str:
        numbers = " ".join(str(self.chance.randrange(1000)) for _ in range(1200))
        body = self.chat(numbers) | {"stream": self.chance.random() < 0.5}
        try:
            async with asyncio.timeout(self.chance.random() / 4):
                await self.http.post(CHAT, json=body)
        except TimeoutError:
            pass
        return "left"

    async def send_garbage(self) -> int:
        headers = {"content-type": "application/json"}
        return (await self.http.post(CHAT, content=b'{"messages": [', headers=headers)).status_code


@dataclass(frozen=True)
class State:
    """Figures that must be as before. Memory in bytes, the rest counted."""

    rss: int
    ledger: int
    counts: dict[str, int]


async def settled(http: httpx.AsyncClient) -> State:
    """The server's state once nothing is under way and no prefix is kept."""
    while True:
        state, memory = await looked(http)
        rows = Counter[str]()
        for engine in memory["engines"].values():
            rows.update({k: engine[k] for k in ("running", "prefilling", "waiting")})
        if not state["calls"] and not rows.total():
            break
        await asyncio.sleep(0.2)
    (await http.post("/v1/admin/prefix-cache/clear", json={})).raise_for_status()
    await asyncio.sleep(1)
    state, memory = await looked(http)
    counts = {key: state[key] for key in ("calls", "tasks", "threads", "open_files")}
    counts["leases"] = sum(state["leases"].values())
    for name in ("running", "prefilling", "waiting", "pages_held", "pages_cached"):
        counts[name] = sum(engine[name] for engine in memory["engines"].values())
    lines = memory["ledger"]
    promised = sum(size for name, size in lines.items() if name not in ("limit", "available"))
    return State(state["rss_bytes"] or 0, promised, counts)


async def looked(http: httpx.AsyncClient) -> tuple[dict[str, Any], dict[str, Any]]:
    state, memory = await http.get("/debug/state"), await http.get("/debug/memory")
    return state.raise_for_status().json(), memory.raise_for_status().json()


async def send(url: str, requests: int, at_once: int, seed: int) -> Tally:
    """`requests` of all kinds, so many at a time, over connections that are closed at the end."""
    tally, chance = Tally(), random.Random(seed)
    limits = httpx.Limits(max_connections=None)
    turns = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits) as http:
        client = Client(http, chance)

        async def one() -> None:
            async with turns:
                await client.one(tally)

        await asyncio.gather(*(one() for _ in range(requests)))
    return tally


async def soak(url: str, options: argparse.Namespace) -> int:
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as http:
        await send(url, options.warmup, options.at_once, options.seed + 1)
        before = await settled(http)
        began = time.monotonic()
        tally = await send(url, options.requests, options.at_once, options.seed)
        seconds = time.monotonic() - began
        after = await settled(http)
    growth = {
        "rss": after.rss / before.rss - 1 if before.rss else 0.0,
        "ledger": after.ledger / before.ledger - 1,
    }
    left = {name: after.counts[name] - count for name, count in before.counts.items()}
    # The thread pools grow to their size when they are first that busy; they are no leak.
    grown = {name: count for name, count in left.items() if count > 0 and name != "threads"}
    report = {
        "requests": options.requests,
        "seconds": round(seconds, 1),
        "ended": dict(sorted(tally.ended.items())),
        "wrong": dict(tally.wrong),
        "before": before.__dict__,
        "after": after.__dict__,
        "growth": {name: round(share, 4) for name, share in growth.items()},
        "left": grown,
    }
    print(json.dumps(report, indent=2))
    well = not tally.wrong and not grown and max(growth.values()) <= options.tolerance
    return 0 if well else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=5000)
    # Freed memory is kept for reuse, and what the mix takes at most comes late.
    parser.add_argument("--warmup", type=int, default=6000, help="requests before the first look")
    parser.add_argument("--at-once", type=int, default=24, help="requests under way together")
    parser.add_argument("--tolerance", type=float, default=0.02, help="growth of memory allowed")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kept = {"response_store": str(Path(folder) / "responses.db"), "response_store_mb": "1"}
        with our_server(DEMO, max_rows="16", **kept) as server:
            return asyncio.run(soak(server.base_url.removesuffix("/v1"), options))


if __name__ == "__main__":
    sys.exit(main())
