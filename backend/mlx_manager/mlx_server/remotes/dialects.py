"""Dialects of servers: the fields that they take beyond OpenAI's own.

A server is known by its list of models. One that is not known is asked for nothing beyond OpenAI's
API, since it might leave out the rest without a word.

Source: the request types of vLLM (entrypoints/openai), llama.cpp (tools/server) and SGLang
(srt/entrypoints/openai/protocol.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Tokens = Literal["below /v1", "at the root", "no"]

COMMON = ("top_k", "min_p", "ignore_eos", "chat_template_kwargs")
OF_ENGINES = (
    *COMMON,
    *("repetition_penalty", "stop_token_ids", "min_tokens", "continue_final_message"),
)


@dataclass(frozen=True, slots=True)
class Dialect:
    """A kind of server.

    name: for messages. fields: the names of fields beyond OpenAI's, by our names of them. counts:
    whether each chunk may have the token counts so far. unlimited: value of completions'
    `max_tokens` for as many as there is room for, if there is one. tokens: where the routes of the
    tokenizer are.
    """

    name: str
    fields: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    counts: bool = False
    unlimited: Mapping[str, Any] | None = None
    tokens: Tokens = "no"


def _same(*names: str) -> Mapping[str, str]:
    return MappingProxyType({name: name for name in names})


OURS = Dialect(
    "MLX Manager",
    _same(
        *OF_ENGINES,
        *("add_generation_prompt", "structured_outputs", "thinking_token_budget"),
        *("return_token_ids", "speculation", "priority", "cache_salt", "truncate_prompt_tokens"),
        *("prompt_name", "use_activation", "instruction"),
    ),
    counts=True,
    unlimited=MappingProxyType({"max_tokens": -1}),
    tokens="below /v1",
)
VLLM = Dialect(
    "vLLM",
    _same(
        *OF_ENGINES,
        *("add_generation_prompt", "structured_outputs", "thinking_token_budget"),
        *("return_token_ids", "cache_salt", "truncate_prompt_tokens", "use_activation"),
    ),
    counts=True,
    unlimited=MappingProxyType({"max_tokens": None}),
    tokens="at the root",
)
LLAMA_CPP = Dialect(
    "llama.cpp",
    MappingProxyType({**_same(*COMMON, "grammar"), "repetition_penalty": "repeat_penalty"}),
    unlimited=MappingProxyType({"max_tokens": -1}),
)
SGLANG = Dialect("SGLang", _same(*OF_ENGINES, "regex", "ebnf"), counts=True)
OTHER = Dialect("a server that is known to speak OpenAI's API alone")

BY_OWNER = {"vllm": VLLM, "llamacpp": LLAMA_CPP, "sglang": SGLANG}
OUR_FIELDS = frozenset({"origin", "state", "max_model_len", "supported_parameters"})
"""Fields by which a card in a list of models is one of this program's."""


def dialect_of(card: Mapping[str, Any]) -> Dialect:
    """Return the dialect of the server that lists a model in this way."""
    if card.keys() >= OUR_FIELDS:
        return OURS
    return BY_OWNER.get(str(card.get("owned_by")), OTHER)
