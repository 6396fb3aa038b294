"""Two keys on a real server whose rows one of them has taken, all of them and for long."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import openai
import pytest
from live import live_server
from minilm import minilm_folder

from mlx_manager.mlx_server.services.keys import add_key

CHAT = "/v1/chat/completions"
ROWS = 2
FLOOD = 6
MANY = 100
"""Rows that take turns on a CPU once another key has been there."""


def body(text: str, tokens: int) -> dict[str, object]:
    return {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }


async def stream(client: httpx.AsyncClient, asked: dict[str, object], begun: asyncio.Event) -> int:
    """The number of events of an answer."""
    async with client.stream("POST", CHAT, json=asked) as answer:
        assert answer.status_code == 200
        events = 0
        async for line in answer.aiter_lines():
            events += line.startswith("data: ")
            begun.set()
    return events


async def test_a_key_is_answered_while_another_has_every_row(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    headers = {
        name: {"authorization": f"Bearer {add_key(file, name, {})}"} for name in ("alice", "bob")
    }
    settings = {"api_keys_file": file, "max_rows": ROWS, "max_waiting": FLOOD - ROWS}
    with live_server(tmp_path / "log", **settings) as server:
        async with (
            httpx.AsyncClient(base_url=server.url, headers=headers["alice"], timeout=120) as alice,
            httpx.AsyncClient(base_url=server.url, headers=headers["bob"], timeout=120) as bob,
        ):
            begun = [asyncio.Event() for _ in range(FLOOD)]
            flood = [
                asyncio.create_task(stream(alice, body(f"story {n}", 7000), begun[n]))
                for n in range(FLOOD)
            ]
            # As many as there are rows for; the others wait.
            waits = asyncio.as_completed([event.wait() for event in begun])
            for _ in range(ROWS):
                await next(waits)
            for n in range(3):
                # Tokens that a draft foretold come in one event: some, and the end, in any case.
                assert await stream(bob, body(f"hello {n}", 5), asyncio.Event()) > 2
            assert not any(task.done() for task in flood)
            for task in flood:
                task.cancel()
            await asyncio.gather(*flood, return_exceptions=True)
    assert "Traceback" not in (tmp_path / "log").read_text()


async def answer(client: httpx.AsyncClient, text: str) -> str:
    asked = {**body(text, 24), "stream": False}
    reply = await client.post(CHAT, json=asked)
    assert reply.status_code == 200
    content: str = reply.json()["choices"][0]["message"]["content"]
    return content


async def test_answers_of_many_rows_that_two_keys_share_are_those_given_alone(
    tmp_path: Path,
) -> None:
    file = tmp_path / "keys.toml"
    tokens = {name: add_key(file, name, {}) for name in ("alice", "bob")}
    with live_server(tmp_path / "log", api_keys_file=file) as server:

        def client(name: str) -> httpx.AsyncClient:
            headers = {"authorization": f"Bearer {tokens[name]}"}
            limits = httpx.Limits(max_connections=None)
            return httpx.AsyncClient(
                base_url=server.url, headers=headers, timeout=120, limits=limits
            )

        async with client("alice") as alice, client("bob") as bob:
            questions = [f"What is {n} + {n + 3}?" for n in range(5)]
            alone = {question: await answer(alice, question) for question in questions}
            asked = [questions[n % 5] for n in range(MANY)]
            clients = [bob if n % 10 == 0 else alice for n in range(MANY)]
            pairs = zip(clients, asked, strict=True)
            answers = await asyncio.gather(*(answer(who, text) for who, text in pairs))
            assert answers == [alone[text] for text in asked]
    assert "Traceback" not in (tmp_path / "log").read_text()


async def is_running(client: httpx.AsyncClient) -> bool:
    reply = await client.get("/v1/admin/requests")
    return any(one["state"] == "running" for one in reply.json()["data"])


async def test_a_key_embeds_a_text_while_another_embeds_thousands(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    tokens = {name: add_key(file, name, {}) for name in ("alice", "bob")}
    settings = {"api_keys_file": file, "model": minilm_folder()}
    flood = [" ".join(["dog"] * (150 + n % 100)) for n in range(2048)]
    with live_server(tmp_path / "log", **settings) as server:

        def client(name: str) -> openai.AsyncOpenAI:
            return openai.AsyncOpenAI(
                base_url=f"{server.url}/v1", api_key=tokens[name], timeout=120, max_retries=0
            )

        model = "default"
        async with (
            client("alice") as alice,
            client("bob") as bob,
            httpx.AsyncClient(base_url=server.url) as admin,
        ):
            [expected] = (await bob.embeddings.create(model=model, input="a short text")).data
            huge = asyncio.create_task(alice.embeddings.create(model=model, input=flood))
            while not await is_running(admin):
                assert not huge.done()
            for _ in range(3):
                [found] = (await bob.embeddings.create(model=model, input="a short text")).data
                assert found.embedding == pytest.approx(expected.embedding, abs=1e-5)
            assert not huge.done()
            huge.cancel()
            await asyncio.gather(huge, return_exceptions=True)
    assert "Traceback" not in (tmp_path / "log").read_text()
