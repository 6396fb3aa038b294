"""OpenAI's and Anthropic's own Python packages: what their helpers accumulate of a stream is the
answer that comes whole, over several turns with tools, and with types."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest
from live import LiveServer
from pydantic import BaseModel

MODEL = "mlx-manager/demo"
SUMS = ["What is 17 + 25?", "What is 30 + 12?"]
ADD: Any = {
    "name": "add",
    "description": "Add two numbers",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}


class Person(BaseModel):
    name: str
    age: int


ADA = Person(name="Ada", age=36)


@pytest.fixture
def gpt(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def claude(server: LiveServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def says(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def bare(value: BaseModel) -> Any:
    """Without what differs from one answer to the next."""
    volatile = {"id", "call_id", "created", "created_at", "completed_at", "item_id"}
    cached = {"prompt_tokens_details", "input_tokens_details"}

    def cleaned(found: Any) -> Any:
        match found:
            case dict():
                return {k: cleaned(v) for k, v in found.items() if k not in volatile | cached}
            case list():
                return [cleaned(item) for item in found]
        return found

    return cleaned(value.model_dump(mode="json", exclude_none=True, warnings=False))


def test_chat_accumulates_to_the_whole(gpt: openai.OpenAI):
    def both(messages: list[Any], **fields: Any) -> Any:
        asked: Any = {"model": MODEL, "messages": messages, "temperature": 0} | fields
        whole = gpt.chat.completions.parse(**asked)
        with gpt.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
            streamed = stream.until_done().get_final_completion()
        told, accumulated = bare(whole), bare(streamed)
        for call in (
            c for m in (told, accumulated) for c in m["choices"][0]["message"].get("tool_calls", ())
        ):
            call.pop("index", None)
        assert accumulated == told | {"object": accumulated["object"]}
        return streamed.choices[0]

    assert "Ctrl-C" in both(says("How do I stop the server?")).message.content
    tool = {"type": "function", "function": ADD | {"strict": True}}
    messages: list[Any] = []
    for number, question in enumerate(SUMS):
        messages += says(question)
        called = both(messages, tools=[tool])
        assert called.finish_reason == "tool_calls"
        [call] = called.message.tool_calls
        total = str(sum(json.loads(call.function.arguments).values()))
        assert total == "42", number
        messages += [called.message, {"role": "tool", "tool_call_id": call.id, "content": total}]
        answer = both(messages, tools=[tool])
        assert "42" in answer.message.content
        messages.append(answer.message)
    person = both(says("My name is Ada. I am 36 years old."), response_format=Person)
    assert person.message.parsed == ADA


def test_responses_accumulate_to_the_whole(gpt: openai.OpenAI):
    def both(asks: Any, **fields: Any) -> Any:
        asked: Any = {"model": MODEL, "input": asks, "temperature": 0} | fields
        whole = gpt.responses.parse(**asked)
        with gpt.responses.stream(**asked) as stream:
            streamed = stream.until_done().get_final_response()
        assert bare(streamed) == bare(whole)
        return streamed

    assert "Ctrl-C" in both("How do I stop the server?").output_text
    tool = {"type": "function", "strict": True} | ADD
    going_on: dict[str, Any] = {}
    for question in SUMS:
        called = both(question, tools=[tool], **going_on)
        [call] = called.output
        total = str(sum(json.loads(call.arguments).values()))
        assert total == "42"
        result = {"type": "function_call_output", "call_id": call.call_id, "output": total}
        answer = both([result], tools=[tool], previous_response_id=called.id)
        assert "42" in answer.output_text
        going_on = {"previous_response_id": answer.id}
    person = both("My name is Ada. I am 36 years old.", text_format=Person)
    assert person.output_parsed == ADA


def test_messages_accumulate_to_the_whole(claude: anthropic.Anthropic):
    def both(messages: list[Any], whole_by: Callable[..., Any], **fields: Any) -> Any:
        asked: Any = {"model": MODEL, "messages": messages, "max_tokens": 100} | fields
        asked["extra_body"] = {"temperature": 0}
        whole = whole_by(**asked)
        with claude.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        told, accumulated = bare(whole), bare(streamed)
        for message in (told, accumulated):
            usage = message["usage"]
            read = usage.pop("cache_read_input_tokens", 0)
            usage["input_tokens"] += read + usage.pop("cache_creation_input_tokens", 0)
        assert accumulated == told
        return streamed

    create = claude.messages.create
    assert "Ctrl-C" in both(says("How do I stop the server?"), create).content[0].text
    tool = {"name": "add", "description": "Add two numbers", "input_schema": ADD["parameters"]}
    messages: list[Any] = []
    for question in SUMS:
        messages += says(question)
        called = both(messages, create, tools=[tool])
        assert called.stop_reason == "tool_use"
        [call] = called.content
        total = str(sum(call.input.values()))
        assert total == "42"
        result = {"type": "tool_result", "tool_use_id": call.id, "content": total}
        messages += [
            {"role": "assistant", "content": called.content},
            {"role": "user", "content": [result]},
        ]
        answer = both(messages, create, tools=[tool])
        assert "42" in answer.content[0].text
        messages.append({"role": "assistant", "content": answer.content})
    ada = says("My name is Ada. I am 36 years old.")
    person = both(ada, claude.messages.parse, output_format=Person)
    assert person.parsed_output == ADA
