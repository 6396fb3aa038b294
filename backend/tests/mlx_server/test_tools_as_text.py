"""Tools for a model whose chat template knows of none: by every protocol, over HTTP.

pi, Continue and Cline offer tools whatever the model is.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import jsonschema
import openai
import pytest
from here import served_here

import mlx_manager.demo_model

MODEL = "plain"
TEMPLATE = """\
{{ bos_token }}{% for m in messages %}\
{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}\
{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content + '<|eot_id|>' }}\
{% endfor %}\
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}\
"""
"""As Gemma 2's: no system messages, no tools, no calls, no results, and turns that alternate."""
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12, "description": "Whose weather"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOLD = "Get the weather of a city"
CHAT_TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": TOLD, "parameters": SCHEMA},
    }
]
RESPONSES_TOOLS: Any = [
    {"type": "function", "name": "get_weather", "description": TOLD, "parameters": SCHEMA}
]
CLAUDE_TOOLS: Any = [{"name": "get_weather", "description": TOLD, "input_schema": SCHEMA}]
QUESTION = "What is the weather in Rome?"
RESULT = '{"temperature": 21}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("models")
    demo = Path(mlx_manager.demo_model.__file__).parent
    shutil.copytree(demo, folder / MODEL, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (folder / MODEL / "chat_template.jinja").write_text(TEMPLATE)
    with served_here(models_dir=folder) as client:
        yield client


@pytest.fixture(scope="module")
def gpt(server: httpx.Client) -> openai.OpenAI:
    url = f"{server.base_url}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=server)


@pytest.fixture(scope="module")
def claude(server: httpx.Client) -> anthropic.Anthropic:
    url = str(server.base_url)
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, http_client=server)


def prompt(server: httpx.Client, messages: list[Any], **more: Any) -> str:
    body = {"model": MODEL, "messages": messages, **more}
    answer = server.post("/v1/apply-template", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["prompt"])


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_a_call_is_made_and_answered_by_chat(
    gpt: openai.OpenAI, server: httpx.Client, choice: Any, streamed: bool
) -> None:
    asked: dict[str, Any] = {"model": MODEL, "tools": CHAT_TOOLS, "max_tokens": 200, "seed": 1}
    asked["parallel_tool_calls"] = False
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    if streamed:
        with gpt.chat.completions.stream(**asked, messages=messages, tool_choice=choice) as stream:
            done: Any = stream.get_final_completion().choices[0]
    else:
        done = gpt.chat.completions.create(**asked, messages=messages, tool_choice=choice)
        done = done.choices[0]
    assert done.finish_reason == "tool_calls"
    (call,) = done.message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": RESULT},
    ]
    text = prompt(server, messages, tools=CHAT_TOOLS)
    arguments = json.dumps(json.loads(call.function.arguments), ensure_ascii=False)
    for said in (TOLD, "Whose weather", QUESTION, RESULT, f'"arguments": {arguments}'):
        assert said in text
    last = gpt.chat.completions.create(**asked, messages=messages, tool_choice="none")
    assert last.choices[0].message.content
    assert last.choices[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_call_is_made_and_answered_by_responses(gpt: openai.OpenAI, streamed: bool) -> None:
    asked: dict[str, Any] = {"model": MODEL, "tools": RESPONSES_TOOLS, "max_output_tokens": 200}
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    demanded: dict[str, Any] = {"input": items, "tool_choice": "required", "store": False}
    if streamed:
        with gpt.responses.stream(**asked, **demanded, parallel_tool_calls=False) as stream:
            done: Any = stream.get_final_response()
    else:
        done = gpt.responses.create(**asked, **demanded, parallel_tool_calls=False)
    (call,) = [item for item in done.output if item.type == "function_call"]
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    items += [
        {"type": "function_call", "call_id": call.call_id, "name": call.name}
        | {"arguments": call.arguments},
        {"type": "function_call_output", "call_id": call.call_id, "output": RESULT},
    ]
    assert gpt.responses.create(**asked, input=items, store=False).output


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("choice", ["any", "tool"])
def test_a_call_is_made_and_answered_by_messages(
    claude: anthropic.Anthropic, choice: str, streamed: bool
) -> None:
    asked: dict[str, Any] = {"model": MODEL, "tools": CLAUDE_TOOLS, "max_tokens": 200}
    asked["system"] = "Be brief."
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    demanded: dict[str, Any] = {"type": choice, "disable_parallel_tool_use": True}
    if choice == "tool":
        demanded["name"] = "get_weather"
    if streamed:
        with claude.messages.stream(**asked, messages=messages, tool_choice=demanded) as stream:
            done: Any = stream.get_final_message()
    else:
        done = claude.messages.create(**asked, messages=messages, tool_choice=demanded)
    assert done.stop_reason == "tool_use"
    (call,) = [block for block in done.content if block.type == "tool_use"]
    jsonschema.validate(call.input, SCHEMA)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": RESULT}
    messages += [
        {"role": "assistant", "content": done.model_dump(exclude_unset=True)["content"]},
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
    ]
    assert claude.messages.create(**asked, messages=messages).stop_reason in (
        *("end_turn", "max_tokens", "tool_use"),
    )


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_without_a_demand_the_model_answers_as_it_likes(gpt: openai.OpenAI, choice: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "Hello!"}]
    asked: dict[str, Any] = {"model": MODEL, "messages": messages, "tools": CHAT_TOOLS}
    asked |= {"temperature": 0, "max_tokens": 40, "tool_choice": choice}
    whole = gpt.chat.completions.create(**asked).choices[0].message
    with gpt.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0].message
    assert whole.content or whole.tool_calls
    assert (whole.content or "") == (streamed.content or "")


def test_a_session_whose_call_was_denied_goes_on(gpt: openai.OpenAI) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": "{"}}
    messages: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "user", "content": "No, don't."},
        {"role": "user", "content": "Hello!"},
    ]
    for tools in ({}, {"tools": CHAT_TOOLS}):
        asked: Any = {"model": MODEL, "messages": messages, "max_tokens": 8, **tools}
        assert gpt.chat.completions.create(**asked).choices
