"""Calls in every format, as a client sees them: the official SDK's streaming and whole answers."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from api.conftest import Serve
from engine.outputs import SAMPLES, TOOLS, Pieces, Sample
from openai_spec import check
from scripted import Step

from mlx_manager.mlx_server.core import Finished, GenerationRequest, Started, Usage
from mlx_manager.mlx_server.engine.output_parser import OutputParser


def plays(sample: Sample) -> list[Step]:
    """The sample as a model writes it, a few characters a token."""
    pieces = [sample.text[i : i + 5] for i in range(0, len(sample.text), 5)]
    parser = OutputParser(Pieces(pieces), sample.output)
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
