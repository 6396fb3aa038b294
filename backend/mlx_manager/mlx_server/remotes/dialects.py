"""Dialects of servers: the fields that they take beyond OpenAI's own.

A server is known by its list of models. One that is not known is asked for nothing beyond OpenAI's
API, since it might leave out the rest without a word.

Sources: vLLM's vllm/entrypoints/openai/{chat_completion,completion}/protocol.py and
vllm/entrypoints/pooling/{base,scoring}/protocol.py; llama.cpp's tools/server/server-common.cpp,
where fields of another type than expected count as left out; SGLang's
python/sglang/srt/entrypoints/openai/protocol.py and srt/sampling/sampling_params.py.
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
    tokenizer are. all_tokens: value of `top_k` for no limit. schema: field of completions for the
    JSON of an answer, None if there is none. names_tools: whether `tool_choice` may name a tool.
    least_top: the fewest alternatives of tokens with which their logprobs are told. lacking: fields
    of OpenAI's completions that the server leaves out or fails at.
    """

    name: str
    fields: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    counts: bool = False
    unlimited: Mapping[str, Any] | None = None
    tokens: Tokens = "no"
    all_tokens: int = 0
    schema: Literal["response_format", "json_schema"] | None = "response_format"
    names_tools: bool = True
    least_top: int = 0
    lacking: frozenset[str] = frozenset()


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
    lacking=frozenset({"suffix"}),
)
LLAMA_CPP = Dialect(
    "llama.cpp",
    MappingProxyType({**_same(*COMMON, "grammar"), "repetition_penalty": "repeat_penalty"}),
    unlimited=MappingProxyType({"max_tokens": -1}),
    schema="json_schema",
    names_tools=False,
    least_top=1,
    lacking=frozenset({"echo", "suffix"}),
)
SGLANG = Dialect(
    "SGLang",
    _same(*OF_ENGINES, "regex", "ebnf", "cache_salt"),
    counts=True,
    all_tokens=-1,
    lacking=frozenset({"suffix"}),
)
OTHER = Dialect("a server that is known to speak OpenAI's API alone", schema=None)

BY_OWNER = {"vllm": VLLM, "llamacpp": LLAMA_CPP, "sglang": SGLANG}
OUR_FIELDS = frozenset({"origin", "state", "max_model_len", "supported_parameters"})
"""Fields by which a card in a list of models is one of this program's."""


def dialect_of(card: Mapping[str, Any]) -> Dialect:
    """Return the dialect of the server that lists a model in this way."""
    if card.keys() >= OUR_FIELDS:
        return OURS
    return BY_OWNER.get(str(card.get("owned_by")), OTHER)
