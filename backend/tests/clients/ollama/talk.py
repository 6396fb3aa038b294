"""Ollama's own client and langchain-ollama: lists, chats, streams, tools, schemas, loading."""

from __future__ import annotations

import json
import sys

import ollama
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaLLM
from pydantic import BaseModel

URL = sys.argv[1].removesuffix("/v1")
MODEL = "mlx-manager/demo"
QUESTION = "How do I stop the server?"
SUM = "What is 17 + 25?"
GREEDY = {"temperature": 0}


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def add(a: int, b: int) -> int:
    """Add two numbers

    Args:
        a: one
        b: the other
    """
    return a + b


def official(client: ollama.Client) -> None:
    names = [model.model for model in client.list().models]
    assert f"{MODEL}:latest" in names, names
    assert client.show(MODEL).modelinfo["llama.context_length"] == 8192
    messages = [{"role": "user", "content": QUESTION}]
    whole = client.chat(model=MODEL, messages=messages, options=GREEDY)
    assert "Ctrl-C" in whole.message.content
    parts = list(client.chat(model=MODEL, messages=messages, options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert parts[-1].done
    assert parts[-1].eval_count == whole.eval_count > 3
    assert parts[-1].total_duration > 0

    turns = [{"role": "user", "content": SUM}]
    called = client.chat(model=MODEL, messages=turns, tools=[add], options=GREEDY).message
    [call] = called.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", {"a": 17, "b": 25})
    turns += [called, {"role": "tool", "tool_name": "add", "content": "42"}]
    answer = client.chat(model=MODEL, messages=turns, tools=[add], options=GREEDY)
    assert "42" in answer.message.content

    asked = [{"role": "user", "content": "Ada is 36."}]
    form = Person.model_json_schema()
    fitting = client.chat(model=MODEL, messages=asked, format=form, options=GREEDY)
    assert Person.model_validate_json(fitting.message.content).name
    written = client.generate(model=MODEL, prompt="Write JSON.", format="json", options=GREEDY)
    assert isinstance(json.loads(written.response), dict)

    client.generate(model=MODEL, keep_alive="5m")
    assert [model.model for model in client.ps().models] == [f"{MODEL}:latest"]
    assert refused(client, "none").status_code == 404


def refused(client: ollama.Client, model: str) -> ollama.ResponseError:
    try:
        client.chat(model=model, messages=[{"role": "user", "content": QUESTION}])
    except ollama.ResponseError as error:
        return error
    raise AssertionError(f"{model} answered")


@tool("add")
def sum_of(a: int, b: int) -> int:
    """Add two numbers"""
    return a + b


def langchain() -> None:
    chat = ChatOllama(model=MODEL, base_url=URL, temperature=0, validate_model_on_init=True)
    whole = chat.invoke(QUESTION)
    assert "Ctrl-C" in whole.text
    assert whole.usage_metadata["output_tokens"] > 3
    assert "".join(chunk.text for chunk in chat.stream(QUESTION)) == whole.text
    with_tools = chat.bind_tools([sum_of])
    turns = [HumanMessage(SUM)]
    called = with_tools.invoke(turns)
    [call] = called.tool_calls
    assert call["args"] == {"a": 17, "b": 25}
    turns += [called, ToolMessage("42", tool_call_id=call["id"])]
    assert "42" in with_tools.invoke(turns).text
    assert isinstance(chat.with_structured_output(Person).invoke("Ada is 36."), Person)
    assert "Ctrl-C" in OllamaLLM(model=MODEL, base_url=URL, temperature=0).invoke(QUESTION)


official(ollama.Client(host=URL))
langchain()
