"""The embedded model, made to call tools in the formats of others: real tokens under real masks."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import jsonschema
import pytest
import pytest_asyncio

import mlx_manager.demo_model
from mlx_manager.mlx_server.config import MLXServerSettings
from mlx_manager.mlx_server.main import open_pool
from mlx_manager.mlx_server.services.inference import ModelPool, generate_chat_completion

pytestmark = pytest.mark.asyncio(loop_scope="module")

DEMO = Path(mlx_manager.demo_model.__file__).parent
SAID_BY_TEMPLATES = {
    "hermes": "<tool_call> tool_call.name",
    "qwen3-coder": "<tool_call>\n<function=",
    "glm": "<arg_key>",
    "glm-4.7": "{function-name}<arg_key>",
    "minimax": "<minimax:tool_call>",
    "longcat": "<longcat_tool_call>",
    "minicpm": '<function name=" <param name="',
    "deepseek": "<｜tool▁calls▁begin｜> ```json",
    "deepseek-3.1": "<｜tool▁calls▁begin｜>",
    "deepseek-3.2": "<｜DSML｜function_calls>",
    "kimi-k2": "<|tool_calls_section_begin|>",
    "mistral": "[TOOL_CALLS]",
    "mistral-3.2": "[TOOL_CALLS] [ARGS]",
    "granite": "<|tool_call|>",
    "gemma-4": "<|tool_call> <tool_call|>",
    "function-gemma": "<start_function_call>",
    "lfm2": "<|tool_call_start|>",
}
"""What each template says that tells its format."""

BOOK = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "nights": {"type": "integer", "minimum": 1, "maximum": 30},
        "breakfast": {"type": "boolean"},
        "room": {"type": "string", "enum": ["single", "double"]},
        "guests": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
    },
    "required": ["city", "nights", "room"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "book", "parameters": BOOK, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]
PARAMETERS = {"book": BOOK, "now": {"type": "object", "maxProperties": 0}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ModelPool]:
    models = tmp_path_factory.mktemp("models")
    own = DEMO / "chat_template.jinja"
    for name, said in SAID_BY_TEMPLATES.items():
        shutil.copytree(DEMO, models / name, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        (models / name / own.name).write_text(f"{{#- {said} -#}}\n{own.read_text()}")
    async with open_pool(MLXServerSettings(models_dir=models)) as pool:
        yield pool


@pytest.mark.parametrize("name", SAID_BY_TEMPLATES)
async def test_a_call_can_be_demanded_in_any_format(pool: ModelPool, name: str) -> None:
    named = {"type": "function", "function": {"name": "book"}}
    body = await generate_chat_completion(
        name,
        messages=[{"role": "user", "content": "A room in Rome, please."}],
        tools=TOOLS,
        tool_choice=named if "a" in name else "required",
        parallel_tool_calls=False,
        max_tokens=300,
        seed=1,
        pool=pool,
    )
    assert isinstance(body, dict)
    answer = body["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    (call,) = answer["message"]["tool_calls"]
    assert not answer["message"].get("content")
    assert call["function"]["name"] in (["book"] if "a" in name else ["book", "now"])
    arguments = json.loads(call["function"]["arguments"])
    jsonschema.validate(arguments, PARAMETERS[call["function"]["name"]])


@pytest.mark.parametrize("name", ["qwen3-coder", "deepseek-3.2", "gemma-4", "hermes"])
async def test_with_strict_tools_text_is_free(pool: ModelPool, name: str) -> None:
    body = await generate_chat_completion(
        name,
        messages=[{"role": "user", "content": "Hello!"}],
        tools=TOOLS,
        temperature=0,
        max_tokens=40,
        pool=pool,
    )
    assert isinstance(body, dict)
    assert body["choices"][0]["message"]["content"]
