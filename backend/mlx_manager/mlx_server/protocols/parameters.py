"""What the parameters of chat and completions mean: which are refused, what the rest become."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlx_manager.mlx_server.core import Sampling, StopRules
from mlx_manager.mlx_server.errors import InvalidParameter, UnsupportedParameter
from mlx_manager.mlx_server.schemas.openai import GenerationParameters
from mlx_manager.mlx_server.schemas.wire import Wire

SEED_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Refusal:
    """A field that is known and not honoured yet. `harmless` values ask for nothing; null too."""

    harmless: tuple[object, ...] = ()
    instead: str = ""


UNSUPPORTED: dict[str, Refusal] = {
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
    "prediction": Refusal(),
    "prompt_logprobs": Refusal(),
    "skip_special_tokens": Refusal((True,)),
    "truncate_prompt_tokens": Refusal(),
    "use_beam_search": Refusal((False,)),
    "verbosity": Refusal(("medium",)),
    "web_search_options": Refusal(),
}
"""What is refused by name. To support a field, honour it and delete its line."""

UNSUPPORTED_IN_CHAT = UNSUPPORTED | {"best_of": Refusal((1,)), "echo": Refusal((False,))}
"""Also what completions honour and chat does not."""


def refuse_unsupported(
    body: Wire, table: Mapping[str, Refusal] = UNSUPPORTED, path: str = ""
) -> None:
    """Refuse the first field of `body` that asks for something this server can't do.

    path: what precedes the field's name in an error.

    Raises:
        UnsupportedParameter: names the field.
    """
    for name in body.model_fields_set & table.keys():
        value = getattr(body, name)
        refusal = table[name]
        if value is not None and not any(_same(value, harmless) for harmless in refusal.harmless):
            message = f"`{path}{name}` is not supported by this server. {refusal.instead}".strip()
            raise UnsupportedParameter(message, param=path + name)


def _same(value: object, harmless: object) -> bool:
    # False == 0 in Python, and completions' `logprobs: 0` does ask for something.
    return type(value) is type(harmless) and value == harmless


def sampling(body: GenerationParameters, draw: int = 0) -> Sampling:
    """The sampling of the `draw`-th of a prompt's n answers: the first has the seed as given."""
    return Sampling.asked(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        seed=None if body.seed is None else (body.seed + draw) & SEED_MASK,
        logit_bias=tuple((body.logit_bias or {}).items()),
    )


def stop_rules(body: GenerationParameters, max_tokens: int | None) -> StopRules:
    """
    Raises:
        InvalidParameter: `min_tokens` above `max_tokens`.
    """
    min_tokens = body.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise InvalidParameter(
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


def includes_usage(body: GenerationParameters) -> bool:
    """Whether the stream ends with a chunk of token counts.

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
