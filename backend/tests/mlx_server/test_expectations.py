"""Expectations of clients that know an API from elsewhere, over HTTP against a real model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from here import served_here

from mlx_manager.mlx_server.main import create_app

MODEL = "mlx-manager/demo"
CONTEXT = 8192
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
QUESTION = "What is the weather in Rome?"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with served_here() as client:
        yield client


def gpt_of(http: httpx.Client) -> openai.OpenAI:
    url = f"{http.base_url}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=http)


def says(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def body_of(path: str, text: str = "Hello!", most: int = 4) -> dict[str, Any]:
    """A greedy request for a short answer, in the words of its endpoint."""
    match path:
        case "/v1/completions":
            return {"prompt": text, "max_tokens": most, "temperature": 0}
        case "/v1/responses":
            return {"input": text, "max_output_tokens": most, "temperature": 0}
    return {"messages": says(text), "max_tokens": most, "temperature": 0}


def answered(http: httpx.Client, path: str, **fields: Any) -> Any:
    answer = http.post(path, json=body_of(path) | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(http: httpx.Client, path: str, **fields: Any) -> dict[str, Any]:
    answer = http.post(path, json=body_of(path) | fields)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


# A prompt that is too long, as clients recognise it


def any_of(*patterns: str) -> Callable[[str, int, dict[str, Any]], bool]:
    compiled = [re.compile(pattern, re.IGNORECASE) for pattern in patterns]
    return lambda message, status, error: any(each.search(message) for each in compiled)


def cline(message: str, status: int, error: dict[str, Any]) -> bool:
    if error.get("code") == "context_length_exceeded":
        return True
    if status != 400:
        return False
    return error["type"] == "invalid_request_error" or "context length" in message


PUBLISHED: dict[str, Callable[[str, int, dict[str, Any]], bool]] = {
    # badlogic/pi-mono: packages/ai/src/utils/overflow.ts, OVERFLOW_PATTERNS
    "pi": any_of(
        "prompt is too long",
        "input is too long for requested model",
        "exceeds the context window",
        "input token count.*exceeds the maximum",
        r"maximum prompt length is \d+",
        "reduce the length of the messages",
        r"maximum context length is \d+ tokens",
        r"exceeds the limit of \d+",
        "exceeds the available context size",
        "greater than the context length",
        "context window exceeds limit",
        "exceeded model token limit",
        r"too large for model with \d+ maximum context length",
        "context[_ ]length[_ ]exceeded",
        "too many tokens",
        "token limit exceeded",
    ),
    # anomalyco/opencode: packages/opencode/src/provider/error.ts, OVERFLOW_PATTERNS
    "OpenCode": any_of(
        "prompt is too long",
        "input is too long for requested model",
        "exceeds the context window",
        "reduce the length of the messages",
        r"maximum context length is \d+ tokens",
        r"exceeds the limit of \d+",
        "exceeds the available context size",
        r"context length is only \d+ tokens",
        "input length.*exceeds.*context length",
    ),
    # QwenLM/qwen-code: packages/core/src/utils/contextLengthError.ts, CONTEXT_LENGTH_PATTERNS
    "qwen-code": any_of(
        r"\bcontext[_\s-]?length[_\s-]?exceeded\b",
        r"\bmaximum context length\b",
        r"\bprompt\s+(?:is\s+)?too long\b",
        r"\binput\s+(?:token\s+)?(?:count\s+|length\s+)?(?:is\s+)?too long\b",
        r"\btoo many tokens\b",
        r"\btokens?\s*>\s*[\d,]+\s*(?:maximum|max|limit)\b",
        r"\b(?:input|prompt|messages?|context)\b[\s\S]{0,120}\btokens?\b[\s\S]{0,120}\bexceed(?:s|ed|ing)?\b",
    ),
    # cline/cline: src/core/context/context-management/context-error-handling.ts
    "Cline": cline,
}
OF_OPENAI = PUBLISHED | {
    # BerriAI/litellm: litellm/litellm_core_utils/exception_mapping_utils.py
    "LiteLLM": any_of(
        "exceed context limit",
        "this model's maximum context length is",
        "model's maximum context limit",
        "is longer than the model's context length",
        "input tokens exceed the configured limit",
        "exceeds the available context size",
        "exceeds the maximum number of tokens allowed",
    ),
    # openai/codex: codex-rs reads `error.code` of a failed response
    "Codex": lambda message, status, error: error["code"] == "context_length_exceeded",
}
OF_ANTHROPIC = PUBLISHED | {
    # Claude Code 2.1: `prompt is too long` decides, and the numbers say by how much
    "Claude Code": any_of(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)"),
    # BerriAI/litellm: exception_mapping_utils.py, of Anthropic's messages
    "LiteLLM": any_of("prompt is too long", "prompt: length"),
}
COUNTS = (
    # QwenLM/qwen-code: contextLengthError.ts, parseTokenCounts: (limit, actual)
    r"maximum context length is\s*(?P<most>\d[\d,]*)\s*tokens?[\s\S]*?(?:resulted in|requested|used)\s*(?P<sent>\d[\d,]*)\s*tokens?",
    # Claude Code, parsePromptTooLongTokenCounts: (actual, limit)
    r"prompt is too long[^0-9]*(?P<sent>\d+)\s*tokens?\s*>\s*(?P<most>\d+)",
)


@pytest.mark.parametrize(
    ("words", "stream"), [(9_000, True), (60_000, False)], ids=["a little", "far"]
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
def test_published_patterns_recognise_a_prompt_that_is_too_long(
    http: httpx.Client, path: str, stream: bool, words: int
):
    text = "word " * words
    answer = http.post(path, json=body_of(path, text) | {"stream": stream})
    assert answer.status_code == 400
    error = answer.json()["error"]
    clients = OF_ANTHROPIC if path == MESSAGES else OF_OPENAI
    blind = [name for name, sees in clients.items() if not sees(error["message"], 400, error)]
    assert not blind, error
    [counts] = [found for pattern in COUNTS if (found := re.search(pattern, error["message"]))]
    [made] = [http.post("/v1/tokenize", json={"prompt": text}).json()["count"]]
    assert int(counts["most"]) == CONTEXT
    assert int(counts["sent"]) == pytest.approx(made, rel=0.05)
    assert int(counts["sent"]) > CONTEXT


def test_the_words_are_these(http: httpx.Client):
    text = "word " * 9_000
    tokens = len(http.post("/v1/tokenize", json={"messages": says(text)}).json()["tokens"])
    openais = http.post(CHAT, json=body_of(CHAT, text)).json()["error"]
    anthropics = http.post(MESSAGES, json=body_of(MESSAGES, text)).json()["error"]
    assert openais == {
        "message": f"This model's maximum context length is {CONTEXT} tokens. However, your "
        f"messages resulted in {tokens} tokens. Please reduce the length of the messages.",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }
    assert anthropics == {
        "type": "invalid_request_error",
        "message": f"prompt is too long: {tokens} tokens > {CONTEXT} maximum",
    }


def test_a_prompt_that_fills_the_context_is_one_token_too_long(http: httpx.Client):
    ids = http.post("/v1/tokenize", json={"prompt": "word " * 9_000}).json()["tokens"][:CONTEXT]
    error = refused(http, COMPLETIONS, prompt=ids)
    assert f"resulted in {CONTEXT + 1} tokens" in error["message"]


@pytest.mark.parametrize(
    "fields", [{"temperature": "hot"}, {"stream_options": {}}, {"top_logprobs": 1}]
)
def test_no_pattern_takes_another_error_for_it(http: httpx.Client, fields: dict[str, Any]):
    message = refused(http, CHAT, **fields)["message"]
    assert not any(
        sees(message, 400, {"type": "", "code": ""})
        for name, sees in OF_OPENAI.items()
        if name != "Cline"
    )


# An offer is no demand


WEATHER = {"type": "function", "name": "get_weather", "parameters": SCHEMA}
OPENAIS_TOOLS: list[dict[str, Any]] = [
    {"type": "web_search"},
    {"type": "web_search_preview_2025_03_11", "search_context_size": "low"},
    {"type": "file_search", "vector_store_ids": ["vs_1"]},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "mcp", "server_label": "x", "server_url": "https://example.com"},
    {"type": "image_generation"},
    {"type": "tool_search"},
    {"type": "computer_use_preview", "environment": "mac", "display_width": 9, "display_height": 9},
    {"type": "shell", "environment": {"type": "container_auto"}},
]
ANTHROPICS_TOOLS: list[dict[str, Any]] = [
    {"type": "web_search_20250305", "name": "web_search"},
    {"type": "web_fetch_20260209", "name": "web_fetch"},
    {"type": "code_execution_20250825", "name": "code_execution"},
    {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
    {"type": "bash_20250124", "name": "bash", "allowed_callers": ["code_execution_20250825"]},
    {"type": "mcp_toolset", "mcp_server_name": "x"},
]


@pytest.mark.parametrize("tool", OPENAIS_TOOLS, ids=lambda tool: str(tool["type"]))
def test_a_hosted_tool_of_openais_is_left_out_and_named(http: httpx.Client, tool: dict[str, Any]):
    asked = body_of(RESPONSES, QUESTION) | {"tools": [tool, WEATHER], "tool_choice": "auto"}
    answer = http.post(RESPONSES, json=asked)
    assert answer.status_code == 200
    assert answer.headers["x-ignored-tools"] == tool["type"]
    assert [shown["type"] for shown in answer.json()["tools"]] == ["function"]
    alone = answered(http, RESPONSES, **asked | {"tools": [WEATHER]})
    assert answer.json()["usage"]["input_tokens"] == alone["usage"]["input_tokens"]
    streamed = http.post(RESPONSES, json=asked | {"stream": True})
    assert streamed.headers["x-ignored-tools"] == tool["type"]
    counted = http.post("/v1/responses/input_tokens", json={"input": QUESTION, "tools": [tool]})
    assert counted.headers["x-ignored-tools"] == tool["type"]


@pytest.mark.parametrize("tool", OPENAIS_TOOLS, ids=lambda tool: str(tool["type"]))
def test_a_hosted_tool_of_openais_is_refused_where_it_is_demanded(
    http: httpx.Client, tool: dict[str, Any]
):
    for choice in ("required", {"type": tool["type"], "name": "x", "server_label": "x"}):
        error = refused(http, RESPONSES, tools=[tool], tool_choice=choice)
        assert error["param"] == "tool_choice"
        assert tool["type"] in error["message"]


def test_beside_a_function_a_hosted_tool_takes_no_part(http: httpx.Client):
    search = {"type": "web_search"}
    for choice in ("none", "auto"):
        assert answered(http, RESPONSES, tools=[search], tool_choice=choice)["tools"] == []
    allowed = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [search, {"type": "function", "name": "get_weather"}],
    }
    for must in ("required", allowed):
        beside: dict[str, Any] = {"tools": [search, WEATHER], "tool_choice": must}
        called = answered(http, RESPONSES, **beside, max_output_tokens=40)
        assert called["output"][0]["type"] == "function_call"


CLIENTS_TOOLS: list[tuple[dict[str, Any], str]] = [
    ({"type": "local_shell"}, "local_shell_call"),
    ({"type": "shell"}, "shell_call"),
    ({"type": "apply_patch"}, "apply_patch_call"),
    ({"type": "custom", "name": "code", "format": {"type": "text"}}, "custom_tool_call"),
    (
        {
            "type": "custom",
            "name": "code",
            "format": {"type": "grammar", "syntax": "regex", "definition": "[ab]{3}"},
        },
        "custom_tool_call",
    ),
    (
        {
            "type": "custom",
            "name": "code",
            "format": {
                "type": "grammar",
                "syntax": "lark",
                "definition": r'start: /[ab]/ "\n\"c"',
            },
        },
        "custom_tool_call",
    ),
]


@pytest.mark.parametrize(("tool", "kind"), CLIENTS_TOOLS)
def test_what_a_client_runs_itself_is_called_and_its_result_read(
    http: httpx.Client, tool: dict[str, Any], kind: str
):
    choice = {key: tool[key] for key in ("type", "name") if key in tool}
    asked: dict[str, Any] = {"tools": [tool], "tool_choice": choice, "max_output_tokens": 60}
    answer = http.post(RESPONSES, json=body_of(RESPONSES, QUESTION) | asked)
    assert "x-ignored-tools" not in answer.headers
    body = answer.json()
    (call,) = body["output"]
    assert call["type"] == kind
    if tool.get("format", {}).get("type") == "grammar":
        assert re.fullmatch('[ab]{3}|[ab]\n"c', call["input"])
    result = {"type": f"{kind}_output", "call_id": call["call_id"], "output": "fine"}
    if kind == "shell_call":
        outcome = {"type": "exit", "exit_code": 0}
        result["output"] = [{"stdout": "fine", "stderr": "", "outcome": outcome}]
    goes_on = answered(
        http, RESPONSES, input=[result], previous_response_id=body["id"], tools=[tool]
    )
    assert goes_on["usage"]["input_tokens"] > body["usage"]["input_tokens"]
    listed = http.get(f"{RESPONSES}/{goes_on['id']}/input_items").json()["data"]
    assert listed[0]["type"] == f"{kind}_output"
    assert listed[0]["id"]


def without_ids(response: Any) -> list[dict[str, Any]]:
    return [item.to_dict() | {"id": "", "call_id": ""} for item in response.output]


@pytest.mark.parametrize(("tool", "kind"), CLIENTS_TOOLS)
def test_what_openais_package_accumulates_of_a_clients_tool_is_what_is_answered_whole(
    http: httpx.Client, tool: dict[str, Any], kind: str
):
    choice = {key: tool[key] for key in ("type", "name") if key in tool}
    asked: dict[str, Any] = {
        "model": "mlx-manager/demo",
        "input": QUESTION,
        "tools": [tool],
        "tool_choice": choice,
        "max_output_tokens": 60,
        "temperature": 0,
    }
    client = gpt_of(http)
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        streamed = stream.get_final_response()
    assert without_ids(streamed) == without_ids(whole)
    assert [item.type for item in streamed.output] == [kind]


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "memory_20250818", "name": "memory"},
        {
            "type": "computer_20250124",
            "name": "computer",
            "display_width_px": 800,
            "display_height_px": 600,
        },
    ],
    ids=lambda tool: str(tool["type"]),
)
def test_what_anthropics_clients_run_themselves_is_called(http: httpx.Client, tool: dict[str, Any]):
    choice = {"type": "tool", "name": tool["name"]}
    asked = body_of(MESSAGES, QUESTION, 200) | {"tools": [tool], "tool_choice": choice}
    answer = http.post(MESSAGES, json=asked)
    assert answer.status_code == 200
    assert "x-ignored-tools" not in answer.headers
    (block,) = [b for b in answer.json()["content"] if b["type"] == "tool_use"]
    assert block["name"] == tool["name"]
    said = [
        *says(QUESTION),
        {"role": "assistant", "content": [block]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": block["id"], "content": "fine"}],
        },
    ]
    assert answered(http, MESSAGES, messages=said, tools=[tool])["type"] == "message"


@pytest.mark.parametrize("tool", ANTHROPICS_TOOLS, ids=lambda tool: str(tool["type"]))
def test_a_hosted_tool_of_anthropics_is_left_out_or_refused_where_it_is_demanded(
    http: httpx.Client, tool: dict[str, Any]
):
    own = {"name": "get_weather", "input_schema": SCHEMA}
    asked = body_of(MESSAGES, QUESTION, 40) | {"tools": [tool, own]}
    answer = http.post(MESSAGES, json=asked)
    assert answer.headers["x-ignored-tools"] == tool["type"]
    assert answer.json()["stop_reason"] == "tool_use"
    anything = refused(http, MESSAGES, tools=[tool], tool_choice={"type": "any"})
    assert tool["type"] in anything["message"]
    if "name" in tool:
        choice = {"type": "tool", "name": tool["name"]}
        error = refused(http, MESSAGES, tools=[tool, own], tool_choice=choice)
        assert tool["type"] in error["message"]


def test_servers_of_tools_and_containers_are_left_out_and_named(http: httpx.Client):
    server = {"type": "url", "url": "https://example.com", "name": "x"}
    beside = {"mcp_servers": [server], "container": "c_1"}
    answer = http.post(MESSAGES, json=body_of(MESSAGES) | beside)
    assert answer.status_code == 200
    assert answer.headers["x-ignored-tools"] == "mcp_servers, container"


def test_in_chat_what_only_a_provider_runs_is_left_out_and_named(http: httpx.Client):
    function = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
    custom = {"type": "custom", "custom": {"name": "apply_patch"}}
    beside = {"tools": [custom, function], "web_search_options": {}}
    answer = http.post(CHAT, json=body_of(CHAT, QUESTION, 40) | beside)
    assert answer.headers["x-ignored-tools"] == "web_search_options, custom"
    assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"
    error = refused(http, CHAT, tools=[custom], tool_choice="required")
    assert error["param"] == "tool_choice"
    named = {"type": "custom", "custom": {"name": "apply_patch"}}
    error = refused(http, CHAT, tools=[custom, function], tool_choice=named)
    assert "custom" in error["message"]


def test_a_tool_of_a_type_that_nobody_knows_is_refused(http: httpx.Client):
    unknown: dict[str, Any] = {"type": "hologram", "name": "x"}
    for path in (CHAT, RESPONSES, MESSAGES):
        assert "`tools[0].type` 'hologram'" in refused(http, path, tools=[unknown])["message"]


def test_functions_that_a_search_would_find_are_offered_where_it_is_left_out(http: httpx.Client):
    deferred = [{"type": "tool_search"}, WEATHER | {"defer_loading": True}]
    plain = answered(http, RESPONSES, tools=[WEATHER])["usage"]["input_tokens"]
    assert answered(http, RESPONSES, tools=deferred)["usage"]["input_tokens"] == plain
    own = {"name": "get_weather", "input_schema": SCHEMA}
    search = {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}
    plain = sum(spent(answered(http, MESSAGES, tools=[own])["usage"]))
    later = own | {"defer_loading": True}
    assert sum(spent(answered(http, MESSAGES, tools=[search, later])["usage"])) == plain
    assert sum(spent(answered(http, MESSAGES, tools=[later])["usage"])) < plain


ITEMS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    (
        {
            "type": "web_search_call",
            "id": "ws_1",
            "status": "completed",
            "action": {"type": "search", "query": "the tallest hill"},
        },
        ("web_search_call", "the tallest hill"),
    ),
    (
        {
            "type": "file_search_call",
            "id": "fs_1",
            "status": "completed",
            "queries": ["blue door"],
            "results": [{"filename": "doors.md", "text": "It is blue.", "score": 0.5}],
        },
        ("blue door", "doors.md", "It is blue."),
    ),
    (
        {
            "type": "code_interpreter_call",
            "id": "ci_1",
            "code": "print(6 * 7)",
            "outputs": [{"type": "logs", "logs": "42"}],
            "container_id": "c",
            "status": "completed",
        },
        ("print(6 * 7)", "42"),
    ),
    (
        {
            "type": "mcp_call",
            "id": "m_1",
            "server_label": "wiki",
            "name": "ask",
            "arguments": '{"q": "hills"}',
            "output": "Many.",
        },
        ("wiki", "ask", "hills", "Many."),
    ),
    (
        {
            "type": "mcp_list_tools",
            "id": "l_1",
            "server_label": "wiki",
            "tools": [{"name": "ask", "input_schema": {}}],
        },
        ("wiki", "ask"),
    ),
    (
        {
            "type": "image_generation_call",
            "id": "ig_1",
            "status": "completed",
            "result": "iVBORw0KGgo" * 1000,
            "revised_prompt": "a red kite",
        },
        ("image_generation_call", "a red kite", "an image"),
    ),
]


@pytest.mark.parametrize(("item", "words"), ITEMS, ids=[item["type"] for item, _ in ITEMS])
def test_what_hosted_tools_did_is_read_as_text(
    http: httpx.Client, item: dict[str, Any], words: tuple[str, ...]
):
    said = [*says("Go on."), item, *says("And then?")]
    first = answered(http, RESPONSES, input=said)
    without = answered(http, RESPONSES, input=[*says("Go on."), *says("And then?")])
    more = first["usage"]["input_tokens"] - without["usage"]["input_tokens"]
    assert 0 < more < 200
    # It is kept, listed and gone on from like any other.
    listed = http.get(f"{RESPONSES}/{first['id']}/input_items", params={"order": "asc"}).json()
    assert listed["data"][1]["type"] == item["type"]
    goes_on = answered(http, RESPONSES, input="More", previous_response_id=first["id"])
    assert goes_on["usage"]["input_tokens"] > first["usage"]["input_tokens"]


def test_what_anthropics_tools_did_is_read_as_text(http: httpx.Client):
    blocks: list[dict[str, Any]] = [
        {"type": "text", "text": "I look it up."},
        {
            "type": "server_tool_use",
            "id": "srvtoolu_1",
            "name": "web_search",
            "input": {"query": "hills"},
        },
        {
            "type": "web_search_tool_result",
            "tool_use_id": "srvtoolu_1",
            "content": [
                {
                    "type": "web_search_result",
                    "url": "https://example.com/hills",
                    "title": "Hills",
                    "encrypted_content": "x" * 20_000,
                }
            ],
        },
        {"type": "mcp_tool_use", "id": "m", "name": "ask", "server_name": "wiki", "input": {}},
        {
            "type": "mcp_tool_result",
            "tool_use_id": "m",
            "is_error": False,
            "content": [{"type": "text", "text": "Many."}],
        },
        {"type": "text", "text": "There are many."},
    ]
    said = [*says("Hills?"), {"role": "assistant", "content": blocks}, *says("Thanks!")]
    plain = [{"type": "text", "text": "I look it up.\nThere are many."}]
    without = [*says("Hills?"), {"role": "assistant", "content": plain}, *says("Thanks!")]

    def tokens(messages: list[dict[str, Any]]) -> int:
        counted = http.post("/v1/messages/count_tokens", json={"messages": messages})
        return int(counted.json()["input_tokens"])

    assert 20 < tokens(said) - tokens(without) < 200
    assert answered(http, MESSAGES, messages=said)["type"] == "message"


def test_a_call_of_a_custom_tool_is_read_as_one(http: httpx.Client):
    call = {"id": "c", "type": "custom", "custom": {"name": "apply_patch", "input": "*** Begin"}}
    said = [
        *says("Go on."),
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "Done!"},
    ]
    text = http.post("/v1/apply-template", json={"messages": said}).json()["prompt"]
    assert "apply_patch" in text
    assert "*** Begin" in text
    assert answered(http, CHAT, messages=said)


# Fields of other APIs


@pytest.mark.parametrize(
    ("path", "name", "value", "instead"),
    [
        (RESPONSES, "max_tokens", 1, "max_output_tokens"),
        (RESPONSES, "max_completion_tokens", 1, "max_output_tokens"),
        (RESPONSES, "stop", ["small"], ""),
        (RESPONSES, "response_format", {"type": "json_object"}, "text.format"),
        (RESPONSES, "reasoning_effort", "low", "reasoning.effort"),
        (RESPONSES, "messages", says("hi"), "input"),
        (RESPONSES, "system", "Be brief.", "instructions"),
        (RESPONSES, "thinking", {"type": "enabled"}, "reasoning.effort"),
        (RESPONSES, "grammar", 'root ::= "a"', "text.format"),
        (RESPONSES, "n", 2, ""),
        (MESSAGES, "response_format", {"type": "json_object"}, "output_config.format"),
        (MESSAGES, "stop", "small", "stop_sequences"),
        (MESSAGES, "max_completion_tokens", 5, "max_tokens"),
        (MESSAGES, "max_output_tokens", 5, "max_tokens"),
        (MESSAGES, "instructions", "Be brief.", "system"),
        (MESSAGES, "reasoning_effort", "low", "thinking"),
        (MESSAGES, "guided_regex", "a+", "output_config.format"),
        (MESSAGES, "logprobs", True, ""),
        (CHAT, "max_output_tokens", 5, "max_completion_tokens"),
        (CHAT, "n_predict", 5, "max_completion_tokens"),
        (CHAT, "max_new_tokens", 5, "max_completion_tokens"),
        (CHAT, "stop_sequences", ["small"], "stop"),
        (CHAT, "text", {"format": {"type": "json_object"}}, "response_format"),
        (CHAT, "output_format", {"type": "json_schema", "schema": {}}, "response_format"),
        (CHAT, "system", "Be brief.", "role system"),
        (CHAT, "instructions", "Be brief.", "role system"),
        (CHAT, "input", "hi", "messages"),
        (CHAT, "prompt", "hi", "messages"),
        (CHAT, "format", "json", "response_format"),
        (CHAT, "options", {"num_ctx": 5}, ""),
        (CHAT, "typical_p", 0.5, ""),
        (CHAT, "mirostat", 2, ""),
        (CHAT, "xtc_probability", 0.5, ""),
        (CHAT, "bad_words", ["no"], ""),
        (CHAT, "include_reasoning", False, ""),
        (COMPLETIONS, "stop_sequences", ["small"], "stop"),
        (COMPLETIONS, "max_output_tokens", 5, "max_tokens"),
        (COMPLETIONS, "messages", says("hi"), "prompt"),
        (COMPLETIONS, "tools", [{"type": "function"}], "/v1/chat/completions"),
        (COMPLETIONS, "top_logprobs", 3, "logprobs"),
        (COMPLETIONS, "chat_template_kwargs", {"a": 1}, "/v1/chat/completions"),
    ],
)
def test_a_field_of_another_api_is_refused_by_name(
    http: httpx.Client, path: str, name: str, value: object, instead: str
):
    error = refused(http, path, **{name: value})
    assert error["message"].startswith(f"`{name}` is not supported by {path}.")
    assert instead in error["message"].partition(".")[2]
    assert error.get("param", name) == name
    # Null is no wish, on any path.
    answered(http, path, **{name: None})


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"stop_sequences": [], "text": {"format": {"type": "text"}}, "typical_p": 1.0}),
        (CHAT, {"include_reasoning": True, "mirostat": 0, "add_special_tokens": False}),
        (COMPLETIONS, {"tools": [], "tool_choice": "none", "add_special_tokens": True}),
        (CHAT, {"max_new_tokens": 4, "n_predict": 4, "stop": ["x"], "stop_sequences": ["x"]}),
        (COMPLETIONS, {"num_predict": 4, "guidance_scale": 1, "negative_prompt": ""}),
        (RESPONSES, {"max_tokens": 4}),
        (MESSAGES, {"max_completion_tokens": 4}),
        (RESPONSES, {"stop": [], "n": 1, "response_format": {"type": "text"}, "logprobs": False}),
        (MESSAGES, {"stop": [], "n": 1, "user": "me", "store": False, "parallel_tool_calls": True}),
    ],
)
def test_a_field_of_another_api_that_asks_for_nothing_is_none(
    http: httpx.Client, path: str, fields: dict[str, Any]
):
    assert answered(http, path, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"json_schema": {"const": 7}},
        {"json_schema": '{"const": 7}'},
        {"grammar": 'root ::= "7"'},
        {"ebnf": 'root ::= "7"'},
        {"regex": "7"},
    ],
    ids=lambda fields: next(iter(fields)),
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_forms_by_llama_cpps_and_sglangs_names_are_honoured(
    http: httpx.Client, path: str, fields: dict[str, Any]
):
    [choice] = answered(http, path, **fields)["choices"]
    assert (choice["text"] if path == COMPLETIONS else choice["message"]["content"]) == "7"


def test_two_forms_by_whatever_names_exclude_each_other(http: httpx.Client):
    error = refused(http, CHAT, grammar='root ::= "7"', response_format={"type": "json_object"})
    assert "exclude each other" in error["message"]


def test_minus_one_token_is_no_limit(http: httpx.Client):
    said = says("Tell me a story.")
    prompt = http.post("/v1/apply-template", json={"messages": said}).json()["prompt"]
    asked: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": said, "max_tokens": -1}),
        (CHAT, {"messages": said, "max_completion_tokens": -1, "max_tokens": None}),
        (COMPLETIONS, {"prompt": prompt, "max_tokens": -1}),
    ]
    answers = [answered(http, path, **fields) for path, fields in asked]
    assert {answer["choices"][0]["finish_reason"] for answer in answers} == {"stop"}
    assert min(answer["usage"]["completion_tokens"] for answer in answers) > 16


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
def test_sampling_parameters_mean_the_same_everywhere(http: httpx.Client, path: str):
    def said(**fields: Any) -> str:
        answer = answered(http, path, **fields)
        for name in ("id", "created", "created_at", "completed_at"):
            answer.pop(name, None)
        match answer:
            case {"choices": [choice]}:
                return str(choice.get("text") or choice.get("message"))
            case {"output": items}:
                return str([item["content"][0]["text"] for item in items])
        return str(answer["content"])

    hot: dict[str, Any] = {"temperature": 2.0, "top_k": -1}
    assert said(**hot, seed=1) == said(**hot, seed=1)
    assert len({said(**hot, seed=seed) for seed in range(6)}) > 1
    assert said(**hot, seed=1, min_p=1.0) == said(temperature=0)
    assert said(repetition_penalty=1.5) == said(repeat_penalty=1.5)
    banned = http.post("/v1/tokenize", json={"content": "Hello"}).json()["tokens"][0]
    assert said(logit_bias={str(banned): -100}) is not None
    beyond = {"presence_penalty": 3}
    answer = http.post(path, json=body_of(path) | beyond)
    assert answer.status_code == (422 if path in (CHAT, COMPLETIONS) else 400)


def test_variables_of_the_template_are_taken_by_every_chat(http: httpx.Client):
    for path in (CHAT, RESPONSES, MESSAGES):
        assert answered(http, path, chat_template_kwargs={"enable_thinking": False})
    counted = {"chat_template_kwargs": {"enable_thinking": False}}
    for path, body in (
        ("/v1/responses/input_tokens", {"input": "hi"}),
        ("/v1/messages/count_tokens", {"messages": says("hi")}),
    ):
        answer = http.post(path, json=body | counted)
        assert answer.status_code == 200
        assert "x-unknown-fields" not in answer.headers


@pytest.mark.parametrize("name", ["prefix", "partial"])
def test_an_answer_goes_on_from_a_message_that_says_so(http: httpx.Client, name: str):
    begun = {"role": "assistant", "content": "Rome is"}
    said = [*says("Where?"), begun | {name: True}]
    asked = answered(http, CHAT, messages=said)
    same = answered(http, CHAT, messages=[*says("Where?"), begun], continue_final_message=True)
    assert asked["choices"] == same["choices"]
    error = refused(http, CHAT, messages=[begun | {name: True}, *says("Where?")])
    assert error["param"] == f"messages[0].{name}"


# Half a character


HALVES = [r"\ud83d", r"\ude00", r"\ud83d\ud83d\ude00", r"a\\\ud83d", r"\uDBFF!"]


@pytest.mark.parametrize(
    ("path", "half"),
    [
        *((path, HALVES[0]) for path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES)),
        *(("/v1/tokenize", half) for half in HALVES),
    ],
)
def test_half_a_character_is_u_fffd_wherever_it_stands(http: httpx.Client, path: str, half: str):
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "HALF"}'}}
    match path:
        case "/v1/chat/completions":
            result = {"role": "tool", "tool_call_id": "c", "content": "HALF"}
            said = [*says("HALF"), {"role": "assistant", "tool_calls": [call]}, result]
            body: dict[str, Any] = {"messages": said, "tools": [tool], "HALF": 1}
        case "/v1/tokenize":
            body = {"prompt": "HALF"}
        case _:
            body = body_of(path, "HALF")
    text = json.dumps(body | {"max_tokens": 2} if path == CHAT else body)
    answer = http.post(
        path,
        content=text.replace("HALF", half).encode(),
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 200, answer.text
    if path == "/v1/tokenize":
        as_python_reads_it = json.loads(f'"{half}"')
        read = re.sub("[\ud800-\udfff]", "\ufffd", as_python_reads_it)
        assert answer.json() == http.post(path, json={"prompt": read}).json()


@pytest.mark.parametrize("text", ['"\\ud83d\\ude00"', '"\\\\ud83d"', '"\\\\\\\\ude00"'])
def test_whole_characters_and_escaped_backslashes_stay(http: httpx.Client, text: str):
    # The body has half a character elsewhere, so that it is read with care.
    body = f'{{"prompt": {text}, "later": "\\ud83d"}}'
    headers = {"content-type": "application/json"}
    answer = http.post("/v1/tokenize", content=body.encode(), headers=headers)
    assert answer.json() == http.post("/v1/tokenize", json={"prompt": json.loads(text)}).json()


# What is read of an answer


def events(http: httpx.Client, path: str, **fields: Any) -> list[str]:
    answer = http.post(path, json=body_of(path) | {"stream": True} | fields)
    assert answer.status_code == 200, answer.text
    return answer.text.split("\n\n")[:-1]


def data(event: str) -> Any:
    return json.loads(event.partition("data: ")[2])


def test_a_response_says_what_it_was_drawn_by_and_whether_it_is_kept(http: httpx.Client):
    plain = answered(http, RESPONSES)
    assert (plain["presence_penalty"], plain["frequency_penalty"]) == (0.0, 0.0)
    assert plain["store"] is True
    assert "user" not in plain
    told = answered(
        http, RESPONSES, presence_penalty=0.5, frequency_penalty=-1, store=False, user="me"
    )
    assert (told["presence_penalty"], told["frequency_penalty"]) == (0.5, -1.0)
    assert (told["store"], told["user"]) == (False, "me")
    *sent, done = events(http, RESPONSES, presence_penalty=0.5, text={"verbosity": "low"})
    assert done == "data: [DONE]"
    shells = [data(event)["response"] for event in sent if '"response":' in event]
    assert len(shells) == 3
    for shell in shells:
        assert (shell["presence_penalty"], shell["store"]) == (0.5, True)
        assert shell["text"]["verbosity"] == "low"
        assert "user" not in shell


def test_a_response_that_failed_ends_with_done_too(http: httpx.Client):
    answer = http.post(
        RESPONSES, json=body_of(RESPONSES, most=3000) | {"stream": True, "timeout": 0.3, "top_k": 0}
    )
    if answer.status_code == 504:
        pytest.skip("it failed before its first token")
    *_, last, done, nothing = answer.text.split("\n\n")
    assert nothing == ""
    assert done == "data: [DONE]"
    assert data(last)["type"] in ("response.failed", "response.completed")


def test_only_what_is_answered_in_the_background_can_be_cancelled(http: httpx.Client):
    gpt = gpt_of(http)
    made = gpt.responses.create(model=MODEL, input="hi", max_output_tokens=2)
    with pytest.raises(openai.BadRequestError) as caught:
        gpt.responses.cancel(made.id)
    assert caught.value.body["message"] == "Cannot cancel a synchronous response."  # type: ignore[index]
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError, match="resp_unknown"):
        gpt.responses.cancel("resp_unknown")


def test_models_tell_their_context_by_vllms_name(http: httpx.Client):
    for model in http.get("/v1/models").json()["data"]:
        assert model["max_model_len"] == model["context_length"]
        assert http.get(f"/v1/models/{model['id']}").json()["max_model_len"] > 0


def test_an_answer_has_the_fingerprint_of_what_drew_it(http: httpx.Client):
    prints = {answered(http, path)["system_fingerprint"] for path in (CHAT, COMPLETIONS)}
    for path in (CHAT, COMPLETIONS):
        *sent, _ = events(http, path)
        prints |= {data(event)["system_fingerprint"] for event in sent}
    [fingerprint] = prints
    assert fingerprint.startswith("fp_")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("n", [1, 2])
def test_usage_grows_with_the_answer_where_that_is_asked_for(http: httpx.Client, path: str, n: int):
    options = {"include_usage": True, "continuous_usage_stats": True}
    *sent, done = events(http, path, stream_options=options, n=n, ignore_eos=True)
    assert done == "data: [DONE]"
    *chunks, last = map(data, sent)
    assert last["choices"] == []
    for row in range(n):
        usages = [c["usage"] for c in chunks if c["choices"][0]["index"] == row and c["usage"]]
        counts = [usage["completion_tokens"] for usage in usages]
        assert counts == sorted(counts)
        assert counts[-1] == 4
        assert {usage["prompt_tokens"] for usage in usages} == {last["usage"]["prompt_tokens"]}
        assert all(
            usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            for usage in usages
        )
    *sent, _ = events(http, path, stream_options={"include_usage": True})
    assert all(data(event)["usage"] is None for event in sent[:-1])


def spent(usage: Any) -> tuple[int, int, int]:
    return (
        usage["input_tokens"],
        usage["cache_creation_input_tokens"],
        usage["cache_read_input_tokens"],
    )


MARK = {"cache_control": {"type": "ephemeral"}}
MARKED: dict[str, Callable[[str], dict[str, Any]]] = {
    "request": lambda text: {"messages": says(text), **MARK},
    "system": lambda text: {"system": [{"type": "text", "text": text, **MARK}]},
    "message": lambda text: {
        "messages": [{"role": "user", "content": [{"type": "text", "text": text, **MARK}]}]
    },
    "tool": lambda text: {
        "messages": says(text),
        "tools": [{"name": "f", "input_schema": SCHEMA, **MARK}],
    },
    "result": lambda text: {
        "messages": [
            *says(text),
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "a",
                        "content": [{"type": "text", "text": "so", **MARK}],
                    }
                ],
            },
        ]
    },
}  # fmt: skip


@pytest.mark.parametrize("where", MARKED)
@pytest.mark.parametrize("stream", [False, True])
def test_what_was_newly_kept_is_counted_where_cache_control_asks(
    http: httpx.Client, where: str, stream: bool
):
    text = f"A prompt that nobody has sent before, {where} {stream}. " * 20
    fields = MARKED[where](text)

    def usage() -> tuple[int, int, int]:
        if not stream:
            return spent(answered(http, MESSAGES, **fields)["usage"])
        found = [data(event) for event in events(http, MESSAGES, **fields)]
        begun, ended = (
            next(event for event in found if event["type"] == kind)
            for kind in ("message_start", "message_delta")
        )
        assert spent(begun["message"]["usage"]) == spent(ended["usage"])
        return spent(ended["usage"])

    first, again = usage(), usage()
    assert sum(first) == sum(again)
    assert first[1] > 100
    # What was kept is what is read, and nothing is kept twice.
    assert again == (first[0], 0, first[1] + first[2])


def test_nothing_is_counted_as_newly_kept_unless_that_is_asked_for(http: httpx.Client):
    usage = spent(
        answered(http, MESSAGES, messages=says("Never said before, so far. " * 20))["usage"]
    )
    assert usage[1] == 0
    assert usage[0] > 100


def test_the_sdks_read_what_is_new(http: httpx.Client):
    url = str(http.base_url)
    claude = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, http_client=http)
    made = claude.messages.create(
        model=MODEL,
        max_tokens=2,
        messages=[{"role": "user", "content": "Said to an SDK alone. " * 20}],
        cache_control={"type": "ephemeral"},
    )
    assert (made.usage.cache_creation_input_tokens or 0) > 50
    gpt = gpt_of(http)
    chunks = list(
        gpt.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=3, stream=True
        )
    )
    assert {chunk.system_fingerprint for chunk in chunks} != {None}
    with gpt.responses.stream(model=MODEL, input="hi") as stream:
        assert stream.get_final_response().status == "completed"


# An app that was not started


async def test_the_contracts_422_needs_no_model():
    transport = httpx.ASGITransport(create_app())
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        for path in (CHAT, COMPLETIONS):
            hot = await client.post(path, json=body_of(path) | {"temperature": 5.0})
            assert hot.status_code == 422
            assert hot.json()["error"]["param"] == "temperature"
