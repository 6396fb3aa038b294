"""gpt-oss, which writes messages in the harmony format.

A message is a header with a channel and a recipient, then a body. Channel analysis is thinking;
other messages are for the caller, or call a function. `<|end|>` ends a message and not the turn,
although the template writes it after answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_manager.mlx_server.models.family import Family, MessageFormat
from mlx_manager.mlx_server.models.module_facts import ModuleFacts

_RECIPIENT = r"(?:to=(?:functions\.)?(?P<name>[^\s\"'<>\[\]{}\\]{1,128})\s*)"

HARMONY = MessageFormat(
    header=(
        rf"(?:<\|start\|>)?(?:assistant)?\s*{_RECIPIENT}?(?:<\|channel\|>)?(?P<channel>\w+)?\s*"
        rf"{_RECIPIENT}?(?:<\|constrain\|>)?\s*\w*\s*<\|message\|>"
    ),
    channels={"analysis": "reasoning"},
    ends=("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>"),
    begun=r"<\|channel\|>(\w+)<\|message\|>$",
    thinking_end="<|end|><|start|>assistant<|channel|>final<|message|>",
)


def _thinking_beside_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Join a message's thinking and content: the template refuses two texts beside calls, and shows
    one as thinking."""
    if not message.get("tool_calls") or not message.get("reasoning_content"):
        return message
    texts = [text for text in (message["reasoning_content"], message["content"]) if text]
    return {**message, "reasoning_content": "\n\n".join(texts), "content": ""}


FAMILY = Family(
    "gpt-oss",
    named=r"gpt[-_]?oss",
    turn_ends=("<|endoftext|>", "<|return|>", "<|call|>"),
    messages=HARMONY,
    tool_format="harmony",
    shown=_thinking_beside_calls,
    modules=ModuleFacts(
        experts=(("router", "experts"),),
        heads=("num_attention_heads",),
        kv_heads=("num_key_value_heads",),
        scales=("sm_scale",),
    ),
)
