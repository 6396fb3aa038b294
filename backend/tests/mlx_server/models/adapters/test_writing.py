"""Calls that are written into the history are what the model's own parser reads."""

from __future__ import annotations

import json

import pytest
from text.outputs import of_mlx, of_syntax, parse

from mlx_manager.mlx_server.core import ToolCall
from mlx_manager.mlx_server.formats import OutputFormat
from mlx_manager.mlx_server.models.adapters import tool_syntax
from mlx_manager.mlx_server.models.adapters.writing import written

NAMED = (
    *("HERMES", "GENERIC", "GRANITE", "MISTRAL", "MISTRAL_ARGS", "KIMI_K2", "DEEPSEEK", "LLAMA"),
    *("DEEPSEEK_31", "QWEN_CODER", "GLM", "GLM_47", "LONGCAT", "MINIMAX", "DEEPSEEK_32", "MINICPM"),
    *("DEEPSEEK_4", "KIMI_K3", "SEED", "COMMAND", "NEMOTRON", "PHI_4", "HUNYUAN", "TOOL_CALLS"),
    *("OLMO_3", "APERTUS", "INTERNLM"),
)
FORMATS = {name.lower(): of_syntax(getattr(tool_syntax, name)) for name in NAMED} | {
    name: of_mlx(name) for name in ("gemma4", "function_gemma", "pythonic")
}
CALLS = (
    ToolCall("abcdefgh9", "get_weather", '{"city": "Paris", "days": 2}'),
    ToolCall("bcdefghi9", "get_weather", '{"city": "Oslo <b> \\"x\\""}'),
)


@pytest.mark.parametrize("several", [False, True], ids=["one", "two"])
@pytest.mark.parametrize("output", FORMATS.values(), ids=FORMATS)
def test_calls_are_read_as_they_were(output: OutputFormat, several: bool) -> None:
    assert output.calls is not None
    assert output.calls.shape is not None
    calls = CALLS if several else CALLS[:1]
    answer = parse([written(output.calls.shape, calls)], output)
    assert [(c.name, c.value) for c in answer.calls] == [
        (call.name, json.loads(call.arguments)) for call in calls
    ]


@pytest.mark.parametrize("output", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("arguments", ['{"city": "Par', "[1]", "Paris"])
def test_broken_arguments_are_written_as_they_are(output: OutputFormat, arguments: str) -> None:
    assert output.calls is not None
    assert output.calls.shape is not None
    text = written(output.calls.shape, [ToolCall("c", "get_weather", arguments)])
    assert arguments in text or json.dumps(arguments) in text
