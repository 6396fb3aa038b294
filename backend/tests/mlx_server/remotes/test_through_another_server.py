"""A server whose models another server of ours has, with their own processes and over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from linux import needs_linux
from live import PROGRAM, LiveServer, live_server
from other_server import THOUGHT, OtherServer, other_server
from tiny_encoders import make_tiny_encoder

from mlx_manager.mlx_server.config import DEMO_MODEL as DEMO
from mlx_manager.mlx_server.config import EMBEDDED

KEY = "sk-studio-0123456789abcdef"
ALICE = "sk-alice-0123456789abcdef"
SAID = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER = {
    "name": "get_weather",
    "description": "The weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
ENDLESS = {"messages": SAID, "max_tokens": 5000, "ignore_eos": True, "stream": True}
OWN = frozenset(
    {
        *("id", "created", "created_at", "completed_at", "system_fingerprint", "request_id"),
        *("model", "item_id", "call_id", "previous_response_id", "obfuscation", "sequence_number"),
        *("prompt_tokens_details", "input_tokens_details", "cache_read_input_tokens"),
        *("input_tokens", "cache_creation_input_tokens", "prompt_eval_cached_count"),
        *("total_duration", "load_duration", "prompt_eval_duration", "eval_duration"),
    }
)
"""Fields that differ between any two answers, or by what is in a prefix cache."""


class Machines:
    """Two servers: studio has the models, and home names them in its file of models.

    other: somebody else's server.
    """

    def __init__(self, studio: LiveServer, home: LiveServer, other: OtherServer, folder: Path):
        self.studio, self.home, self.other, self.folder = studio, home, other, folder


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    folder = tmp_path_factory.mktemp("machines")
    make_tiny_encoder(folder / "models" / "bert")
    make_tiny_encoder(folder / "models" / "judge", reranker=True)
    with (
        pytest.MonkeyPatch.context() as to,
        other_server() as other,
        live_server(folder / "studio", api_key=KEY, models_dir=folder / "models") as studio,
    ):
        to.setenv("STUDIO_KEY", KEY)
        other.models = ("one",)
        (folder / "models.toml").write_text(file_of(studio.url, other.url))
        with live_server(
            folder / "home",
            models_file=folder / "models.toml",
            model="big",
            audit_log=folder / "audit",
        ) as home:
            yield Machines(studio, home, other, folder)


def file_of(studio: str, other: str) -> str:
    key = 'key_env = "STUDIO_KEY"\n'
    return (
        f'[models.big]\nurl = "{studio}/v1"\n{key}aliases = ["huge"]\n'
        f'[models.brief]\nbase = "big"\nsystem = "Answer in French."\n'
        f'[models.twins]\nurl = ["{studio}", "{other}/v1/"]\n{key}'
        f'[models.vectors]\nurl = "{studio}/v1"\nremote_model = "bert"\n{key}'
        f'[models.scores]\nurl = "{studio}/v1"\nremote_model = "judge"\n{key}'
        f'[models.locked]\nurl = "{studio}/v1"\n'
    )


@pytest.fixture(name="home")
async def _home(machines: Machines) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=machines.home.url, timeout=60) as client:
        yield client


@pytest.fixture(name="studio")
async def _studio(machines: Machines) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"authorization": f"Bearer {KEY}"}
    url = machines.studio.url
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as client:
        yield client


def alike(value: Any) -> Any:
    """Return an answer without `OWN`, and with numbers as exact as batches leave them."""
    match value:
        case float():
            return round(value, 2)
        case dict():
            return {name: alike(each) for name, each in value.items() if name not in OWN}
        case list():
            return [alike(each) for each in value]
    return value


def read(response: httpx.Response) -> Any:
    """Return an answer, or the joined texts and names of a stream, and its last event."""
    assert response.status_code == 200, response.text
    if response.headers["content-type"].startswith("application/json"):
        return alike(response.json())
    lines = response.text.replace("data: ", "").splitlines()
    events = [alike(json.loads(line)) for line in lines if line.startswith("{")]
    return texts(events), events[-1]


def texts(value: Any) -> str:
    """Return the pieces of an answer's text, joined: a stream's pieces may be larger than those
    that it is made of."""
    match value:
        case {"content": str(text)} | {"text": str(text)} | {"delta": str(text)}:
            return text
        case {"name": str(name), "arguments": str(text)}:
            return name + text
        case {"arguments": str(text)} | {"partial_json": str(text)}:
            return text
        case dict():
            return "".join(texts(each) for each in value.values())
        case list():
            return "".join(map(texts, value))
    return ""


CHAT = {"messages": SAID, "temperature": 0, "max_tokens": 12}
STRICT = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"sky": {"enum": ["blue", "grey"]}},
            "required": ["sky"],
            "additionalProperties": False,
        },
    },
}
FUNCTION = {"type": "function", "function": WEATHER}
CALLED = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
}
RESULT = [
    *SAID,
    {"role": "assistant", "content": None, "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "call_1", "content": "Sunny, 21 degrees"},
]
COMPLETION = {"prompt": "Once upon", "temperature": 0, "max_tokens": 5}
MESSAGE = {"messages": SAID, "max_tokens": 20, "temperature": 0}
OLLAMA = {"messages": SAID, "options": {"temperature": 0, "num_predict": 6}}
ASKED = {
    "chat": ("chat/completions", CHAT),
    "chat streamed": ("chat/completions", CHAT | {"stream": True}),
    "usage streamed": (
        "chat/completions",
        CHAT | {"stream": True, "stream_options": {"include_usage": True}},
    ),
    "answers": ("chat/completions", CHAT | {"n": 2, "temperature": 1, "seed": 7, "top_k": 20}),
    "seed": ("chat/completions", CHAT | {"temperature": 1, "seed": -5, "logit_bias": {"40": -9}}),
    "tools": ("chat/completions", CHAT | {"tools": [FUNCTION], "max_tokens": 40}),
    "forced tool": (
        "chat/completions",
        CHAT | {"tools": [FUNCTION], "tool_choice": "required", "max_tokens": 40},
    ),
    "tools streamed": (
        "chat/completions",
        CHAT | {"tools": [FUNCTION], "max_tokens": 40, "tool_choice": FUNCTION, "stream": True},
    ),
    "result": ("chat/completions", CHAT | {"messages": RESULT, "tools": [FUNCTION]}),
    "schema": ("chat/completions", CHAT | {"response_format": STRICT}),
    "regex": ("chat/completions", CHAT | {"guided_regex": "[ab]{3}"}),
    "logprobs": ("chat/completions", CHAT | {"logprobs": True, "top_logprobs": 3}),
    "ids": ("chat/completions", CHAT | {"return_token_ids": True, "stop": ["tool"]}),
    "stop": ("chat/completions", CHAT | {"stop": ["tool"], "stream": True}),
    "completion": ("completions", COMPLETION),
    "echo": ("completions", COMPLETION | {"echo": True, "logprobs": 2}),
    "scored": ("completions", COMPLETION | {"echo": True, "logprobs": 1, "max_tokens": 0}),
    "texts and tokens": ("completions", COMPLETION | {"prompt": [[5, 6, 7], [8, 9]], "n": 2}),
    "ids of a text": ("completions", COMPLETION | {"return_token_ids": True}),
    "unlimited": ("completions", COMPLETION | {"max_tokens": -1, "stop": [","]}),
    "completion streamed": ("completions", COMPLETION | {"stream": True, "logprobs": 0}),
    "messages": ("messages", MESSAGE),
    "messages streamed": ("messages", MESSAGE | {"stream": True}),
    "stop sequence": ("messages", MESSAGE | {"stop_sequences": ["zzz", "tool"]}),
    "messages' tools": (
        "messages",
        MESSAGE
        | {
            "max_tokens": 40,
            "tools": [{"name": "get_weather", "input_schema": WEATHER["parameters"]}],
            "tool_choice": {"type": "any"},
        },
    ),
    "counted": ("messages/count_tokens", {"messages": SAID, "system": "Be kind."}),
    "responses": ("responses", {"input": "Hello!", "max_output_tokens": 9, "temperature": 0}),
    "truncated": (
        "responses",
        {
            "input": [
                {"role": "user", "content": "a " * 9000},
                {"role": "user", "content": "Hi"},
            ],
            "truncation": "auto",
            "max_output_tokens": 9,
            "temperature": 0,
        },
    ),
    "responses streamed": (
        "responses",
        {"input": "Hello!", "max_output_tokens": 9, "temperature": 0, "stream": True},
    ),
    "ollama": ("/api/chat", OLLAMA | {"stream": False}),
    "ollama streamed": ("/api/chat", OLLAMA | {"keep_alive": "1m"}),
    "ollama's raw": (
        "/api/generate",
        {"prompt": "Once upon", "raw": True, "stream": False, "options": OLLAMA["options"]},
    ),
    "tokens": ("tokenize", {"messages": SAID, "tools": [FUNCTION], "return_token_strs": True}),
    "tokens of a text": ("tokenize", {"content": "Hello!"}),
    "text": ("detokenize", {"tokens": [40, 41, 42]}),
    "template": ("apply-template", {"messages": SAID}),
}


@pytest.mark.parametrize(("path", "body"), ASKED.values(), ids=ASKED)
async def test_an_answer_is_the_other_machines_own(
    home: httpx.AsyncClient, studio: httpx.AsyncClient, path: str, body: dict[str, Any]
):
    place = path if path.startswith("/") else f"/v1/{path}"
    there = await studio.post(place, json={**body, "model": DEMO})
    here = await home.post(place, json={**body, "model": "big"})
    assert read(here) == read(there)


ENCODED = {
    "embeddings": ("embeddings", "bert", "vectors", {"input": ["hello world", [5, 6]]}),
    "base64": ("embeddings", "bert", "vectors", {"input": "a", "encoding_format": "base64"}),
    "rerank": ("rerank", "judge", "scores", {"query": "a", "documents": ["b", "hello", "a"]}),
    "logits": (
        "rerank",
        "judge",
        "scores",
        {"query": "a", "documents": ["b", "hello"], "use_activation": False},
    ),
}


@pytest.mark.parametrize(("path", "there", "here", "body"), ENCODED.values(), ids=ENCODED)
async def test_vectors_and_scores_are_the_other_machines_own(
    home: httpx.AsyncClient, studio: httpx.AsyncClient, path: str, there: str, here: str, body: Any
):
    own = await home.post(f"/v1/{path}", json={**body, "model": here})
    theirs = await studio.post(f"/v1/{path}", json={**body, "model": there})
    assert read(own) == read(theirs)


ERRORS = {
    "too long": (
        "chat/completions",
        CHAT | {"messages": [{"role": "user", "content": "a " * 9000}]},
    ),
    "too long for messages": (
        "messages",
        MESSAGE | {"messages": [{"role": "user", "content": "a " * 9000}]},
    ),
    "a tool": (
        "responses",
        {
            "input": "Hi",
            "tool_choice": "required",
            "tools": [
                {
                    "type": "function",
                    "name": "f",
                    "strict": True,
                    "parameters": {
                        "type": "object",
                        "properties": {"a": {"type": "string", "pattern": "(?=b)"}},
                        "required": ["a"],
                        "additionalProperties": False,
                    },
                }
            ],
        },
    ),
    "a schema": (
        "responses",
        {
            "input": "Hi",
            "text": {
                "format": {
                    "type": "json_schema",
                    "name": "x",
                    "strict": True,
                    "schema": {"type": "string", "pattern": "(?=b)"},
                }
            },
        },
    ),
    "an unknown token": ("completions", COMPLETION | {"prompt": [99999]}),
    "the wrong kind": ("embeddings", {"input": "a"}),
}


@pytest.mark.parametrize(("path", "body"), ERRORS.values(), ids=ERRORS)
async def test_an_error_names_the_callers_own_field(
    home: httpx.AsyncClient, studio: httpx.AsyncClient, path: str, body: dict[str, Any]
):
    theirs = await studio.post(f"/v1/{path}", json={**body, "model": DEMO})
    own = await home.post(f"/v1/{path}", json={**body, "model": "big"})
    assert own.status_code == theirs.status_code in (400, 422)
    said, meant = own.json()["error"], theirs.json()["error"]
    assert {**said, "message": ""} == {**meant, "message": ""}


async def test_the_sdk_finds_a_model_elsewhere_and_streams_its_answer(machines: Machines):
    sdk = openai.AsyncOpenAI(base_url=f"{machines.home.url}/v1", api_key="x", max_retries=0)
    async with sdk:
        assert "big" in [model.id async for model in sdk.models.list()]
        asked: dict[str, Any] = {"model": "huge", "messages": SAID, "temperature": 0}
        whole = await sdk.chat.completions.create(**asked)
        assert whole.model == "big"
        stream = await sdk.chat.completions.create(**asked, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(pieces) == whole.choices[0].message.content


async def test_a_preset_of_a_model_elsewhere_lays_its_table_over_requests(home: httpx.AsyncClient):
    body = {"messages": SAID}
    plain = await home.post("/v1/apply-template", json={**body, "model": "big"})
    brief = await home.post("/v1/apply-template", json={**body, "model": "big:brief"})
    assert "French" not in plain.json()["prompt"]
    assert "Answer in French." in brief.json()["prompt"]


# Those who go


async def until(condition: Callable[[], Any], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def running(client: httpx.AsyncClient) -> Callable[[], Any]:
    """Return a question: how many rows are under way at the other machine."""

    async def ask() -> int:
        engine = (await client.get(f"/v1/models/{DEMO}")).json()["engine"]
        return int(engine["running"] + engine["prefilling"] + engine["waiting"])

    return ask


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_hangs_up_ends_the_request_there(
    home: httpx.AsyncClient, studio: httpx.AsyncClient, stream: bool
):
    rows = running(studio)

    async def idle() -> bool:
        return await rows() == 0

    asking = asyncio.create_task(
        home.post("/v1/chat/completions", json={**ENDLESS, "model": "big", "stream": stream})
    )
    await until(rows)
    asking.cancel()
    await until(idle)


async def test_the_owner_sees_and_cancels_a_request_there(
    home: httpx.AsyncClient, studio: httpx.AsyncClient
):
    rows = running(studio)

    async def progress() -> bool:
        found = (await home.get("/v1/admin/requests")).json()["data"]
        return any(call["tokens"] > 2 and call["prompt_tokens"] == 18 for call in found)

    async def idle() -> bool:
        return await rows() == 0

    asking = asyncio.create_task(
        home.post("/v1/chat/completions", json={**ENDLESS, "model": "big", "stream": False})
    )
    await until(progress)
    [call] = (await home.get("/v1/admin/requests")).json()["data"]
    await home.post(f"/v1/admin/requests/{call['id']}/cancel")
    assert (await asking).json()["error"]["code"] == "request_cancelled"
    await until(idle)


# Where a model is


async def test_the_list_has_the_models_of_both_and_says_where_they_are(
    home: httpx.AsyncClient, machines: Machines
):
    listed = (await home.get("/v1/models")).json()["data"]
    cards = {card["id"]: card for card in listed}
    assert listed[0]["id"] == "big"
    assert cards.keys() == {"big", "brief", "twins", "vectors", "scores", "locked", *EMBEDDED}
    big = cards["big"]
    assert (big["origin"], big["state"], big["root"]) == ("remote", "loaded", DEMO)
    assert (big["kind"], big["context_length"], big["type"]) == ("text", 8192, "llm")
    [server] = big["servers"]
    assert (server["url"], server["health"]) == (f"{machines.studio.url}/v1", "up")
    assert "servers" not in cards[DEMO]


def test_the_program_lists_where_models_are(machines: Machines):
    ran = subprocess.run(
        [str(PROGRAM), "list", "--url", machines.home.url],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    [line] = [line for line in ran.stdout.splitlines() if line.split()[:1] == ["big"]]
    assert f"{machines.studio.url}/v1 (up)" in line


@needs_linux("the files that a process has mapped")
def test_the_process_that_passes_requests_on_has_not_loaded_mlx(machines: Machines):
    maps = Path(f"/proc/{machines.home.process.pid}/maps").read_text()
    assert "libmlx" not in maps
    assert not children(machines.home.process.pid)


@pytest.mark.parametrize("name", ["big", "brief"])
@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("models/pin", {}),
        ("prefix-cache/clear", {}),
        ("prefix-cache/warm", {"text": "You are told a lot."}),
    ],
)
async def test_what_is_done_to_a_loaded_model_is_refused_for_one_elsewhere(
    home: httpx.AsyncClient, path: str, more: dict[str, Any], name: str
):
    asked = await home.post(f"/v1/admin/{path}", json={"model": name, **more})
    assert asked.status_code == 400
    error = asked.json()["error"]
    assert "another machine" in error["message"]
    assert error["param"] == "model"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/tokenize", {"prompt": "a"}),
        ("/v1/detokenize", {"tokens": [1]}),
        ("/v1/apply-template", {"messages": SAID}),
        ("/v1/messages/count_tokens", {"messages": SAID}),
    ],
)
async def test_a_request_that_goes_in_a_circle_is_ended(
    home: httpx.AsyncClient, path: str, body: dict[str, Any]
):
    headers = {"x-mlx-manager-hops": "4"}
    model = "vectors" if path == "/v1/embeddings" else "big"
    answer = await home.post(path, json={**body, "model": model}, headers=headers)
    assert (answer.status_code, "circle" in answer.text) == (502, True)


async def test_a_refused_key_is_the_owners_fault_and_not_the_callers(home: httpx.AsyncClient):
    answer = await home.post("/v1/chat/completions", json={**CHAT, "model": "locked"})
    assert answer.status_code in (502, 503)
    assert "key_env" in answer.json()["error"]["message"]


# Counting


async def test_metrics_and_audit_count_as_for_models_here(
    home: httpx.AsyncClient, machines: Machines
):
    body = {**CHAT, "model": "huge", "max_tokens": 3}
    answer = await home.post("/v1/chat/completions", json=body, headers={"x-request-id": "counted"})
    assert answer.json()["usage"]["total_tokens"] == 21

    async def recorded() -> bool:
        with closing(sqlite3.connect(machines.folder / "audit")) as log:
            names = [
                row[0] for row in log.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            ]
            rows = [row for name in names for row in log.execute(f"SELECT * FROM {name}")]
        return any("counted" in row and "big" in row and 18 in row and 3 in row for row in rows)

    await until(recorded)
    metrics = (await home.get("/metrics")).text
    server = f"{machines.studio.url}/v1"
    assert f'remote_up{{model_name="big",server="{server}"}} 1.0' in metrics
    assert 'request_success_total{finished_reason="length",model_name="big"}' in metrics


# A machine that fails: the last tests, since it does not come back


async def test_a_killed_machine_ends_a_stream_with_one_error_and_another_answers(
    home: httpx.AsyncClient, machines: Machines
):
    body = {**ENDLESS, "model": "twins"}
    async with home.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = answer.aiter_lines()
        async for line in lines:
            if '"content"' in line:
                break
        workers = children(machines.studio.process.pid)
        for pid in (machines.studio.process.pid, *workers):
            os.kill(pid, signal.SIGKILL)
        rest = [line async for line in lines if line.startswith("data:")]
    failed = [line for line in rest if '"error"' in line]
    assert failed == rest[-1:]
    assert json.loads(failed[0].removeprefix("data:"))["error"]["code"] == "remote_failed"

    for _ in range(3):
        twins = await home.post("/v1/chat/completions", json={**CHAT, "model": "twins"})
        assert twins.status_code == 200, twins.text
        assert twins.json()["choices"][0]["message"]["reasoning_content"] == "".join(THOUGHT)
    lone = await home.post("/v1/chat/completions", json={**CHAT, "model": "big"})
    assert (lone.status_code, lone.json()["error"]["code"]) == (503, "remote_unavailable")
    assert int(lone.headers["retry-after"]) >= 1
    cards = {card["id"]: card for card in (await home.get("/v1/models")).json()["data"]}
    assert cards["big"]["state"] == "down"
    assert machines.studio.url in cards["big"]["failure"]
    assert cards["twins"]["state"] == "loaded"
    assert [server["health"] for server in cards["twins"]["servers"]] == ["down", "up"]


def children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in listed.read_text().split()] if listed.exists() else []


def test_no_key_is_in_a_log(machines: Machines):
    for name in ("home", "studio"):
        assert KEY not in (machines.folder / name).read_text()
