"""Forms that would end, fill or stop the process that compiles them, beside eight answers."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from crowd import Crowd
from linux import skip_without_linux
from live import LiveServer, live_server

ASK = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
OBJECT = {"type": "object"}
SIMPLE = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}


def chain(length: int, link: Any) -> dict[str, Any]:
    """Definitions of which each is `link` of a reference to the next."""
    links = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    return {"$defs": links | {f"d{length}": {"type": "integer"}}, **OBJECT, "$ref": "#/$defs/d0"}


def objects(ref: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": ref}, "required": ["a"]}


def bare(ref: Any) -> Any:
    return ref


def any_of(ref: Any) -> dict[str, Any]:
    return {"anyOf": [ref, {"type": "null"}]}


def all_of(ref: Any) -> dict[str, Any]:
    return {"allOf": [ref, {"minimum": 0}]}


def items(ref: Any) -> dict[str, Any]:
    return {"type": "array", "items": ref, "minItems": 1}


def prefix_items(ref: Any) -> dict[str, Any]:
    return {"type": "array", "prefixItems": [ref], "minItems": 1}


def more_properties(ref: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": ref, "minProperties": 1}


RULES = "start: r0\n" + "".join(f'r{i}: r{i + 1} "a"\n' for i in range(4000)) + 'r4000: "x"\n'
TERMINALS = (
    "start: T0\n" + "".join(f'T{i}: T{i + 1} "a"\n' for i in range(10_000)) + 'T10000: "x"\n'
)
DOUBLED = "start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(30)) + 'T30: "a"?\n'
GBNF = (
    "root ::= r0\n" + "".join(f'r{i} ::= r{i + 1} "a"\n' for i in range(4000)) + 'r4000 ::= "x"\n'
)
NESTED_JSON = 'start: %json {"$ref": "#/$defs/d0", "$defs": {' + (
    ", ".join(f'"d{i}": {{"$ref": "#/$defs/d{i + 1}"}}' for i in range(4000)) + ', "d4000": {}}}'
)
OPTIONAL = "a?" * 30_000 + "a" * 30_000


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema} | more}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", ASK | fields


def forced(parameters: Any, **more: Any) -> dict[str, Any]:
    function = {"name": "f", "parameters": parameters} | more
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}


DEEP = chain(1000, objects)
MESSAGES = {"max_tokens": 4, "messages": ASK["messages"]}
REQUESTS: dict[str, tuple[tuple[str, dict[str, Any]], str]] = {
    "objects": (chat(response_format=schema_format(DEEP)), "response_format"),
    "strict": (chat(response_format=schema_format(DEEP, strict=True)), "response_format"),
    "references": (chat(guided_json=chain(4000, bare)), "guided_json"),
    "any of": (chat(guided_json=chain(2000, any_of)), "guided_json"),
    "all of": (chat(guided_json=chain(2000, all_of)), "guided_json"),
    "items": (chat(guided_json=chain(2000, items)), "guided_json"),
    "prefix items": (chat(guided_json=chain(2000, prefix_items)), "guided_json"),
    "properties": (chat(guided_json=chain(2000, more_properties)), "guided_json"),
    "rules": (chat(guided_grammar=RULES), "guided_grammar"),
    "terminals": (chat(structured_outputs={"grammar": TERMINALS}), "structured_outputs.grammar"),
    "doubled terminals": (chat(guided_grammar=DOUBLED), "guided_grammar"),
    "GBNF": (chat(guided_grammar=GBNF), "guided_grammar"),
    "a schema in a grammar": (chat(guided_grammar=NESTED_JSON), "guided_grammar"),
    "a long expression": (chat(guided_regex=OPTIONAL), "guided_regex"),
    "groups": (chat(guided_regex="(" * 4000 + "a" + ")" * 4000), "guided_regex"),
    "a pattern": (chat(guided_json={"type": "string", "pattern": OPTIONAL}), "guided_json"),
    "a forced tool": (chat(**forced(DEEP)), "tools[0].function.parameters"),
    "a strict tool": (
        chat(**forced(DEEP, strict=True) | {"tool_choice": "auto"}),
        "tools[0].function.parameters",
    ),
    "completions": (
        ("/v1/completions", {"prompt": "x", "response_format": schema_format(DEEP)}),
        "response_format",
    ),
    "responses": (
        (
            "/v1/responses",
            {
                "input": "x",
                "text": {"format": {"type": "json_schema", "name": "x", "schema": DEEP}},
            },
        ),
        "text.format",
    ),
    "a tool of responses": (
        (
            "/v1/responses",
            {
                "input": "x",
                "tools": [{"type": "function", "name": "f", "parameters": DEEP, "strict": False}],
                "tool_choice": "required",
            },
        ),
        "tools[0].parameters",
    ),
    "messages": (
        (
            "/v1/messages",
            MESSAGES | {"output_config": {"format": {"type": "json_schema", "schema": DEEP}}},
        ),
        "output_config.format",
    ),
    "a tool of messages": (
        (
            "/v1/messages",
            MESSAGES
            | {"tools": [{"name": "f", "input_schema": DEEP}], "tool_choice": {"type": "any"}},
        ),
        "tools[0].input_schema",
    ),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("grammars") / "log"
    with live_server(log, log_level="warning") as running:
        yield running
        left = children(running.process.pid)
    assert "Traceback" not in log.read_text()
    assert not [pid for pid in left if runs(pid)]


def children(pid: int) -> list[int]:
    skip_without_linux("/proc, to find a process's children")
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return ") Z " not in Path(f"/proc/{pid}/stat").read_text()


@pytest.fixture
async def http(server: LiveServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        yield client


async def test_forms_that_are_too_deep_or_too_large_cost_their_request_alone(
    http: httpx.AsyncClient,
):
    async with Crowd(http, 100) as crowd:
        answers = await asyncio.gather(
            *(http.post(path, json=body) for (path, body), _ in REQUESTS.values())
        )
    for (name, (_, param)), answer in zip(REQUESTS.items(), answers, strict=True):
        error = answer.json()["error"]
        assert answer.status_code in (400, 422), (name, answer.text)
        too_long = ("context length", "prompt is too long")
        if "tool" in name and any(said in error["message"] for said in too_long):
            # A template that prints a tool's parameters has made a long prompt of it.
            continue
        assert param in error["message"], (name, error)
        assert error.get("param", param) == param, (name, error)
    assert all(told.well for told in crowd.told)
    path, body = chat(response_format=schema_format(SIMPLE), max_tokens=40)
    answer = await http.post(path, json=body)
    assert answer.json()["choices"][0]["finish_reason"] == "stop"


def endless(number: int) -> dict[str, Any]:
    """A schema that takes longer to compile than it may, and that nobody has asked for yet."""
    # That names which fit one fit no other is found out for each two.
    patterns = {f"^a{number}b{i}[a-z]*$": {"type": "string"} for i in range(900)}
    return {"type": "object", "patternProperties": patterns}


async def test_clients_that_have_left_hold_up_nobody(http: httpx.AsyncClient):
    async def leave(number: int) -> None:
        path, body = chat(guided_json=endless(number))
        with contextlib.suppress(httpx.TimeoutException):
            await http.post(path, json=body, timeout=0.5)

    await asyncio.gather(*map(leave, range(40)))
    # Nobody waits for the forty: with their work to be done, each of these would take a minute.
    async with asyncio.timeout(15):
        for path in ("/metrics", "/v1/models", "/health"):
            assert (await http.get(path)).status_code == 200
        long = {"messages": [{"role": "user", "content": "word " * 3000}], "max_tokens": 1}
        assert (await http.post("/v1/chat/completions", json=long)).status_code == 200
        path, body = chat(response_format=schema_format(SIMPLE), max_tokens=40)
        answer = await http.post(path, json=body)
        assert answer.json()["choices"][0]["finish_reason"] == "stop"


async def test_what_takes_too_long_is_refused_by_name(http: httpx.AsyncClient):
    path, body = chat(guided_json=endless(-1))
    answer = await http.post(path, json=body)
    assert answer.status_code == 422
    assert "`guided_json`" in answer.json()["error"]["message"]
    assert "more than" in answer.json()["error"]["message"]


UNHELD = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "not": {}, "required": ["a"]}
UNHELD |= {"additionalProperties": False, "propertyNames": {"maxLength": 9}}
NAMES = "not, propertyNames"
PATTERN = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?!b)"}}}
RESPONSES_FORMAT = {"type": "json_schema", "name": "x", "schema": UNHELD}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        chat(response_format=schema_format(UNHELD)),
        ("/v1/completions", {"prompt": "x", "guided_json": UNHELD}),
        ("/v1/responses", {"input": "x", "text": {"format": RESPONSES_FORMAT}}),
        chat(**forced(UNHELD)),
    ],
)
async def test_what_is_not_enforced_is_named_in_a_header(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], stream: bool
):
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    asked = body | {"stream": stream, limit: 60}
    async with http.stream("POST", path, json=asked) as answer:
        text = (await answer.aread()).decode()
    assert answer.status_code == 200, text
    assert answer.headers["x-schema-not-enforced"] == NAMES


async def test_what_llguidance_has_no_words_for_is_left_out_and_named(http: httpx.AsyncClient):
    loose = chat(response_format=schema_format(SIMPLE), **forced(PATTERN) | {"tool_choice": "auto"})
    for path, body in (chat(guided_json=PATTERN), chat(**forced(PATTERN)), loose):
        answer = await http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-schema-not-enforced"] == "pattern"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        chat(response_format=schema_format(UNHELD, strict=True)),
        (
            "/v1/responses",
            {"input": "x", "text": {"format": RESPONSES_FORMAT | {"strict": True}}},
        ),
        chat(**forced(UNHELD, strict=True)),
    ],
)
async def test_what_can_not_be_enforced_is_refused_if_it_is_strict(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
):
    answer = await http.post(path, json=body)
    assert answer.status_code in (400, 422)
    assert "propertyNames" in answer.json()["error"]["message"]


async def test_a_header_is_there_only_where_something_is_not_enforced(http: httpx.AsyncClient):
    path, body = chat(response_format=schema_format(SIMPLE))
    assert "x-schema-not-enforced" not in (await http.post(path, json=body)).headers
