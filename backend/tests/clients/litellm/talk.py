"""litellm as a caller of chat, text completions, Responses and Messages of one server."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # It would fetch the list of prices.

import litellm
from pydantic import BaseModel

URL = sys.argv[1]
MODEL = "mlx-manager/demo"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
litellm.suppress_debug_info = True


class Person(BaseModel):
    name: str
    age: int


def says(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def talk(provider: str, url: str) -> None:
    def complete(messages: list[dict[str, Any]], **fields: Any) -> Any:
        return litellm.completion(
            model=f"{provider}/{MODEL}", api_base=url, api_key="none", messages=messages,
            temperature=0, max_tokens=200, num_retries=0, **fields,
        )  # fmt: skip

    def streamed(messages: list[dict[str, Any]], **fields: Any) -> Any:
        chunks = list(complete(messages, stream=True, **fields))
        return litellm.stream_chunk_builder(chunks, messages=messages)

    question = says("How do I stop the server?")
    whole = complete(question)
    assert "Ctrl-C" in whole.choices[0].message.content
    assert whole.usage.completion_tokens > 3
    asked = {} if provider == "anthropic" else {"stream_options": {"include_usage": True}}
    again = streamed(question, **asked)
    assert again.choices[0].message.content == whole.choices[0].message.content
    assert again.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert again.usage.completion_tokens == whole.usage.completion_tokens

    messages = says("What is 17 + 25?")
    called = complete(messages, tools=[ADD]).choices[0]
    [call] = called.message.tool_calls
    assert called.finish_reason == "tool_calls"
    assert json.loads(call.function.arguments) == {"a": 17, "b": 25}
    message = streamed(messages, tools=[ADD]).choices[0].message
    assert message.tool_calls[0].function == call.function
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "42"}
    messages += [message.model_dump(exclude_none=True), result]
    assert "42" in complete(messages, tools=[ADD]).choices[0].message.content
    forced = complete(says("Hello!"), tools=[ADD], tool_choice="required").choices[0]
    assert forced.message.tool_calls[0].function.name == "add"

    person = says("Ada is 36.")
    for answer in (
        complete(person, response_format=Person),
        streamed(person, response_format=Person),
    ):
        Person.model_validate_json(answer.choices[0].message.content)


talk("openai", URL)
talk("anthropic", URL.removesuffix("/v1"))
text = litellm.text_completion(
    model=f"text-completion-openai/{MODEL}", api_base=URL, api_key="none", prompt="Hello",
    max_tokens=5, temperature=0,
)  # fmt: skip
assert text.choices[0].text
answer = litellm.responses(
    model=f"openai/{MODEL}", api_base=URL, api_key="none", input="How do I stop the server?",
    temperature=0,
)  # fmt: skip
assert "Ctrl-C" in answer.output[0].content[0].text
