"""The server as its users meet it: a process started with the README's command, and OpenAI's SDK."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from live import LiveServer, live_server
from openai_spec import check
from tiny_models import make_tiny_model

MODEL = "mlx-manager/demo"
QUESTIONS = [
    "How do I start the server?",
    "How do I stop it?",
    "What is 17 + 25?",
    "Hello!",
    "How do I load a model?",
    "How can I list the models?",
    "How do I stream an answer?",
    "How do I change the port?",
    "My name is Ada. What is my name?",
    "What is MLX?",
    "Who are you?",
    "How do I see the settings?",
    "What is 3 + 4?",
    "Write a JSON object with a name.",
    "How do I stop streaming?",
    "Thank you!",
]
LONG = "Say something about everything. " * 300


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with live_server(log) as running:
        yield running
    text = log.read_text()
    assert "Traceback" not in text, text
    assert "Task was destroyed" not in text, text
    assert running.process.returncode == 0


@pytest.fixture
def sdk(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def http(server: LiveServer) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
        yield client


def says(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def greedy(question: str, **fields: Any) -> dict[str, Any]:
    return {"messages": says(question), "temperature": 0, "max_tokens": 40} | fields


# The official SDK


def test_sdk_chats(sdk: openai.OpenAI):
    answer = sdk.chat.completions.create(model=MODEL, messages=says("Hello!"), temperature=0)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    check("CreateChatCompletionResponse", answer.model_dump(exclude_unset=True))


def test_sdk_streams_the_same_text_as_it_gets_whole(sdk: openai.OpenAI):
    for question in QUESTIONS[:4]:
        asked: dict[str, Any] = {"model": MODEL, "messages": says(question), "temperature": 0}
        whole = sdk.chat.completions.create(**asked)
        chunks = list(
            sdk.chat.completions.create(
                **asked, stream=True, stream_options={"include_usage": True}
            )
        )
        for chunk in chunks:
            check("CreateChatCompletionStreamResponse", chunk.model_dump(exclude_unset=True))
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
        assert chunks[-1].usage is not None
        assert whole.usage is not None
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        told = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
        assert told == whole.choices[0].message.content


def test_sdk_completes_texts_and_token_ids(sdk: openai.OpenAI):
    answer = sdk.completions.create(
        model=MODEL, prompt=["Hello", "How do I"], max_tokens=5, temperature=0, n=2, echo=True
    )
    check("CreateCompletionResponse", answer.model_dump(exclude_unset=True))
    texts = [choice.text for choice in answer.choices]
    assert texts[0] == texts[1]
    assert texts[0].startswith("Hello")
    assert texts[2].startswith("How do I")
    ids = sdk.completions.create(model=MODEL, prompt=[[5, 6, 7], [8]], max_tokens=3)
    assert [choice.index for choice in ids.choices] == [0, 1]
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 4
    streamed = sdk.completions.create(
        model=MODEL, prompt="Hello", max_tokens=5, temperature=0, stream=True
    )
    assert "Hello" + "".join(chunk.choices[0].text for chunk in streamed) == texts[0]


def test_sdk_lists_and_finds_models(sdk: openai.OpenAI):
    models = sdk.models.list().data
    assert MODEL in [model.id for model in models]
    check("Model", sdk.models.retrieve(MODEL).model_dump())


def test_a_length_is_told_from_a_stop(sdk: openai.OpenAI):
    cut = sdk.chat.completions.create(
        model=MODEL, messages=says("How do I start the server?"), max_tokens=2
    )
    assert cut.choices[0].finish_reason == "length"
    assert cut.usage is not None
    assert cut.usage.completion_tokens == 2


def test_a_stop_string_ends_the_answer_before_it(sdk: openai.OpenAI):
    asked: dict[str, Any] = {"model": MODEL, "messages": says(QUESTIONS[0]), "temperature": 0}
    text = sdk.chat.completions.create(**asked).choices[0].message.content
    assert text is not None
    stop = text[5:12]
    cut = sdk.chat.completions.create(**asked, stop=[stop]).choices[0]
    assert cut.message.content == text[: text.index(stop)]
    assert cut.finish_reason == "stop"
    # As vLLM tells which one it was.
    assert cut.model_extra == {"stop_reason": stop}


def test_top_p_of_0_leaves_the_most_likely_token(sdk: openai.OpenAI):
    def asked(**how: float) -> str | None:
        said = says("Who are you?")
        answer = sdk.chat.completions.create(model=MODEL, messages=said, max_tokens=30, **how)
        return answer.choices[0].message.content

    drawn = {asked(top_p=0, temperature=2, seed=seed) for seed in range(3)}
    assert drawn == {asked(temperature=0)}


def test_the_same_seed_gives_the_same_answer(sdk: openai.OpenAI):
    asked: dict[str, Any] = {"model": MODEL, "messages": says("Hello!"), "temperature": 1.5}
    first, again = (
        sdk.chat.completions.create(**asked, seed=7, max_tokens=20).choices[0].message.content
        for _ in range(2)
    )
    several = sdk.chat.completions.create(**asked, seed=7, max_tokens=20, n=3)
    assert first == again == several.choices[0].message.content


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def test_sdk_calls_a_tool_and_hands_its_result_back(sdk: openai.OpenAI):
    messages: list[Any] = says("What is the weather in Rome?")
    asked: dict[str, Any] = {"model": MODEL, "tools": [WEATHER], "temperature": 0}
    called = sdk.chat.completions.create(messages=messages, **asked).choices[0]
    assert called.finish_reason == "tool_calls"
    assert called.message.tool_calls
    call: Any = called.message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    streamed = list(sdk.chat.completions.create(messages=messages, stream=True, **asked))
    deltas = [d for chunk in streamed for d in chunk.choices[0].delta.tool_calls or ()]
    functions = [delta.function for delta in deltas if delta.function is not None]
    assert "".join(f.arguments or "" for f in functions) == call.function.arguments
    assert streamed[-1].choices[0].finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21}'}
    messages += [called.message.model_dump(), result]
    answer = sdk.chat.completions.create(messages=messages, **asked).choices[0]
    assert "21" in (answer.message.content or "")


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"model": "gpt-9"}, openai.NotFoundError),
        ({"temperature": 5.0}, openai.UnprocessableEntityError),
        ({"top_logprobs": 3}, openai.BadRequestError),
        ({"messages": says("word " * 20_000)}, openai.BadRequestError),
        ({"messages": []}, openai.UnprocessableEntityError),
        ({"logit_bias": {"99999999": 1}}, openai.UnprocessableEntityError),
        ({"stop_token_ids": [99999999]}, openai.UnprocessableEntityError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_the_sdks_own(
    sdk: openai.OpenAI, fields: dict[str, Any], error: type[Exception], stream: bool
):
    asked: dict[str, Any] = {"model": MODEL, "messages": says("hi")} | fields
    extra = {name: asked.pop(name) for name in list(asked) if name == "stop_token_ids"}
    with pytest.raises(error) as caught:
        sdk.chat.completions.create(**asked, stream=stream, extra_body=extra)
    assert isinstance(caught.value, openai.APIStatusError)
    check("ErrorResponse", {"error": caught.value.body})


async def test_a_top_k_beyond_every_vocabulary_excludes_nothing(http: httpx.AsyncClient):
    asked = {"messages": says(QUESTIONS[0]), "max_tokens": 8, "seed": 1}
    beyond, off = [await ask(http, **asked, top_k=top_k) for top_k in (10**40, 0)]
    assert beyond["choices"] == off["choices"]


# Many at once


async def ask(http: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    check("CreateChatCompletionResponse", answer)
    return answer


async def test_each_of_sixteen_gets_exactly_what_it_gets_alone(http: httpx.AsyncClient):
    alone = [await ask(http, **greedy(question)) for question in QUESTIONS]
    together = await asyncio.gather(*[ask(http, **greedy(question)) for question in QUESTIONS])
    for single, shared in zip(alone, together, strict=True):
        assert shared["choices"] == single["choices"]


async def test_two_hundred_connections_are_all_answered(http: httpx.AsyncClient):
    answers = await asyncio.gather(
        *[ask(http, **greedy(QUESTIONS[i % 16], max_tokens=4)) for i in range(200)]
    )
    assert len(answers) == 200
    assert {answer["usage"]["completion_tokens"] for answer in answers} <= {1, 2, 3, 4}


# Those who go


async def hang_up(server: LiveServer, body: dict[str, Any], after: bytes) -> None:
    """Send a request, read until `after` has come, and cut the connection."""
    url = httpx.URL(server.url)
    assert url.port is not None
    reader, writer = await asyncio.open_connection(url.host, url.port)
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n"
    writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + data)
    await writer.drain()
    if after:
        await reader.readuntil(after)
    writer.transport.abort()


async def until(condition: Callable[[dict[str, Any]], bool], http: httpx.AsyncClient) -> None:
    """Ask for the model's state until it fits, for half a minute at most."""
    deadline = time.monotonic() + 30
    while not condition(card := (await http.get(f"/v1/models/{MODEL}")).json()):
        assert time.monotonic() < deadline, card
        await asyncio.sleep(0.02)


def idle(card: dict[str, Any]) -> bool:
    engine = card["engine"]
    busy = engine["running"], engine["prefilling"], engine["waiting"], engine["pages_held"]
    return busy == (0, 0, 0, 0)


@pytest.mark.parametrize("stream", [True, False])
async def test_fifty_who_hang_up_leave_nothing_behind(
    server: LiveServer, http: httpx.AsyncClient, stream: bool
):
    await until(idle, http)
    endless = greedy("Hello!", stream=stream, max_tokens=5000, ignore_eos=True)
    long = endless | {"messages": says(LONG)}
    after = b"data: " if stream else b""
    async with asyncio.TaskGroup() as group:
        for number in range(50):
            group.create_task(
                hang_up(server, endless, after) if number % 2 else hang_up(server, long, b"")
            )
    await until(idle, http)
    answer = await ask(http, **greedy("Hello!"))
    assert answer["choices"][0]["message"]["content"]


# Bodies that are broken


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"hello", 400),
        (b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', 400),
        (b"[]", 400),
        (b'{"prompt": ""}', 422),
        (b'{"prompt": []}', 422),
        (b'{"prompt": "' + b"x" * 40_000_000 + b'"}', 413),
        (b'{"prompt": "' + b"x " * 5_000_000 + b'"}', 400),
    ],
    ids=["empty", "cut", "text", "not utf-8", "list", "no text", "no prompts", "40 MB", "10 MB"],
)
async def test_a_broken_body_is_answered_clearly(http: httpx.AsyncClient, body: bytes, status: int):
    headers = {"content-type": "application/json"}
    response = await http.post("/v1/completions", content=body, headers=headers)
    assert response.status_code == status, response.text
    check("ErrorResponse", response.json())
    assert len(response.content) < 1000


async def test_a_tool_that_cant_be_held_to_is_named_as_its_protocol_does(http: httpx.AsyncClient):
    good, bad = {"type": "object", "properties": {}}, {"type": "object", "not": {}}
    said: dict[str, Any] = {"messages": says("Hello!"), "max_tokens": 5}
    functions: list[dict[str, Any]] = [
        {"type": "function", "name": name, "parameters": schema, "strict": True}
        for name, schema in (("f", good), ("g", bad))
    ]
    space = {"type": "namespace", "name": "n", "tools": functions}
    allowed = [{"type": "function", "name": "g"}]
    for path, param, body in (
        (
            "/v1/chat/completions",
            "tools[1].function.parameters",
            {
                **said,
                "tools": [{"type": "function", "function": function} for function in functions],
                "tool_choice": "required",
            },
        ),
        (
            "/v1/messages",
            "tools[1].input_schema",
            {
                **said,
                "tools": [
                    {"name": "f", "input_schema": good, "strict": True},
                    {"name": "g", "input_schema": bad, "strict": True},
                ],
                "tool_choice": {"type": "any"},
            },
        ),
        (
            "/v1/responses",
            "tools[1].parameters",
            {
                "input": "Hello!",
                "tools": functions,
                "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": allowed},
            },
        ),
        (
            "/v1/responses",
            "tools[0].tools[1].parameters",
            {"input": "Hello!", "tools": [space], "tool_choice": "required"},
        ),
    ):
        answer = await http.post(path, json=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["message"].startswith(f"`{param}` can't be honoured")
        # Anthropic's errors name a field in their words alone.
        assert error.get("param", param) == param


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/v1/chat/completions", "messages"),
        ("/v1/completions", "prompt"),
        ("/v1/responses", "input"),
    ],
)
@pytest.mark.parametrize("words", [20_000, 2_000_000], ids=["whole", "its beginning"])
async def test_a_prompt_that_is_too_long_is_named_as_its_protocol_does(
    http: httpx.AsyncClient, path: str, param: str, words: int
):
    text = "no " * words
    answer = await http.post(path, json={param: says(text) if param == "messages" else text})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert ("more than" in error["message"]) == (words == 2_000_000)


async def test_an_unknown_field_is_named_in_a_header(http: httpx.AsyncClient):
    response = await http.post("/v1/chat/completions", json=greedy("Hello!", top_a=0.1))
    assert response.status_code == 200
    assert response.headers["x-unknown-fields"] == "top_a"


# Without a server


SCRIPT = """
import asyncio
from mlx_manager.mlx_server.services.inference import generate_chat_completion, generate_completion

async def main():
    messages = [{"role": "user", "content": "Hello!"}]
    whole = await generate_chat_completion("mlx-manager/demo", messages, temperature=0)
    chunks = await generate_chat_completion(
        "mlx-manager/demo", messages, temperature=0, stream=True
    )
    parts = [chunk["choices"][0]["delta"].get("content", "") async for chunk in chunks]
    assert "".join(parts) == whole["choices"][0]["message"]["content"]
    text = await generate_completion("mlx-manager/demo", "Hello", max_tokens=3, echo=True)
    print(text["choices"][0]["text"])

asyncio.run(main())
"""


def test_scripts_need_no_server():
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("Hello")


# A small server with broken models beside the good ones


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("small")
    models = folder / "models"
    weights = make_tiny_model(models / "good") / "model.safetensors"
    shutil.copytree(models / "good", models / "truncated")
    whole = weights.read_bytes()
    (models / "truncated" / weights.name).write_bytes(whole[: len(whole) // 2])
    shutil.copytree(models / "good", models / "unknown-kind")
    config = json.loads((models / "good" / "config.json").read_text())
    (models / "unknown-kind" / "config.json").write_text(
        json.dumps(config | {"model_type": "abacus"})
    )
    (models / "empty").mkdir()
    (models / "empty" / "config.json").write_text("{")
    by_module = (sys.executable, "-m", "mlx_manager.mlx_server.main")
    with live_server(
        folder / "log.txt", by_module, max_rows=1, max_waiting=2, models_dir=models
    ) as running:
        yield running
    assert running.process.returncode == 0


@pytest.fixture
async def small_http(small_server: LiveServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=small_server.url, timeout=300) as client:
        yield client


async def test_beyond_the_limit_of_waiting_requests_there_is_429(small_http: httpx.AsyncClient):
    body = greedy("Hello!", max_tokens=100, ignore_eos=True)
    responses = await asyncio.gather(
        *[small_http.post("/v1/chat/completions", json=body) for _ in range(12)]
    )
    assert {response.status_code for response in responses} == {200, 429}
    refused = [response for response in responses if response.status_code == 429]
    assert all(int(response.headers["retry-after"]) >= 1 for response in refused)
    assert all(response.json()["error"]["code"] == "overloaded" for response in refused)
    await ask(small_http, **greedy("Hello!"))


@pytest.mark.parametrize(
    ("model", "status", "code"),
    [
        ("truncated", 400, "model_load_failed"),
        ("unknown-kind", 400, "model_not_supported"),
        ("empty", 400, "model_load_failed"),
        ("nowhere", 404, "model_not_found"),
    ],
)
async def test_a_model_that_cant_be_loaded_says_why_and_the_server_lives_on(
    small_http: httpx.AsyncClient, model: str, status: int, code: str
):
    response = await small_http.post("/v1/chat/completions", json=greedy("hi", model=model))
    assert response.status_code == status, response.text
    check("ErrorResponse", response.json())
    assert response.json()["error"]["code"] == code
    assert model in response.json()["error"]["message"]
    await ask(small_http, **greedy("Hello!", max_tokens=2))
    answer = await ask(small_http, **greedy("Hello!", max_tokens=2, model="good"))
    assert answer["model"] == "good"


async def test_every_model_on_offer_is_listed_with_its_state(small_http: httpx.AsyncClient):
    listed = (await small_http.get("/v1/models")).json()
    check("ListModelsResponse", listed)
    states = {model["id"]: model["state"] for model in listed["data"]}
    assert states[MODEL] == "loaded"
    assert {"good", "truncated"} <= states.keys()
