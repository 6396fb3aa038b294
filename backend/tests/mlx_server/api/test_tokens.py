from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from demo import Demo, demo
from scripted import ScriptedBackend, ScriptedPool
from thorough import slow

from mlx_manager.mlx_server.api.respond import BLOCK
from mlx_manager.mlx_server.config import MLXServerSettings
from mlx_manager.mlx_server.main import create_app

__all__ = ["demo"]

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO = [{"role": "user", "content": "Hello!"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(demo: Demo) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(MLXServerSettings(), demo.pool)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client,
    ):
        await app.state.server.started.wait()
        yield client


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_texts_become_tokens_and_come_back(client: httpx.AsyncClient, prefix: str):
    asked = {"prompt": "Grüße, world", "return_token_strs": True}
    body = (await client.post(f"{prefix}/tokenize", json=asked)).json()
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert body["max_model_len"] == 8192
    assert body["token_strs"][0] == "<|begin_of_text|>"
    back = (await client.post(f"{prefix}/detokenize", json={"tokens": body["tokens"]})).json()
    assert back["content"] == back["prompt"] == "<|begin_of_text|>Grüße, world"


async def test_a_bos_is_added_to_prompts_and_to_nothing_else(client: httpx.AsyncClient):
    async def tokens(**asked: object) -> list[int]:
        return (await client.post("/v1/tokenize", json=asked)).json()["tokens"]

    bare = await tokens(content="Hello")
    assert await tokens(prompt="Hello", add_special_tokens=False) == bare
    assert await tokens(content="Hello", add_special=True) == await tokens(prompt="Hello")
    assert (await tokens(prompt="Hello"))[1:] == bare


async def test_a_conversation_is_rendered_as_the_model_sees_it(client: httpx.AsyncClient):
    for prefix in ("", "/v1"):
        answer = await client.post(f"{prefix}/apply-template", json={"messages": HELLO})
        text = answer.json()["prompt"]
        assert text.startswith("<|begin_of_text|><|start_header_id|>user")
        assert text.endswith("<|start_header_id|>assistant<|end_header_id|>\n\n")
    tokens = (await client.post("/v1/tokenize", json={"messages": HELLO})).json()["tokens"]
    back = (await client.post("/v1/detokenize", json={"tokens": tokens})).json()
    assert back["prompt"] == text


async def test_a_client_may_make_prompts_itself(client: httpx.AsyncClient):
    for path in ("/tokenizer_info", "/v1/tokenizer_info?model=mlx-manager/demo"):
        info = (await client.get(path)).json()
        assert info["bos_token"] == "<|begin_of_text|>"
        assert info["eos_token"] == "<|eot_id|>"
        assert info["model_max_length"] == 8192
        assert "messages" in info["chat_template"]
    missing = await client.get("/tokenizer_info?model=other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


async def test_large_answers_come_in_pieces_and_whole(client: httpx.AsyncClient):
    text = 'Grüße, "日本" 🙂\n' * 8000
    asked = {"content": text, "return_token_strs": True}
    answer = await client.post("/v1/tokenize", json=asked)
    few = (await client.post("/v1/tokenize", json=asked | {"content": text[:14]})).json()
    found = answer.json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) > 2 * BLOCK
    assert found["tokens"][: few["count"] - 1] == few["tokens"][:-1]
    told = await client.post("/v1/detokenize", json={"tokens": found["tokens"]})
    assert told.json() == {"prompt": text, "content": text}
    rendered = await client.post(
        "/v1/apply-template", json={"messages": [{"role": "user", "content": text}]}
    )
    assert text.strip() in rendered.json()["prompt"]
    for large in (answer, told, rendered):
        assert "content-length" not in large.headers
    none = (await client.post("/v1/detokenize", json={"tokens": []})).json()
    assert none == {"prompt": "", "content": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {"content": "word, " * 2**20}, "prompt"),
        pytest.param("tokenize", {"prompt": "word, " * 2**20}, "prompt", marks=slow),
        ("tokenize", {"messages": [{"role": "user", "content": "word, " * 2**20}]}, "messages"),
        ("detokenize", {"tokens": [5] * (2**18 + 1)}, "tokens"),
    ],
)
async def test_more_tokens_than_several_contexts_are_not_told(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
):
    response = await client.post(f"/v1/{path}", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "more than 262144 tokens" in error["message"]


@pytest.mark.parametrize("path", ["tokenize", "apply-template"])
async def test_conversations_are_as_long_as_a_chats_may_be(client: httpx.AsyncClient, path: str):
    part = {"type": "text", "text": "a"}
    for messages in (HELLO * 20_000, [{"role": "user", "content": [part] * 20_000}]):
        response = await client.post(f"/v1/{path}", json={"messages": messages})
        assert response.status_code == 413
        assert response.json()["error"]["param"] == "messages"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": "a", "content": "b"}, "prompt"),
        ("tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("tokenize", {"content": "a", "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
        ("tokenize", {"messages": HELLO, "add_special": True}, "add_special"),
        ("detokenize", {"tokens": [10**9]}, "tokens"),
        ("detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("apply-template", {"messages": []}, "messages"),
    ],
)
async def test_what_is_wrong_is_named(
    client: httpx.AsyncClient, path: str, body: dict[str, object], param: str
):
    answer = await client.post(f"/v1/{path}", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_what_no_message_may_ask_for_is_not_counted_either(client: httpx.AsyncClient):
    body = {"messages": HELLO, "tools": [], "tool_choice": {"type": "tool", "name": "f"}}
    counted = await client.post("/v1/messages/count_tokens", json=body)
    sent = await client.post("/v1/messages", json=body | {"max_tokens": 1})
    assert counted.status_code == sent.status_code == 400
    assert counted.json()["error"] == sent.json()["error"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "name": "f"}}, "tools"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"input": [{"type": "hologram", "id": "x"}]}, "input[0]"),
        ({"messages": []}, "messages"),
        ({"input": []}, "input"),
    ],
)
async def test_what_no_response_may_ask_for_is_not_counted_either(
    client: httpx.AsyncClient, fields: dict[str, object], param: str
):
    counted = await client.post("/v1/responses/input_tokens", json={"input": HELLO} | fields)
    sent = await client.post("/v1/responses", json={"input": HELLO} | fields)
    assert counted.status_code == sent.status_code == 400
    assert counted.json()["error"] == sent.json()["error"]
    assert param in counted.json()["error"]["message"]


async def test_another_model_is_unknown(client: httpx.AsyncClient):
    answer = await client.post("/v1/tokenize", json={"prompt": "a", "model": "gpt-9"})
    assert answer.status_code == 404


@pytest.mark.parametrize("ask", ["body", "header", "setting"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/tokenize", {"prompt": "x"}),
        ("/v1/detokenize", {"tokens": [1]}),
        ("/v1/apply-template", {"messages": HELLO}),
        ("/v1/messages/count_tokens", {"messages": HELLO}),
        ("/v1/responses/input_tokens", {"input": HELLO}),
    ],
)
async def test_a_model_that_takes_long_to_load_is_waited_for_within_the_limits(
    serve, path: str, body: dict[str, object], ask: str
):
    pool = ScriptedPool(ScriptedBackend(lambda _: []))
    settings = {"timeout_seconds": 0.02} if ask == "setting" else {}
    headers = {"x-request-timeout": "0.02"} if ask == "header" else {}
    fields = {"timeout": 0.02} if ask == "body" else {}
    async with serve(pool=pool, **settings) as client:
        pool.loading = asyncio.Event()
        answer = await client.post(path, json=body | fields, headers=headers)
    assert answer.status_code == 504
    assert "x-unknown-fields" not in answer.headers
    message = answer.json()["error"]["message"]
    assert "`timeout` of 0.02 s: its model was still being loaded" in message


async def test_the_owner_sees_and_ends_a_question_about_tokens(serve):
    pool = ScriptedPool(ScriptedBackend(lambda _: []))
    token = {"authorization": "Bearer of the house"}
    async with serve(pool=pool, admin_token="of the house") as client:
        pool.loading = asyncio.Event()
        asking = asyncio.create_task(client.get("/tokenizer_info"))
        await asyncio.sleep(0)
        (call,) = (await client.get("/v1/admin/requests", headers=token)).json()["data"]
        assert (call["protocol"], call["phase"]) == ("tokens", "load")
        await client.post(f"/v1/admin/requests/{call['id']}/cancel", headers=token)
        assert (await asking).json()["error"]["code"] == "request_cancelled"
