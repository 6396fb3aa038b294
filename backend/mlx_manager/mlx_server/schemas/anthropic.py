"""Anthropic's wire types: what Messages takes and gives.

As in `schemas.openai`, a field that is declared is honoured, listed in `NO_EFFECT`, or refused by
`protocols.messages` when it asks for something; a field that is not is named in a header.

`cache_control` is accepted wherever Anthropic accepts it. Prefixes are reused anyway; where it
stands, the usage says how many tokens were newly kept.

Source: Anthropic's API reference and the types of its Python SDK.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from mlx_manager.mlx_server.limits import MaxTokens
from mlx_manager.mlx_server.schemas import hosted
from mlx_manager.mlx_server.schemas.sampling import SamplingParameters
from mlx_manager.mlx_server.schemas.wire import (
    TEMPLATE_VARIABLES,
    ImageSource,
    Many,
    ModelName,
    NonEmpty,
    StopString,
    Timed,
    Wire,
    choose,
    text_or_list,
)

NO_EFFECT = frozenset(
    {
        *("metadata", "service_tier", "inference_geo", "speed"),
        *("context_management", "diagnostics", "fallbacks"),
    }
)
"""Hints that change nothing about the answer here: accepted, and without effect."""


# ---------------------------------------------------------------------------------------------
# Tools
# ---------------------------------------------------------------------------------------------


class MessagesTool(Wire):
    """A function the model may call, which needs a name and an `input_schema`.

    A tool that the client runs, bash, text_editor, memory or computer with a date, needs neither.
    `eager_input_streaming` has no effect: inputs are always streamed as they are written. A tool
    with `defer_loading` is offered once a `tool_reference` in a tool's result names it, or a
    `tool_addition`; or at once, where the tool that would search for it is left out. Other known
    types are left out; see `schemas.hosted`.
    """

    types_read = ("custom", None)

    type: str | None = None
    name: NonEmpty | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: Any = Field(None, description="No effect")
    eager_input_streaming: bool | None = Field(None, description="No effect")
    input_examples: Any = None
    allowed_callers: Many[str] | None = None
    defer_loading: bool | None = None
    max_characters: int | None = Field(None, description="Of a text editor: most that a view shows")
    display_width_px: int | None = Field(None, description="Of a computer")
    display_height_px: int | None = Field(None, description="Of a computer")
    display_number: int | None = Field(None, description="No effect")
    enable_zoom: bool | None = Field(None, description="Of a computer: offers the action zoom")

    def options(self) -> dict[str, Any]:
        """Return what the definition says of a tool whose schema is Anthropic's."""
        return self.model_dump(
            include={"max_characters", "display_width_px", "display_height_px", "enable_zoom"}
        )

    def is_left_out(self) -> bool:
        """Return True for a tool that a provider runs, or that only such a tool may call."""
        callers = self.allowed_callers
        if callers and "direct" not in callers:
            return True
        return self.type not in (None, "custom") and hosted.is_hosted(self.type)


class ToolName(Wire):
    """A tool of the request, or one that was defined in a message before."""

    type: Literal["tool_reference"]
    name: NonEmpty


class ToolDefinition(Wire):
    type: Literal["tool_definition"]
    definition: MessagesTool


class OtherTool(Wire):
    """A tool of an MCP server that Anthropic would call."""

    types_read = ()

    type: str


# ---------------------------------------------------------------------------------------------
# Blocks
# ---------------------------------------------------------------------------------------------


class TextBlock(Wire):
    type: Literal["text"] = "text"
    text: str
    citations: Any = Field(None, description="No effect: they stand beside the text")
    cache_control: Any = Field(None, description="No effect: prefixes are reused anyway")


class ThinkingBlock(Wire):
    """`signature` is a digest of the thinking when given. Where that is omitted, it is the thinking
    itself, which is read again when taken; any other signature is not looked at."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Wire):
    """Thinking that only another server can read; the conversation goes on without it."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Wire):
    """A call. Who made it, the model or its code (`caller`), has no effect."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]
    caller: Any = None
    cache_control: Any = Field(None, description="No effect")


class ToolReferenceBlock(Wire):
    """Tool of this request that a search for tools has found; it is offered from then on."""

    type: Literal["tool_reference"]
    tool_name: NonEmpty
    cache_control: Any = Field(None, description="No effect")


class ImageBlock(Wire):
    """A picture, for a model that sees."""

    type: Literal["image"]
    source: ImageSource = None
    cache_control: Any = Field(None, description="No effect")


class OtherBlock(Wire):
    """A kind of content that no model here reads."""

    types_read = ()

    type: str


_TEXT = frozenset({"text"})
_SHOWN = frozenset({"text", "image"})
_TOOLS = frozenset({"tool_reference", "tool_definition"})
_SOURCES = frozenset({"text", "content"})
_READ = frozenset({"text", "image", "document", "search_result"})
_RESULT = _READ | {"tool_reference"}
_CHANGES = frozenset({"tool_addition", "tool_removal"})
_ALL = _READ | _CHANGES | {"thinking", "redacted_thinking", "tool_use", "tool_result"}


def _kind(value: object, known: frozenset[str]) -> str:
    match value:
        case {"type": str(kind)} | BaseModel(type=str(kind)) if kind in known:  # type: ignore[misc]
            return f"<{kind}>"
    return "<other>"


def _text_kind(value: object) -> str:
    return _kind(value, _TEXT)


def _shown_kind(value: object) -> str:
    return _kind(value, _SHOWN)


def _tool_kind(value: object) -> str:
    return _kind(value, _TOOLS)


def _source_kind(value: object) -> str:
    return _kind(value, _SOURCES)


def _result_kind(value: object) -> str:
    return _kind(value, _RESULT)


def _any_kind(value: object) -> str:
    return _kind(value, _ALL)


TextOnly = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[OtherBlock, Tag("<other>")],
    Discriminator(_text_kind),
]
TextContent = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Many[TextOnly], Tag("<list>")],
    choose(text_or_list, "a string or a list of text blocks"),
]
Shown = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[OtherBlock, Tag("<other>")],
    Discriminator(_shown_kind),
]
ShownContent = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Many[Shown], Tag("<list>")],
    choose(text_or_list, "a string or a list of text and image blocks"),
]


class TextSource(Wire):
    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str


class ContentSource(Wire):
    type: Literal["content"]
    content: ShownContent


class OtherSource(Wire):
    """Source that is not text: a PDF, a file, or a URL."""

    types_read = ()

    type: str


Source = Annotated[
    Annotated[TextSource, Tag("<text>")]
    | Annotated[ContentSource, Tag("<content>")]
    | Annotated[OtherSource, Tag("<other>")],
    Discriminator(_source_kind),
]


class Citations(Wire):
    enabled: bool | None = None


class DocumentBlock(Wire):
    """A text, which is read with its title and its context before it."""

    type: Literal["document"]
    source: Source
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None
    cache_control: Any = Field(None, description="No effect")


class SearchResultBlock(Wire):
    """A text, which is read with its title and its source before it."""

    type: Literal["search_result"]
    source: str
    title: str
    content: Many[TextOnly]
    citations: Citations | None = None
    cache_control: Any = Field(None, description="No effect")


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[DocumentBlock, Tag("<document>")]
    | Annotated[SearchResultBlock, Tag("<search_result>")]
    | Annotated[ToolReferenceBlock, Tag("<tool_reference>")]
    | Annotated[OtherBlock, Tag("<other>")],
    Discriminator(_result_kind),
]
ResultContent = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Many[ResultBlock], Tag("<list>")],
    choose(text_or_list, "a string or a list of content blocks"),
]


class ToolResultBlock(Wire):
    type: Literal["tool_result"]
    tool_use_id: str
    content: ResultContent | None = None
    is_error: bool | None = None
    cache_control: Any = Field(None, description="No effect")


SomeTool = Annotated[
    Annotated[ToolName, Tag("<tool_reference>")]
    | Annotated[ToolDefinition, Tag("<tool_definition>")]
    | Annotated[OtherTool, Tag("<other>")],
    Discriminator(_tool_kind),
]


class ToolAdditionBlock(Wire):
    """In a message of role system: the tool is offered from here on."""

    type: Literal["tool_addition"]
    tool: SomeTool
    cache_control: Any = Field(None, description="No effect")


class ToolRemovalBlock(Wire):
    """In a message of role system: the tool is not offered any more."""

    type: Literal["tool_removal"]
    tool: SomeTool
    cache_control: Any = Field(None, description="No effect")


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[DocumentBlock, Tag("<document>")]
    | Annotated[SearchResultBlock, Tag("<search_result>")]
    | Annotated[ToolAdditionBlock, Tag("<tool_addition>")]
    | Annotated[ToolRemovalBlock, Tag("<tool_removal>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[OtherBlock, Tag("<other>")],
    Discriminator(_any_kind),
]
Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Many[Block], Tag("<list>")],
    choose(text_or_list, "a string or a list of content blocks"),
]


class MessageOutputConfig(Wire):
    effort: NonEmpty | None = Field(None, description="Of this turn; handed to the chat template")


class InputMessage(Wire):
    """`output_config` and `clear_at` go with role system only.

    A system message may hold settings alone. The text of one with `clear_at` "next_user_message" is
    left out once a user's message follows it.
    """

    role: Literal["user", "assistant", "system"]
    content: Content | None = None
    output_config: MessageOutputConfig | None = None
    clear_at: Literal["next_user_message", "never"] | None = None


# ---------------------------------------------------------------------------------------------
# Requests
# ---------------------------------------------------------------------------------------------


class MessagesToolChoice(Wire):
    """`name` is that of the tool to call, with type "tool" only."""

    type: Literal["auto", "any", "tool", "none"]
    name: NonEmpty | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Wire):
    """`budget_tokens` goes with type "enabled" only. Anthropic's least budget is not ours.

    With `display` "omitted" the answer's thinking is in the signature alone, and comes back to the
    model with it. It is given as it is otherwise, with "summarized" and "updates", too: nothing
    here sums thinking up.
    """

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized", "omitted", "updates"] | None = None


class OutputFormat(Wire):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Wire):
    effort: NonEmpty | None = Field(None, description="Handed to the chat template")
    format: OutputFormat | None = Field(None, description="JSON schema that the answer fits")


class CountTokensRequest(Timed):
    """`POST /v1/messages/count_tokens`, and what a message's prompt is made of."""

    model: ModelName | None = Field(None, description="Model id; the server's default when absent")
    messages: Annotated[Many[InputMessage], Field(min_length=1)]
    system: TextContent | None = Field(None, description="Text, or a list of text blocks")
    tools: Many[MessagesTool] | None = Field(None, description="Functions the model may call")
    tool_choice: MessagesToolChoice | None = Field(None, description="auto, any, tool or none")
    thinking: Thinking | None = Field(
        None, description="enabled with a budget, disabled or adaptive; default: the model's"
    )
    output_config: OutputConfig | None = Field(None, description="Effort and format")
    output_format: OutputFormat | None = Field(
        None, description="Elder name of `output_config.format`"
    )
    cache_control: Any = Field(
        None, description="Prefixes are reused anyway; the usage says what was newly kept"
    )
    speed: Any = Field(None, description="No effect")
    context_management: Any = Field(None, description="No effect: nothing is left out")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description=TEMPLATE_VARIABLES)
    mcp_servers: Many[Any] | None = Field(
        None, description="Left out and named in `x-ignored-tools`: nothing here calls them"
    )

    def ignored_tools(self) -> list[str]:
        tools = [str(tool.type) for tool in self.tools or () if tool.is_left_out()]
        return list(dict.fromkeys([*tools, *(["mcp_servers"] if self.mcp_servers else [])]))


class MessagesRequest(CountTokensRequest, SamplingParameters):
    """`POST /v1/messages`."""

    max_tokens: MaxTokens = Field(description="Most tokens generated, thinking included")
    stream: bool | None = Field(None, description="Send the answer as server-sent events")
    stop_sequences: Annotated[list[StopString], Field(max_length=16)] | None = Field(
        None,
        description="Up to 16 strings of up to 1,024 characters that end the answer, "
        "not part of it",
    )
    metadata: Any = Field(None, description="No effect")
    service_tier: Any = Field(None, description="No effect")
    inference_geo: Any = Field(None, description="No effect")
    diagnostics: Any = Field(None, description="No effect")
    fallbacks: Any = Field(None, description="No effect: there is no other model to ask")
    container: Any = Field(
        None, description="Left out and named in `x-ignored-tools`: nothing here runs code"
    )
    thread: Any = Field(None, description="Conversation that the server keeps")
    compaction: Any = Field(None, description="A summary in place of an answer")

    def ignored_tools(self) -> list[str]:
        container = [] if self.container is None else ["container"]
        return [*super().ignored_tools(), *container]


# ---------------------------------------------------------------------------------------------
# Answers
# ---------------------------------------------------------------------------------------------


class OutputTokensDetails(Wire):
    thinking_tokens: int


class MessageUsage(Wire):
    """The prompt's tokens are the sum of the three input counts, each token in one of them.

    `cache_creation_input_tokens` is what was newly kept for reuse, where the request asked for that
    by `cache_control`; otherwise it is 0, and those tokens count as `input_tokens`.
    """

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails | None = None


StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class MessagesResponse(Wire):
    """A whole answer, and with no content what a stream begins with."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Wire):
    input_tokens: int


class MessagesErrorDetail(Wire):
    type: str
    message: str


class MessagesErrorBody(Wire):
    """The body of every answer that is not 2xx, and of an error inside a stream."""

    type: Literal["error"] = "error"
    error: MessagesErrorDetail
    request_id: str
