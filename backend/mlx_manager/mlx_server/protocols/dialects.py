"""Fields of other endpoints and servers that ask for something, which an endpoint refuses by name.

A field that nobody knows is named in a header. A field that is known to change an answer elsewhere
must not vanish so: the client would take what it gets for what it has asked for.

Sources: the request types of OpenAI's and Anthropic's packages, vLLM's and SGLang's protocol
modules, llama.cpp's server README, Ollama's API reference, and TGI's, OpenRouter's, Cohere's and
Jina's API descriptions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from mlx_manager.mlx_server.schemas import anthropic, embeddings, openai, responses
from mlx_manager.mlx_server.schemas.wire import Timed, Wire

Endpoint = Literal[
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/tokenize",
    "/v1/apply-template",
]
CHAT: Endpoint = "/v1/chat/completions"
COMPLETIONS: Endpoint = "/v1/completions"
RESPONSES: Endpoint = "/v1/responses"
MESSAGES: Endpoint = "/v1/messages"
EMBEDDINGS: Endpoint = "/v1/embeddings"
RERANK: Endpoint = "/v1/rerank"
TOKENIZE: Endpoint = "/v1/tokenize"
APPLY_TEMPLATE: Endpoint = "/v1/apply-template"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A field that is known and not honoured. `harmless` values ask for nothing; null does neither.

    instead: a sentence that says what to do. by: who does not support it. twins: fields of the same
    meaning that are honoured; beside one with the same value the field asks for nothing more.
    """

    harmless: tuple[object, ...] = ()
    instead: str = ""
    by: str = "this server"
    twins: tuple[str, ...] = ()


HARMLESS: dict[str, tuple[object, ...]] = {
    "add_bos_token": (True,),
    "adapter_id": ("",),
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "background": (False,),
    "bad_words": ([],),
    "ban_eos_token": (False,),
    "banned_strings": ([],),
    "banned_tokens": ([], ""),
    "best_of": (1,),
    "continue_final_message": (False,),
    "decoder_input_details": (False,),
    "details": (False,),
    "do_sample": (True,),
    "dry_multiplier": (0, 0.0),
    "dynatemp_range": (0, 0.0),
    "early_stopping": (False,),
    "ebnf": ("",),
    "echo": (False,),
    "embedding_type": ("float",),
    "embedding_types": (["float"],),
    "encoding_format": ("float",),
    "format": ("",),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "grammar": ("",),
    "guidance_scale": (1, 1.0),
    "grammar_lazy": (False,),
    "ignore_eos": (False,),
    "images": ([],),
    "include": ([],),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "instructions": ("",),
    "late_chunking": (False,),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "logprobs": (False,),
    "lora": ([],),
    "lora_path": ("",),
    "min_new_tokens": (0,),
    "min_tokens": (0,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "n_keep": (0,),
    "n_probs": (0,),
    "negative_prompt": ("",),
    "no_stop_trim": (False,),
    "normalize": (True,),
    "normalized": (True,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "options": ({},),
    "output_dtype": ("float",),
    "parallel_tool_calls": (True, False),
    "parse_special": (True,),
    "parse_tool_calls": (True,),
    "plugins": ([],),
    "post_sampling_probs": (False,),
    "preserved_tokens": ([],),
    "raw": (False,),
    "raw_scores": (False,),
    "reasoning_format": ("auto", "deepseek"),
    "regex": ("",),
    "rep_pen": (1, 1.0),
    "repeat_last_n": (-1,),
    "response_fields": ([],),
    "response_format": ({"type": "text"},),
    "return_hidden_states": (False,),
    "return_logprob": (False,),
    "return_token_ids": (False,),
    "return_token_strs": (False,),
    "return_tokens": (False,),
    "return_tokens_as_token_ids": (False,),
    "safe_prompt": (False,),
    "samplers": ([],),
    "separate_reasoning": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop": ([], ""),
    "stop_regex": ([], ""),
    "stop_sequences": ([],),
    "stop_token_ids": ([],),
    "stream": (False,),
    "stream_reasoning": (True,),
    "suffix": ("",),
    "system": ("", []),
    "t_max_predict_ms": (0, -1),
    "text": ({}, {"format": {"type": "text"}}),
    "tfs_z": (1, 1.0),
    "token_healing": (False,),
    "tool_choice": ("auto", "none", {"type": "auto"}, {"type": "none"}),
    "tools": ([],),
    "top_logprobs": (0,),
    "top_n_sigma": (-1, -1.0, 0, 0.0),
    "transforms": ([],),
    "truncate": (False, "NONE"),
    "truncation": ("disabled",),
    "typical_p": (1, 1.0),
    "use_beam_search": (False,),
    "watermark": (False,),
    "with_pieces": (False,),
    "xtc_probability": (0, 0.0),
}
"""Values by which a field asks for what is done anyway."""
_HARMLESS_AT: dict[Endpoint, dict[str, tuple[object, ...]]] = {
    # A chat template writes the BOS itself, and a raw prompt gets one.
    CHAT: {"add_special_tokens": (False,), "add_special": (False,)},
    COMPLETIONS: {"add_special_tokens": (True,), "add_special": (True,)},
}

OF_PROMPTS = frozenset(
    {
        *("messages", "input", "prompt", "content", "inputs", "input_ids", "prompt_embeds"),
        *("system", "instructions", "system_prompt", "suffix", "images", "documents"),
        *("previous_response_id", "conversation", "thread", "truncation", "truncate_prompt_tokens"),
        *("tools", "functions", "chat_template", "chat_template_kwargs", "template", "raw"),
        *("add_generation_prompt", "continue_final_message", "mm_processor_kwargs", "safe_prompt"),
        *("reasoning", "reasoning_effort", "thinking", "enable_thinking", "think"),
        *("transforms", "options"),
    }
)
"""Fields that change a prompt."""

OF_ANSWERS = frozenset(
    {
        # llama.cpp, text-generation-webui, TabbyAPI
        *("n_predict", "repeat_last_n", "typical_p", "tfs_z", "mirostat", "mirostat_mode"),
        *("dynatemp_range", "dry_multiplier", "xtc_probability", "top_n_sigma", "samplers"),
        *("n_keep", "n_probs", "post_sampling_probs", "return_tokens", "response_fields"),
        *("t_max_predict_ms", "grammar_lazy", "preserved_tokens", "lora", "reasoning_format"),
        *("parse_tool_calls", "ban_eos_token", "banned_tokens", "banned_strings", "token_healing"),
        *("guidance_scale", "negative_prompt", "rep_pen", "max_length", "add_bos_token"),
        # vLLM, SGLang
        *("bad_words", "allowed_token_ids", "guided_whitespace_pattern", "structural_tag"),
        *("spaces_between_special_tokens", "return_tokens_as_token_ids", "include_reasoning"),
        *("logprob_token_ids", "stop_regex", "min_new_tokens", "no_stop_trim", "lora_path"),
        *("custom_logit_processor", "return_hidden_states", "return_logprob", "separate_reasoning"),
        *("stream_reasoning", "sampling_params"),
        # TGI, transformers
        *("max_new_tokens", "do_sample", "num_beams", "num_return_sequences", "early_stopping"),
        *("watermark", "details", "decoder_input_details", "adapter_id", "parameters"),
        # Ollama, Mistral, OpenRouter, Anthropic, LiteLLM
        *("format", "num_predict", "random_seed", "plugins", "output_format", "output_config"),
    }
)
"""Fields that change an answer, by names that none of our endpoints has."""

OF_VECTORS = frozenset(
    {
        *("input_type", "task", "task_type", "normalize", "normalized", "late_chunking"),
        *("truncate", "embedding_type", "embedding_types", "output_dtype", "output_dimension"),
        *("texts", "inputs", "raw_scores", "messages", "prompt", "instructions", "instruction"),
        *("stream", "tools", "input", "query", "documents", "chat_template_kwargs"),
        *("encoding_format", "dimensions", "prompt_name", "top_n", "return_documents"),
    }
)
"""Fields that change an embedding or a ranking."""

_MAX_TOKENS = (
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens"),
    *("max_length", "n_predict", "num_predict"),
)
_FORMS = (
    *("response_format", "text", "output_format", "output_config", "format", "json_schema"),
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("grammar", "regex", "ebnf", "structural_tag"),
)
_THINKING = (
    *("reasoning", "reasoning_effort", "thinking", "enable_thinking", "think"),
    *("thinking_budget", "thinking_token_budget"),
)
_CONVERSATION = ("messages", "input", "prompt", "inputs")
_SYSTEM = ("system", "instructions", "system_prompt")
_STOP = ("stop", "stop_sequences", "stop_regex")
_TWINS = (
    _MAX_TOKENS,
    ("stop", "stop_sequences"),
    ("seed", "random_seed"),
    ("repetition_penalty", "repeat_penalty", "rep_pen"),
    ("min_tokens", "min_new_tokens"),
)
"""Names of one thing, of which clients that speak to many servers send several."""

INSTEAD: dict[Endpoint, dict[tuple[str, ...], str]] = {
    CHAT: {
        _MAX_TOKENS: "Use `max_completion_tokens`.",
        _FORMS: "Use `response_format`.",
        _THINKING: "Use `reasoning_effort` or `enable_thinking`.",
        _CONVERSATION: "Use `messages`.",
        _SYSTEM: "Send a message of role system.",
        _STOP: "Use `stop`.",
        ("suffix", "echo", "raw"): "Use /v1/completions.",
        ("previous_response_id", "conversation"): "Use /v1/responses, or send all messages.",
    },
    COMPLETIONS: {
        _MAX_TOKENS: "Use `max_tokens`.",
        _FORMS: "Use `response_format`.",
        _THINKING: "Use /v1/chat/completions.",
        _CONVERSATION: "Use `prompt`.",
        _SYSTEM: "Put it into `prompt`.",
        _STOP: "Use `stop`.",
        ("tools", "tool_choice", "functions", "parallel_tool_calls"): "Use /v1/chat/completions.",
        ("chat_template_kwargs", "add_generation_prompt"): "Use /v1/chat/completions.",
        ("top_logprobs",): "Use `logprobs`.",
    },
    RESPONSES: {
        _MAX_TOKENS: "Use `max_output_tokens`.",
        _FORMS: "Use `text.format`.",
        _THINKING: "Use `reasoning.effort`.",
        _CONVERSATION: "Use `input`.",
        _SYSTEM: "Use `instructions`.",
        _STOP: "Nothing there ends an answer but its model; use /v1/chat/completions.",
        ("functions",): "Use `tools`.",
        ("function_call",): "Use `tool_choice`.",
        ("logprobs",): "Use `include` with `message.output_text.logprobs`.",
        ("n", "best_of"): "Ask once for each answer.",
    },
    MESSAGES: {
        _MAX_TOKENS: "Use `max_tokens`.",
        _FORMS: "Use `output_config.format`.",
        _THINKING: "Use `thinking`.",
        _CONVERSATION: "Use `messages`.",
        _SYSTEM: "Use `system`.",
        _STOP: "Use `stop_sequences`.",
        ("functions",): "Use `tools`.",
        ("function_call",): "Use `tool_choice`.",
        ("parallel_tool_calls",): "Use `tool_choice.disable_parallel_tool_use`.",
        ("n", "best_of"): "Ask once for each answer.",
        ("logprobs", "top_logprobs"): "Use /v1/chat/completions.",
    },
    EMBEDDINGS: {
        (*_CONVERSATION, "texts"): "Use `input`.",
        ("input_type", "task", "task_type", "instruction", "instructions"): "Use `prompt_name`.",
        ("truncate",): "Use `truncate_prompt_tokens`.",
        ("output_dimension",): "Use `dimensions`.",
        ("embedding_type", "embedding_types", "output_dtype"): "Use `encoding_format`.",
    },
    RERANK: {
        (*_CONVERSATION, "texts"): "Use `query` and `documents`.",
        ("truncate",): "Use `truncate_prompt_tokens`.",
        ("raw_scores", "normalize"): "Use `use_activation`.",
        ("instructions",): "Use `instruction`.",
    },
    TOKENIZE: {_SYSTEM: "Send a message of role system.", ("input", "inputs"): "Use `prompt`."},
    APPLY_TEMPLATE: {
        _SYSTEM: "Send a message of role system.",
        _CONVERSATION: "Use `messages`.",
    },
}
"""Advice on what to use instead of a field, by endpoint and field."""

_GENERATING: tuple[tuple[type[Wire], Collection[str]], ...] = (
    (openai.ChatCompletionRequest, openai.NO_EFFECT),
    (openai.CompletionRequest, openai.NO_EFFECT),
    (responses.ResponsesRequest, responses.NO_EFFECT),
    (anthropic.MessagesRequest, anthropic.NO_EFFECT),
    (embeddings.EmbeddingsRequest, embeddings.NO_EFFECT),
    (embeddings.RerankRequest, embeddings.NO_EFFECT),
    (openai.TokenizeRequest, ()),
)
_HINTS = frozenset(
    {
        *("model", "stream", "cache_control", "context_management", "verbosity", "stream_options"),
        *("mcp_servers", "container", "web_search_options", "max_tool_calls"),
        *Timed.model_fields,
        *(name for _, hints in _GENERATING for name in hints),
    }
)
"""Fields that are offers, or that change no answer where they are not known."""
KNOWN = (
    frozenset(name for kind, _ in _GENERATING for name in kind.model_fields) - _HINTS
    | OF_PROMPTS
    | OF_ANSWERS
)


def foreign(
    endpoint: Endpoint, kind: type[Wire], names: Collection[str] = KNOWN
) -> Mapping[str, Refusal]:
    """Return the refusals of the `names` that bodies of `kind`, sent to `endpoint`, do not have."""
    instead = {name: said for group, said in INSTEAD[endpoint].items() for name in group}
    harmless = HARMLESS | _HARMLESS_AT.get(endpoint, {})
    honoured = kind.model_fields.keys()
    twins = {
        name: tuple(twin for twin in group if twin in honoured)
        for group in _TWINS
        for name in group
    }
    return {
        name: Refusal(harmless.get(name, ()), instead.get(name, ""), endpoint, twins.get(name, ()))
        for name in sorted(names)
        if name not in kind.model_fields
    }
