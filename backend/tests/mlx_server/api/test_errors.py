from __future__ import annotations

import gzip
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai_spec import check
from scripted import MODEL, says

from mlx_manager.mlx_server.core import Started
from mlx_manager.mlx_server.errors import (
    ContextLengthExceeded,
    GenerationFailed,
    MLXManagerError,
    ModelTooLarge,
    OutOfMemory,
    Overloaded,
)

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
OTHER = {"type": "hologram", "depth": 3}


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (Overloaded("full", retry_after=3), 429, "overloaded"),
        (OutOfMemory("no room"), 503, "out_of_memory"),
        (ContextLengthExceeded.counted(5, 4, param="messages"), 400, "context_length_exceeded"),
        (ModelTooLarge("9 GB"), 507, "model_too_large"),
        (GenerationFailed("broken"), 500, "generation_failed"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_has_the_status_and_code_of_its_class(
    serve, error: MLXManagerError, status: int, code: str, stream: bool
):
    async with serve(lambda _: [error]) as client:
        response = await client.post(CHAT, json=HELLO | {"stream": stream})
    assert response.status_code == status
    body = response.json()
    check("ErrorResponse", body)
    assert body["error"]["code"] == code
    assert body["error"]["param"] == error.param
    expected = None if error.retry_after is None else str(error.retry_after)
    assert response.headers.get("retry-after") == expected


async def test_an_unknown_model_is_not_found(serve):
    async with serve() as client:
        response = await client.post(CHAT, json=HELLO | {"model": "gpt-9"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert response.json()["error"]["param"] == "model"


@pytest.mark.parametrize(
    ("fields", "param", "says_what"),
    [
        ({"temperature": 5.0}, "temperature", "less than or equal to 2, not 5"),
        ({"messages": []}, "messages", "at least 1"),
        ({"stop": ["a", ""]}, "stop[1]", "`stop[1]` should have at least 1 character."),
        ({"stop": "x" * 1025}, "stop", "`stop` should have at most 1024 characters."),
        ({"stop": ["x" * 1025]}, "stop[0]", "`stop[0]` should have at most 1024 characters."),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "100"),
        ({"max_tokens": 0}, "max_tokens", "at least 1, or -1"),
        ({"max_tokens": -2}, "max_tokens", "-1"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens", "exceeds"),
        ({"temperature": 10**400}, "temperature", "`temperature` should be a finite number."),
    ],
)
@pytest.mark.parametrize("status", [422, 400])
async def test_a_value_out_of_its_range_has_the_status_that_the_owner_wants(
    serve, fields: dict[str, object], param: str, says_what: str, status: int
):
    async with serve(validation_status=status) as client:
        response = await client.post(CHAT, json=HELLO | fields)
    assert response.status_code == status
    check("ErrorResponse", response.json())
    error = response.json()["error"]
    assert error["param"] == param
    assert says_what in error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "x", "temperature": 5}, "temperature"),
        ("/v1/completions", {"prompt": "x", "best_of": 1, "n": 2}, "best_of"),
        ("/v1/completions", {"prompt": ""}, "prompt"),
    ],
)
async def test_ranges_are_422_in_completions_too(
    serve, path: str, fields: dict[str, object], param: str
):
    async with serve() as client:
        response = await client.post(path, json=fields)
    assert (response.status_code, response.json()["error"]["param"]) == (422, param)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/responses", {"input": "hi", "temperature": 5}, "temperature"),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 0}, "max_output_tokens"),
        ("/v1/responses/input_tokens", {"input": 5}, "input"),
        ("/v1/messages", HELLO | {"max_tokens": 0}, "max_tokens"),
        ("/v1/messages", HELLO, "max_tokens"),
        ("/v1/messages/count_tokens", {"messages": []}, "messages"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": "hi", "dimensions": 0}, "dimensions"),
        ("/v1/rerank", {"query": "q", "documents": []}, "documents"),
        ("/v1/tokenize", {"prompt": 5}, "prompt"),
        ("/v1/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/v1/apply-template", {"messages": []}, "messages"),
    ],
)
async def test_elsewhere_whatever_is_wrong_is_400(
    serve, path: str, fields: dict[str, object], param: str
):
    async with serve() as client:
        response = await client.post(path, json=fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert f"`{param}`" in error["message"]
    assert error.get("param", param) == param


@pytest.mark.parametrize(
    ("fields", "param", "says_what"),
    [
        ({"messages": None}, "messages", "array"),
        ({"messages": [{"role": "bot", "content": ""}]}, "messages[0].role", "'assistant'"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "content parts"),
        ({"stop": 5}, "stop", "a list of at most 16 strings"),
        ({"tool_choice": "maybe"}, "tool_choice", "'required'"),
        ({"temperature": "hot"}, "temperature", "a valid number"),
        ({"prediction": {}}, "prediction.type", "required"),
        ({"prediction": {"type": "diff", "content": ""}}, "prediction.type", "'content'"),
        (
            {"prediction": {"type": "content", "content": [{"type": "image_url"}]}},
            "prediction.content[0].type",
            "a prediction is text only",
        ),
        (
            {"prediction": {"type": "content", "content": [{"type": "text"}]}},
            "prediction.content[0].text",
            "needs a `text`",
        ),
        ({"speculation": "never"}, "speculation", "'off'"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": "{}"}}},
            "response_format.json_schema.schema",
            "`response_format.json_schema.schema` should be a JSON schema, as an object.",
        ),
    ],
)
async def test_a_bad_value_is_400_and_names_the_field_and_what_is_allowed(
    serve, fields: dict[str, object], param: str, says_what: str
):
    async with serve() as client:
        response = await client.post(CHAT, json=HELLO | fields)
    assert response.status_code == 400
    check("ErrorResponse", response.json())
    error = response.json()["error"]
    assert error["param"] == param
    assert says_what in error["message"]


@pytest.mark.parametrize(
    ("path", "field", "item"),
    [
        ("/v1/chat/completions", "messages", {"role": "bot"}),
        ("/v1/completions", "prompt", -1),
        ("/v1/completions", "prompt", [-1]),
        ("/v1/responses", "input", {"type": "message"}),
        ("/v1/messages", "messages", {"role": "bot"}),
        ("/v1/embeddings", "input", []),
        ("/v1/rerank", "documents", 5),
        ("/v1/detokenize", "tokens", "a"),
    ],
)
async def test_of_a_long_list_the_first_wrong_item_alone_is_named(
    serve, path: str, field: str, item: object
):
    async with serve() as client:
        response = await client.post(path, json={field: [item] * 8_000})
    assert response.status_code == (422 if path == "/v1/completions" else 400)
    message = response.json()["error"]["message"]
    assert f"`{field}[0]" in message
    assert f"`{field}[1]" not in message
    assert "more" not in message


async def test_more_wrong_values_than_can_be_looked_up_are_counted(serve):
    async with serve() as client:
        response = await client.post(CHAT, json=HELLO | {"logit_bias": dict.fromkeys(range(2000))})
    assert response.status_code == 400
    assert "2000 wrong values" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (CHAT, "logit_bias", {str(token): 1 for token in range(100_000)}),
        (CHAT, "logit_bias", dict.fromkeys(range(100_000), "x")),
        (CHAT, "stop", ["a"] * 100_000),
        (CHAT, "stop_token_ids", [-1] * 100_000),
        (CHAT, "bad_words", ["a"] * 100_000),
        (CHAT, "structured_outputs.choice", [1] * 100_000),
        ("/v1/messages", "stop_sequences", ["a"] * 100_000),
        ("/v1/responses", "include", ["a"] * 100_000),
        ("/v1/detokenize", "tokens", [1] * (2**20 + 1)),
        ("/v1/completions", "prompt", [1] * (2**20 + 1)),
        (CHAT, "f" * 500, [1] * 100_000),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
async def test_long_lists_are_counted_and_not_validated(serve, path: str, field: str, value: Any):
    outer, _, inner = field.partition(".")
    async with serve() as client:
        response = await client.post(path, json=HELLO | {outer: {inner: value} if inner else value})
    assert response.status_code == 413
    message = response.json()["error"]["message"]
    assert f"`{field[:64]}` has {len(value)} entries; this server accepts" in message
    assert len(message) < 200


async def test_a_name_that_fills_a_page_is_repeated_in_part(serve):
    async with serve() as client:
        response = await client.post(CHAT, json=HELLO | {"model": "x" * 4096})
        missing = await client.get("/v1/models/" + "y" * 30_000)
    for answer in (response, missing):
        assert answer.status_code == 404
        assert len(answer.json()["error"]["message"]) < 5000


@pytest.mark.parametrize(
    ("body", "says_what"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "unicode"),
        (b"[]", "JSON object"),
        (b"null", "JSON object"),
        (b"[" * 5000, "not valid JSON"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_a_body_that_is_not_a_json_object_is_400(
    serve, path: str, body: bytes, says_what: str
):
    async with serve() as client:
        response = await client.post(
            path, content=body, headers={"content-type": "application/json"}
        )
    assert response.status_code == 400
    check("ErrorResponse", response.json())
    assert says_what in response.json()["error"]["message"]


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
async def test_a_body_must_be_declared_as_json(serve, kind: str | None):
    headers = {} if kind is None else {"content-type": kind}
    async with serve() as client:
        response = await client.post(CHAT, content=b"{}", headers=headers)
    assert response.status_code == 400
    assert "Content-Type: application/json" in response.json()["error"]["message"]


async def test_a_charset_may_be_declared_too(serve):
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    async with serve() as client:
        assert (await client.post(CHAT, content=body, headers=headers)).status_code == 200


async def test_a_compressed_body_is_refused_as_such(serve):
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    headers = {"content-type": "application/json", "content-encoding": "compress"}
    plain = headers | {"content-encoding": "identity"}
    async with serve() as client:
        packed = await client.post(CHAT, content=gzip.compress(body), headers=headers)
        assert (await client.post(CHAT, content=body, headers=plain)).status_code == 200
    assert packed.status_code == 400
    assert "Content-Encoding: compress" in packed.json()["error"]["message"]


async def test_a_body_above_the_limit_is_413_by_its_length_or_while_it_comes(serve):
    read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(1000):
            read += 1000
            yield b" " * 1000

    headers = {"content-type": "application/json"}
    async with serve(max_body_mb=0.01) as client:
        announced = await client.post(CHAT, content=b" " * 20_000, headers=headers)
        chunked = await client.post(CHAT, content=endless(), headers=headers)
    for response in (announced, chunked):
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("POST", "/v1/nothing", 404, "not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/completions", 405, "method_not_allowed"),
    ],
)
async def test_paths_and_methods_that_do_not_exist(
    serve, method: str, path: str, status: int, code: str
):
    async with serve() as client:
        response = await client.request(method, path)
    assert response.status_code == status
    check("ErrorResponse", response.json())
    assert response.json()["error"]["code"] == code


async def test_a_bad_value_of_the_query_is_named_as_the_client_named_it(serve):
    async with serve() as client:
        response = await client.get("/v1/responses/resp_1/input_items?limit=0")
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "limit"
    assert error["message"] == "`limit` should be greater than or equal to 1."


async def test_what_nobody_expected_is_a_500_with_the_requests_id_and_a_traceback_in_the_log(
    serve, caplog: pytest.LogCaptureFixture
):
    async with serve(lambda _: [ValueError("secret detail")]) as client:
        response = await client.post(CHAT, json=HELLO, headers={"x-request-id": "abc-1"})
    assert response.status_code == 500
    check("ErrorResponse", response.json())
    assert "abc-1" in response.json()["error"]["message"]
    assert "secret detail" not in response.text
    assert response.headers["x-request-id"] == "abc-1"
    [record] = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "abc-1" in record.getMessage()
    assert record.exc_info is not None


async def test_what_nobody_expected_in_a_stream_is_its_last_event(serve):
    async with serve(lambda _: [[Started(1)], ValueError("oops")]) as client:
        response = await client.post(CHAT, json=HELLO | {"stream": True})
    assert response.status_code == 200
    assert '"role":"assistant"' in response.text
    *_, last, nothing = response.text.split("\n\n")
    assert last.startswith('data: {"error":')
    assert nothing == ""


@pytest.mark.parametrize("sent", ["abc", "x" * 129, "a b", "ü"])
async def test_every_answer_has_a_request_id_the_callers_if_it_is_sound(serve, sent: str):
    async with serve() as client:
        response = await client.get("/health", headers={"x-request-id": sent.encode()})
    assert (response.headers["x-request-id"] == sent) == (sent == "abc")


async def test_unknown_fields_are_named_in_a_header_and_the_log(
    serve, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    fields = {"top_a": 1, "a\r\nset-cookie: b": 2, "日本": 3}
    async with serve() as client:
        response = await client.post(CHAT, json=HELLO | fields)
    assert response.status_code == 200
    named = response.headers["x-unknown-fields"]
    assert named == r"top_a, a\r\nset-cookie: b, \u65e5\u672c"
    assert "set-cookie" not in response.headers
    assert any("top_a" in record.getMessage() for record in caplog.records)


async def test_unknown_fields_are_refused_when_the_owner_is_strict(serve):
    async with serve(strict_fields=True) as client:
        response = await client.post(CHAT, json=HELLO | {"top_a": 1})
        known = await client.post(CHAT, json=HELLO | {"user": "me", "store": True})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "top_a"
    assert known.status_code == 200
    assert "x-unknown-fields" not in known.headers


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [OTHER]}]}, "messages[0].content[0].type"),
        ("/v1/responses", {"input": [OTHER]}, "input[0].type"),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [OTHER]}]},
            "input[0].content[0].type",
        ),
        ("/v1/responses", {"input": "hi", "tools": [OTHER]}, "tools[0].type"),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [OTHER]}]},
            "messages[0].content[0].type",
        ),
        ("/v1/messages", HELLO | {"tools": [OTHER | {"name": "find"}]}, "tools[0].type"),
    ],
)
async def test_an_unknown_kind_is_refused_as_such_and_not_by_its_fields_where_the_owner_is_strict(
    serve, path: str, fields: dict[str, object], param: str
):
    asked = fields if path == "/v1/responses" else fields | {"max_tokens": 5}
    async with serve(strict_fields=True) as client:
        response = await client.post(path, json=asked)
    message = response.json()["error"]["message"]
    assert f"`{param.removesuffix('.type')}" in message
    assert "'hologram'" in message
    assert "Unknown fields" not in message


async def test_the_next_request_is_answered_after_each_kind_of_failure(serve):
    failures = iter([GenerationFailed("x"), ValueError("y"), Overloaded("z")])

    def script(_: object) -> list[object]:
        failure = next(failures, None)
        return says("ok") if failure is None else [failure]

    async with serve(script) as client:
        statuses = [(await client.post(CHAT, json=HELLO)).status_code for _ in range(4)]
    assert statuses == [500, 500, 429, 200]
    assert MODEL
