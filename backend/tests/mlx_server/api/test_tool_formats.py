"""Calls in every format, as a client sees them: the official SDK's streaming and whole answers."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from api.conftest import Serve
from openai_spec import check
from scripted import Step
from text.outputs import HERMES, SAMPLES, TOOLS, Pieces, Sample, of_mlx

from mlx_manager.mlx_server.core import Finished, GenerationRequest, Started, Usage
from mlx_manager.mlx_server.formats import OutputFormat
from mlx_manager.mlx_server.text.output_parser import OutputParser


def plays(sample: Sample) -> list[Step]:
    """The sample as a model writes it, a few characters a token."""
    return played(sample.text, sample.output)


def played(text: str, output: OutputFormat) -> list[Step]:
    pieces = [text[i : i + 5] for i in range(0, len(text), 5)]
    parser = OutputParser(Pieces(pieces), output)
    steps: list[Step] = [[Started(3)]]
    steps += [events for token in range(len(pieces)) if (events := parser.push(token))]
    last = parser.finish("stop")
    reason = "tool_calls" if parser.called else "stop"
    return [*steps, [*last, Finished(reason, Usage(3, len(pieces)))]]


@pytest.mark.parametrize("sample", [s for s in SAMPLES if s.calls], ids=lambda sample: sample.title)
async def test_the_sdk_reads_the_calls_of_every_format(serve: Serve, sample: Sample) -> None:
    def script(_: GenerationRequest) -> list[Step]:
        return plays(sample)

    async with serve(script) as http:
        client = openai.AsyncOpenAI(base_url="http://server/v1", api_key="x", http_client=http)
        asked: dict[str, Any] = {
            "model": "mlx-manager/demo",
            "messages": [{"role": "user", "content": "How is Paris?"}],
            "tools": TOOLS,
        }
        whole = await client.chat.completions.create(**asked)
        check("CreateChatCompletionResponse", whole.model_dump(exclude_unset=True))
        async with client.chat.completions.stream(**asked) as stream:
            async for _ in stream:
                pass
            streamed = await stream.get_final_completion()
    for answer in (whole, streamed):
        message = answer.choices[0].message
        calls: list[Any] = list(message.tool_calls or ())
        found = [(call.function.name, json.loads(call.function.arguments)) for call in calls]
        assert tuple(found) == sample.calls
        assert (message.content or "") == sample.content
        assert len({call.id for call in calls}) == len(calls)
        assert answer.choices[0].finish_reason == "tool_calls"


CODER, GLM, GEMMA, KIMI = map(of_mlx, ("qwen3_coder", "glm47", "gemma4", "kimi_k2"))
BROKEN: tuple[tuple[OutputFormat, str, dict[str, Any]], ...] = (
    (
        CODER,
        '<function=note>\n<parameter=edits>\n[{"old": "a\n\tb"}]\n</parameter>\n</function>',
        {"edits": [{"old": "a\n\tb"}]},
    ),
    (
        GLM,
        '<tool_call>note\n<arg_key>edits</arg_key>\n<arg_value>[{"old": "a\nb"}]</arg_value>',
        {"edits": [{"old": "a\nb"}]},
    ),
    (HERMES, '<tool_call>{"name": "note", "arguments": {"a": 1 </tool_call>', {"a": 1}),
    (
        HERMES,
        r'<tool_call>{"name": "note", "arguments": {"a": [tru, 01, "\ud83d',
        {"a": ["tru", "01", "\ufffd"]},
    ),
    (GEMMA, "<|tool_call>call:note{a-b:['it's',None", {"a-b": ["it's", None]}),
    (
        KIMI,
        '<|tool_call_begin|>functions_note_1<|tool_call_argument_begin|>{"a": "x',
        {"a": "x"},
    ),
)
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Go."}], "tools": TOOLS},
    "/v1/responses": {
        "input": "Go.",
        "tools": [{"type": "function", **tool["function"]} for tool in TOOLS],
    },
    "/v1/messages": {
        "messages": [{"role": "user", "content": "Go."}],
        "max_tokens": 99,
        "tools": [
            {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]}
            for tool in TOOLS
        ],
    },
}


def arguments_of(body: dict[str, Any]) -> Any:
    match body:
        case {"choices": [{"message": {"tool_calls": [call]}}]}:
            return json.loads(call["function"]["arguments"])
        case {"output": [{"type": "function_call", "arguments": arguments}]}:
            return json.loads(arguments)
        case {"content": [{"type": "tool_use", "input": given}], "stop_reason": "tool_use"}:
            return given
    raise AssertionError(body)


def streamed_arguments(text: str) -> Any:
    found = ""
    for line in text.splitlines():
        match json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else None:
            case {"choices": [{"delta": {"tool_calls": [{"function": function}]}}]}:
                found += function.get("arguments") or ""
            case {"type": "response.function_call_arguments.delta", "delta": delta}:
                found += delta
            case {"type": "content_block_delta", "delta": {"partial_json": delta}}:
                found += delta
    return json.loads(found)


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize(("output", "text", "given"), BROKEN, ids=lambda value: str(value)[:20])
async def test_arguments_that_leave_are_json_however_they_were_written(
    serve: Serve, path: str, output: OutputFormat, text: str, given: dict[str, Any]
) -> None:
    async with serve(lambda _: played(text, output)) as http:
        body = {"model": "mlx-manager/demo", **ASKED[path]}
        whole = await http.post(path, json=body)
        assert whole.status_code == 200, whole.text
        assert arguments_of(whole.json()) == given
        streamed = await http.post(path, json=body | {"stream": True})
        assert streamed_arguments(streamed.text) == given
