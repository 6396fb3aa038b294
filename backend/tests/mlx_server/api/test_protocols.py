"""What is the same whatever protocol a request comes by: there is one path for all of them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from anthropic.types import RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from openai.types.responses import ResponseStreamEvent
from openai_spec import check
from scripted import MODEL, Script, ScriptedBackend, ScriptedPool, says
from sdk_models import events, strictly

from mlx_manager.mlx_server.api.connection import MOST_PIECES
from mlx_manager.mlx_server.config import MLXServerSettings
from mlx_manager.mlx_server.core import (
    Admitted,
    Event,
    Finished,
    GenerationRequest,
    Message,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)
from mlx_manager.mlx_server.errors import (
    ContextLengthExceeded,
    GenerationFailed,
    MLXManagerError,
    OutOfMemory,
    Overloaded,
)
from mlx_manager.mlx_server.main import create_app


@dataclass(frozen=True)
class Protocol:
    """How to say the same in one protocol, and how to read what it answers."""

    path: str
    body: dict[str, Any]
    limit: str
    text: Callable[[Any], str]
    tokens: Callable[[Any], tuple[int, int, int]]
    cut: Callable[[Any], bool]
    bad: tuple[str, Any] = ("temperature", 5)

    @property
    def out_of_range(self) -> int:
        """The status of a value that is."""
        return 422 if self.path in ("/v1/chat/completions", "/v1/completions") else 400


SAID = [{"role": "user", "content": "hi"}]
CHAT = Protocol(
    "/v1/chat/completions",
    {"messages": SAID, "stream_options": {"include_usage": True}},
    "max_tokens",
    lambda body: body["choices"][0]["message"]["content"],
    lambda body: (
        body["usage"]["prompt_tokens"],
        body["usage"]["prompt_tokens_details"]["cached_tokens"],
        body["usage"]["completion_tokens"],
    ),
    lambda body: body["choices"][0]["finish_reason"] == "length",
)
COMPLETIONS = Protocol(
    "/v1/completions",
    {"prompt": "hi", "stream_options": {"include_usage": True}},
    "max_tokens",
    lambda body: body["choices"][0]["text"],
    CHAT.tokens,
    CHAT.cut,
)
MESSAGES = Protocol(
    "/v1/messages",
    {"messages": SAID, "max_tokens": 2},
    "max_tokens",
    lambda body: "".join(block["text"] for block in body["content"]),
    lambda body: (
        body["usage"]["input_tokens"] + body["usage"]["cache_read_input_tokens"],
        body["usage"]["cache_read_input_tokens"],
        body["usage"]["output_tokens"],
    ),
    lambda body: body["stop_reason"] == "max_tokens",
)
RESPONSES = Protocol(
    "/v1/responses",
    {"input": "hi"},
    "max_output_tokens",
    lambda body: "".join(part["text"] for item in body["output"] for part in item["content"]),
    lambda body: (
        body["usage"]["input_tokens"],
        body["usage"]["input_tokens_details"]["cached_tokens"],
        body["usage"]["output_tokens"],
    ),
    lambda body: body["incomplete_details"] == {"reason": "max_output_tokens"},
)
EMBEDDINGS = Protocol(
    "/v1/embeddings",
    {"input": ["hi", "ho"]},
    "",
    lambda body: str([item["embedding"][0] for item in body["data"]]),
    lambda body: (body["usage"]["prompt_tokens"], 0, 0),
    lambda body: False,
    bad=("dimensions", 0),
)
RERANK = Protocol(
    "/v1/rerank",
    {"query": "hi", "documents": ["a", "b"]},
    "",
    lambda body: str([result["relevance_score"] for result in body["results"]]),
    EMBEDDINGS.tokens,
    EMBEDDINGS.cut,
    bad=("top_n", -1),
)
ALL = [CHAT, COMPLETIONS, MESSAGES, RESPONSES]
READING = [EMBEDDINGS, RERANK]
"""What only reads has no streams."""

everywhere = pytest.mark.parametrize("protocol", ALL, ids=lambda protocol: protocol.path)
both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
even_reading = pytest.mark.parametrize(
    "protocol", [*ALL, *READING], ids=lambda protocol: protocol.path
)
every_way = pytest.mark.parametrize(
    ("protocol", "stream"),
    [(protocol, stream) for protocol in ALL for stream in (False, True)]
    + [(protocol, False) for protocol in READING],
    ids=lambda given: given.path if isinstance(given, Protocol) else ["whole", "streamed"][given],
)


def asked(protocol: Protocol, stream: bool, **fields: Any) -> dict[str, Any]:
    body = protocol.body | fields
    if protocol not in READING:
        body |= {"stream": stream}
    if not stream:
        body.pop("stream_options", None)
    return body


def parts(response: httpx.Response) -> list[dict[str, Any]]:
    """The objects of a stream, checked against the SDKs' models where those have names."""
    assert response.headers["content-type"].startswith("text/event-stream")
    if "event: " not in response.text:
        lines = [line for line in response.text.split("\n\n") if line.startswith("data: {")]
        return [json.loads(line.removeprefix("data: ")) for line in lines]
    named = [(name, data) for name, data in events(response.text) if name != "ping"]
    for name, data in named:
        assert data["type"] == name
        if name == "error":
            strictly(ErrorResponse, data)
        else:
            kind = ResponseStreamEvent if name.startswith("response.") else RawMessageStreamEvent
            strictly(kind, data)
    return [data for _, data in named]


def joined(protocol: Protocol, response: httpx.Response) -> Any:
    """A stream as the body that would have come whole."""
    found = parts(response)
    if protocol is RESPONSES:
        return found[-1]["response"]
    if protocol is MESSAGES:
        body = found[0]["message"]
        texts = [part["delta"]["text"] for part in found if part["type"] == "content_block_delta"]
        body["content"] = [{"text": "".join(texts)}]
        ending = next(part for part in found if part["type"] == "message_delta")
        return body | ending["delta"] | {"usage": ending["usage"]}
    choices = [part["choices"][0] for part in found if part["choices"]]
    texts = [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices]  # fmt: skip
    whole = {"text": "".join(texts), "message": {"content": "".join(texts)}}
    return {
        "choices": [whole | {"finish_reason": choices[-1]["finish_reason"]}],
        "usage": found[-1]["usage"],
    }


async def answered(
    client: httpx.AsyncClient, protocol: Protocol, stream: bool, **fields: Any
) -> Any:
    response = await client.post(protocol.path, json=asked(protocol, stream, **fields))
    assert response.status_code == 200, response.text
    return joined(protocol, response) if stream else response.json()


def failure(protocol: Protocol, body: Any) -> str:
    """The message of an error, which must have the protocol's shape."""
    if protocol is MESSAGES:
        strictly(ErrorResponse, body)
        assert body["request_id"]
    else:
        check("ErrorResponse", body)
    found: str = body["error"]["message"]
    return found


@everywhere
@both
async def test_more_tokens_may_be_asked_for_than_a_counter_holds(serve, protocol, stream):
    async with serve() as client:
        body = await answered(client, protocol, stream, **{protocol.limit: 10**400})
        assert protocol.text(body) == "Hello"
        counted = (await client.get("/metrics")).text
    assert re.search(r"request_params_max_tokens_count\{.*\} 1.0", counted)


@everywhere
@both
async def test_text_usage_and_end_are_told(serve, protocol: Protocol, stream: bool):
    script = says("Hel", "lo", prompt_tokens=30, cached=16)
    async with serve(lambda _: script) as client:
        body = await answered(client, protocol, stream)
    assert protocol.text(body) == "Hello"
    assert protocol.tokens(body) == (30, 16, 2)
    assert not protocol.cut(body)


@everywhere
@both
async def test_a_cut_by_length_is_told(serve, protocol: Protocol, stream: bool):
    backend = ScriptedBackend(lambda _: says("Hel", "lo", reason="length"))
    async with serve(pool=ScriptedPool(backend)) as client:
        body = await answered(client, protocol, stream, **{protocol.limit: 2})
    assert backend.requests[0].max_tokens == 2
    assert protocol.cut(body)


@every_way
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Overloaded("It is full.", retry_after=3), 429),
        (OutOfMemory("No room."), 503),
        (ContextLengthExceeded("5 tokens > 4"), 400),
        (GenerationFailed("It broke."), 500),
    ],
)
async def test_a_failure_before_the_first_event_has_its_status(
    serve, protocol: Protocol, stream: bool, error: MLXManagerError, status: int
):
    async with serve(lambda _: [error]) as client:
        response = await client.post(protocol.path, json=asked(protocol, stream))
    assert response.status_code == status
    assert error.message in failure(protocol, response.json())
    wait = None if error.retry_after is None else str(error.retry_after)
    assert response.headers.get("retry-after") == wait
    assert response.headers["request-id"] == response.headers["x-request-id"]


@every_way
async def test_an_unknown_model_a_bad_value_and_a_broken_body_are_told(
    serve, protocol: Protocol, stream: bool
):
    headers = {"content-type": "application/json"}
    async with serve() as client:
        missing = await client.post(protocol.path, json=asked(protocol, stream, model="gpt-9"))
        name, value = protocol.bad
        hot = await client.post(protocol.path, json=asked(protocol, stream, **{name: value}))
        broken = await client.post(protocol.path, content=b"{", headers=headers)
    for response, status, word in (
        (missing, 404, "gpt-9"),
        (hot, protocol.out_of_range, name),
        (broken, 400, "JSON"),
    ):
        assert response.status_code == status
        assert word in failure(protocol, response.json())


@even_reading
async def test_a_model_name_longer_than_any_path_is_refused(serve, protocol: Protocol):
    async with serve() as client:
        for length, status in ((4096, 404), (4097, protocol.out_of_range)):
            body = asked(protocol, False, model="x" * length)
            refused = await client.post(protocol.path, json=body)
            assert refused.status_code == status
    assert "`model` should have at most 4096 char" in failure(protocol, refused.json())


@even_reading
async def test_a_body_too_large_and_a_wrong_method_are_told(serve, protocol: Protocol):
    async with serve(max_body_mb=0.001) as client:
        large = await client.post(protocol.path, json=asked(protocol, False, x="x" * 2000))
        wrong = await client.put(protocol.path)
    assert (large.status_code, wrong.status_code) == (413, 405)
    for response in (large, wrong):
        assert failure(protocol, response.json())


@everywhere
@pytest.mark.parametrize("error", [GenerationFailed("It broke."), ValueError("secret")])
async def test_a_failure_in_a_stream_is_its_last_event(serve, protocol: Protocol, error: Exception):
    async with serve(lambda _: [[Started(1)], [TextDelta("a")], error]) as client:
        response = await client.post(protocol.path, json=asked(protocol, True))
    assert response.status_code == 200
    last = parts(response)[-1]
    if protocol is RESPONSES:
        assert last["type"] == "response.failed"
        told = last["response"]["error"]["message"]
    else:
        told = failure(protocol, last)
    assert "It broke." in told or "failed to answer (ValueError)" in told
    assert "secret" not in response.text


@everywhere
async def test_silence_is_filled_and_the_answer_is_the_same(serve, protocol: Protocol):
    gate = asyncio.Event()
    script: Script = lambda _: [gate, *says("Hel", "lo")]  # noqa: E731
    pool = ScriptedPool(ScriptedBackend(script))
    app = create_app(MLXServerSettings(model=MODEL, keepalive_seconds=0.001), pool)
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))
        if len(sent) == 4:
            gate.set()

    async with app.router.lifespan_context(app):
        await app.state.server.started.wait()
        await call(app, protocol, send, asyncio.Event())
    sign = b"event: ping" if protocol is MESSAGES else b": keep-alive"
    assert all(body.startswith(sign) for body in sent[1:4])
    assert protocol.text(joined_bytes(protocol, b"".join(sent))) == "Hello"


def joined_bytes(protocol: Protocol, body: bytes) -> Any:
    headers = {"content-type": "text/event-stream"}
    return joined(protocol, httpx.Response(200, content=body, headers=headers))


async def call(
    app: Any, protocol: Protocol, send: Any, leaves: asyncio.Event, *, stream: bool = True
):
    """The application itself, by a caller who hangs up when `leaves` is set."""
    bodies = [json.dumps(asked(protocol, stream)).encode()]

    async def receive() -> dict[str, Any]:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        await leaves.wait()
        return {"type": "http.disconnect"}

    scope = {
        "type": "http",
        "method": "POST",
        "path": protocol.path,
        "headers": [(b"content-type", b"application/json")],
        "query_string": b"",
    }
    await app(scope, receive, send)


@every_way
async def test_hanging_up_cancels(protocol: Protocol, stream: bool):
    backend = ScriptedBackend(lambda _: [[Started(1)], [TextDelta("a")], asyncio.Event()])
    pool = ScriptedPool(backend)
    app = create_app(MLXServerSettings(model=MODEL), pool)
    leaves = asyncio.Event()

    async def send(message: Any) -> None:
        pass

    async with app.router.lifespan_context(app):
        await app.state.server.started.wait()
        calling = asyncio.create_task(call(app, protocol, send, leaves, stream=stream))
        await backend.until(lambda backend: backend.running == 1)
        leaves.set()
        await backend.until(lambda backend: backend.cancelled == 1)
        await calling
    assert (backend.running, pool.leases) == (0, 0)


# What only some of them have


@pytest.mark.parametrize("protocol", READING, ids=lambda protocol: protocol.path)
async def test_what_was_read_is_told_in_order_with_its_usage(serve, protocol: Protocol):
    backend = ScriptedBackend(lambda _: says(prompt_tokens=30))
    async with serve(pool=ScriptedPool(backend)) as client:
        body = await answered(client, protocol, False, later=1)
    assert protocol.text(body) == ("[0.0, 1.0]" if protocol is EMBEDDINGS else "[1.0, 0.0]")
    assert body["usage"] == {"prompt_tokens": 30, "total_tokens": 30}
    assert body["model"] == MODEL


@pytest.mark.parametrize("protocol", READING, ids=lambda protocol: protocol.path)
@pytest.mark.parametrize("ask", ["body", "header"])
async def test_reading_has_its_time_out_too(serve, protocol: Protocol, ask: str):
    fields = {"timeout": 0.02} if ask == "body" else {}
    headers = {"x-request-timeout": "0.02"} if ask == "header" else {}
    async with serve(lambda _: [asyncio.Event()]) as client:
        body = asked(protocol, False) | fields
        response = await client.post(protocol.path, json=body, headers=headers)
    assert response.status_code == 504
    assert "`timeout` of 0.02 s" in failure(protocol, response.json())


@pytest.mark.parametrize(
    ("protocol", "scores"),
    [
        (CHAT, {"logprobs": True, "top_logprobs": 20}),
        (COMPLETIONS, {"logprobs": 20}),
        (RESPONSES, {"top_logprobs": 20}),
    ],
    ids=lambda value: getattr(value, "path", None),
)
async def test_an_answer_with_many_scores_comes_in_blocks_and_whole(
    serve, protocol: Protocol, scores: dict[str, Any]
):
    top = tuple((i, b'"%d"' % i, -float(i)) for i in range(20))
    scored = [TextDelta('"', (TokenLogprob(i, b'"', -i / 8, top),)) for i in range(500)]

    def script(_: object) -> list[list[Event]]:
        return [[Started(3)], *[[delta] for delta in scored], [Finished("stop", Usage(3, 500))]]

    async with serve(script) as client:
        answer = await client.post(protocol.path, json=asked(protocol, False, **scores))
    assert "content-length" not in answer.headers
    body = answer.json()
    assert protocol.text(body) == '"' * 500
    assert protocol.tokens(body) == (3, 0, 500)
    # Each token has an entry for every alternative.
    assert [answer.text.count(f'\\"{i}\\""') for i in range(20)] == [500] * 20


async def test_tokens_are_counted_without_generating(serve):
    backend = ScriptedBackend(lambda _: says("x"))
    asking = {"messages": SAID, "system": "Be very brief."}
    async with serve(pool=ScriptedPool(backend)) as client:
        response = await client.post("/v1/messages/count_tokens", json=asking | {"later": 1})
        missing = await client.post("/v1/messages/count_tokens", json=asking | {"model": "x"})
    assert response.json() == {"input_tokens": 4}
    assert response.headers["x-unknown-fields"] == "later"
    assert failure(MESSAGES, missing.json())
    assert not backend.requests


async def test_the_tokens_of_what_a_response_goes_on_from_and_refers_to_are_counted(serve):
    backend = ScriptedBackend(lambda _: says("one two three"))
    async with serve(pool=ScriptedPool(backend)) as client:
        first = await answered(client, RESPONSES, False, input="a b c d")
        generated = len(backend.requests)
        [item] = first["output"]

        async def count(**fields: Any) -> Any:
            answer = await client.post("/v1/responses/input_tokens", json=fields)
            check("TokenCountsResource", answer.json())
            return answer.json()["input_tokens"], answer.headers.get("x-unknown-fields")

        assert await count(input="hi", instructions="Be brief.", personality="x") == (
            3,
            "personality",
        )
        assert await count(previous_response_id=first["id"]) == (7, None)
        assert await count(input=[reference(item), *SAID]) == (4, None)
        long = [{"role": "user", "content": "word " * 3000} for _ in range(5)]
        assert await count(input=long) == (15000, None)
        assert await count(input=long, truncation="auto") == (6000, None)
        lost = await client.post(
            "/v1/responses/input_tokens", json={"input": [{"id": "x"}], "model": None}
        )
        nothing = await client.post("/v1/responses/input_tokens", json={})
    assert lost.status_code == 404
    assert nothing.json()["error"]["message"] == "`input` is empty."
    assert len(backend.requests) == generated


async def test_a_conversation_has_no_more_messages_for_having_been_sent_piece_by_piece(serve):
    half = [SAID[0]] * (MOST_PIECES // 2)
    async with serve() as client:
        first = await answered(client, RESPONSES, False, input=half)
        going_on = {"input": half, "previous_response_id": first["id"]}
        second = await client.post("/v1/responses", json=going_on)
    assert second.status_code == 413
    error = second.json()["error"]
    assert error["param"] == "input"
    assert "`input` and `previous_response_id` have more than the 8192" in error["message"]


async def test_a_response_goes_on_from_one_that_was_kept_streamed_or_not(serve):
    backend = ScriptedBackend(lambda _: says("Hel", "lo"))
    async with serve(pool=ScriptedPool(backend)) as client:
        first = await answered(client, RESPONSES, True, instructions="Only now.")
        kept = (await client.get(f"/v1/responses/{first['id']}")).json()
        second = await answered(client, RESPONSES, False, previous_response_id=first["id"])
        third = await answered(
            client, RESPONSES, False, previous_response_id=second["id"], input="bye", store=False
        )
        lost = await client.get(f"/v1/responses/{third['id']}")
        listed = (await client.get(f"/v1/responses/{second['id']}/input_items")).json()
    assert kept == first
    said = [(message.role, message.content) for message in backend.requests[-1].prompt.messages]
    hello = [("user", "hi"), ("assistant", "Hello")]
    assert said == [*hello, *hello, ("user", "bye")]
    assert lost.status_code == 404
    check("ErrorResponse", lost.json())
    [item] = listed["data"]
    assert item["content"] == [{"type": "input_text", "text": "hi"}]


@pytest.mark.parametrize("param", ["stream", "starting_after"])
async def test_a_response_that_is_complete_is_not_streamed_again(serve, param: str):
    async with serve() as client:
        kept = await answered(client, RESPONSES, False)
        refused = await client.get(f"/v1/responses/{kept['id']}", params={param: "1"})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["param"], error["code"]) == (param, "unsupported_parameter")
    check("ErrorResponse", refused.json())


def reference(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "item_reference", "id": item["id"]}


async def test_a_request_refers_to_items_that_were_kept_instead_of_sending_them(serve):
    def script(request: Any) -> list[list[Event]]:
        call = [ToolCallStarted(0, "c", "add"), ToolCallDelta(0, "{}")]
        first = [ReasoningDelta("Hm"), TextDelta("So"), *call]
        done = [TextDelta("Done"), Finished("stop", Usage(1, 2))]
        begun = len(request.prompt.messages) == 1
        ending = [*first, Finished("tool_calls", Usage(1, 2))] if begun else done
        return [[Started(1)], ending]

    backend = ScriptedBackend(script)
    result = {"type": "function_call_output", "call_id": "c", "output": "42"}
    async with serve(pool=ScriptedPool(backend)) as client:
        first = await answered(client, RESPONSES, True, input=SAID)
        path = f"/v1/responses/{first['id']}/input_items"
        [asked] = (await client.get(path)).json()["data"]
        said = [*map(reference, [asked, *first["output"]]), result]
        second = await answered(client, RESPONSES, False, input=said)
        path = f"/v1/responses/{second['id']}/input_items"
        listed = (await client.get(path, params={"order": "asc"})).json()["data"]
        going_on = [reference(second["output"][0]), SAID[0]]
        await answered(client, RESPONSES, False, input=going_on, previous_response_id=first["id"])
    by_reference, together = (request.prompt.messages for request in backend.requests[1:])
    call = ToolCall("c", "add", "{}")
    thought = Message("assistant", "So", reasoning="Hm", tool_calls=(call,))
    hello = Message("user", "hi")
    assert by_reference == (hello, thought, Message("tool", "42", tool_call_id="c"))
    assert [message.content for message in together] == ["hi", "So\nDone", "hi"]
    kinds = ["message", "reasoning", "message", "function_call", "function_call_output"]
    assert [item["type"] for item in listed] == kinds
    assert listed[1]["content"] == first["output"][0]["content"]


async def test_an_item_that_is_not_kept_is_a_404_that_names_it(serve):
    async with serve() as client:
        unkept = await answered(client, RESPONSES, False, store=False)
        kept = await answered(client, RESPONSES, False)
        await client.delete(f"/v1/responses/{kept['id']}")
        for item in (unkept["output"][0], kept["output"][0], {"id": "msg_\0x"}):
            asked = {"input": [*SAID, reference(item)]}
            response = await client.post("/v1/responses", json=asked)
            assert response.status_code == 404
            check("ErrorResponse", response.json())
            error = response.json()["error"]
            assert (error["code"], error["param"]) == ("item_not_found", "input[1]")
            assert repr(item["id"]) in error["message"]
            assert "`store: false`" in error["message"]


async def test_what_is_referred_to_counts_as_if_it_had_been_sent(serve):
    content = [{"type": "input_text", "text": "hi"}] * (MOST_PIECES // 2)
    async with serve() as client:
        first = await answered(
            client, RESPONSES, False, input=[{"role": "user", "content": content}]
        )
        path = f"/v1/responses/{first['id']}/input_items"
        [item] = (await client.get(path)).json()["data"]
        again = await client.post("/v1/responses", json={"input": [reference(item)] * 2})
    assert again.status_code == 413
    assert again.json()["error"]["message"].startswith("`input` has more than the 8192 messages")


@both
async def test_thinking_that_is_omitted_is_not_sent_and_comes_back_to_the_model(
    serve, stream: bool
):
    def thinks(request: GenerationRequest) -> list[Any]:
        ending = [[TextDelta("So.")], [Finished("stop", Usage(3, 4))]]
        return [[Started(3)], [ReasoningDelta("secret")], [ReasoningDelta(" plan")], *ending]

    backend = ScriptedBackend(thinks)
    pool = ScriptedPool(backend)
    omitted = {"thinking": {"type": "adaptive", "display": "omitted"}}
    async with serve(pool=pool) as client:
        body = asked(MESSAGES, stream, **omitted)
        response = await client.post("/v1/messages", json=body)
        assert response.status_code == 200, response.text
        assert "secret" not in response.text
        if stream:
            deltas = [each["delta"] for each in parts(response) if "delta" in each]
            [signature] = [each["signature"] for each in deltas if "signature" in each]
            block = {"type": "thinking", "thinking": "", "signature": signature}
        else:
            block = response.json()["content"][0]
        turns = [*SAID, {"role": "assistant", "content": [block]}, *SAID]
        await client.post("/v1/messages", json=body | {"messages": turns})
    assert backend.requests[1].prompt.messages[1].reasoning == "secret plan"


@pytest.mark.parametrize("kind", [{}, {"type": None}, {"type": "message"}])
async def test_an_item_that_names_no_type_is_a_message(serve, kind: dict[str, Any]):
    backend = ScriptedBackend(lambda _: says("Hello"))
    async with serve(pool=ScriptedPool(backend)) as client:
        first = await answered(client, RESPONSES, False, input=[SAID[0] | kind])
        await answered(client, RESPONSES, False, previous_response_id=first["id"])
        listed = (await client.get(f"/v1/responses/{first['id']}/input_items")).json()
    said = [(message.role, message.content) for message in backend.requests[-1].prompt.messages]
    assert said == [("user", "hi"), ("assistant", "Hello"), ("user", "hi")]
    assert listed["data"][0]["type"] == "message"


@pytest.mark.parametrize("name", ["include", "include[]"])
async def test_what_is_to_be_included_of_a_kept_response_is_or_is_refused_by_name(serve, name: str):
    script: Script = lambda _: [[ReasoningDelta("Hm"), TextDelta("So"), Finished("stop", Usage(1, 2))]]  # noqa: E731  # fmt: skip
    encrypted, logprobs = "reasoning.encrypted_content", "message.output_text.logprobs"
    async with serve(script) as client:
        plain = await answered(client, RESPONSES, False)
        whole = await answered(client, RESPONSES, False, include=[encrypted])
        again = await answered(client, RESPONSES, False, input=plain["output"])
        path = f"/v1/responses/{plain['id']}"
        listing = f"/v1/responses/{again['id']}/input_items"
        told = (await client.get(path, params={name: encrypted})).json()
        # What hosted tools find is never there, as in a request.
        nothing = await client.get(path, params={name: "file_search_call.results"})
        listed = (await client.get(listing, params={name: [encrypted]})).json()["data"]
        for place in (path, listing):
            unknown = await client.get(place, params={name: [encrypted, "everything"]})
            unkept = await client.get(place, params={name: [encrypted, logprobs]})
            assert (unknown.status_code, unkept.status_code) == (400, 400)
            assert (
                unknown.json()["error"]["param"] == unkept.json()["error"]["param"] == "include[1]"
            )
            assert "'everything' is unknown" in unknown.json()["error"]["message"]
            assert logprobs in unkept.json()["error"]["message"]
    assert nothing.json() == plain
    thinking = whole["output"][0]["encrypted_content"]
    assert told["output"][0]["encrypted_content"] == thinking
    assert told["output"][1] == plain["output"][1]
    assert [item.get("encrypted_content") for item in listed] == [None, thinking]


async def test_input_items_come_in_pages(serve):
    said = [{"role": "user", "content": str(number)} for number in range(5)]
    async with serve() as client:
        response = await answered(client, RESPONSES, False, input=said)
        path = f"/v1/responses/{response['id']}/input_items"
        newest = (await client.get(path, params={"limit": 2})).json()
        rest = (await client.get(path, params={"after": newest["last_id"]})).json()
        oldest = (await client.get(path, params={"limit": 1, "order": "asc"})).json()
        wrong = await client.get(path, params={"after": "nothing"})

    def numbers(page: Any) -> str:
        return "".join(item["content"][0]["text"] for item in page["data"])

    assert (numbers(newest), newest["has_more"]) == ("43", True)
    assert (numbers(rest), rest["has_more"]) == ("210", False)
    assert numbers(oldest) == "0"
    assert wrong.status_code == 400


async def test_a_response_that_is_not_there_is_told(serve):
    async with serve() as client:
        for response in (
            await client.get("/v1/responses/resp_x"),
            await client.delete("/v1/responses/resp_x"),
            await client.get("/v1/responses/resp_x/input_items"),
            await client.post(
                "/v1/responses", json={"input": "x", "previous_response_id": "resp_x"}
            ),
        ):
            assert response.status_code == 404
            check("ErrorResponse", response.json())
            assert response.json()["error"]["code"] == "response_not_found"


async def test_a_stream_that_is_cut_keeps_nothing(serve):
    async with serve(lambda _: [[Started(1)], GenerationFailed("x")]) as client:
        response = await client.post("/v1/responses", json={"input": "x", "stream": True})
        first = parts(response)[0]["response"]
        assert (await client.get(f"/v1/responses/{first['id']}")).status_code == 404


async def test_truncation_leaves_out_the_oldest_turns_that_do_not_fit(serve):
    backend = ScriptedBackend(lambda _: [[Started(1)], [Finished("stop", Usage(1, 0))]])
    turns = [{"role": "user", "content": "word " * 3000} for _ in range(5)]
    async with serve(pool=ScriptedPool(backend)) as client:
        for truncation in ("disabled", "auto"):
            await answered(client, RESPONSES, False, input=turns, truncation=truncation)
    assert [len(request.prompt.messages) for request in backend.requests] == [5, 2]


async def test_a_call_that_has_no_place_in_a_body_is_a_failure_to_all(serve):
    call = [ToolCallStarted(0, "a", "f"), ToolCallDelta(0, "[1]")]
    script = lambda _: [[Started(1)], [*call, Finished("tool_calls", Usage(1, 2))]]  # noqa: E731
    async with serve(script, admin_token="correct horse") as client:
        response = await client.post(MESSAGES.path, json=asked(MESSAGES, False))
        owner = {"authorization": "Bearer correct horse"}
        [kept] = (await client.get("/v1/admin/audit", headers=owner)).json()["data"]
        metrics = (await client.get("/metrics")).text
    assert response.status_code == 500
    assert "called f with what is no JSON object" in failure(MESSAGES, response.json())
    assert kept["outcome"] == "generation_failed"
    assert (
        'request_errors_total{code="generation_failed",model_name="mlx-manager/demo"} 1.0'
        in metrics
    )


@pytest.mark.parametrize(
    ("protocol", "name"),
    [(CHAT, "stop"), (COMPLETIONS, "stop"), (MESSAGES, "stop_sequences")],
    ids=lambda given: given.path if isinstance(given, Protocol) else given,
)
async def test_a_stop_string_that_is_too_long_is_refused_by_name(
    serve, protocol: Protocol, name: str
):
    async with serve() as client:
        longest = asked(protocol, False) | {name: ["x" * 1024]}
        too_long = asked(protocol, False) | {name: ["x", "x" * 1025]}
        taken = await client.post(protocol.path, json=longest)
        refused = await client.post(protocol.path, json=too_long)
    assert (taken.status_code, refused.status_code) == (200, protocol.out_of_range)
    assert f"`{name}[1]` should have at most 1024 char" in failure(protocol, refused.json())


@everywhere
@pytest.mark.parametrize("ask", ["body", "header"])
async def test_a_time_out_is_a_504_that_names_limit_and_phase(serve, protocol: Protocol, ask: str):
    fields = {"timeout": 0.02} if ask == "body" else {}
    headers = {"x-request-timeout": "0.02"} if ask == "header" else {}
    async with serve(lambda _: [[Admitted()], asyncio.Event()]) as client:
        body = asked(protocol, True) | fields
        response = await client.post(protocol.path, json=body, headers=headers)
    assert response.status_code == 504
    told = failure(protocol, response.json())
    assert "`timeout` of 0.02 s" in told
    assert "its prompt was still being processed" in told
    if protocol is MESSAGES:
        assert response.json()["error"]["type"] == "timeout_error"


@pytest.mark.parametrize("limit", ["timeout", "first_token_timeout", "queue_timeout"])
async def test_an_sdk_does_not_ask_again_for_what_has_run_out_of_time(serve, limit: str):
    pool = ScriptedPool(ScriptedBackend(lambda _: [asyncio.Event()]))
    async with serve(pool=pool) as client:
        sdk = openai.AsyncOpenAI(base_url="http://server/v1", api_key="none", http_client=client)
        with pytest.raises(openai.InternalServerError, match=f"`{limit}` of 0.02 s"):
            await sdk.responses.create(input="hi", extra_body={limit: 0.02})
    assert len(pool.backend.requests) == 1


@everywhere
async def test_a_time_out_of_an_answer_that_has_begun_is_its_last_event(serve, protocol: Protocol):
    script: Script = lambda _: [[Started(1)], [TextDelta("a")], asyncio.Event()]  # noqa: E731
    async with serve(script, timeout_seconds=0.02) as client:
        streamed = await client.post(protocol.path, json=asked(protocol, True))
        whole = await client.post(protocol.path, json=asked(protocol, False) | {"timeout": 60})
    assert (streamed.status_code, whole.status_code) == (200, 504)
    last = parts(streamed)[-1]
    if protocol is RESPONSES:
        assert last["type"] == "response.failed"
        told = last["response"]["error"]["message"]
    else:
        told = failure(protocol, last)
    assert "its answer was not complete" in told
    assert told == failure(protocol, whole.json())


@even_reading
@pytest.mark.parametrize("value", ["soon", "-1", "nan", "0"])
async def test_a_time_out_that_is_none_is_refused_by_name(serve, protocol: Protocol, value: str):
    async with serve() as client:
        headers = {"x-queue-timeout": value}
        wrong = await client.post(protocol.path, json=asked(protocol, False), headers=headers)
        body = asked(protocol, False) | {"queue_timeout": 0}
        zero = await client.post(protocol.path, json=body)
    malformed = 400 if value == "soon" else protocol.out_of_range
    assert (wrong.status_code, zero.status_code) == (malformed, protocol.out_of_range)
    assert "`x-queue-timeout` must be a number of seconds" in failure(protocol, wrong.json())
    assert "`queue_timeout`" in failure(protocol, zero.json())


@even_reading
async def test_a_body_that_stops_coming_is_a_408(serve, protocol: Protocol):
    async def body() -> AsyncIterator[bytes]:
        yield b'{"mess'
        await asyncio.Event().wait()

    async with serve(client_timeout_seconds=0.02) as client:
        headers = {"content-type": "application/json"}
        response = await client.post(protocol.path, content=body(), headers=headers)
    assert response.status_code == 408
    assert response.headers["connection"] == "close"
    assert "Nothing more of the body came" in failure(protocol, response.json())
