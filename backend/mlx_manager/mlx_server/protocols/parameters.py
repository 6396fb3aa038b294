"""Parameters of chat and completions: those that are refused, and the meaning of the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from mlx_manager.mlx_server.core import Sampling, StopRules
from mlx_manager.mlx_server.defaults import asked_sampling
from mlx_manager.mlx_server.errors import InvalidParameter, OutOfRange, UnsupportedParameter
from mlx_manager.mlx_server.limits import UNLIMITED
from mlx_manager.mlx_server.protocols.answer import Times
from mlx_manager.mlx_server.protocols.dialects import CHAT, COMPLETIONS, Refusal, foreign
from mlx_manager.mlx_server.schemas.openai import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationParameters,
)
from mlx_manager.mlx_server.schemas.sampling import SamplingParameters
from mlx_manager.mlx_server.schemas.wire import Wire

T = TypeVar("T")

SEED_MASK = 2**64 - 1


UNSUPPORTED: dict[str, Refusal] = {
    # Spoken answers.
    "audio": Refusal(),
    "chat_template": Refusal(instead="The model's own template is used."),
    "documents": Refusal(instead="Put them in `chat_template_kwargs`."),
    "function_call": Refusal(("none", "auto"), "Use `tool_choice`."),
    "functions": Refusal(([],), "Use `tools`."),
    "include_stop_str_in_output": Refusal((False,)),
    "length_penalty": Refusal((1.0,)),
    "logits_processors": Refusal(([],)),
    "modalities": Refusal((["text"],), "Only ['text'] is possible."),
    "moderation": Refusal(),
    "prompt_logprobs": Refusal(),
    "skip_special_tokens": Refusal((True,)),
    "truncate_prompt_tokens": Refusal(),
    "use_beam_search": Refusal((False,)),
}
"""Fields that are refused by name. To support one, honour it and delete its line."""

UNSUPPORTED_IN_CHAT: dict[str, Refusal] = {
    **foreign(CHAT, ChatCompletionRequest),
    **UNSUPPORTED,
    "best_of": Refusal((1,)),
    "echo": Refusal((False,)),
}
"""Fields that chat refuses: those above, and those that only other protocols honour."""
UNSUPPORTED_IN_COMPLETIONS: dict[str, Refusal] = {
    **UNSUPPORTED,
    **foreign(COMPLETIONS, CompletionRequest),
}
"""Fields that completions refuse: those above, and those that only other protocols honour."""


def refuse_unsupported(
    body: Wire, table: Mapping[str, Refusal] = UNSUPPORTED, path: str = ""
) -> None:
    """Refuse the first field of `body` that asks for something this server can't do.

    path: what precedes the field's name in an error.

    Raises:
        UnsupportedParameter: names the field.
    """
    for name in sorted(body.model_fields_set & table.keys()):
        value = getattr(body, name)
        refusal = table[name]
        twins = [getattr(body, twin) for twin in refusal.twins]
        if value is not None and not any(
            _same(value, each) for each in (*refusal.harmless, *twins)
        ):
            message = f"`{path}{name}` is not supported by {refusal.by}. {refusal.instead}".strip()
            raise UnsupportedParameter(message, param=path + name)


def agreed(name: str, value: T | None, other: str, asked: T | None) -> T | None:
    """Return the value of a field that may be given by two names.

    Raises:
        InvalidParameter: the two differ.
    """
    if value is not None and asked is not None and value != asked:
        raise InvalidParameter(f"`{name}` and `{other}` differ; send one of them.", param=name)
    return asked if value is None else value


def limited(max_tokens: int | None) -> int | None:
    """Return the most tokens of an answer, None for as many as the context has room for."""
    return None if max_tokens == UNLIMITED else max_tokens


def _same(value: object, harmless: object) -> bool:
    # False == 0 in Python, and completions' `logprobs: 0` does ask for something.
    return type(value) is type(harmless) and value == harmless


def sampling(body: SamplingParameters, draw: int = 0) -> Sampling:
    """Return the sampling of a prompt's `draw`-th answer; the first has the seed as given.

    Raises:
        InvalidParameter: two names of one parameter that differ.
    """
    repetition = agreed(
        "repetition_penalty", body.repetition_penalty, "repeat_penalty", body.repeat_penalty
    )
    return asked_sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=repetition,
        seed=None if body.seed is None else (body.seed + draw) & SEED_MASK,
        logit_bias=tuple((body.logit_bias or {}).items()),
    )


def prediction(body: SamplingParameters) -> str:
    """Return the text that the answer is expected to be much like, "" without one.

    Raises:
        InvalidParameter: a part of it lacks its text.
        UnsupportedParameter: a part of it is no text.
    """
    if body.prediction is None:
        return ""
    content, path = body.prediction.content, "prediction.content"
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        if part.type != "text":
            raise UnsupportedParameter(
                f"`{path}[{i}]` is of type {part.type!r}; a prediction is text only.",
                param=f"{path}[{i}].type",
            )
        if part.text is None:
            raise InvalidParameter(
                f"`{path}[{i}]` of type text needs a `text`.", param=f"{path}[{i}].text"
            )
        texts.append(part.text)
    return "".join(texts)


def stop_rules(body: GenerationParameters, max_tokens: int | None) -> StopRules:
    """
    Raises:
        OutOfRange: `min_tokens` above `max_tokens`.
    """
    min_tokens = body.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise OutOfRange(
            f"`min_tokens` ({min_tokens}) exceeds the most tokens allowed ({max_tokens}).",
            param="min_tokens",
        )
    strings = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return StopRules(
        strings=tuple(strings),
        token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos or False,
        min_tokens=min_tokens,
    )


def counts_all_along(body: GenerationParameters) -> bool:
    """Return True if every chunk of the stream is to have the token counts so far."""
    return includes_usage(body) and bool(
        body.stream_options and body.stream_options.continuous_usage_stats
    )


def times(body: GenerationParameters) -> Times:
    """Return which chunks of the answer tell how fast it is made; a whole answer does at its end.

    Raises:
        InvalidParameter: `stream_options` without `stream`.
    """
    includes_usage(body)
    if body.timings_per_token:
        return "always"
    options = body.stream_options
    return "last" if body.include_timings or (options and options.include_timings) else "never"


def includes_usage(body: GenerationParameters) -> bool:
    """Return whether the stream ends with a chunk of token counts.

    Raises:
        InvalidParameter: `stream_options` without `stream`.
    """
    if body.stream_options is None:
        return False
    if not body.stream:
        raise InvalidParameter(
            "`stream_options` is allowed only when `stream` is true.", param="stream_options"
        )
    return body.stream_options.include_usage or False
