"""OpenAI's wire types of the Responses API.

As in `schemas.openai`, a field that is declared is honoured, listed in `NO_EFFECT`, or refused by
`protocols.responses` when it asks for something; a field that is not is named in a header.

Source: OpenAI's API description and the types of its Python SDK.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, TypeAdapter, model_validator

from mlx_manager.mlx_server.limits import MaxTokens
from mlx_manager.mlx_server.schemas import hosted
from mlx_manager.mlx_server.schemas.sampling import CACHE_SALT, CacheSalt, SamplingParameters
from mlx_manager.mlx_server.schemas.wire import (
    TEMPLATE_VARIABLES,
    ImageUrl,
    Many,
    ModelName,
    NonEmpty,
    Timed,
    Wire,
    choose,
    shape,
    text_or_list,
)

NO_EFFECT = frozenset(
    {
        "user",
        "safety_identifier",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "max_tool_calls",
        "stream_options",
        "verbosity",
        "client_metadata",
    }
)
"""Hints that change nothing about the answer here: accepted, and without effect."""

NO_EFFECT_IN_COMPACTING = frozenset(
    {
        *("service_tier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
        *("client_metadata", "image", "text", "parallel_tool_calls"),
    }
)
"""Likewise, of what a conversation is summed up for."""

Status = Literal["in_progress", "completed", "incomplete", "failed"]


# ---------------------------------------------------------------------------------------------
# Items
# ---------------------------------------------------------------------------------------------


class TextPart(Wire):
    """Text that was said by whomever. What stands beside it has no effect."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Any = None
    logprobs: Any = None


class RefusalPart(Wire):
    type: Literal["refusal"]
    refusal: str


class EncryptedPart(Wire):
    """Text for another agent, which Codex says that it is encrypted: nothing here encrypts."""

    type: Literal["encrypted_content"]
    encrypted_content: str


class ImagePart(Wire):
    """A picture, for a model that sees."""

    type: Literal["input_image"]
    image_url: ImageUrl = None
    file_id: str | None = Field(None, description="Refused: no files are kept here")
    detail: str | None = Field(None, description="No effect")


class OtherPart(Wire):
    """A kind of content that no model here reads."""

    types_read = ()

    type: str


_PARTS = {
    "input_text": "<text>",
    "output_text": "<text>",
    "text": "<text>",
    "refusal": "<refusal>",
    "encrypted_content": "<encrypted>",
    "input_image": "<image>",
}


def _part_kind(value: object) -> str:
    match value:
        case {"type": str(kind)}:
            return _PARTS.get(kind, "<other>")
        case BaseModel():
            return _PARTS.get(value.type, "<other>")  # type: ignore[attr-defined]
    return "<other>"


Part = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[RefusalPart, Tag("<refusal>")]
    | Annotated[EncryptedPart, Tag("<encrypted>")]
    | Annotated[ImagePart, Tag("<image>")]
    | Annotated[OtherPart, Tag("<other>")],
    Discriminator(_part_kind),
]
Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Many[Part], Tag("<list>")],
    choose(text_or_list, "a string or a list of content parts"),
]


class MessageItem(Wire):
    """An item that names no type is one. `phase` has no effect."""

    type: Literal["message"] | None = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: str | None = None
    status: str | None = None
    phase: Any = None


class FunctionCallItem(Wire):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str
    id: str | None = None
    status: str | None = None


class FunctionCallOutputItem(Wire):
    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: str | None = None
    status: str | None = None


class ReasoningPart(Wire):
    type: Literal["summary_text", "reasoning_text"]
    text: str


class ReasoningItem(Wire):
    """`encrypted_content` is the thinking in a form that this server can read again."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Many[ReasoningPart] | None = None
    content: Many[ReasoningPart] | None = None
    encrypted_content: str | None = None
    status: str | None = None


class ItemReference(Wire):
    """An item of a response that was kept, the request's or the answer's, by its id.

    Of an item without a type, the id alone tells that it is one.
    """

    type: Literal["item_reference"] | None = "item_reference"
    id: str


class CustomCallItem(Wire):
    """A call of a `custom` tool, which takes a text."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str
    id: str | None = None
    status: str | None = None
    caller: Any = None


class LocalShellCallItem(Wire):
    type: Literal["local_shell_call"]
    call_id: str
    action: dict[str, Any]
    id: str | None = None
    status: str | None = None


class ShellCallItem(Wire):
    type: Literal["shell_call"]
    call_id: str
    action: dict[str, Any]
    environment: Any = None
    id: str | None = None
    status: str | None = None
    caller: Any = None
    created_by: Any = None


class ApplyPatchCallItem(Wire):
    type: Literal["apply_patch_call"]
    call_id: str
    operation: dict[str, Any]
    id: str | None = None
    status: str | None = None
    caller: Any = None
    created_by: Any = None


class ToolOutputItem(Wire):
    """Output of a client's own tool. OpenAI's local_shell_call_output has the call's id as `id`."""

    type: Literal["custom_tool_call_output", "local_shell_call_output", "apply_patch_call_output"]
    call_id: str | None = None
    output: Content | None = None
    id: str | None = None
    status: str | None = None
    caller: Any = None
    created_by: Any = None

    @model_validator(mode="after")
    def _answers(self) -> ToolOutputItem:
        if self.call_id is None and self.id is None:
            raise ValueError("`call_id` is required")
        return self


class ShellOutput(Wire):
    """Output of one command of a `shell` tool."""

    stdout: str = ""
    stderr: str = ""
    outcome: dict[str, Any] | None = None
    created_by: Any = None


class ShellOutputItem(Wire):
    type: Literal["shell_call_output"]
    call_id: str
    output: Many[ShellOutput]
    max_output_length: int | None = None
    id: str | None = None
    status: str | None = None
    caller: Any = None
    created_by: Any = None


class CompactionItem(Wire):
    """A conversation up to here, summed up, in a form that this server can read again."""

    type: Literal["compaction", "compaction_summary", "context_compaction"]
    encrypted_content: str
    id: str | None = None
    created_by: Any = None


class CompactionTrigger(Wire):
    """Asks for a summary of the conversation in place of an answer. The last item, if any."""

    type: Literal["compaction_trigger"]
    id: str | None = None


class ToolFormat(Wire):
    """Format of the text of a `custom` tool; `definition` and `syntax` go with type grammar."""

    type: Literal["text", "grammar"]
    definition: NonEmpty | None = None
    syntax: Literal["lark", "regex"] | None = None


class ResponsesTool(Wire):
    """A function the model may call, or a namespace with its `tools`, which are functions.

    The client also runs `custom` tools, which take a text, `local_shell`, `shell` and
    `apply_patch`. Other known types are left out; see `schemas.hosted`. A tool with `defer_loading`
    is offered at once: nothing here loads it later. `output_schema` has no effect.
    """

    types_read = ("function", "namespace", "custom", "local_shell", "shell", "apply_patch")

    type: str
    format: ToolFormat | None = None
    environment: Any = Field(None, description='Of `shell`: {"type": "local"}')
    allowed_callers: Many[str] | None = None
    tools: Many[ResponsesTool] | None = None
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    output_schema: Any = None

    def is_left_out(self) -> bool:
        """Return True for a tool that a provider runs, or that only such a tool may call."""
        if self.allowed_callers and "direct" not in self.allowed_callers:
            return True
        if self.type == "shell":
            match self.environment:
                case None | {"type": "local"}:
                    return False
            return True
        return self.type not in self.types_read and hosted.is_tool(self.type)


class TextFormat(Wire):
    """`schema` and `strict` go with type json_schema; its `name` and `description` do nothing."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class AgentMessageItem(Wire):
    """Message between two of a client's agents. Codex's own; the API describes none."""

    type: Literal["agent_message"]
    author: str
    recipient: str
    content: Content
    id: str | None = None


class AdditionalToolsItem(Wire):
    """Tools that may be called from here on; each takes the place of an earlier one of its name."""

    type: Literal["additional_tools"]
    role: Literal["developer"] = "developer"
    tools: Many[ResponsesTool]
    id: str | None = None


class UpdatedReasoning(Wire):
    effort: NonEmpty | None = Field(None, description="Handed to the chat template")


class UpdatedText(Wire):
    format: TextFormat


class ConfigurationUpdateItem(Wire):
    """Settings of all answers from here on, until another item changes them; they go before those
    of the request."""

    type: Literal["configuration_update"]
    reasoning: UpdatedReasoning | None = None
    text: UpdatedText | None = None
    id: str | None = None


class OtherItem(Wire):
    """Record of a hosted tool, which is read as text, or another item that nobody here can read."""

    types_read = ()

    type: str


_DECLARED = (
    *("message", "function_call", "function_call_output", "reasoning", "custom_tool_call"),
    *("local_shell_call", "shell_call", "apply_patch_call", "shell_call_output", "compaction"),
    *("agent_message", "additional_tools", "configuration_update"),
)
_OUTPUTS = ("custom_tool_call_output", "local_shell_call_output", "apply_patch_call_output")
_ITEMS = {
    **{name: name for name in _DECLARED},
    **dict.fromkeys(_OUTPUTS, "tool_output"),
    **dict.fromkeys(("compaction_summary", "context_compaction"), "compaction"),
}
_INPUT_ITEMS = _ITEMS | {name: name for name in ("item_reference", "compaction_trigger")}
"""Types of items, and the tags of those that are declared here."""


def _item_kind(value: object, kinds: Mapping[str, str] = _ITEMS) -> str:
    match value:
        case {"type": str(kind)}:
            return f"<{kinds.get(kind, 'other')}>"
        case BaseModel():
            kind = value.type  # type: ignore[attr-defined]
            return f"<{kinds.get(kind or 'message', 'other')}>"
    return "<message>"


def _input_kind(value: object) -> str:
    match value:
        case ItemReference():
            return "<item_reference>"
        case {"type": str()} | {"role": _} | {"content": _}:
            return _item_kind(value, _INPUT_ITEMS)
        case {"id": _}:
            return "<item_reference>"
    return _item_kind(value, _INPUT_ITEMS)


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionCallOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[CustomCallItem, Tag("<custom_tool_call>")]
    | Annotated[LocalShellCallItem, Tag("<local_shell_call>")]
    | Annotated[ShellCallItem, Tag("<shell_call>")]
    | Annotated[ShellOutputItem, Tag("<shell_call_output>")]
    | Annotated[ApplyPatchCallItem, Tag("<apply_patch_call>")]
    | Annotated[ToolOutputItem, Tag("<tool_output>")]
    | Annotated[CompactionItem, Tag("<compaction>")]
    | Annotated[AgentMessageItem, Tag("<agent_message>")]
    | Annotated[AdditionalToolsItem, Tag("<additional_tools>")]
    | Annotated[ConfigurationUpdateItem, Tag("<configuration_update>")]
    | Annotated[OtherItem, Tag("<other>")],
    Discriminator(_item_kind),
]
Items: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
"""Parser of the items that the store keeps."""
InputItem = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionCallOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[CustomCallItem, Tag("<custom_tool_call>")]
    | Annotated[LocalShellCallItem, Tag("<local_shell_call>")]
    | Annotated[ShellCallItem, Tag("<shell_call>")]
    | Annotated[ShellOutputItem, Tag("<shell_call_output>")]
    | Annotated[ApplyPatchCallItem, Tag("<apply_patch_call>")]
    | Annotated[ToolOutputItem, Tag("<tool_output>")]
    | Annotated[CompactionItem, Tag("<compaction>")]
    | Annotated[AgentMessageItem, Tag("<agent_message>")]
    | Annotated[AdditionalToolsItem, Tag("<additional_tools>")]
    | Annotated[ConfigurationUpdateItem, Tag("<configuration_update>")]
    | Annotated[CompactionTrigger, Tag("<compaction_trigger>")]
    | Annotated[ItemReference, Tag("<item_reference>")]
    | Annotated[OtherItem, Tag("<other>")],
    Discriminator(_input_kind),
]


# ---------------------------------------------------------------------------------------------
# Requests
# ---------------------------------------------------------------------------------------------


class ToolReference(Wire):
    """`tool_choice` that names a tool, or several of them with type allowed_tools."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Many[dict[str, Any]] | None = None


ToolChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("<text>")]
    | Annotated[ToolReference, Tag("<object>")],
    choose(shape, "'auto', 'none', 'required' or an object that names functions"),
]


class ResponsesReasoning(Wire):
    """`summary` has no effect: thinking is told in full, and not summed up."""

    effort: NonEmpty | None = Field(None, description="Handed to the chat template")
    summary: str | None = None
    generate_summary: str | None = None


class TextOptions(Wire):
    format: TextFormat | None = Field(None, description="What the answer's text must be")
    verbosity: Any = Field(None, description="No effect")


Input = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Many[InputItem], Tag("<list>")],
    choose(text_or_list, "a string or a list of items"),
]


class InputTokensRequest(Timed):
    """`POST /v1/responses/input_tokens`, and what a response's prompt is made of."""

    model: ModelName | None = Field(None, description="Model id; the server's default when absent")
    input: Input | None = Field(None, description="Text, or a list of items")
    instructions: str | None = Field(None, description="System text, for this answer only")
    previous_response_id: str | None = Field(None, description="What the conversation goes on from")
    tools: Many[ResponsesTool] | None = Field(None, description="Functions the model may call")
    tool_choice: ToolChoice | None = Field(
        None, description="auto, none, required, a tool by name or type, or allowed_tools"
    )
    parallel_tool_calls: bool | None = Field(None, description="Several calls in one answer")
    reasoning: ResponsesReasoning | None = Field(None, description="Effort")
    text: TextOptions | None = Field(None, description="Format of the answer")
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto leaves the oldest turns out of a conversation that is too long"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description=TEMPLATE_VARIABLES)
    conversation: Any = Field(None, description="Conversation kept by the server")

    def ignored_tools(self) -> list[str]:
        given = self.input if isinstance(self.input, list) else []
        added = (item.tools for item in given if isinstance(item, AdditionalToolsItem))
        tools = (*(self.tools or ()), *chain.from_iterable(added))
        return list(dict.fromkeys(tool.type for tool in tools if tool.is_left_out()))


class ContextManagement(Wire):
    """compact_threshold: tokens of the prompt from which on; by default three quarters of the
    context."""

    type: Literal["compaction"]
    compact_threshold: int | None = Field(None, ge=1)


class CompactRequest(InputTokensRequest):
    """`POST /v1/responses/compact`."""

    service_tier: Any = Field(None, description="No effect")
    prompt_cache_key: str | None = Field(None, description="No effect: prefixes are shared anyway")
    prompt_cache_retention: Any = Field(None, description="No effect")
    prompt_cache_options: Any = Field(None, description="No effect")
    client_metadata: Any = Field(None, description="No effect")
    image: Any = Field(None, description="No effect: there are no images")
    priority: int | None = Field(None, description="Lower goes first")
    cache_salt: CacheSalt | None = Field(None, description=CACHE_SALT)


class ResponsesRequest(InputTokensRequest, SamplingParameters):
    """`POST /v1/responses`."""

    input: Input = Field(description="Text, or a list of items")
    store: bool | None = Field(None, description="Keep the answer to go on from; default true")
    stream: bool | None = Field(None, description="Send the answer as server-sent events")
    max_output_tokens: MaxTokens | None = Field(
        None, description="Most tokens generated, reasoning included; default: the context"
    )
    include: Many[str] | None = Field(
        None,
        description="message.output_text.logprobs, reasoning.encrypted_content; what hosted tools "
        "find is never there",
    )
    metadata: dict[str, str] | None = Field(None, description="Kept with the answer")

    user: str | None = Field(None, description="No effect")
    safety_identifier: str | None = Field(None, description="No effect")
    service_tier: Any = Field(None, description="No effect")
    prompt_cache_key: str | None = Field(None, description="No effect: prefixes are shared anyway")
    prompt_cache_retention: Any = Field(None, description="No effect")
    prompt_cache_options: Any = Field(None, description="No effect")
    max_tool_calls: int | None = Field(None, description="No effect: only hosted tools count")
    stream_options: Any = Field(None, description="No effect: events are never padded")
    verbosity: Any = Field(None, description="No effect")

    background: bool | None = Field(None, description="Answer later")
    context_management: Many[ContextManagement] | None = Field(
        None, description="Sum up a conversation that has become long, before it is answered"
    )
    generate: bool | None = Field(
        None, description="false: process the prompt for what comes next, and generate nothing"
    )
    client_metadata: Any = Field(None, description="No effect")
    stream_id: Any = Field(None, description="Several conversations in one WebSocket")
    moderation: Any = Field(None, description="Moderate input and output")
    prompt: Any = Field(None, description="Template kept by the server")
    top_logprobs: int | None = Field(None, ge=0, le=20, description="Alternatives per token")


# ---------------------------------------------------------------------------------------------
# Answers
# ---------------------------------------------------------------------------------------------


class ResponsesResponse(Wire):
    """A response at any time of its life. `output` holds items as above."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    model: str
    output: list[dict[str, Any]]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    usage: dict[str, Any] | None


class CompactedResponse(Wire):
    """The user's newest messages, and an item that stands for all else."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[dict[str, Any]]
    usage: dict[str, Any]


class InputTokens(Wire):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class DeletedResponse(Wire):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ItemList(Wire):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
