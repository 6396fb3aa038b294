"""Callers of every kind, who make each of the server's metrics move."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import httpx

CHAT, EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"
QUESTIONS = (
    "How do I start the server?",
    "What is 17 + 25?",
    "Who are you?",
    "What is the weather in Paris?",
    "Write a JSON object with a name.",
)
MANUAL = "The page table of a row lists its pages, and a page holds sixteen tokens. " * 24
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


class Caller:
    """One who asks now this and now that, and sometimes what can't be answered."""

    def __init__(
        self, http: httpx.AsyncClient, chance: random.Random, models: Sequence[str], reader: str
    ) -> None:
        self._http = http
        self._chance = chance
        self._models = models
        self._reader = reader

    async def ask(self) -> None:
        model = self._chance.choice(self._models)
        match self._chance.randrange(20):
            case 0 | 1:
                await self._leave(model)
            case 2:
                await self._fail(model)
            case 3 | 4:
                texts = [self._question() * self._chance.randrange(1, 8) for _ in range(8)]
                await self._http.post(EMBEDDINGS, json={"model": self._reader, "input": texts})
            case 5 | 6 | 7:
                weather = {"tools": [TOOL], "max_tokens": 60}
                await self._chat(model, "What is the weather in Paris?", **weather)
            case 8 | 9 | 10 | 11:
                await self._chat(model, MANUAL + self._question(), stream=True, max_tokens=80)
            case 12:
                await self._chat(model, self._question(), n=3, max_tokens=30)
            case _:
                most = self._chance.choice([8, 40, 200])
                await self._chat(model, self._question(), stream=True, max_tokens=most)

    def _question(self) -> str:
        return f"{self._chance.choice(QUESTIONS)} ({self._chance.randrange(1000)})"

    def _body(self, model: str, text: str) -> dict[str, Any]:
        return {"model": model, "messages": [{"role": "user", "content": text}]}

    async def _chat(self, model: str, text: str, **fields: Any) -> None:
        await self._http.post(CHAT, json=self._body(model, text) | fields)

    async def _leave(self, model: str) -> None:
        body = self._body(model, "Count!") | {
            "stream": True,
            "ignore_eos": True,
            "max_tokens": 2000,
        }
        async with self._http.stream("POST", CHAT, json=body) as answer:
            lines = answer.aiter_lines()
            for _ in range(self._chance.randrange(10, 200)):
                await anext(lines, None)

    async def _fail(self, model: str) -> None:
        match self._chance.randrange(4):
            case 0:
                await self._chat("nobody/knows-it", "Hello!")
            case 1:
                await self._chat(model, "far too long " * 20_000)
            case 2:
                await self._chat(model, "Hello!", temperature=-1)
            case 3:
                await self._chat(model, MANUAL, ignore_eos=True, max_tokens=2000, timeout=0.2)


async def talk(
    url: str,
    done: Callable[[], bool],
    callers: int,
    models: Sequence[str],
    reader: str,
    key: str = "none",
) -> None:
    """So many callers at once, who ask one thing after the other until `done`.

    models: those that chat. reader: one that embeds. key: the API key.
    """
    headers = {"authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits, headers=headers) as http:

        async def again(seed: int) -> None:
            caller = Caller(http, random.Random(seed), models, reader)
            while not done():
                await caller.ask()

        await asyncio.gather(*(again(seed) for seed in range(callers)))
