"""pydantic-ai over chat completions, Responses and Messages: text, tools, typed output."""

from __future__ import annotations

import asyncio
import sys

from anthropic import AsyncAnthropic
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.messages import ToolCallPart
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

URL = sys.argv[1]
MODEL = "mlx-manager/demo"
GREEDY = {"temperature": 0, "max_tokens": 200}


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def add(a: int, b: int) -> int:
    """Add two numbers"""
    return a + b


async def talk(model: Model) -> None:
    question = "How do I stop the server?"
    agent = Agent(model, model_settings=GREEDY)
    whole = await agent.run(question)
    assert "Ctrl-C" in whole.output, whole.output
    async with agent.run_stream(question) as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
    assert "".join(pieces) == whole.output
    assert stream.usage.output_tokens == whole.usage.output_tokens > 3

    adder = Agent(model, tools=[add], model_settings=GREEDY)
    counted = await adder.run("What is 17 + 25?")
    [call] = [
        part
        for message in counted.all_messages()
        for part in message.parts
        if isinstance(part, ToolCallPart)
    ]
    assert (call.tool_name, call.args_as_dict()) == ("add", {"a": 17, "b": 25})
    assert "42" in counted.output
    async with adder.run_stream("What is 17 + 25?") as stream:
        assert await stream.get_output() == counted.output

    for output in (NativeOutput(Person), ToolOutput(Person)):
        typed = Agent(model, output_type=output, model_settings=GREEDY)
        whole = await typed.run("Ada is 36.")
        assert isinstance(whole.output, Person), whole
        async with typed.run_stream("Ada is 36.") as stream:
            assert await stream.get_output() == whole.output


async def main() -> None:
    openai = OpenAIProvider(base_url=URL, api_key="none")
    claude = AnthropicProvider(
        anthropic_client=AsyncAnthropic(base_url=URL.removesuffix("/v1"), api_key="none")
    )
    for model in (
        OpenAIChatModel(MODEL, provider=openai),
        OpenAIResponsesModel(MODEL, provider=openai),
        AnthropicModel("claude-sonnet-4-5", provider=claude),
    ):
        await talk(model)


asyncio.run(main())
