"""OpenAI's Agents SDK over Responses and chat completions: text, tools, sessions, typed output."""

from __future__ import annotations

import asyncio
import sys

from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from agents.items import ToolCallItem, ToolCallOutputItem
from openai import AsyncOpenAI
from openai.types.responses import ResponseTextDeltaEvent
from pydantic import BaseModel

URL = sys.argv[1]
MODEL = "mlx-manager/demo"
GREEDY = ModelSettings(temperature=0, max_tokens=200, include_usage=True)
QUESTION = "How do I stop the server?"


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers"""
    return a + b


async def talk(model: Model) -> None:
    agent = Agent("Helper", model=model, model_settings=GREEDY)
    whole = await Runner.run(agent, QUESTION)
    assert "Ctrl-C" in whole.final_output, whole.final_output
    run = Runner.run_streamed(agent, QUESTION)
    pieces = [
        event.data.delta
        async for event in run.stream_events()
        if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent)
    ]
    assert "".join(pieces) == run.final_output == whole.final_output
    used = run.context_wrapper.usage
    assert used.output_tokens == whole.context_wrapper.usage.output_tokens > 3

    adder = Agent("Adder", model=model, model_settings=GREEDY, tools=[add])
    counted = await Runner.run(adder, "What is 17 + 25?")
    assert "42" in counted.final_output
    assert [type(item) for item in counted.new_items[:2]] == [ToolCallItem, ToolCallOutputItem]
    run = Runner.run_streamed(adder, "What is 17 + 25?")
    async for _ in run.stream_events():
        pass
    assert run.final_output == counted.final_output

    typed = Agent("Reader", model=model, model_settings=GREEDY, output_type=Person)
    assert isinstance((await Runner.run(typed, "Ada is 36.")).final_output, Person)

    session = SQLiteSession("one")
    for question in ("Hello!", QUESTION):
        again = await Runner.run(agent, question, session=session)
    assert "Ctrl-C" in again.final_output
    assert len(await session.get_items()) == 4


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=URL, api_key="none")
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        await talk(kind(model=MODEL, openai_client=client))


asyncio.run(main())
