"""`/v1/tokenize`, `/v1/apply-template` and the owner's prompts to be read ahead: body → prompt,
what was found → body. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mlx_manager.mlx_server.core import Conversation, Text
from mlx_manager.mlx_server.errors import InvalidParameter
from mlx_manager.mlx_server.protocols import sse
from mlx_manager.mlx_server.protocols.chat import conversation
from mlx_manager.mlx_server.protocols.dialects import (
    APPLY_TEMPLATE,
    OF_PROMPTS,
    TOKENIZE,
    Refusal,
    foreign,
)
from mlx_manager.mlx_server.protocols.parameters import refuse_unsupported
from mlx_manager.mlx_server.protocols.pieces import sliced
from mlx_manager.mlx_server.schemas.admin import WarmRequest
from mlx_manager.mlx_server.schemas.openai import (
    ChatCompletionRequest,
    ChatMessage,
    PromptRequest,
    TemplateParameters,
    TokenizeRequest,
)

PIECE = 4096
"""Number of characters or tokens in a piece."""
OF_TEXTS = ("add_special_tokens", "add_special")
OF_CONVERSATIONS = (
    *("tools", "chat_template_kwargs", "reasoning_effort", "enable_thinking"),
    *("add_generation_prompt", "continue_final_message"),
)


UNSUPPORTED_IN_TOKENIZE: dict[str, Refusal] = {
    **foreign(TOKENIZE, TokenizeRequest, OF_PROMPTS | {"parse_special", "with_pieces"}),
}
UNSUPPORTED_IN_TEMPLATES: dict[str, Refusal] = {
    **foreign(APPLY_TEMPLATE, PromptRequest, OF_PROMPTS),
}
UNSUPPORTED_IN_WARMING: dict[str, Refusal] = {
    **foreign(TOKENIZE, WarmRequest, OF_PROMPTS),
}
"""Fields that would change a prompt elsewhere, and are refused by name here."""


@dataclass(frozen=True, slots=True)
class Tokenizing:
    """Prompt to tokenise; `special`: with the model's BOS, if the prompt is a text."""

    prompt: Conversation | Text
    special: bool


def asked_to_render(body: PromptRequest) -> Conversation:
    """
    Raises:
        InvalidParameter: as `rendered`.
        UnsupportedParameter: as `rendered`, and a field that would change the prompt elsewhere.
    """
    refuse_unsupported(body, UNSUPPORTED_IN_TEMPLATES)
    return rendered(body.messages, body)


def rendered(messages: list[ChatMessage], body: TemplateParameters) -> Conversation:
    """
    Raises:
        InvalidParameter: a value that contradicts another.
        UnsupportedParameter: content that is not text.
    """
    return conversation(
        ChatCompletionRequest(
            messages=messages,
            tools=body.tools,
            chat_template_kwargs=body.chat_template_kwargs,
            reasoning_effort=body.reasoning_effort,
            enable_thinking=body.enable_thinking,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
        )
    )


def tokenizing(body: TokenizeRequest) -> Tokenizing:
    """
    Raises:
        InvalidParameter: none or several of `prompt`, `content` and `messages`; or something that
            only the other kind of prompt can have.
        UnsupportedParameter: a field that would change the prompt elsewhere.
    """
    refuse_unsupported(body, UNSUPPORTED_IN_TOKENIZE)
    given = [name for name in ("prompt", "content", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise InvalidParameter("Send one of `prompt`, `content` and `messages`.", param="prompt")
    if body.messages is not None:
        _refuse(body, OF_TEXTS, "a conversation, whose special tokens its template writes")
        return Tokenizing(rendered(body.messages, body), special=True)
    _refuse(body, OF_CONVERSATIONS, "a text: send `messages`")
    asked = body.add_special_tokens if body.add_special_tokens is not None else body.add_special
    special = given == ["prompt"] if asked is None else asked
    return Tokenizing(Text(body.prompt if body.prompt is not None else body.content or ""), special)


def read_ahead(body: WarmRequest) -> Conversation | Text:
    """
    Raises:
        InvalidParameter: none or both of `text` and `messages`; or something that only a
            conversation can have, with a text.
        UnsupportedParameter: a field that would change the prompt elsewhere.
    """
    refuse_unsupported(body, UNSUPPORTED_IN_WARMING)
    if (body.text is None) == (body.messages is None):
        raise InvalidParameter("Send one of `text` and `messages`.", param="text")
    if body.messages is not None:
        return rendered(body.messages, body)
    _refuse(body, OF_CONVERSATIONS, "a text: send `messages`")
    return Text(body.text or "")


def _refuse(body: TemplateParameters, names: Iterable[str], prompt: str) -> None:
    for name in names:
        if getattr(body, name):
            raise InvalidParameter(f"`{name}` has no effect on {prompt}.", param=name)


def tokenized(
    ids: Sequence[int], context_length: int, texts: Sequence[str] | None
) -> Iterator[str]:
    """Yield a `TokenizeResponse` in pieces."""
    yield f'{{"count":{len(ids)},"max_model_len":{context_length},"tokens":'
    yield from sliced(ids, PIECE)
    if texts is not None:
        yield ',"token_strs":'
        yield from sliced(texts, PIECE)
    yield "}"


def told(text: str) -> Iterator[str]:
    """Yield a `TextResponse` in pieces."""
    for before in ('{"prompt":"', '","content":"'):
        yield before
        for start in range(0, len(text), PIECE):
            yield sse.quote(text[start : start + PIECE])[1:-1]
    yield '"}'
