"""Forms that would end, fill or stop the process that compiles them, beside eight answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from crowd import Crowd
from live import LiveServer, live_server

ASK = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
OBJECT = {"type": "object"}
SIMPLE = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}


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
    assert "Traceback" not in log.read_text()


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
        assert param in error["message"], (name, error)
        assert error.get("param", param) == param, (name, error)
    assert all(told.well for told in crowd.told)
    path, body = chat(response_format=schema_format(SIMPLE), max_tokens=40)
    answer = await http.post(path, json=body)
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
