"""What every family of models needs between the vocabulary of `core` and a tokenizer.

`ModelAdapter` is what the rest of the server uses, `DefaultAdapter` what holds for any model whose
tokenizer and template are in order. The families override what they do otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import jinja2

from mlx_manager.mlx_server.core import Conversation, Message, Tool, ToolCall
from mlx_manager.mlx_server.errors import InvalidRequest
from mlx_manager.mlx_server.formats import PLAIN, OutputFormat

Tokenizer = Any
"""mlx-lm's `TokenizerWrapper`, or anything that has the methods used."""

RENDER_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)
"""What a chat template raises: its own refusals, and mishaps such as adding None to a string."""


class ModelAdapter(Protocol):
    """How one loaded model wants its prompts and writes its answers."""

    @property
    def family(self) -> str: ...

    def get_stop_tokens(self, tokenizer: Tokenizer) -> list[int]:
        """The ids that end an answer, without duplicates."""
        ...

    def apply_chat_template(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The template's text for messages in its own form (dicts with `role` and `content`)."""
        ...

    def render(self, conversation: Conversation, tokenizer: Tokenizer) -> list[int]:
        """The prompt's tokens, with exactly one BOS if the model wants one.

        Raises:
            InvalidRequest: the model has no chat template, or it refuses the conversation.
        """
        ...

    def encode_text(self, text: str, tokenizer: Tokenizer) -> list[int]:
        """A raw prompt's tokens, with exactly one BOS if the model wants one."""
        ...

    def output_format(
        self, tokenizer: Tokenizer, conversation: Conversation | None, prompt_ids: Sequence[int]
    ) -> OutputFormat:
        """What the answer to this prompt looks like; `conversation` None for a raw prompt."""
        ...


class DefaultAdapter:
    """Any model. `config` is its config.json, with generation_config.json's EOS merged in."""

    family: ClassVar[str] = "default"
    turn_ends: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self._config_eos = _as_ids((config or {}).get("eos_token_id"))

    def get_stop_tokens(self, tokenizer: Tokenizer) -> list[int]:
        ids = [*_tokenizer_eos(tokenizer), *self._config_eos]
        ids += [i for name in self.turn_ends if (i := token_id(tokenizer, name)) is not None]
        return list(dict.fromkeys(ids))

    def apply_chat_template(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        text: str = tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, tokenize=False, **kwargs
        )
        return text

    def render(self, conversation: Conversation, tokenizer: Tokenizer) -> list[int]:
        if not tokenizer.has_chat_template:
            raise InvalidRequest(
                "This model has no chat template; use /v1/completions with a prompt.",
                param="messages",
            )
        offers = conversation.tools if conversation.tool_choice != "none" else ()
        options: dict[str, Any] = dict(conversation.template_args)
        if conversation.continue_final_message:
            options["continue_final_message"] = True
        try:
            text = self.apply_chat_template(
                tokenizer,
                [_template_message(m) for m in conversation.messages],
                conversation.add_generation_prompt and not conversation.continue_final_message,
                tools=[_template_tool(tool) for tool in offers] or None,
                **options,
            )
        except RENDER_ERRORS as error:
            raise InvalidRequest(
                f"The model's chat template refuses these messages: {error}", param="messages"
            ) from error
        return self.encode_text(text, tokenizer)

    def encode_text(self, text: str, tokenizer: Tokenizer) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        prefix = _prefix(tokenizer)
        return ids if ids[: len(prefix)] == prefix else prefix + ids

    def output_format(
        self, tokenizer: Tokenizer, conversation: Conversation | None, prompt_ids: Sequence[int]
    ) -> OutputFormat:
        return PLAIN if conversation is None else OutputFormat()


def token_id(tokenizer: Tokenizer, name: str) -> int | None:
    """The id of a token of this very name, None if the vocabulary has none."""
    found = tokenizer.convert_tokens_to_ids(name)
    unknown = getattr(tokenizer, "unk_token_id", None)
    return found if isinstance(found, int) and found != unknown else None


def _tokenizer_eos(tokenizer: Tokenizer) -> list[int]:
    return [
        *_as_ids(tokenizer.eos_token_id),
        *sorted(_as_ids(getattr(tokenizer, "eos_token_ids", None))),
    ]


def _as_ids(value: Any) -> list[int]:
    """A configuration's EOS: absent, one id or several."""
    if isinstance(value, int):
        return [value]
    return [int(i) for i in value] if isinstance(value, Iterable) else []


def _prefix(tokenizer: Tokenizer) -> list[int]:
    """The tokens that the tokenizer itself puts before any text: its BOS, mostly."""
    bare: list[int] = tokenizer.encode("a", add_special_tokens=False)
    full: list[int] = tokenizer.encode("a", add_special_tokens=True)
    starts = range(len(full) - len(bare) + 1)
    return full[: next((i for i in starts if full[i : i + len(bare)] == bare), 0)]


def _template_message(message: Message) -> dict[str, Any]:
    entry: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        entry["name"] = message.name
    if message.reasoning is not None:
        entry["reasoning_content"] = message.reasoning
    if message.tool_calls:
        entry["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        entry["tool_call_id"] = message.tool_call_id
    return entry


def _template_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": _arguments(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _arguments(text: str) -> Any:
    """The arguments as the object that most templates want; as they are if they are none."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _template_tool(tool: Tool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": dict(tool.parameters) or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}
