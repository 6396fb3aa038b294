"""OpenAI's wire types: what chat, completions and models take and give.

Requests accept fields that nobody here knows, because clients run ahead of servers; they land in
`model_extra` and are named by `unknown_fields`. A field that is declared is either honoured,
listed in `NO_EFFECT`, or refused by `protocols.parameters` when it asks for something. A null
means the default.

Source: OpenAI's API description (github.com/openai/openai-openapi) and, for what other servers
added to it (top_k, min_p, stop_token_ids, chat_template_kwargs, ...), vLLM's.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from mlx_manager.mlx_server.limits import (
    MaxTokens,
    MaxTokensOrZero,
    MinP,
    Penalty,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopP,
)
from mlx_manager.mlx_server.schemas.wire import (
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


class ChatToolCall(Wire):
    id: str | None = ""
    type: Literal["function"] | None = "function"
    function: FunctionCall


class ContentPart(Wire):
    """A piece of a message."""

    types_read = ("text", "refusal")

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
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


Messages = Annotated[Many[ChatMessage], Field(min_length=1)]


class FunctionDefinition(Wire):
    name: NonEmpty
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(Wire):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Wire):
    name: NonEmpty


class NamedToolChoice(Wire):
    type: Literal["function"]
    function: NamedFunction


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
    """What the content must be, one of them, as vLLM has it."""

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
    """How much thinking there is to be, as OpenRouter has it."""

    effort: NonEmpty | None = Field(None, description="As `reasoning_effort`")
    max_tokens: int | None = Field(None, ge=0, description="As `thinking_token_budget`")
    enabled: bool | None = Field(None, description="As `enable_thinking`")


class StreamOptions(Wire):
    include_usage: bool | None = Field(
        None, description="Send a last chunk with the token counts and no choices"
    )
    include_obfuscation: bool | None = Field(None, description="No effect: chunks are never padded")


# ---------------------------------------------------------------------------------------------
# Requests
# ---------------------------------------------------------------------------------------------


Stop = Annotated[
    Annotated[StopString, Tag("<text>")]
    | Annotated[list[StopString], Field(max_length=16), Tag("<list>")],
    choose(text_or_list, "a string or a list of at most 16 strings"),
]


class GenerationParameters(Timed):
    """What chat and completions have in common."""

    model: ModelName | None = Field(None, description="Model id; the server's default when absent")
    stream: bool | None = Field(None, description="Send the answer as server-sent events")
    stream_options: StreamOptions | None = Field(None, description="Only with `stream`")
    n: int | None = Field(None, ge=1, le=128, description="Answers to each prompt")

    temperature: Temperature | None = Field(
        None, description="0 is greedy; default: the model's, or 1"
    )
    top_p: TopP | None = Field(None, description="Nucleus sampling; 1 is off")
    top_k: TopK | None = Field(None, description="Most likely tokens kept; 0 or -1 is off")
    min_p: MinP | None = Field(
        None, description="Least probability kept, relative to the best; 0 is off"
    )
    seed: int | None = Field(
        None, ge=-(2**63), le=2**63 - 1, description="Same seed, same draws; see Seeds"
    )
    presence_penalty: Penalty | None = Field(None, description="Over the output; default 0")
    frequency_penalty: Penalty | None = Field(None, description="Over the output; default 0")
    repetition_penalty: RepetitionPenalty | None = Field(
        None, description="Multiplicative, over prompt and output; 1 is off"
    )
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, description="Token id to a bias from -100 to 100"
    )
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

    best_of: int | None = Field(
        None, ge=1, le=20, description="Draw that many, return the n likeliest by mean logprob"
    )
    priority: int | None = Field(
        None, description="Lower goes first among waiting requests, and is paused last; default 0"
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
    max_tokens: MaxTokens | None = Field(None, description="Older name of max_completion_tokens")
    max_completion_tokens: MaxTokens | None = Field(
        None, description="Most tokens generated, reasoning included; default: the context"
    )
    tools: Many[ChatTool] | None = Field(None, description="Functions the model may call")
    tool_choice: ToolChoice | None = Field(
        None, description="auto, none, required, or a function by name"
    )
    parallel_tool_calls: bool | None = Field(None, description="Several calls in one answer")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables for the chat template, such as enable_thinking"
    )
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
    prediction: Any = Field(None, description="Text expected in the answer")
    verbosity: str | None = Field(None, description="low, medium or high")
    web_search_options: Any = Field(None, description="Search the web for the answer")
    moderation: Any = Field(None, description="Moderate input and output")
    functions: Any = Field(None, description="Older form of tools")
    function_call: Any = Field(None, description="Older form of tool_choice")
    echo: bool | None = Field(None, description="Repeat the last message before the answer")
    documents: Any = Field(None, description="Documents for the template; chat_template_kwargs")
    chat_template: str | None = Field(None, description="Template in place of the model's")


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
        None, description="Most tokens generated; default 16"
    )
    echo: bool | None = Field(None, description="Put the prompt before the completion")

    logprobs: int | None = Field(None, ge=0, le=20, description="Logprobs, that many per token")
    suffix: str | None = Field(None, description="Text after the completion (fill in the middle)")


class TemplateParameters(Timed):
    """What goes into a conversation's prompt besides its messages."""

    model: ModelName | None = Field(None, description="Model id; the server's default when absent")
    tools: Many[ChatTool] | None = Field(None, description="Functions the model may call")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables for the chat template, such as enable_thinking"
    )
    add_generation_prompt: bool | None = Field(
        None, description="Open the assistant's turn after the last message; default true"
    )
    continue_final_message: bool | None = Field(None, description="Leave the last message open")


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
    reasoning_tokens: int = 0


class Usage(Wire):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class ChatCompletionChoice(Wire):
    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None = None
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    token_ids: list[int] | None = None


class ChatCompletionResponse(Wire):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatCompletionChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class CompletionChoice(Wire):
    index: int
    text: str
    logprobs: dict[str, Any] | None = None
    finish_reason: Literal["stop", "length"] | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class CompletionResponse(Wire):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


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
    token_ids: list[int] | None = None


class ChatCompletionChunk(Wire):
    """One event of a chat stream. Written by hand in `protocols.chat`, described here."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
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


class ModelCard(Wire):
    """A model on offer. What is beyond OpenAI's four fields says how it is served.

    kind: what it is for; absent while nothing of it is here. origin: where it was found.
    root: the model or the folder whose files it has; its own id, but for what the owner made.
    bytes: of its weights, measured once it is loaded.
    weights, engine: of a loaded model only; `engine` counts its rows and KV pages.
    sampling: what it is drawn by where a request is silent, if not by OpenAI's defaults.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    kind: Literal["text", "embedding", "reranker"] | None = None
    state: Literal["loadable", "loading", "loaded"]
    origin: str
    root: str
    family: str
    context_length: int
    bytes: int
    weights: ModelWeights | None = None
    sampling: dict[str, int | float] | None = None
    engine: dict[str, Any] | None = None


class ModelList(Wire):
    object: Literal["list"] = "list"
    data: list[ModelCard]
