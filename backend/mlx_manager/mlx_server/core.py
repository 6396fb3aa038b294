"""The vocabulary of the server: requests, the events of answers, and the models that answer.

Every protocol (chat, completions, Responses, Messages) is translated to one `GenerationRequest`
and from one stream of `Event`s. This module is standard library only and imports nothing of ours,
so that every other module may depend on it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

Kind = Literal["text", "embedding", "reranker"]
"""Purpose of a model: to generate text, to turn texts into vectors, to score pairs of texts."""

Role = Literal["system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length", "tool_calls"]


# ---------------------------------------------------------------------------------------------
# Requests
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an assistant message made. `arguments` is the JSON text the model wrote."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Image:
    """A picture in a message, sound as far as a whole decoding tells.

    data: the file's bytes: PNG, JPEG, WebP or GIF, of which the first frame counts. digest: SHA-256
    of them in hexadecimal; equal pictures have equal digests. width, height: pixels, after EXIF's
    orientation. param: the request's field that holds the picture, for errors to name.
    """

    data: bytes = field(repr=False, compare=False)
    digest: str
    width: int
    height: int
    param: str = field(default="messages", compare=False)


Part = str | Image
Parts = str | tuple[Part, ...]
"""Content of a message: a text, or texts and pictures in their order."""


def joined_parts(parts: Iterable[Part], between: str = "") -> Parts:
    """Return parts as the content of a message: a text, unless there is a picture. Texts that meet
    are joined by `between`."""
    content: list[Part] = []
    for part in parts:
        if isinstance(part, str) and content and isinstance(content[-1], str):
            content[-1] = f"{content[-1]}{between}{part}"
        else:
            content.append(part)
    match content:
        case []:
            return ""
        case [str(text)]:
            return text
    return tuple(part for part in content if part != "")


@dataclass(frozen=True, slots=True)
class Message:
    """A turn of a conversation, or a part of one."""

    role: Role
    content: Parts = ""
    name: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """The texts of the content, joined; pictures are left out."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part for part in self.content if isinstance(part, str))

    @property
    def parts(self) -> tuple[Part, ...]:
        """The texts and pictures of the content, in their order; none if it is empty."""
        if isinstance(self.content, str):
            return (self.content,) if self.content else ()
        return self.content

    @property
    def images(self) -> tuple[Image, ...]:
        """The pictures of the content, in their order."""
        return tuple(part for part in self.parts if isinstance(part, Image))


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is its JSON Schema.

    text_grammar: a grammar in Lark's syntax that constrains the text of its only parameter; None:
    no constraint. param: the request's field that describes the function. schema_field: the name of
    its parameters, or its grammar, in that field.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False
    param: str = field(default="tools", compare=False)
    schema_field: str = field(default="parameters", compare=False)
    text_grammar: str | None = None

    @property
    def schema_param(self) -> str:
        """Field of the request to which errors in the parameters refer."""
        return f"{self.param}.{self.schema_field}"


@dataclass(frozen=True, slots=True)
class NamedTool:
    """`tool_choice` that names one function."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | NamedTool


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt that the model's chat template renders.

    `template_args` are handed to the template as they are (`enable_thinking`, ...). `param`: the
    request's field that the messages are from, for errors to name.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_args: Mapping[str, Any] = field(default_factory=dict)
    param: str = "messages"

    @property
    def offers_tools(self) -> bool:
        """True if the model is told of tools."""
        return bool(self.tools) and self.tool_choice != "none"


@dataclass(frozen=True, slots=True)
class Text:
    """A raw prompt; the tokenizer adds its BOS unless the text already begins with it.

    With a `suffix`, the model writes the text between the two (infilling).
    """

    param: ClassVar[str] = "prompt"

    text: str
    suffix: str = ""


@dataclass(frozen=True, slots=True)
class Tokens:
    """A prompt that is tokenised already; nothing is added to it."""

    param: ClassVar[str] = "prompt"

    ids: tuple[int, ...]


Prompt = Conversation | Text | Tokens


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters by which a token is drawn from the logits.

    Order: penalties and bias on the logits, then temperature, then top_k, top_p, min_p, then the
    draw. `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch those filters off.
    `repetition_penalty` is sign-aware and multiplicative (CTRL, arXiv:1909.05858) over prompt and
    output; `presence_penalty` and `frequency_penalty` are OpenAI's, over the output alone.
    The same `seed` gives the same draws whatever else is in the batch. It gives the same tokens,
    too, unless the batch changes the rounding of logits so far that a draw falls on another token.
    None draws a fresh seed.
    `silent` names the fields that the request left open, for the model's owner and makers to fill.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    silent: frozenset[str] = field(default=frozenset(), compare=False)


SAMPLING_DEFAULTS = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    }
)
"""The fields of `Sampling` that a model's settings may fill."""


@dataclass(frozen=True, slots=True)
class StopRules:
    """Conditions that end a row, besides its token limit.

    `strings` end the text before their first occurrence, wherever token borders fall.
    `ignore_eos` lets the row run past the model's end-of-turn tokens. Until `min_tokens` have been
    generated, tokens that would end the row are forbidden, and `strings` are ordinary text.
    """

    strings: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0


STRING_FORMATS = frozenset(
    {
        *("date-time", "time", "date", "duration", "email", "hostname"),
        *("ipv4", "ipv6", "uuid", "uri"),
    }
)
"""The `format`s of strings in JSON schemas that answers are constrained to."""


@dataclass(frozen=True, slots=True)
class JsonObject:
    """The answer is a JSON object. `param`, here and below, is the field that asked for it."""

    param: str = field(default="response_format", compare=False)


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """The answer is JSON that fits `schema`, itself JSON text.

    If `strict`, a schema with a part that can't be enforced is refused. Otherwise such parts are
    left out, and named in `Started.unheld`.
    """

    schema: str
    strict: bool = False
    param: str = field(default="response_format", compare=False)


@dataclass(frozen=True, slots=True)
class Regex:
    """The whole answer matches `pattern` (Rust's syntax, without look-around)."""

    pattern: str
    param: str = field(default="structured_outputs", compare=False)


@dataclass(frozen=True, slots=True)
class Choice:
    """The answer is one of `options`."""

    options: tuple[str, ...]
    param: str = field(default="structured_outputs", compare=False)


@dataclass(frozen=True, slots=True)
class Grammar:
    """The answer is derived from a grammar in Lark's or llama.cpp's (GBNF) syntax."""

    text: str
    param: str = field(default="structured_outputs", compare=False)


Constraint = JsonObject | JsonSchema | Regex | Choice | Grammar
"""Constraint on the content of an answer; thinking and tool calls are free."""


HOPS = "x-mlx-manager-hops"
"""Header of a request that one server of this program's sends to another: `Caller.hops` there."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The origin of a request.

    key: name of its API key, "" without one. protocol: chat, completions, responses, messages,
    ollama, embeddings, rerank, tokens or warm; "" from a script. request_id: id of the HTTP
    request. hops: number of servers of this program's that have passed the request on.
    """

    key: str = ""
    protocol: str = ""
    request_id: str = ""
    hops: int = 0


NOBODY = Caller()


Speculation = Literal["auto", "off"]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One row of a batch, from a request of any protocol.

    `max_tokens` None means: up to the model's context. `echo` puts the prompt's text before the
    completion. `logprobs` None asks for none; k >= 0 asks for the chosen token's and the k best,
    and with `echo` for the prompt's too. `thinking_budget` is the most tokens of thinking; beyond
    it, the text that ends thinking is written for the model. Lower `priority` goes first.
    `return_ids` asks for token ids in `Started` and `Finished`. `inputs` are the texts of a call
    that generates nothing, in place of the prompt, for observers. `context_length` limits prompt
    and answer together where the owner allows fewer tokens than the model takes. `prediction` is
    a text that the answer is expected to be much like. `speculation` "off": no tokens are tried
    ahead, "auto": as the server's setting says; None is left to the owner. Nothing that is kept of
    a prompt is found by a request with another `cache_salt`.
    """

    model: str
    prompt: Prompt
    sampling: Sampling = field(default_factory=Sampling)
    stop: StopRules = field(default_factory=StopRules)
    max_tokens: int | None = None
    echo: bool = False
    logprobs: int | None = None
    constraint: Constraint | None = None
    thinking_budget: int | None = None
    priority: int = 0
    return_ids: bool = False
    inputs: tuple[str | tuple[int, ...], ...] = ()
    context_length: int | None = None
    prediction: str = ""
    speculation: Speculation | None = None
    cache_salt: str = field(default="", repr=False)
    request_id: str = ""
    caller: Caller = Caller()


@dataclass(frozen=True, slots=True)
class Overlay:
    """Defaults of a model's owner for the fields that a request leaves open.

    system: a text before the request's own system messages. template_args: for the chat template,
    where the request does not set them. thinking_budget: tokens, where the request names none.
    context_length: the most tokens of prompt and answer together, for every request. speculation:
    whether tokens are tried ahead, where the request does not say.
    """

    system: str | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)
    thinking_budget: int | None = None
    context_length: int | None = None
    speculation: Speculation | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """Inputs to be turned into one vector each.

    inputs: texts, or token ids of the model's tokenizer, to which nothing is added. dimensions: the
    length of a vector; None: the model's. truncate: the most tokens that are kept of an input, -1
    for as many as the model takes; None refuses an input that is too long. prompt: the name of the
    model's prompt that is put before texts. Lower `priority` goes first.
    """

    model: str
    inputs: tuple[str | tuple[int, ...], ...]
    dimensions: int | None = None
    truncate: int | None = None
    prompt: str | None = None
    request_id: str = ""
    priority: int = 0
    caller: Caller = Caller()


@dataclass(frozen=True, slots=True)
class RerankRequest:
    """Documents to be scored by how well each answers the query.

    truncate: as in `EmbeddingRequest`, of query and document together. activate: scores are logits
    after the model's activation (a sigmoid, say); False: the logits themselves. instruction: the
    task by which a document is judged; None: the model's own.
    """

    model: str
    query: str
    documents: tuple[str, ...]
    truncate: int | None = None
    activate: bool = True
    request_id: str = ""
    priority: int = 0
    caller: Caller = Caller()
    instruction: str | None = None


# ---------------------------------------------------------------------------------------------
# Answers
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. `cached_tokens` of the prompt were found in the prefix cache, and `kept_tokens`
    are new in it. `accepted_prediction_tokens` of the prediction were tried and are in the answer,
    and `rejected_prediction_tokens` were tried and are not."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    kept_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the best alternatives at its place.

    logprob: natural, before temperature, penalties and masks; None for a prompt's first token.
    piece: its bytes, which need not be whole characters. top: (id, bytes, logprob), best first.
    """

    token_id: int
    piece: bytes
    logprob: float | None
    top: tuple[tuple[int, bytes, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Admitted:
    """The start of a row's prefill. This event is pushed alone.

    A row whose answer takes no processing has no such event.
    """


@dataclass(frozen=True, slots=True)
class Started:
    """The end of a row's prefill; the first token follows. ids: the prompt's tokens, if asked for.

    kept_tokens: tokens of the prompt that are new in the prefix cache.
    unheld: names of the request's demands on the answer's form that are not enforced.
    queued, prefill: seconds before the prefill, and of the prefill.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    ids: tuple[int, ...] = ()
    unheld: tuple[str, ...] = ()
    queued: float = field(default=0.0, compare=False)
    prefill: float = field(default=0.0, compare=False)
    kept_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """A call begins. `index` counts the answer's calls from 0; `id` stays the same."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of the call's JSON arguments; joined in order they are the arguments."""

    index: int
    arguments: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of every stream that did not fail. Failures are raised, never an event.

    stop_sequence: the stop string or token text that matched; None for an end of turn. ids: all
    tokens that were drawn, if asked for.
    """

    reason: FinishReason
    usage: Usage
    stop_sequence: str | None = None
    ids: tuple[int, ...] = ()


Event = Admitted | Started | TextDelta | ReasoningDelta | ToolCallStarted | ToolCallDelta | Finished

Push = Callable[[list[Event], int], None]
"""Function that takes the events of one step of a row, and the number of tokens that have been
drawn for its answer so far. It is called in the event loop and does not wait."""


@dataclass(frozen=True, slots=True)
class RowStatus:
    """Progress of one row of a request. tokens: the number that has been drawn for it."""

    request_id: str
    prompt_tokens: int
    tokens: int


Progress = list[tuple[int, list[Event]]]
"""Results of one step for one caller: new events of its rows, each with the row's index."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Results of an encoder, in the order of its inputs.

    rows: float32 numbers for each input, a vector or a single score. tokens: number of tokens that
    were read in all.
    """

    rows: tuple[array[float], ...]
    tokens: int


# ---------------------------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tokenized:
    """A prompt as tokens, and the most that the model takes. texts: each token's, if asked for."""

    ids: Sequence[int]
    context_length: int
    texts: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """Facts about a model's tokenizer, for clients that make their own prompts.

    The tokens are texts, None where the tokenizer has none; `chat_template` is in Jinja.
    """

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    vocab_size: int
    context_length: int
    chat_template: str | None


class Backend(Protocol):
    """A loaded model that answers requests."""

    async def generate(self, request: GenerationRequest, push: Push) -> None:
        """Answer the request: push the events of each step that has any, `Finished` last.

        Cancelling the call cancels the request in any state: waiting, between prefill chunks, or at
        the next decode step.

        Raises:
            MLXManagerError: any failure of this request, from `errors`.
        """
        ...


class Encoder(Protocol):
    """A loaded model that reads texts and generates none. Cancelling the call cancels the work.

    begun: called in the event loop when the request's turn has come.
    """

    async def embed(self, request: EmbeddingRequest, begun: Callable[[], None]) -> Encoded:
        """Return a vector for each input.

        Raises:
            MLXManagerError: any failure of this request, from `errors`.
        """
        ...

    async def rank(self, request: RerankRequest, begun: Callable[[], None]) -> Encoded:
        """Return a score for each document, in the order of the request.

        Raises:
            MLXManagerError: any failure of this request, from `errors`.
        """
        ...
