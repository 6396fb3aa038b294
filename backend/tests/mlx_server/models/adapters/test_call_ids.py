"""Kimi K2 reads the names of calls off the ids in its history, and repeats them."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper, load
from models.adapters.published import Published, write_tokenizer

from mlx_manager.mlx_server.core import Conversation, Message, Tool, ToolCall
from mlx_manager.mlx_server.models.adapters import get_adapter

TEMPLATE = """
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
<|im_system|>tool<|im_middle|>## Return of {{ m.tool_call_id }}
{{ m.content }}<|im_end|>
{%- else -%}
<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}
{%- if m.tool_calls -%}
<|tool_calls_section_begin|>
{%- for call in m.tool_calls -%}
<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}
{#- -#}<|tool_call_end|>
{%- endfor -%}
<|tool_calls_section_end|>
{%- endif -%}<|im_end|>
{%- endif -%}
{%- endfor -%}
{%- if tools -%}{{ tools | tojson }}{%- endif -%}
"""
"""Modelled on chat_template.jinja in moonshotai/Kimi-K2-Instruct."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TokenizerWrapper:
    folder: Path = tmp_path_factory.mktemp("kimi")
    write_tokenizer(folder, Published("kimi", "kimi_k2", "[BOS]", "<|im_end|>"), TEMPLATE)
    return load(folder)


def call(call_id: str, name: str = "note") -> ToolCall:
    return ToolCall(call_id, name, "{}")


def rendered(tokenizer: TokenizerWrapper, *messages: Message) -> str:
    tools = (Tool("note"), Tool("mcp.add-2"))
    conversation = Conversation((Message("user", "Go."), *messages), tools)
    adapter = get_adapter({"model_type": "kimi_k2"}, "x", tokenizer)
    return adapter.render_text(conversation, tokenizer)


@pytest.mark.parametrize(
    "call_id", ["functions.note:0", "functions_note_0", "call_abc", "toolu_01", "note", "x"]
)
def test_ids_in_the_history_are_as_the_model_gives_them(
    tokenizer: TokenizerWrapper, call_id: str
) -> None:
    text = rendered(
        tokenizer,
        Message("assistant", tool_calls=(call(call_id),)),
        Message("tool", "done", tool_call_id=call_id),
    )
    assert "<|tool_call_begin|>functions.note:0<|tool_call_argument_begin|>" in text
    assert "## Return of functions.note:0\ndone" in text


def test_the_calls_of_a_conversation_are_counted(tokenizer: TokenizerWrapper) -> None:
    text = rendered(
        tokenizer,
        Message("assistant", tool_calls=(call("c1"), call("functions.note:1"))),
        Message("tool", "one", tool_call_id="c1"),
        Message("tool", "two", tool_call_id="functions.note:1"),
        Message("assistant", tool_calls=(call("c2", "mcp.add-2"),)),
        Message("tool", "three", tool_call_id="c2"),
        Message("tool", "four", tool_call_id="unknown"),
    )
    returns = [part.split("<|im_end|>")[0] for part in text.split("## Return of ")[1:]]
    assert returns == [
        "functions.note:0\none",
        "functions.note:1\ntwo",
        "functions.mcp.add-2:2\nthree",
        "unknown\nfour",
    ]


def test_an_id_that_comes_again_is_the_latest_call(tokenizer: TokenizerWrapper) -> None:
    text = rendered(
        tokenizer,
        *(
            message
            for said in ("one", "two")
            for message in (
                Message("assistant", tool_calls=(call("same"),)),
                Message("tool", said, tool_call_id="same"),
            )
        ),
    )
    assert "## Return of functions.note:0\none" in text
    assert "## Return of functions.note:1\ntwo" in text
