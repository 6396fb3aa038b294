"""OpenAI's wire types: what chat, completions and models take and give.

Requests accept fields that nobody here knows, because clients run ahead of servers; they land in
`model_extra` and are named by `unknown_fields`. A field that is declared is either honoured,
listed in `NO_EFFECT`, or refused by `protocols.parameters` when it asks for something. A null
means the default.

Source: OpenAI's API description (github.com/openai/openai-openapi) and, for what other servers
added to it (top_k, min_p, stop_token_ids, chat_template_kwargs, ...), vLLM's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from mlx_manager.mlx_server.limits import MaxTokensOrUnlimited, MaxTokensOrZero
from mlx_manager.mlx_server.schemas import hosted
from mlx_manager.mlx_server.schemas.sampling import SamplingParameters
from mlx_manager.mlx_server.schemas.wire import (
    TEMPLATE_VARIABLES,
    ImageUrl,
    Many,
    ModelName,
    NonEmpty,
    StopString,
    Timed,
    Wire,
    choose,
    object_or_boolean,
    shape,
    text_or_ids,
    text_or_list,
)

TokenId = Annotated[int, Field(strict=True, ge=0)]


NO_EFFECT = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "verbosity",
    }
)
"""Hints that change nothing about the answer here: accepted, and without effect."""


# ---------------------------------------------------------------------------------------------
# Messages and tools
# ---------------------------------------------------------------------------------------------


class FunctionCall(Wire):
    """A call's name and its arguments as JSON text."""

    name: str
    arguments: str | None = ""


class CustomCall(Wire):
    """A call of a `custom` tool, which takes a text."""

    name: str
    input: str


class ChatToolCall(Wire):
    """A call of a function, or of a `custom` tool of an earlier server's."""

    id: str | None = ""
    type: Literal["function", "custom"] | None = "function"
    function: FunctionCall | None = None
    custom: CustomCall | None = None


class ContentPart(Wire):
    """A piece of a message."""

    types_read = ("text", "refusal", "image_url")

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl = Field(None, description="Of type image_url, for a model that sees")
    input_audio: Any = None
    file: Any = None


Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Many[ContentPart], Tag("<list>")],
    choose(text_or_list, "a string or a list of content parts"),
]


class ChatMessage(Wire):
    """A message of the conversation, asked or answered.

    `annotations` (of a web search) have no effect; `audio` and `function_call` must be null.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: Many[ChatToolCall] | None = None
    tool_call_id: str | None = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    prefix: bool | None = Field(
        None, description="Of the last message, the assistant's: the answer goes on from it"
    )
    partial: bool | None = Field(None, description="As `prefix`")


Messages = Annotated[Many[ChatMessage], Field(min_length=1)]


class FunctionDefinition(Wire):
    name: NonEmpty
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(Wire):
    """A function that the model may call, if `type` is "function".

    Other known types are left out; see `schemas.hosted`.
    """

    types_read = ("function",)

    type: str
    function: FunctionDefinition | None = None


def ignored(tools: Sequence[ChatTool] | None) -> list[str]:
    """Return the types of tools that are offered and left out, each once."""
    return list(dict.fromkeys(tool.type for tool in tools or () if hosted.is_tool(tool.type)))


class NamedFunction(Wire):
    name: NonEmpty


class AllowedTools(Wire):
    """Some of `tools`, which alone may be called, or one of which must be."""

    mode: Literal["auto", "required"] = "auto"
    tools: Many[dict[str, Any]]


class NamedToolChoice(Wire):
    """A function that must be called, or with type allowed_tools several that may be."""

    types_read = ("function", "allowed_tools")

    type: str
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


ToolChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("<text>")]
    | Annotated[NamedToolChoice, Tag("<object>")],
    choose(shape, "'auto', 'none', 'required' or an object that names a function"),
]


AnySchema = Annotated[
    Annotated[dict[str, Any], Tag("<object>")] | Annotated[bool, Tag("<boolean>")],
    choose(object_or_boolean, "a JSON schema, as an object"),
]


class JsonSchemaFormat(Wire):
    """A JSON schema by OpenAI's rules: `strict` refuses what can't be held to."""

    name: str | None = None
    description: str | None = None
    schema_: AnySchema | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Wire):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="Instead of `json_schema`, as llama.cpp has it"
    )


JsonSchemaText = Annotated[
    Annotated[NonEmpty, Tag("<text>")] | Annotated[dict[str, Any], Tag("<object>")],
    choose(shape, "a JSON schema, as an object or as text"),
]
Choices = Annotated[list[str], Field(min_length=1, max_length=10_000)]


class StructuredOutputs(Wire):
    """Constraint on the content, one of several kinds, as vLLM has it."""

    json_: JsonSchemaText | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: NonEmpty | None = None
    choice: Choices | None = None
    grammar: NonEmpty | None = None
    structural_tag: Any = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


class Reasoning(Wire):
    """Amount of thinking, as OpenRouter has it."""

    effort: NonEmpty | None = Field(None, description="As `reasoning_effort`")
    max_tokens: int | None = Field(None, ge=0, description="As `thinking_token_budget`")
    enabled: bool | None = Field(None, description="As `enable_thinking`")


class ChatThinking(Wire):
    """A switch for thinking, as DeepSeek, Moonshot and Zhipu have it in chat."""

    type: Literal["enabled", "disabled", "adaptive", "auto"] | None = None
    budget_tokens: int | None = Field(None, ge=0, description="As `thinking_token_budget`")


class StreamOptions(Wire):
    include_usage: bool | None = Field(
        None, description="Send a last chunk with the token counts and no choices"
    )
    include_obfuscation: bool | None = Field(None, description="No effect: chunks are never padded")
    include_timings: bool | None = Field(None, description="As `include_timings` of the request")
    continuous_usage_stats: bool | None = Field(
        None, description="With `include_usage`: the token counts so far in every chunk, as vLLM"
    )


# ---------------------------------------------------------------------------------------------
# Requests
# ---------------------------------------------------------------------------------------------


Stop = Annotated[
    Annotated[StopString, Tag("<text>")]
    | Annotated[list[StopString], Field(max_length=16), Tag("<list>")],
    choose(text_or_list, "a string or a list of at most 16 strings"),
]


class GenerationParameters(SamplingParameters):
    """Parameters that chat and completions have in common."""

    model: ModelName | None = Field(None, description="Model id; the server's default when absent")
    stream: bool | None = Field(None, description="Send the answer as server-sent events")
    stream_options: StreamOptions | None = Field(None, description="Only with `stream`")
    n: int | None = Field(None, ge=1, le=128, description="Answers to each prompt")
    stop: Stop | None = Field(
        None,
        description="Up to 16 strings of up to 1,024 characters that end the answer, "
        "not part of it",
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = Field(
        None, description="Tokens that end the answer"
    )
    ignore_eos: bool | None = Field(None, description="Go on past the model's end of turn")
    min_tokens: int | None = Field(
        None,
        ge=0,
        description="Fewest tokens before a stop string or the end of turn may end the answer; a "
        "form or budget that leaves no other token still ends it",
    )

    user: Any = Field(None, description="No effect")
    metadata: Any = Field(None, description="No effect")
    store: Any = Field(None, description="No effect: nothing is stored")
    service_tier: Any = Field(None, description="No effect")
    safety_identifier: Any = Field(None, description="No effect")
    prompt_cache_key: Any = Field(None, description="No effect: prefixes are shared anyway")
    prompt_cache_retention: Any = Field(None, description="No effect")
    prompt_cache_options: Any = Field(None, description="No effect")
    verbosity: Any = Field(None, description="No effect")

    best_of: int | None = Field(
        None, ge=1, le=20, description="Draw that many, return the n likeliest by mean logprob"
    )
    include_timings: bool | None = Field(
        None,
        description="`timings` of the answer, in a stream with each choice's last chunk: tokens a "
        "second of prompt and answer, and the time to the first",
    )
    timings_per_token: bool | None = Field(
        None, description="As `include_timings`, with every chunk, by llama.cpp's name"
    )
    return_token_ids: bool | None = Field(
        None, description="Token ids of prompt and answer; in a stream, the answer's at its end"
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="JSON schema, regex, choice or grammar that the answer fits"
    )
    guided_json: JsonSchemaText | None = Field(None, description="JSON schema that the answer fits")
    guided_regex: NonEmpty | None = Field(
        None, description="Regular expression that the whole answer matches (Rust's syntax)"
    )
    guided_choice: Choices | None = Field(None, description="Strings of which the answer is one")
    guided_grammar: NonEmpty | None = Field(
        None, description="Lark or GBNF grammar that the answer is derived from"
    )
    response_format: ResponseFormat | None = Field(
        None, description="text, json_object, or json_schema with the schema the answer fits"
    )
    json_schema: JsonSchemaText | None = Field(
        None, description="As `guided_json`, by llama.cpp's and SGLang's name"
    )
    grammar: str | None = Field(None, description="As `guided_grammar`, by llama.cpp's name")
    regex: str | None = Field(None, description="As `guided_regex`, by SGLang's name")
    ebnf: str | None = Field(None, description="As `guided_grammar`, by SGLang's name")
    logits_processors: Any = Field(None, description="Code run on each step's logits")
    use_beam_search: bool | None = Field(None, description="Beam search instead of sampling")
    length_penalty: float | None = Field(None, description="For beam search")
    skip_special_tokens: bool | None = Field(None, description="Special tokens left out of text")
    include_stop_str_in_output: bool | None = Field(None, description="Stop string kept in text")
    prompt_logprobs: int | None = Field(None, description="Logprobs of the prompt's tokens")
    truncate_prompt_tokens: int | None = Field(None, description="Keep the prompt's last tokens")


class ChatCompletionRequest(GenerationParameters):
    """`POST /v1/chat/completions`."""

    messages: Messages
    max_tokens: MaxTokensOrUnlimited | None = Field(
        None, description="Older name of max_completion_tokens"
    )
    max_completion_tokens: MaxTokensOrUnlimited | None = Field(
        None, description="Most tokens generated, reasoning included; default, and -1: the context"
    )
    tools: Many[ChatTool] | None = Field(None, description="Functions the model may call")
    tool_choice: ToolChoice | None = Field(
        None, description="auto, none, required, or a function by name"
    )
    parallel_tool_calls: bool | None = Field(None, description="Several calls in one answer")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description=TEMPLATE_VARIABLES)
    reasoning_effort: NonEmpty | None = Field(None, description="Handed to the chat template")
    thinking_token_budget: int | None = Field(
        None, ge=0, description="Most tokens of thinking; it is then ended for the model"
    )
    enable_thinking: bool | None = Field(
        None,
        description="Handed to the chat template, as `thinking` or `reasoning` where it reads that "
        "(Seed-OSS's gets a budget of 0); false also ends what it begins all the same",
    )
    reasoning: Reasoning | None = Field(
        None, description="effort, max_tokens (the thinking budget) and enabled in one object"
    )
    thinking: ChatThinking | None = Field(
        None, description="`type` enabled or disabled, as `enable_thinking`, and a budget"
    )
    thinking_budget: int | None = Field(None, ge=0, description="As `thinking_token_budget`")
    add_generation_prompt: bool | None = Field(
        None, description="Open the assistant's turn after the last message; default true"
    )
    continue_final_message: bool | None = Field(
        None, description="Leave the last message open and go on writing it"
    )

    logprobs: bool | None = Field(None, description="Logprobs of the answer's tokens")
    top_logprobs: int | None = Field(None, ge=0, le=20, description="Alternatives per token")
    modalities: Many[str] | None = Field(None, description="Kinds of output")
    audio: Any = Field(None, description="Voice and format of spoken output")
    web_search_options: Any = Field(
        None, description="Left out and named in `x-ignored-tools`: nothing here searches the web"
    )
    moderation: Any = Field(None, description="Moderate input and output")
    functions: Any = Field(None, description="Older form of tools")
    function_call: Any = Field(None, description="Older form of tool_choice")
    echo: bool | None = Field(None, description="Repeat the last message before the answer")
    documents: Any = Field(None, description="Documents for the template; chat_template_kwargs")
    chat_template: str | None = Field(None, description="Template in place of the model's")

    def ignored_tools(self) -> list[str]:
        searches = [] if self.web_search_options is None else ["web_search_options"]
        return [*searches, *ignored(self.tools)]


Prompt = Annotated[
    Annotated[NonEmpty, Tag("<text>")]
    | Annotated[Many[TokenId], Field(min_length=1), Tag("<ids>")],
    choose(text_or_ids, "a string or a list of token ids"),
]
Prompts = Annotated[
    Annotated[NonEmpty, Tag("<text>")]
    | Annotated[Many[TokenId], Tag("<ids>")]
    | Annotated[Many[Prompt], Field(min_length=1), Tag("<list>")],
    choose(shape, "a string, a list of token ids, or a list of either"),
]


class CompletionRequest(GenerationParameters):
    """`POST /v1/completions`."""

    prompt: Prompts = Field(description="Text, token ids, or a list of either")
    max_tokens: MaxTokensOrZero | None = Field(
        None, description="Most tokens generated; default 16; -1: the context"
    )
    echo: bool | None = Field(None, description="Put the prompt before the completion")

    logprobs: int | None = Field(None, ge=0, le=20, description="Logprobs, that many per token")
    suffix: str | None = Field(None, description="Text after the completion (fill in the middle)")


class TemplateParameters(Timed):
    """Parts of a conversation's prompt besides its messages."""

    model: ModelName | None = Field(None, description="Model id; the server's default when absent")
    tools: Many[ChatTool] | None = Field(None, description="Functions the model may call")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description=TEMPLATE_VARIABLES)
    reasoning_effort: NonEmpty | None = Field(None, description="Handed to the chat template")
    enable_thinking: bool | None = Field(None, description="Handed to the chat template")
    add_generation_prompt: bool | None = Field(
        None, description="Open the assistant's turn after the last message; default true"
    )
    continue_final_message: bool | None = Field(None, description="Leave the last message open")

    def ignored_tools(self) -> list[str]:
        return ignored(self.tools)


class PromptRequest(TemplateParameters):
    """`POST /v1/apply-template`: a conversation as the model's template renders it."""

    messages: Messages


class TokenizeRequest(TemplateParameters):
    """`POST /v1/tokenize`: one of a text (by vLLM's name or llama.cpp's) and a conversation."""

    messages: Messages | None = Field(None, description="A conversation")
    prompt: str | None = Field(None, description="Text; its tokens begin with the model's BOS")
    content: str | None = Field(None, description="Text; its tokens have no BOS")
    add_special_tokens: bool | None = Field(None, description="Whether a text gets the BOS")
    add_special: bool | None = Field(None, description="As `add_special_tokens`")
    return_token_strs: bool | None = Field(None, description="Each token's text, too")


class DetokenizeRequest(Timed):
    """`POST /v1/detokenize`."""

    model: ModelName | None = Field(None, description="Model id; the server's default when absent")
    tokens: Many[TokenId] = Field(description="Token ids")


# ---------------------------------------------------------------------------------------------
# Answers
# ---------------------------------------------------------------------------------------------


class PromptTokensDetails(Wire):
    cached_tokens: int = 0


class CompletionTokensDetails(Wire):
    """`reasoning_tokens`: of thinking. The others: tokens of the prediction that were tried, and
    are in the answer or are not."""

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(Wire):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class ChatCompletionChoice(Wire):
    """An answer. stop_reason: the stop string that ended it, by vLLM's name; absent otherwise."""

    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None = None
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    stop_reason: str | None = None
    token_ids: list[int] | None = None


class ChatCompletionResponse(Wire):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[ChatCompletionChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    timings: dict[str, Any] | None = None


class CompletionChoice(Wire):
    index: int
    text: str
    logprobs: dict[str, Any] | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: str | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class CompletionResponse(Wire):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[CompletionChoice]
    usage: Usage | None = None
    timings: dict[str, Any] | None = None


class DeltaFunction(Wire):
    name: str | None = None
    arguments: str | None = None


class DeltaToolCall(Wire):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: DeltaFunction | None = None


class ChatDelta(Wire):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[DeltaToolCall] | None = None


class ChatChunkChoice(Wire):
    index: int
    delta: ChatDelta
    logprobs: dict[str, Any] | None = None
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    stop_reason: str | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(Wire):
    """One event of a chat stream. Written by hand in `protocols.chat`, described here."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class TokenizeResponse(Wire):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TokenizerInfoResponse(Wire):
    """`GET /tokenizer_info`, by vLLM's names. `chat_template` is in Jinja."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    vocab_size: int
    model_max_length: int
    chat_template: str | None


class TextResponse(Wire):
    """A text, by vLLM's name and by llama.cpp's."""

    prompt: str
    content: str


class ErrorDetail(Wire):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(Wire):
    """The body of every answer that is not 2xx, and of an error inside a stream."""

    error: ErrorDetail


class ModelWeights(Wire):
    """The form of the weights in memory, and why it was chosen. `dtype`: of the activations."""

    name: str
    dtype: str
    reason: str


class Architecture(Wire):
    """Modalities of the input and the output, by OpenRouter's names."""

    modality: str
    input_modalities: list[str]
    output_modalities: list[str]


class TopProvider(Wire):
    """The limits that OpenRouter's clients read."""

    context_length: int | None
    max_completion_tokens: int | None


class ModelServer(Wire):
    """A server on another machine that has a model, and the number of requests under way there.

    model: the model's name there, "" before the server was reached. failure: why it is left alone,
    "" if it is not.
    """

    url: str
    health: Literal["unknown", "up", "down"]
    model: str
    requests: int
    failure: str


class ModelCard(Wire):
    """A model on offer. What is beyond OpenAI's four fields says how it is served.

    type, max_context_length, loaded_context_length, capabilities: as LM Studio has them.
    architecture, top_provider, supported_parameters: as OpenRouter has them.
    supports_reasoning: absent while the model is not loaded.

    max_model_len: `context_length`, by vLLM's name.
    kind: what it is for; absent while nothing of it is here. origin: where it was found.
    root: the model or the folder whose files it has; its own id, but for what the owner made, and
    for models on other machines, where it is the name there.
    servers: the other machines that have it; absent for models that are loaded here.
    bytes: of its weights, measured once it is loaded.
    weights, engine: of a loaded model only; `engine` counts its rows and KV pages.
    sampling: what it is drawn by where a request is silent, if not by OpenAI's defaults.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    kind: Literal["text", "embedding", "reranker"] | None = None
    state: Literal["loadable", "loading", "loaded", "down"]
    doing: str | None = None
    failure: str | None = None
    origin: str
    root: str
    family: str
    context_length: int
    max_model_len: int
    type: Literal["llm", "vlm", "embeddings"] | None = None
    max_context_length: int | None = None
    loaded_context_length: int | None = None
    input_modalities: list[str]
    output_modalities: list[str]
    supports_tools: bool | None = None
    supports_reasoning: bool | None = None
    capabilities: list[str]
    architecture: Architecture
    top_provider: TopProvider
    supported_parameters: list[str]
    bytes: int
    weights: ModelWeights | None = None
    sampling: dict[str, int | float] | None = None
    engine: dict[str, Any] | None = None
    servers: list[ModelServer] | None = None


class ModelList(Wire):
    object: Literal["list"] = "list"
    data: list[ModelCard]
