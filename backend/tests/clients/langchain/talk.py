"""langchain-openai over chat completions and over Responses: text, tools, structured output."""

from __future__ import annotations

import sys

from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL = sys.argv[1]
MODEL = "mlx-manager/demo"


@tool
def add(a: int, b: int) -> int:
    """Add two numbers"""
    return a + b


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def gathered(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    whole, *rest = chunks
    for chunk in rest:
        whole += chunk
    return whole


def talk(model: ChatOpenAI) -> None:
    question = "How do I stop the server?"
    whole = model.invoke(question)
    assert "Ctrl-C" in whole.text, whole
    chunks = list(model.stream(question))
    streamed = gathered(chunks)
    assert streamed.text == whole.text
    for name in ("input_tokens", "output_tokens", "total_tokens"):
        assert streamed.usage_metadata[name] == whole.usage_metadata[name] > 3

    with_tools = model.bind_tools([add])
    messages = [HumanMessage("What is 17 + 25?")]
    called = with_tools.invoke(messages)
    [call] = called.tool_calls
    assert (call["name"], call["args"]) == ("add", {"a": 17, "b": 25})
    streamed = gathered(list(with_tools.stream(messages)))
    assert [(c["name"], c["args"]) for c in streamed.tool_calls] == [("add", call["args"])]
    messages += [
        streamed,
        ToolMessage(str(add.invoke(call["args"])), tool_call_id=streamed.tool_calls[0]["id"]),
    ]
    assert "42" in with_tools.invoke(messages).text
    [forced] = model.bind_tools([add], tool_choice="add").invoke("Hello!").tool_calls
    assert forced["name"] == "add"

    for method in ("json_schema", "function_calling"):
        structured = model.with_structured_output(Person, method=method)
        assert structured.invoke("Ada is 36.").model_fields_set == {"name", "age"}
        *_, last = structured.stream("Ada is 36.")
        assert isinstance(last, Person)
    assert isinstance(
        model.with_structured_output(None, method="json_mode").invoke("Write JSON."), dict
    )


for responses in (False, True):
    talk(
        ChatOpenAI(
            model=MODEL, base_url=URL, api_key="none", temperature=0, max_retries=0,
            stream_usage=True, use_responses_api=responses,
        )
    )  # fmt: skip
