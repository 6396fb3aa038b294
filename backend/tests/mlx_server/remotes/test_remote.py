"""A model on servers of somebody else's, real ones, and what they do wrong."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from other_server import ANSWER, THOUGHT, OtherServer, other_server

from mlx_manager.mlx_server.config import MLXServerSettings
from mlx_manager.mlx_server.core import (
    Admitted,
    Conversation,
    Event,
    Finished,
    GenerationRequest,
    Grammar,
    Image,
    JsonObject,
    JsonSchema,
    Message,
    NamedTool,
    ReasoningDelta,
    Regex,
    Sampling,
    Started,
    StopRules,
    Text,
    TextDelta,
    Tool,
    Usage,
)
from mlx_manager.mlx_server.errors import (
    ContextLengthExceeded,
    MLXManagerError,
    RemoteFailed,
    RemoteUnavailable,
    UnsupportedParameter,
)
from mlx_manager.mlx_server.main import create_app
from mlx_manager.mlx_server.remotes.breaker import FAILURES
from mlx_manager.mlx_server.remotes.remote import Remote
from mlx_manager.mlx_server.remotes.remotes import Placement, Remotes

KEY = "sk-0123456789abcdef"
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
    "gg=="
)
OPEN = frozenset({"temperature", "top_p", "top_k", "min_p"})
TALK = Conversation((Message("user", "Hello!"),))
ASKED = GenerationRequest(
    "big",
    TALK,
    Sampling(silent=OPEN | {"presence_penalty", "frequency_penalty", "repetition_penalty"}),
    request_id="chatcmpl-1",
)


@pytest.fixture(name="one")
def _one() -> Iterator[OtherServer]:
    with other_server() as server:
        server.models = ("one",)
        yield server


@pytest.fixture(name="two")
def _two() -> Iterator[OtherServer]:
    with other_server() as server:
        server.models = ("one",)
        yield server


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THEIR_KEY", KEY)


@asynccontextmanager
async def remote(
    *servers: OtherServer | str, model: str | None = None, silence: float = 30.0
) -> AsyncIterator[Remote]:
    urls = tuple(s if isinstance(s, str) else f"{s.url}/v1" for s in servers)
    remotes = Remotes({"big": Placement(urls, "THEIR_KEY", model, None, silence)})
    try:
        found = remotes.get("big")
        assert found is not None
        yield found
    finally:
        await remotes.close()


async def ask(model: Remote, request: GenerationRequest = ASKED) -> list[Event]:
    events: list[Event] = []
    await model.generate(request, lambda some, _: events.extend(some))
    return events


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  # the servers are threads
            await asyncio.sleep(0.01)


def said(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


async def test_an_answer_of_a_server_with_habits_is_read(one: OtherServer) -> None:
    async with remote(one) as model:
        events = await ask(model)
    assert isinstance(events[0], Admitted)
    assert isinstance(events[1], Started)
    assert said(events) == "".join(ANSWER)
    thought = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    assert thought == "".join(THOUGHT)
    assert events[-1] == Finished("stop", Usage(11, 7))
    [body] = one.bodies
    assert body["model"] == "one"
    assert not body.keys() & OPEN
    assert one.headers[0]["authorization"] == f"Bearer {KEY}"


async def test_a_server_without_counts_has_its_pieces_counted(one: OtherServer) -> None:
    one.usage = False
    async with remote(one) as model:
        end = (await ask(model))[-1]
    assert isinstance(end, Finished)
    assert end.usage == Usage(0, len(THOUGHT) + len(ANSWER))


BEYOND: dict[str, GenerationRequest] = {
    "top_k": GenerationRequest("big", ASKED.prompt, Sampling(top_k=5)),
    "min_p": GenerationRequest("big", ASKED.prompt, Sampling(min_p=0.1)),
    "repetition_penalty": GenerationRequest("big", ASKED.prompt, Sampling(repetition_penalty=2)),
    "ignore_eos": GenerationRequest("big", ASKED.prompt, stop=StopRules(ignore_eos=True)),
    "stop_token_ids": GenerationRequest("big", ASKED.prompt, stop=StopRules(token_ids=(3,))),
    "min_tokens": GenerationRequest("big", ASKED.prompt, stop=StopRules(min_tokens=3)),
    "thinking_token_budget": GenerationRequest("big", ASKED.prompt, thinking_budget=3),
    "return_token_ids": GenerationRequest("big", ASKED.prompt, return_ids=True),
    "cache_salt": GenerationRequest("big", ASKED.prompt, cache_salt="mine\0"),
    "speculation": GenerationRequest("big", ASKED.prompt, speculation="off"),
    "guided_regex": GenerationRequest("big", ASKED.prompt, constraint=Regex("a", "guided_regex")),
    "grammar": GenerationRequest("big", ASKED.prompt, constraint=Grammar("a", "grammar")),
    "context_length": GenerationRequest("big", ASKED.prompt, context_length=9),
    "max_tokens": GenerationRequest("big", Text("a")),
    "response_format": GenerationRequest("big", Text("a"), max_tokens=9, constraint=JsonObject()),
    "add_generation_prompt": GenerationRequest(
        "big", Conversation((), add_generation_prompt=False)
    ),
    "continue_final_message": GenerationRequest(
        "big", Conversation((), continue_final_message=True)
    ),
    "chat_template_kwargs.style": GenerationRequest(
        "big", Conversation((), template_args={"style": "short"})
    ),
}


TOOLS = (Tool("f"), Tool("g"))
ONE_TOOL = replace(TALK, tools=TOOLS[:1], tool_choice=NamedTool("f"))
SCHEMA = JsonSchema('{"type": "array"}')
CHAT_FORM = {
    "type": "json_schema",
    "json_schema": {"name": "answer", "schema": {"type": "array"}, "strict": False},
}
KNOWN: dict[str, GenerationRequest] = {
    "all tokens": GenerationRequest("big", ASKED.prompt, Sampling(top_k=0)),
    "schema": GenerationRequest("big", Text("a"), max_tokens=9, constraint=SCHEMA),
    "chat's schema": GenerationRequest("big", ASKED.prompt, constraint=SCHEMA),
    "tool_choice": GenerationRequest("big", replace(ONE_TOOL, tools=TOOLS)),
    "its only tool": GenerationRequest("big", ONE_TOOL),
    "logprobs": GenerationRequest("big", ASKED.prompt, logprobs=0),
    "suffix": GenerationRequest("big", Text("a", "b"), max_tokens=9),
    "echo": GenerationRequest("big", Text("a"), max_tokens=9, echo=True),
}
"""Requests that one known server or another takes in words of its own, or not at all."""


@pytest.mark.parametrize(("param", "request_"), BEYOND.items(), ids=BEYOND)
async def test_what_an_unknown_server_may_leave_out_is_refused_by_name(
    one: OtherServer, param: str, request_: GenerationRequest
) -> None:
    async with remote(one) as model:
        with pytest.raises(UnsupportedParameter) as error:
            await ask(model, request_)
    assert error.value.param == param
    assert one.url in error.value.message
    assert not one.bodies


@pytest.mark.parametrize(
    ("owner", "request_", "fields"),
    [
        ("vllm", "top_k", {"top_k": 5}),
        ("vllm", "guided_regex", {"structured_outputs": {"regex": "a"}}),
        ("vllm", "max_tokens", {"max_tokens": None}),
        ("vllm", "cache_salt", {"cache_salt": hashlib.sha256(b"mine\0").hexdigest()}),
        ("llamacpp", "repetition_penalty", {"repeat_penalty": 2}),
        ("llamacpp", "grammar", {"grammar": "a"}),
        ("llamacpp", "max_tokens", {"max_tokens": -1}),
        ("sglang", "grammar", {"ebnf": "a"}),
        ("sglang", "guided_regex", {"regex": "a"}),
        ("sglang", "cache_salt", {"cache_salt": hashlib.sha256(b"mine\0").hexdigest()}),
        ("sglang", "all tokens", {"top_k": -1}),
        ("vllm", "all tokens", {"top_k": 0}),
        ("sglang", "response_format", {"response_format": {"type": "json_object"}}),
        ("llamacpp", "response_format", {"json_schema": {"type": "object"}}),
        ("llamacpp", "schema", {"json_schema": {"type": "array"}}),
        ("llamacpp", "chat's schema", {"response_format": CHAT_FORM}),
        ("llamacpp", "its only tool", {"tool_choice": "required"}),
        ("vllm", "tool_choice", {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
        ("llamacpp", "logprobs", {"logprobs": True, "top_logprobs": 1}),
        ("other", "logprobs", {"logprobs": True, "top_logprobs": 0}),
        ("other", "suffix", {"suffix": "b"}),
    ],
)
async def test_servers_that_are_known_are_asked_in_their_own_words(
    one: OtherServer, owner: str, request_: str, fields: dict[str, Any]
) -> None:
    one.card = {"owned_by": owner}
    async with remote(one) as model:
        await ask(model, BEYOND.get(request_) or KNOWN[request_])
    assert {name: one.bodies[0][name] for name in fields} == fields


@pytest.mark.parametrize(
    ("owner", "param"),
    [
        ("llamacpp", "tool_choice"),
        ("llamacpp", "suffix"),
        ("llamacpp", "echo"),
        ("sglang", "suffix"),
        ("sglang", "max_tokens"),
        ("vllm", "suffix"),
    ],
)
async def test_what_a_known_server_leaves_out_or_fails_at_is_refused_by_name(
    one: OtherServer, owner: str, param: str
) -> None:
    one.card = {"owned_by": owner, "max_model_len": 4096}
    async with remote(one) as model:
        with pytest.raises(UnsupportedParameter) as error:
            await ask(model, BEYOND.get(param) or KNOWN[param])
    assert error.value.param == param
    assert not one.bodies


async def test_a_server_that_is_off_is_followed_by_the_next(one: OtherServer) -> None:
    async with remote("http://127.0.0.1:9/v1", one) as model:
        assert said(await ask(model)) == "".join(ANSWER)
        assert [server.health for server in model.servers()] == ["down", "up"]


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_a_server_that_can_not_answer_now_is_followed_by_the_next(
    one: OtherServer, two: OtherServer, status: int
) -> None:
    one.status = status
    async with remote(one, two) as model:
        assert said(await ask(model)) == "".join(ANSWER)
    assert len(one.bodies) == len(two.bodies) == 1


@pytest.mark.parametrize("status", [400, 404, 422, 500])
async def test_a_request_that_is_at_fault_goes_to_no_other_server(
    one: OtherServer, two: OtherServer, status: int
) -> None:
    one.status = status
    async with remote(one, two) as model:
        with pytest.raises(MLXManagerError, match="no such luck"):
            await ask(model)
    assert not two.bodies


async def test_a_server_that_fails_again_and_again_is_left_alone(one: OtherServer) -> None:
    one.status = 503
    async with remote(one) as model:
        for _ in range(FAILURES):
            with pytest.raises(MLXManagerError):
                await ask(model)
        with pytest.raises(RemoteUnavailable, match="no such luck") as error:
            await ask(model)
        assert error.value.retry_after is not None
        assert len(one.bodies) == FAILURES
        assert model.failure


async def test_a_request_goes_to_the_server_with_the_fewest(
    one: OtherServer, two: OtherServer
) -> None:
    one.endless = two.endless = True
    async with remote(one, two) as model:
        asking = [asyncio.create_task(ask(model)) for _ in range(6)]
        await until(lambda: one.running + two.running == 6)
        assert one.running == two.running == 3
        assert [server.requests for server in model.servers()] == [3, 3]
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
        assert await asyncio.to_thread(one.left.wait, 10)
        assert await asyncio.to_thread(two.left.wait, 10)
        assert model.leases == 0


async def test_an_answer_that_is_cut_is_an_error_and_is_not_begun_anew(
    one: OtherServer, two: OtherServer
) -> None:
    one.cut = True
    async with remote(one, two) as model:
        events: list[Event] = []
        with pytest.raises(RemoteFailed, match="before it was whole"):
            await model.generate(ASKED, lambda some, _: events.extend(some))
    assert said(events) == "".join(ANSWER)
    assert not two.bodies


async def test_a_silent_server_is_given_up(one: OtherServer, two: OtherServer) -> None:
    one.silent = True
    async with remote(one, two, silence=1.0) as model:
        assert said(await ask(model)) == "".join(ANSWER)
    assert await asyncio.to_thread(one.left.wait, 10)


async def test_no_redirect_is_followed(one: OtherServer, two: OtherServer) -> None:
    async with remote(one) as model:
        await model.learn()
        one.moved = f"{two.url}/v1/chat/completions"
        with pytest.raises(RemoteFailed, match="redirects"):
            await ask(model)
    async with remote(one) as model:
        one.moved = f"{two.url}/v1/models"
        await model.learn()
        assert model.facts is None
        assert "redirects" in (model.failure or "")
    assert not two.headers


async def test_the_environments_proxy_is_not_used(
    one: OtherServer, two: OtherServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, two.url)
    monkeypatch.delenv("no_proxy", raising=False)
    async with remote(one) as model:
        await ask(model)
    assert one.bodies
    assert not two.bodies


@pytest.mark.parametrize(
    "content",
    [
        b"data: {\n\n",
        b"data: []\n\n",
        b'data: {"usage": {"prompt_tokens": Infinity}}\n\n',
        b'data: {"choices": [3]}\n\n',
        b"<html>",
        b"",
        b"\xff\xfe",
    ],
)
async def test_what_is_no_answer_is_told(one: OtherServer, content: bytes) -> None:
    async with remote(one) as model:
        await model.learn()
        one.strange = content
        with pytest.raises((RemoteFailed, RemoteUnavailable)):
            await ask(model)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"data": [3]}', b'{"data": []}'])
async def test_what_is_no_list_of_models_is_told(one: OtherServer, content: bytes) -> None:
    one.strange = content
    async with remote(one) as model:
        with pytest.raises(MLXManagerError, match=one.url):
            await ask(model)


async def test_a_card_with_another_kind_of_kind_is_read_without_it(one: OtherServer) -> None:
    one.card = {"kind": ["text"], "family": 7, "input_modalities": "text", "meta": []}
    async with remote(one) as model:
        assert said(await ask(model)) == "".join(ANSWER)
        assert model.kind is None


@pytest.mark.parametrize("content", [b"{}", b'{"tokens": [1]}', b"[]"])
async def test_what_is_no_answer_of_a_tokenizers_is_told(one: OtherServer, content: bytes) -> None:
    one.card = {"owned_by": "vllm"}
    async with remote(one) as model:
        await model.learn()
        one.strange = content
        with pytest.raises(RemoteFailed, match="does not answer as a model server does"):
            await model.tokenize(TALK)


async def test_which_of_several_models_is_meant_must_be_said(one: OtherServer) -> None:
    one.models = ("a", "b")
    async with remote(one) as model:
        with pytest.raises(MLXManagerError, match="remote_model"):
            await ask(model)
    async with remote(one, model="alias") as model:
        await ask(model)
    one.models = ("a", "big")
    async with remote(one) as model:
        await ask(model)
    assert [body["model"] for body in one.bodies] == ["alias", "big"]


async def test_an_error_in_a_stream_is_the_requests(one: OtherServer) -> None:
    message = "This model's maximum context length is 10 tokens. However, you requested 12 tokens."
    event = {"error": {"message": message, "type": "BadRequestError", "code": 400}}
    async with remote(one) as model:
        await model.learn()
        one.strange = f"data: {json.dumps(event)}\n\n".encode()
        with pytest.raises(ContextLengthExceeded) as error:
            await ask(model)
    assert (error.value.context, error.value.tokens) == (10, 12)


async def test_a_key_that_is_not_set_is_named_and_nothing_is_asked(
    one: OtherServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("THEIR_KEY")
    async with remote(one) as model:
        with pytest.raises(RemoteFailed, match="THEIR_KEY"):
            await ask(model)
        assert model.failure
    assert not one.headers


async def test_a_picture_goes_along(one: OtherServer) -> None:
    data = base64.b64decode(PIXEL)
    picture = Image(data, hashlib.sha256(data).hexdigest(), 1, 1)
    asked = replace(ASKED, prompt=Conversation((Message("user", ("What is it?", picture)),)))
    async with remote(one) as model:
        await ask(model, asked)
    [message] = one.bodies[0]["messages"]
    text, image = message["content"]
    assert text == {"type": "text", "text": "What is it?"}
    assert image["image_url"]["url"] == f"data:image/png;base64,{PIXEL}"


@asynccontextmanager
async def served(
    folder: Path, server: OtherServer, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """Serve `big`, which is at the other server, and yield a client."""
    file = folder / "models.toml"
    file.write_text(f'[models.big]\nurl = "{server.url}/v1"\n')
    app = create_app(MLXServerSettings(models_file=file, model="big", hf_cache=False, **settings))
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client,
    ):
        await app.state.server.started.wait()
        yield client


HELLO = {"model": "big", "messages": [{"role": "user", "content": "Hello!"}]}


async def test_a_keys_tokens_are_counted_though_they_are_known_only_at_the_end(
    one: OtherServer, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    secret = "sk-alice"
    digest = hashlib.sha256(secret.encode()).hexdigest()
    keys.write_text(f'[alice]\nsha256 = "{digest}"\ntokens_per_minute = 100\n')
    headers = {"authorization": f"Bearer {secret}"}
    async with served(tmp_path, one, api_keys_file=keys) as client:
        for _ in range(2):
            answer = await client.post("/v1/chat/completions", json=HELLO, headers=headers)
            assert answer.json()["usage"]["total_tokens"] == 18
        left = int(answer.headers["x-ratelimit-remaining-tokens"])
    # The header goes out before the second answer is charged, or after.
    assert 100 - 2 * 18 <= left <= 100 - 18 + 5


async def test_the_default_model_may_be_on_a_machine_that_is_off(tmp_path: Path) -> None:
    async with served(tmp_path, OtherServer("http://127.0.0.1:9")) as client:
        answer = await client.post("/v1/chat/completions", json=HELLO)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "remote_unavailable")
        [big, *_] = (await client.get("/v1/models")).json()["data"]
    assert (big["id"], big["state"], big["origin"]) == ("big", "down", "remote")


async def test_settings_that_are_read_again_move_a_model(
    one: OtherServer, two: OtherServer, tmp_path: Path
) -> None:
    async with served(tmp_path, one) as client:
        await client.post("/v1/chat/completions", json=HELLO)
        (tmp_path / "models.toml").write_text(f'[models.big]\nurl = "{two.url}/v1"\n')
        moved = await client.post("/v1/admin/reload")
        assert moved.json()["changed"] == ["big"]
        await client.post("/v1/chat/completions", json=HELLO)
    assert len(one.bodies) == len(two.bodies) == 1


async def test_no_key_is_logged_or_told(one: OtherServer, caplog: pytest.LogCaptureFixture) -> None:
    one.status = 401
    with caplog.at_level(logging.DEBUG):
        async with remote(one) as model:
            with pytest.raises(RemoteFailed) as error:
                await ask(model)
    assert KEY not in caplog.text
    assert KEY not in error.value.message
    assert "key_env" in error.value.message
