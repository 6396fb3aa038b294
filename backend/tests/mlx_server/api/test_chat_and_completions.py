from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from here import start_here
from openai_spec import check
from scripted import MODEL, ScriptedBackend, ScriptedPool, says

from mlx_manager.mlx_server.config import MLXServerSettings
from mlx_manager.mlx_server.core import Started
from mlx_manager.mlx_server.main import create_app

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
ONCE = {"prompt": "once"}


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def test_chat_answers_whole_or_in_chunks(serve):
    async with serve() as client:
        whole = (await client.post(CHAT, json=HELLO)).json()
        parts = chunks(await client.post(CHAT, json=HELLO | {"stream": True}))
    check("CreateChatCompletionResponse", whole)
    joined = "".join(part["choices"][0]["delta"].get("content", "") for part in parts)
    assert whole["choices"][0]["message"]["content"] == joined == "Hello"
    assert whole["model"] == MODEL
    assert whole["usage"]["total_tokens"] == 5


async def test_completions_answer_whole_or_in_chunks(serve):
    async with serve() as client:
        whole = (await client.post(COMPLETIONS, json=ONCE)).json()
        parts = chunks(await client.post(COMPLETIONS, json=ONCE | {"stream": True}))
    check("CreateCompletionResponse", whole)
    assert whole["choices"][0]["text"] == "Hello"
    assert "".join(part["choices"][0]["text"] for part in parts) == "Hello"


async def test_several_answers_and_prompts_come_in_one_response(serve):
    async with serve() as client:
        chat = (await client.post(CHAT, json=HELLO | {"n": 3})).json()
        texts = (await client.post(COMPLETIONS, json={"prompt": ["a", [1]], "n": 2})).json()
        streamed = chunks(await client.post(CHAT, json=HELLO | {"n": 2, "stream": True}))
    assert [choice["index"] for choice in chat["choices"]] == [0, 1, 2]
    assert [choice["index"] for choice in texts["choices"]] == [0, 1, 2, 3]
    assert {part["choices"][0]["index"] for part in streamed} == {0, 1}


async def test_more_answers_than_a_model_ever_takes_in_are_refused_for_good_and_no_fewer():
    """By a real engine, which says how many those are: it tells whoever may try again to do so."""
    app = create_app(MLXServerSettings(max_rows=2, max_waiting=1, hf_cache=False), start=start_here)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client,
    ):
        await app.state.server.started.wait()
        for path, body, asked, param in (
            (CHAT, HELLO | {"n": 3}, {"n": 4}, "n"),
            (COMPLETIONS, {"prompt": "a", "n": 3}, {"n": 4}, "n"),
            (COMPLETIONS, {"prompt": ["a", "b", "c"]}, {"n": 2}, "n"),
            (COMPLETIONS, {"prompt": "a", "n": 1, "best_of": 3}, {"best_of": 4}, "n"),
            (COMPLETIONS, {"prompt": ["a"] * 3}, {"prompt": ["a"] * 4}, "prompt"),
        ):
            most = await client.post(path, json=body | {"max_tokens": 1})
            assert most.status_code == 200, most.text
            more = await client.post(path, json=body | {"max_tokens": 1} | asked)
            error = more.json()["error"]
            assert (more.status_code, error["code"], error["param"]) == (
                400,
                "invalid_request",
                param,
            )
            assert "`n`" in error["message"]
            assert "takes at most 3 (MLX_SERVER_MAX_ROWS and MLX_SERVER" in error["message"]
            assert "retry-after" not in more.headers


async def test_what_is_sent_ends_up_in_the_request(serve):
    backend = ScriptedBackend(lambda _: says("x"))
    async with serve(pool=ScriptedPool(backend)) as client:
        await client.post(
            COMPLETIONS, json=ONCE | {"temperature": 0, "max_tokens": 3, "echo": True}
        )
    [request] = backend.requests
    assert (request.sampling.temperature, request.max_tokens, request.echo) == (0, 3, True)


async def test_nothing_is_answered_before_start_up_has_finished(serve):
    pool = ScriptedPool(ScriptedBackend(lambda _: says("x")), loading=asyncio.Event())
    async with serve(pool=pool, started=False) as client:
        for response in (await client.get("/health"), await client.post(CHAT, json=HELLO)):
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "server_not_ready"
            assert response.headers["retry-after"] == "1"


async def test_health_tells_the_version(serve):
    async with serve() as client:
        response = await client.get("/health")
    assert response.status_code == 200
    assert response.json()["status"] == "healthy"
    assert set(response.json()) == {"status", "version"}


async def test_without_its_default_model_the_server_is_unhealthy_and_serves_the_others(serve):
    async with serve(model="missing") as client:
        health = await client.get("/health")
        other = await client.post(CHAT, json=HELLO | {"model": MODEL})
        default = await client.post(CHAT, json=HELLO)
    assert (health.status_code, other.status_code, default.status_code) == (503, 200, 404)
    assert "missing" in health.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [(CHAT, HELLO | {"n": 2}), (COMPLETIONS, ONCE)])
async def test_a_caller_who_hangs_up_leaves_nothing_running(path: str, body: dict, stream: bool):
    backend = ScriptedBackend(lambda _: [[Started(1)], asyncio.Event()])
    pool = ScriptedPool(backend)
    app = create_app(MLXServerSettings(), pool)
    async with app.router.lifespan_context(app):
        await app.state.server.started.wait()
        hang_up = asyncio.Event()
        inbox = [
            {
                "type": "http.request",
                "body": json.dumps(body | {"stream": stream}).encode(),
                "more_body": False,
            }
        ]
        sent = []

        async def receive() -> dict[str, Any]:
            if inbox:
                return inbox.pop()
            await hang_up.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        call = asyncio.create_task(app(scope, receive, send))
        rows = body.get("n", 1)
        await backend.until(lambda backend: backend.running == rows)
        hang_up.set()
        await call
        assert (backend.running, backend.cancelled, pool.leases) == (0, rows, 0)
        assert all(message.get("more_body", True) for message in sent)
