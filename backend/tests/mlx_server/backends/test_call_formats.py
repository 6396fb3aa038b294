"""The embedded model, made to call tools in the formats of others: real tokens under real masks."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import jsonschema
import pytest
import pytest_asyncio
from here import start_here
from mlx_lm.utils import load_tokenizer
from thorough import slow

import mlx_manager.demo_model
from mlx_manager.mlx_server.config import MLXServerSettings
from mlx_manager.mlx_server.main import open_pool
from mlx_manager.mlx_server.models.adapters.tool_syntax import syntax_of
from mlx_manager.mlx_server.services.inference import ModelPool, generate_chat_completion
from mlx_manager.mlx_server.text.tool_calls.formats import FORMATS

pytestmark = pytest.mark.asyncio(loop_scope="module")

DEMO = Path(mlx_manager.demo_model.__file__).parent
TOLD_TO_MLX_LM = {"qwen3-coder": "<tool_call>\n<function=", "glm": "<arg_key>"}
"""Texts by which mlx-lm tells formats whose own text others have as well."""
TOLD_BY_NOTHING = {"generic"}
"""Formats of models whose templates have no place for tools."""
SAID_BY_TEMPLATES = {
    name: TOLD_TO_MLX_LM.get(name, " ".join(form.template))
    for name, form in FORMATS.items()
    if name not in TOLD_BY_NOTHING
}
"""What each template says that tells its format."""
WRITTEN_ALIKE = {
    *("glm-4.7", "minimax", "longcat", "minicpm", "deepseek", "deepseek-3.1", "deepseek-4"),
    *("mistral", "granite", "function-gemma", "seed-oss", "command"),
    *("nemotron", "phi-4", "hunyuan", "tool-calls", "olmo-3", "apertus", "internlm"),
}
"""Those that differ from others by their markers. `test_forced_calls` has what masks make of each."""

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


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = tmp_path_factory.mktemp("models")
    own = DEMO / "chat_template.jinja"
    for name, said in SAID_BY_TEMPLATES.items():
        shutil.copytree(DEMO, models / name, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        (models / name / own.name).write_text(f"{{#- {said} -#}}\n{own.read_text()}")
    return models


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(models: Path) -> AsyncIterator[ModelPool]:
    async with open_pool(MLXServerSettings(models_dir=models), start=start_here) as pool:
        yield pool


@pytest.mark.parametrize("name", SAID_BY_TEMPLATES)
async def test_a_template_tells_the_format(models: Path, name: str) -> None:
    assert syntax_of(load_tokenizer(models / name)) is FORMATS[name]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=slow if name in WRITTEN_ALIKE else [])
        for name in SAID_BY_TEMPLATES
        # Where the format covers the thinking, this model never ends it.
        if not FORMATS[name].whole
    ],
)
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
