"""Families that depart from the default: their turn ends, and facts that mlx-lm does not know.

Most differences between families are found in their tokenizers and templates; this module has the
rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import regex

from mlx_manager.mlx_server.core import Conversation
from mlx_manager.mlx_server.formats import OutputFormat, Region
from mlx_manager.mlx_server.models.adapters.answer import (
    Edges,
    Marks,
    kept_tokens,
    prompt_tail,
)
from mlx_manager.mlx_server.models.adapters.base import DefaultAdapter, Tokenizer
from mlx_manager.mlx_server.models.adapters.template import Messages, TemplateTraits
from mlx_manager.mlx_server.models.adapters.tool_syntax import NAME


class QwenAdapter(DefaultAdapter):
    family: ClassVar[str] = "qwen"
    turn_ends: ClassVar[tuple[str, ...]] = ("<|endoftext|>", "<|im_end|>")


class MistralAdapter(DefaultAdapter):
    """Mistral's models. Magistral thinks between `[THINK]` and `[/THINK]`."""

    family: ClassVar[str] = "mistral"
    turn_ends: ClassVar[tuple[str, ...]] = ("</s>",)
    thinking: ClassVar[tuple[Marks, ...]] = (("[THINK]", "[/THINK]"),)


class GemmaAdapter(DefaultAdapter):
    """Gemma models. Gemma 4 ends its turns with `<turn|>`, older ones with `<end_of_turn>`."""

    family: ClassVar[str] = "gemma"
    turn_ends: ClassVar[tuple[str, ...]] = ("<turn|>", "<end_of_turn>")


class PhiAdapter(DefaultAdapter):
    family: ClassVar[str] = "phi"
    turn_ends: ClassVar[tuple[str, ...]] = ("<|endoftext|>", "<|im_end|>", "<|end|>")


class GLMAdapter(DefaultAdapter):
    """GLM models, which have no token for the end of a turn: they begin the next speaker's."""

    family: ClassVar[str] = "glm"
    turn_ends: ClassVar[tuple[str, ...]] = ("<|endoftext|>", "<|user|>", "<|observation|>")


class DeepSeekAdapter(DefaultAdapter):
    """DeepSeek models. V3.2 has a function of mlx-lm's in place of a template. The function fails
    at variables that it does not know, where a template ignores them.
    """

    family: ClassVar[str] = "deepseek"
    turn_ends: ClassVar[tuple[str, ...]] = ("<｜end▁of▁sentence｜>",)
    known: ClassVar[frozenset[str]] = frozenset(
        {
            *("tools", "continue_final_message", "enable_thinking", "thinking_mode"),
            *("drop_thinking", "context", "add_default_bos_token"),
        }
    )

    def apply_chat_template(
        self,
        tokenizer: Tokenizer,
        messages: Messages,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        if tokenizer.chat_template is None:
            kwargs = {name: value for name, value in kwargs.items() if name in self.known}
        return super().apply_chat_template(tokenizer, messages, add_generation_prompt, **kwargs)


class GraniteAdapter(DefaultAdapter):
    """Granite models. Granite 3 thinks if the template's argument `thinking` says so, without
    special tokens, and then puts its answer between `<response>` and `</response>`.
    """

    family: ClassVar[str] = "granite"
    turn_ends: ClassVar[tuple[str, ...]] = ("<|end_of_text|>",)

    def reasoning_marks(self, tokenizer: Tokenizer, conversation: Conversation) -> Marks | None:
        if self.variables(conversation).get("thinking"):
            return "<think>", "</think>"
        return super().reasoning_marks(tokenizer, conversation)

    def structural_marks(self, tokenizer: Tokenizer, conversation: Conversation) -> Sequence[str]:
        if self.variables(conversation).get("thinking"):
            return "<response>", "</response>"
        return super().structural_marks(tokenizer, conversation)


class HunyuanAdapter(DefaultAdapter):
    """Hunyuan models, which think between `<think>` and `</think>` and answer between `<answer>`
    and `</answer>`. Each tag is on a line of its own and has no special token. Source: vLLM's
    hunyuan_a13b_reasoning_parser.py.
    """

    family: ClassVar[str] = "hunyuan"

    def reasoning_marks(self, tokenizer: Tokenizer, conversation: Conversation) -> Marks | None:
        return "<think>", "</think>"

    def structural_marks(self, tokenizer: Tokenizer, conversation: Conversation) -> Sequence[str]:
        return "<answer>", "\n</answer>", "</answer>"


# ---------------------------------------------------------------------------------------------
# gpt-oss
# ---------------------------------------------------------------------------------------------

_RECIPIENT = rf"(?:to=(?:functions\.)?{NAME}\s*)"
HARMONY_HEADER = (
    rf"(?:<\|start\|>)?(?:assistant)?\s*{_RECIPIENT}?(?:<\|channel\|>)?(?P<channel>\w+)?\s*"
    rf"{_RECIPIENT}?(?:<\|constrain\|>)?\s*\w*\s*<\|message\|>"
)
HARMONY_ENDS: tuple[tuple[str, Region], ...] = (
    ("<|end|>", "header"),
    ("<|return|>", "header"),
    ("<|call|>", "header"),
    ("<|start|>", "header"),
    ("<|channel|>", "header"),
)


class GptOssAdapter(DefaultAdapter):
    """gpt-oss, which writes messages in the harmony format: a header with a channel and a
    recipient, then a body. Channel analysis is thinking; other messages are for the caller, or
    call a function.

    `<|end|>` ends a message and not the turn, although the template writes it after answers.
    """

    family: ClassVar[str] = "gpt-oss"
    turn_ends: ClassVar[tuple[str, ...]] = ("<|endoftext|>", "<|return|>", "<|call|>")

    def thinks(self, tokenizer: Tokenizer) -> bool:
        return True

    def _turn_end_of(self, traits: TemplateTraits, tokenizer: Tokenizer) -> int | None:
        return None

    def apply_chat_template(
        self,
        tokenizer: Tokenizer,
        messages: Messages,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        placed = [_thinking_beside_calls(message) for message in messages]
        return super().apply_chat_template(tokenizer, placed, add_generation_prompt, **kwargs)

    def _answer(
        self, tokenizer: Tokenizer, conversation: Conversation, prompt_ids: Sequence[int]
    ) -> OutputFormat:
        output = super()._answer(tokenizer, conversation, prompt_ids)
        edges: Edges = {"content": HARMONY_ENDS, "reasoning": HARMONY_ENDS}
        return OutputFormat(
            edges=edges,
            initial=_initial_region(tokenizer, conversation, prompt_ids),
            header=HARMONY_HEADER,
            channels={"analysis": "reasoning"},
            calls=output.calls,
            offered=output.offered,
            parallel=output.parallel,
            keep=kept_tokens(tokenizer, edges, output.calls, HARMONY_HEADER),
            thinking_end="<|end|><|start|>assistant<|channel|>final<|message|>",
            new_call_id=output.new_call_id,
        )


def _initial_region(
    tokenizer: Tokenizer, conversation: Conversation, prompt_ids: Sequence[int]
) -> Region:
    if conversation.continue_final_message:
        return "content"
    header = regex.search(
        r"<\|channel\|>(\w+)<\|message\|>$", prompt_tail(tokenizer, prompt_ids).rstrip()
    )
    if header is None:
        return "header"
    return "reasoning" if header[1] == "analysis" else "content"


def _thinking_beside_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Join a message's thinking and content: the template refuses two texts beside calls, and shows
    one as thinking."""
    if not message.get("tool_calls") or not message.get("reasoning_content"):
        return message
    texts = [text for text in (message["reasoning_content"], message["content"]) if text]
    return {**message, "reasoning_content": "\n\n".join(texts), "content": ""}
