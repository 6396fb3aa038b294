"""`/v1/messages`: body → request, events → Anthropic's stream, events → body. Pure."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Any, TypeVar, assert_never

from pydantic_core import from_json, to_json

from mlx_manager.mlx_server import core
from mlx_manager.mlx_server.core import (
    Admitted,
    Conversation,
    Event,
    Finished,
    GenerationRequest,
    JsonSchema,
    Message,
    NamedTool,
    Part,
    Parts,
    Progress,
    ReasoningDelta,
    Started,
    StopRules,
    TextDelta,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolCallStarted,
    ToolChoice,
)
from mlx_manager.mlx_server.errors import (
    ContextLengthExceeded,
    GenerationFailed,
    InvalidParameter,
    MLXManagerError,
    UnsupportedParameter,
)
from mlx_manager.mlx_server.protocols import sse
from mlx_manager.mlx_server.protocols.client_tools import CALLABLE, dated_tool
from mlx_manager.mlx_server.protocols.dialects import MESSAGES, OF_PROMPTS, Refusal, foreign
from mlx_manager.mlx_server.protocols.hosted import check_demand, demanded, told, unknown_tool
from mlx_manager.mlx_server.protocols.images import content_of, parts_of, seen
from mlx_manager.mlx_server.protocols.neighbours import merged
from mlx_manager.mlx_server.protocols.parameters import prediction, refuse_unsupported, sampling
from mlx_manager.mlx_server.protocols.pieces import whole
from mlx_manager.mlx_server.protocols.thinking import closed, opened
from mlx_manager.mlx_server.schemas.anthropic import (
    Block,
    ContentSource,
    CountTokensRequest,
    DocumentBlock,
    ImageBlock,
    InputMessage,
    MessagesRequest,
    MessagesResponse,
    MessagesTool,
    MessageUsage,
    OtherBlock,
    OtherSource,
    OutputTokensDetails,
    RedactedThinkingBlock,
    ResultBlock,
    SearchResultBlock,
    Shown,
    Source,
    StopReason,
    TextBlock,
    TextOnly,
    TextSource,
    ThinkingBlock,
    ToolAdditionBlock,
    ToolDefinition,
    ToolName,
    ToolReferenceBlock,
    ToolRemovalBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from mlx_manager.mlx_server.schemas.hosted import is_block, is_client_run, searches_tools
from mlx_manager.mlx_server.schemas.wire import Wire

T = TypeVar("T")

UNSUPPORTED: dict[str, Refusal] = {
    **foreign(MESSAGES, MessagesRequest),
    "thread": Refusal(instead="Send the whole conversation."),
    "compaction": Refusal(instead="Ask for a summary in a message."),
}
UNSUPPORTED_IN_COUNTING: dict[str, Refusal] = {
    **foreign(MESSAGES, CountTokensRequest, OF_PROMPTS),
}
UNSUPPORTED_OF_TOOLS: dict[str, Refusal] = {
    "input_examples": Refusal(([],), "Put them in the description."),
}
"""Fields that are refused by name. To support one, honour it and delete its line."""

NONCE = re.compile(r"^x-anthropic-billing-header:.*\n?", re.MULTILINE)
"""A line that Claude Code puts before its system text, another one in every request."""


# ---------------------------------------------------------------------------------------------
# Body → request
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MessageHead:
    """Properties of an answer that are known before it begins.

    request_id: named in the answer's errors. omits_thinking: the client keeps the thinking and does
    not show it. counts_kept: the request asked for its prompt to be cached, so the answer counts
    the tokens that are newly cached.
    """

    model: str
    request_id: str
    max_tokens: int
    omits_thinking: bool = False
    counts_kept: bool = False
    id: str = field(default_factory=lambda: f"msg_{secrets.token_hex(12)}")


def head(body: MessagesRequest, model: str, request_id: str) -> MessageHead:
    return MessageHead(
        model=model,
        request_id=request_id,
        max_tokens=body.max_tokens,
        omits_thinking=body.thinking is not None and body.thinking.display == "omitted",
        counts_kept=_asks_to_keep(body),
    )


def _asks_to_keep(body: MessagesRequest) -> bool:
    """Return True if there is a `cache_control` anywhere."""
    blocks: list[Wire] = [body, *(body.tools or ())]
    if isinstance(body.system, list):
        blocks += body.system
    for message in body.messages:
        for _, block in _numbered(message.content):
            blocks.append(block)
            if isinstance(block, ToolResultBlock | SearchResultBlock):
                blocks += block.content if isinstance(block.content, list) else []
    return any(getattr(block, "cache_control", None) is not None for block in blocks)


def request(body: MessagesRequest, head: MessageHead) -> GenerationRequest:
    """
    Raises:
        InvalidParameter: a value that contradicts another.
        UnsupportedParameter: a field or a kind of content that can't be honoured.
    """
    refuse_unsupported(body, UNSUPPORTED)
    prompt, constraint = conversation(body), _constraint(body)
    if constraint is not None and prompt.continue_final_message:
        # As at Anthropic, whose documentation of structured outputs has it.
        raise InvalidParameter(
            f"`{constraint.param}` can't hold an answer whose beginning is in `messages`: with it, "
            "what is answered is no JSON. Let `messages` end with the user's, or leave the format "
            "out.",
            param=constraint.param,
        )
    return GenerationRequest(
        model=head.model,
        prompt=prompt,
        sampling=sampling(body),
        stop=StopRules(strings=tuple(body.stop_sequences or ())),
        max_tokens=body.max_tokens,
        constraint=constraint,
        thinking_budget=body.thinking.budget_tokens if body.thinking else None,
        priority=body.priority or 0,
        prediction=prediction(body),
        speculation=body.speculation,
        cache_salt=body.cache_salt or "",
        request_id=head.id,
    )


def counted(body: CountTokensRequest) -> Conversation:
    """Return the prompt of a request whose tokens are only counted.

    Raises:
        InvalidParameter: as `conversation`.
        UnsupportedParameter: as `conversation`, and a field that would change the prompt elsewhere.
    """
    refuse_unsupported(body, UNSUPPORTED_IN_COUNTING)
    return conversation(body)


def conversation(body: CountTokensRequest) -> Conversation:
    """Return the prompt. The answer continues an assistant's message at its end.

    Raises:
        InvalidParameter: a block where it can't be, or a value that contradicts another.
        UnsupportedParameter: a kind of content, tool or thinking that can't be honoured.
    """
    # Anthropic merges neighbours, too, and many templates need it.
    said = merged(_messages(body.messages), frozenset({"system", "user", "assistant"}))
    messages = [*_system(body), *said]
    if not messages:
        raise InvalidParameter("`messages` says nothing, and nor does `system`.", param="messages")
    if len(messages) > 1 and messages[-1] == Message("assistant"):
        # At Anthropic this one message may be empty: the answer begins with it.
        messages.pop()
    last = messages[-1]
    go_on = last.role == "assistant"
    if go_on and (last.tool_calls or not last.text.strip()):
        raise InvalidParameter(
            "`messages` ends with an answer that can't be gone on from: it must end with text. "
            "Send the results of its tools, or leave it out.",
            param="messages",
        )
    choice, parallel = _tool_choice(body)
    tools = tuple(_offered(body))
    check_demand(choice, tools, body.ignored_tools())
    return Conversation(
        messages=tuple(messages),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        add_generation_prompt=not go_on,
        continue_final_message=go_on,
        template_args=_template_args(body),
    )


def _constraint(body: MessagesRequest) -> JsonSchema | None:
    """
    Raises:
        InvalidParameter: the format is given twice.
    """
    asked, param = body.output_format, "output_format"
    if body.output_config is not None and body.output_config.format is not None:
        if asked is not None:
            raise InvalidParameter(
                "`output_format` and `output_config.format` mean the same; send one of them.",
                param=param,
            )
        asked, param = body.output_config.format, "output_config.format"
    return (
        None if asked is None else JsonSchema(json.dumps(asked.schema_), strict=True, param=param)
    )


def _template_args(body: CountTokensRequest) -> Mapping[str, Any]:
    args: dict[str, Any] = {}
    if (effort := _effort(body)) is not None:
        args["reasoning_effort"] = effort
    own = body.chat_template_kwargs or {}
    thinking = body.thinking
    if thinking is None:
        return args | own
    if (thinking.type == "enabled") != (thinking.budget_tokens is not None):
        raise InvalidParameter(
            "`thinking.budget_tokens` goes with type 'enabled', and only with it.",
            param="thinking.budget_tokens",
        )
    if thinking.type in ("enabled", "disabled"):
        args["enable_thinking"] = thinking.type == "enabled"
    return args | own


def _effort(body: CountTokensRequest) -> str | None:
    """Return the effort that a system message asks for in the turn that is to be answered, or else
    the request's. Results of tools begin no turn."""
    for message in reversed(body.messages):
        if message.output_config is not None and message.output_config.effort is not None:
            return message.output_config.effort
        results = (isinstance(block, ToolResultBlock) for _, block in _numbered(message.content))
        if message.role == "user" and not any(results):
            break
    return None if body.output_config is None else body.output_config.effort


def _tool_choice(body: CountTokensRequest) -> tuple[ToolChoice, bool]:
    """Return which tools may be called, and whether several calls may be made.

    Raises:
        InvalidParameter: a name without a choice of a tool, or the other way round.
        UnsupportedParameter: a call of what only a provider could run is demanded.
    """
    choice = body.tool_choice
    if choice is None:
        return "auto", True
    parallel = not choice.disable_parallel_tool_use
    if (choice.type == "tool") != (choice.name is not None):
        raise InvalidParameter(
            "`tool_choice.name` goes with type 'tool', and only with it.", param="tool_choice.name"
        )
    if choice.name is not None:
        for tool in body.tools or ():
            if tool.name == choice.name and tool.is_left_out():
                raise demanded(tool.type or choice.name, "tool_choice.name")
        return NamedTool(choice.name), parallel
    return ("required" if choice.type == "any" else choice.type), parallel  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class _Change:
    """Change of a tool, offered from here on or no more. `param`: place of its name."""

    name: str
    param: str
    offered: bool = True
    definition: Tool | None = None


def _offered(body: CountTokensRequest) -> Iterator[Tool]:
    """Yield the tools that may be called by the end of `messages`.

    A deferred tool is among them if a message refers to it, or if the request offers a tool that
    would search for it, since searches are left out here.
    """
    given = body.tools or ()
    found = any(searches_tools(tool.type) for tool in given)
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(given) if not tool.is_left_out()]
    offered = {
        tool.name: found or not tool.defer_loading for tool in given if not tool.is_left_out()
    }
    defined: dict[str, Tool] = {}
    for change in _changes(body.messages):
        if change.definition is not None:
            defined[change.name] = change.definition
        elif change.name not in offered:
            raise InvalidParameter(
                f"`{change.param}` {change.name!r} is none of `tools`.", param=change.param
            )
        offered[change.name] = change.offered
    for tool in (*(tool for tool in tools if tool.name not in defined), *defined.values()):
        if offered[tool.name]:
            yield tool


def _changes(messages: Sequence[InputMessage]) -> Iterator[_Change]:
    """Yield the changes to tools that results and system messages make, in their order."""
    for m, message in enumerate(messages):
        for b, block in _numbered(message.content):
            path = f"messages[{m}].content[{b}]"
            match block:
                case ToolResultBlock(content=content):
                    for p, part in _numbered(content):
                        if isinstance(part, ToolReferenceBlock):
                            yield _Change(part.tool_name, f"{path}.content[{p}].tool_name")
                case ToolAdditionBlock(tool=ToolDefinition(definition=definition)):
                    tool = _tool(definition, f"{path}.tool.definition")
                    yield _Change(tool.name, tool.param, definition=tool)
                case ToolAdditionBlock(tool=ToolName(name=name)):
                    yield _Change(name, f"{path}.tool.name")
                case ToolRemovalBlock(tool=ToolName(name=name)):
                    yield _Change(name, f"{path}.tool.name", offered=False)


def _numbered(content: str | list[T] | None) -> Iterator[tuple[int, T]]:
    return enumerate(content if isinstance(content, list) else ())


def _tool(tool: MessagesTool, path: str) -> Tool:
    if tool.type not in (None, "custom") and not is_client_run(tool.type):
        raise unknown_tool(path, tool.type)
    refuse_unsupported(tool, UNSUPPORTED_OF_TOOLS, f"{path}.")
    if tool.name is None:
        raise InvalidParameter(f"`{path}.name` is required.", param=f"{path}.name")
    if is_client_run(tool.type):
        description, parameters = dated_tool(str(tool.type), tool.options())
        strict = tool.strict or False
        return Tool(tool.name, description, parameters, strict, param=path, schema_field="type")
    if tool.input_schema is None:
        raise InvalidParameter(f"`{path}.input_schema` is required.", param=f"{path}.input_schema")
    return Tool(
        tool.name,
        tool.description,
        tool.input_schema,
        tool.strict or False,
        param=path,
        schema_field="input_schema",
    )


# -- Messages ---------------------------------------------------------------------------------


def _system(body: CountTokensRequest) -> Iterator[Message]:
    """Yield the system text without `NONCE`, which would spoil the shared prefix."""
    match body.system:
        case None:
            texts: list[str] = []
        case str(text):
            texts = [text]
        case blocks:
            texts = [_text(block, f"system[{i}]") for i, block in enumerate(blocks)]
    kept = [NONCE.sub("", text) for text in texts]
    if any(kept):
        yield Message("system", "\n".join(text for text in kept if text))


def _messages(messages: Sequence[InputMessage]) -> Iterator[Message]:
    before = ""
    asked_last = max((i for i, each in enumerate(messages) if each.role == "user"), default=-1)
    for index, message in enumerate(messages):
        _check_settings(message, f"messages[{index}]")
        path = f"messages[{index}].content"
        blocks = message.content or ""
        if message.role == "system" and not blocks and before == "user":
            # Claude Code sends these for the settings that they hold.
            continue
        if message.clear_at == "next_user_message" and index < asked_last:
            if not (blocks := _changes_of_tools(blocks)):
                continue
        elif message.content is None:
            continue
        before = message.role
        if isinstance(blocks, str):
            yield Message(message.role, blocks)
        elif message.role == "assistant":
            yield _answer(blocks, path)
        elif message.role == "user":
            yield from _turn(blocks, path)
        else:
            told = [_told(block, f"{path}[{i}]") for i, block in enumerate(blocks)]
            yield Message("system", "\n".join(told))


def _check_settings(message: InputMessage, path: str) -> None:
    """
    Raises:
        InvalidParameter: a message without content, or settings that only a system message has.
    """
    for name in ("output_config", "clear_at"):
        if message.role != "system" and getattr(message, name) is not None:
            raise InvalidParameter(
                f"`{path}.{name}` goes with role 'system', and only with it.",
                param=f"{path}.{name}",
            )
    if message.content is None and message.output_config is None:
        raise InvalidParameter(f"`{path}.content` is required.", param=f"{path}.content")


def _changes_of_tools(content: str | list[Block]) -> list[Block]:
    """Return the blocks of a system message that hold when its text is not shown any more."""
    return [
        block
        for _, block in _numbered(content)
        if isinstance(block, ToolAdditionBlock | ToolRemovalBlock)
    ]


def _answer(blocks: Sequence[Block], path: str) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for index, block in enumerate(blocks):
        match block:
            case TextBlock(text=text):
                texts.append(text)
            case ThinkingBlock(thinking=thinking, signature=signature):
                thoughts.append(thinking or opened(signature) or "")
            case RedactedThinkingBlock():
                pass
            case OtherBlock(type=kind) if is_block(kind):
                texts.append(_hosted(block))
            case ToolUseBlock():
                arguments = json.dumps(block.input, ensure_ascii=False)
                calls.append(ToolCall(block.id, block.name, arguments))
            case _:
                raise _misplaced(block, f"{path}[{index}]", "assistant")
    return Message(
        "assistant",
        "\n".join(texts),
        reasoning="\n".join(filter(None, thoughts)) or None,
        tool_calls=tuple(calls),
    )


def _hosted(block: OtherBlock) -> str:
    """Return what a tool that a provider ran was asked, or gave. Of a summary, return its text."""
    match block.model_extra or {}:
        case {"content": str(summary)} if block.type == "compaction":
            return summary
        case fields:
            return told(block.type, fields)


def _turn(blocks: Sequence[Block], path: str) -> Iterator[Message]:
    """Yield a user's blocks as messages: one for each result, one for what is in between."""
    said: list[Part] = []
    for index, block in enumerate(blocks):
        match block:
            case TextBlock() | ImageBlock() | DocumentBlock() | SearchResultBlock():
                said += _read(block, f"{path}[{index}]")
            case ToolResultBlock():
                if said:
                    yield Message("user", content_of(said))
                    said = []
                content = _result(block, f"{path}[{index}].content")
                yield Message("tool", content, tool_call_id=block.tool_use_id)
            case OtherBlock(type=kind) if is_block(kind):
                said.append(_hosted(block))
            case _:
                raise _misplaced(block, f"{path}[{index}]", "user")
    if said or not blocks:
        yield Message("user", content_of(said))


def _result(block: ToolResultBlock, path: str) -> Parts:
    content: Parts
    match block.content:
        case None:
            content = ""
        case str(content):
            pass
        case parts:
            found = (_found(part, f"{path}[{i}]") for i, part in enumerate(parts))
            content = content_of(chain.from_iterable(found))
    if not block.is_error:
        return content
    # Chat templates know no failed calls, so it is said in words.
    match parts_of(content):
        case (str(text), *rest):
            return content_of((f"Error: {text}", *rest))
        case rest:
            return content_of(("Error: ", *rest))


def _told(block: Block, path: str) -> str:
    match block:
        case ToolAdditionBlock(tool=ToolName(name=name)):
            return CALLABLE.format(name)
        case ToolAdditionBlock(tool=ToolDefinition(definition=definition)):
            return CALLABLE.format(definition.name)
        case ToolRemovalBlock(tool=ToolName(name=name)):
            return f"The tool {name} can't be called any more."
        case ToolAdditionBlock(tool=tool) | ToolRemovalBlock(tool=tool):
            raise UnsupportedParameter(
                f"`{path}.tool` is of type {tool.type!r}, which is not possible there.",
                param=f"{path}.tool.type",
            )
    return _text(block, path)


def _found(part: ResultBlock, path: str) -> Sequence[Part]:
    match part:
        case ToolReferenceBlock(tool_name=name):
            return (CALLABLE.format(name),)
        case OtherBlock():
            return (_text(part, path),)
    return _read(part, path)


def _read(
    block: TextBlock | ImageBlock | DocumentBlock | SearchResultBlock, path: str
) -> Sequence[Part]:
    """Return a block's parts: title, context and source first, if any, then the content."""
    match block:
        case TextBlock(text=text):
            return (text,)
        case ImageBlock(source=source):
            return (seen(source, path, block.type),)
        case DocumentBlock():
            about = {"Title": block.title, "Context": block.context}
            content = _source(block.source, f"{path}.source")
        case SearchResultBlock():
            about = {"Title": block.title, "Source": block.source}
            content = [_text(part, f"{path}.content[{i}]") for i, part in enumerate(block.content)]
    if block.citations is not None and block.citations.enabled:
        raise UnsupportedParameter(
            f"`{path}.citations` can't be enabled: answers have none here. Ask for quotations in "
            "the text.",
            param=f"{path}.citations",
        )
    return [*(f"{name}: {said}" for name, said in about.items() if said), *content]


def _source(source: Source, path: str) -> Sequence[Part]:
    match source:
        case TextSource(data=text):
            return (text,)
        case ContentSource(content=content):
            if isinstance(content, str):
                return (content,)
            return [_shown(part, f"{path}.content[{i}]") for i, part in enumerate(content)]
        case OtherSource(type=kind):
            raise UnsupportedParameter(
                f"`{path}` is of type {kind!r}; only text is possible there.", param=f"{path}.type"
            )


def _shown(block: Shown, path: str) -> Part:
    if isinstance(block, ImageBlock):
        return seen(block.source, path, block.type)
    return _text(block, path)


def _text(block: Block | TextOnly, path: str) -> str:
    if isinstance(block, TextBlock):
        return block.text
    raise UnsupportedParameter(
        f"`{path}` is of type {block.type!r}; only text is possible there.", param=f"{path}.type"
    )


def _misplaced(block: Block, path: str, role: str) -> MLXManagerError:
    if isinstance(block, OtherBlock):
        return UnsupportedParameter(
            f"`{path}` is of type {block.type!r}, which this server can't read.",
            param=f"{path}.type",
        )
    return InvalidParameter(
        f"`{path}` is of type {block.type!r}, which is no part of a message of role {role}.",
        param=f"{path}.type",
    )


# ---------------------------------------------------------------------------------------------
# What a stream and a body have in common
# ---------------------------------------------------------------------------------------------


def _thinking(head: MessageHead, thinking: str) -> ThinkingBlock:
    """Return a block of thinking with a signature, which clients hand back unread.

    In place of Anthropic's proof of origin the signature is a digest of the thinking; where the
    thinking is omitted, the signature carries the thinking.
    """
    if head.omits_thinking:
        return ThinkingBlock(type="thinking", thinking="", signature=closed(thinking))
    signature = base64.b64encode(hashlib.sha256(thinking.encode()).digest()).decode()
    return ThinkingBlock(type="thinking", thinking=thinking, signature=signature)


def _start(head: MessageHead, started: Started) -> MessagesResponse:
    return MessagesResponse(
        id=head.id,
        type="message",
        role="assistant",
        model=head.model,
        content=[],
        stop_reason=None,
        stop_sequence=None,
        usage=MessageUsage(
            **_read_tokens(head, started.prompt_tokens, started.cached_tokens, started.kept_tokens),
            output_tokens=0,
        ),
    )


def _read_tokens(head: MessageHead, prompt: int, cached: int, kept: int) -> dict[str, int]:
    """Return Anthropic's three input counts; each token of the prompt is in one of them."""
    new = kept if head.counts_kept else 0
    return {
        "input_tokens": prompt - cached - new,
        "cache_creation_input_tokens": new,
        "cache_read_input_tokens": cached,
    }


def _usage(head: MessageHead, usage: core.Usage) -> MessageUsage:
    return MessageUsage(
        **_read_tokens(head, usage.prompt_tokens, usage.cached_tokens, usage.kept_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(thinking_tokens=usage.reasoning_tokens),
    )


def _stop_reason(head: MessageHead, end: Finished) -> StopReason:
    match end.reason:
        case "tool_calls":
            return "tool_use"
        case "length":
            cut = end.usage.completion_tokens >= head.max_tokens
            return "max_tokens" if cut else "model_context_window_exceeded"
        case "stop":
            return "end_turn" if end.stop_sequence is None else "stop_sequence"
    assert_never(end.reason)


# ---------------------------------------------------------------------------------------------
# Events → stream
# ---------------------------------------------------------------------------------------------


class MessageStream:
    """Writer of an answer's events in Anthropic's form: blocks open, grow and close in turn."""

    media_type = sse.MEDIA_TYPE
    keep_alive = sse.named("ping", {"type": "ping"}).encode()

    def __init__(self, head: MessageHead) -> None:
        self.head = head
        self._index = -1
        self._block = ""
        self._thinking: list[str] = []
        self._text_open = ""

    def write(self, progress: Progress) -> bytes:
        """Return the events of one step, ready for the wire."""
        out = ""
        for _, events in progress:
            for event in events:
                # The one path that nearly every token takes.
                if type(event) is TextDelta and self._block == "text":
                    out += self._text_open + sse.quote(event.text) + "}}\n\n"
                else:
                    out += self._event(event)
        return out.encode("ascii")

    def end(self) -> bytes:
        return _event("message_stop").encode("ascii")

    def fail(self, error: MLXManagerError) -> bytes:
        body = error_body(error, self.head.request_id)
        return sse.named("error", body).encode("ascii")

    def _event(self, event: Event) -> str:  # noqa: PLR0911 one for each kind
        match event:
            case Admitted():
                return ""
            case Started():
                message = _start(self.head, event).model_dump(exclude_unset=True)
                return _event("message_start", message=message)
            case TextDelta(text):
                delta = {"type": "text_delta", "text": text}
                return self._enter({"type": "text", "text": ""}) + self._delta(delta)
            case ReasoningDelta(text):
                block = {"type": "thinking", "thinking": "", "signature": ""}
                begun = self._enter(block)
                self._thinking.append(text)
                if self.head.omits_thinking:
                    return begun
                return begun + self._delta({"type": "thinking_delta", "thinking": text})
            case ToolCallStarted(_, call_id, name):
                return self._enter({"type": "tool_use", "id": call_id, "name": name, "input": {}})
            case ToolCallDelta(_, arguments):
                return self._delta({"type": "input_json_delta", "partial_json": arguments})
            case Finished():
                ending = {
                    "stop_reason": _stop_reason(self.head, event),
                    "stop_sequence": event.stop_sequence,
                }
                usage = _usage(self.head, event.usage).model_dump()
                return self._leave() + _event("message_delta", delta=ending, usage=usage)

    def _enter(self, block: dict[str, Any]) -> str:
        """Open a block unless one of its kind is open that goes on; each call has its own."""
        if self._block == block["type"] != "tool_use":
            return ""
        closed = self._leave()
        self._index += 1
        self._block = block["type"]
        self._text_open = (
            'event: content_block_delta\ndata: {"type":"content_block_delta",'
            f'"index":{self._index},"delta":{{"type":"text_delta","text":'
        )
        return closed + _event("content_block_start", index=self._index, content_block=block)

    def _leave(self) -> str:
        if not self._block:
            return ""
        signed = ""
        if self._block == "thinking":
            signature = _thinking(self.head, "".join(self._thinking)).signature
            signed = self._delta({"type": "signature_delta", "signature": signature})
            self._thinking.clear()
        self._block = ""
        return signed + _event("content_block_stop", index=self._index)

    def _delta(self, delta: dict[str, Any]) -> str:
        return _event("content_block_delta", index=self._index, delta=delta)


def _event(kind: str, **fields: Any) -> str:
    return sse.named(kind, {"type": kind, **fields})


# ---------------------------------------------------------------------------------------------
# Events → body
# ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Open:
    """Block that is being collected. `call`: start of the call, for a tool's block only."""

    kind: str
    call: ToolCallStarted | None = None
    pieces: list[str] = field(default_factory=list)

    def block(self, head: MessageHead, *, cut: bool) -> TextBlock | ThinkingBlock | ToolUseBlock:
        """Return the finished block.

        cut: whether the token limit came within the block.

        Raises:
            GenerationFailed: a call's arguments are no JSON object.
        """
        text = "".join(self.pieces)
        if self.call is not None:
            given = _input(self.call.name, text, cut=cut)
            return ToolUseBlock(type="tool_use", id=self.call.id, name=self.call.name, input=given)
        if self.kind == "thinking":
            return _thinking(head, text)
        return TextBlock(type="text", text=text)


def _input(name: str, arguments: str, *, cut: bool) -> dict[str, Any]:
    """Return a call's arguments as far as they were written: an answer may be cut off within them.

    Arguments that were cut where they can't be parsed are empty.

    Raises:
        GenerationFailed: complete arguments are no JSON object.
    """
    try:
        given = from_json(arguments, allow_partial=True) if arguments else {}
    except ValueError:
        given = _read_by_python(arguments)
    if isinstance(given, dict):
        return given
    if cut:
        return {}
    raise GenerationFailed(
        f"The model called {name} with what is no JSON object, or one nested too deep: "
        f"{arguments[:200]}"
    )


def _read_by_python(arguments: str) -> Any:
    """Return the value of JSON that pydantic can't parse; None if Python can't parse it either.

    Such JSON has more than 200 levels, as many as pydantic can still write, or escapes half of a
    character, which becomes U+FFFD.
    """
    try:
        text = json.dumps(json.loads(arguments), ensure_ascii=False)
        given = json.loads(text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"))
        # As deep as in the body: a message's content has blocks.
        to_json([[[given]]])
    except (ValueError, RecursionError):
        return None
    return given


class MessageAnswer:
    """Collector of an answer's events into the body of a response."""

    def __init__(self, head: MessageHead) -> None:
        self.head = head
        self._blocks: list[_Open] = []
        self._content: list[TextBlock | ThinkingBlock | ToolUseBlock] = []
        self._started: Started | None = None
        self._finished: Finished | None = None

    def add(self, progress: Progress) -> None:
        """
        Raises:
            GenerationFailed: a call's arguments are no JSON object.
        """
        for _, events in progress:
            for event in events:
                self._add(event)

    def _add(self, event: Event) -> None:
        match event:
            case Started():
                self._started = event
            case TextDelta(text):
                self._grow("text", text)
            case ReasoningDelta(text):
                self._grow("thinking", text)
            case ToolCallStarted():
                self._blocks.append(_Open("tool_use", event))
            case ToolCallDelta(_, arguments):
                self._blocks[-1].pieces.append(arguments)
            case Finished():
                last = len(self._blocks) - 1 if event.reason == "length" else None
                blocks = enumerate(self._blocks)
                self._content = [block.block(self.head, cut=i == last) for i, block in blocks]
                self._finished = event

    def _grow(self, kind: str, text: str) -> None:
        if not self._blocks or self._blocks[-1].kind != kind:
            self._blocks.append(_Open(kind))
        self._blocks[-1].pieces.append(text)

    def body(self) -> Iterator[str]:
        """A `MessagesResponse`, once the answer has finished."""
        assert self._started is not None
        assert self._finished is not None
        message = _start(self.head, self._started)
        message.content = self._content
        message.stop_reason = _stop_reason(self.head, self._finished)
        message.stop_sequence = self._finished.stop_sequence
        message.usage = _usage(self.head, self._finished.usage)
        return iter((whole(message),))


# ---------------------------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------------------------

ERROR_TYPES: Mapping[int, str] = MappingProxyType(
    {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        405: "invalid_request_error",
        408: "timeout_error",
        413: "invalid_request_error",
        422: "invalid_request_error",
        429: "rate_limit_error",
        431: "invalid_request_error",
        503: "overloaded_error",
        504: "timeout_error",
    }
)
"""Anthropic's name of what a status means; whatever else is wrong is an `api_error`."""


def error_body(error: MLXManagerError, request_id: str) -> dict[str, Any]:
    """Return a failure in the shape that Anthropic's clients know.

    Agents recognise a prompt that is too long by the words of Anthropic's message, and shorten it
    by the difference of its numbers.
    """
    message = error.message
    match error:
        case ContextLengthExceeded(tokens=int(tokens), context=int(context)):
            message = f"prompt is too long: {tokens} tokens > {context} maximum"
        case ContextLengthExceeded():
            message = f"prompt is too long: {message}"
    return error_shape(error.status, message, request_id)


def error_shape(status: int, message: str, request_id: str) -> dict[str, Any]:
    detail = {"type": ERROR_TYPES.get(status, "api_error"), "message": message}
    return {"type": "error", "error": detail, "request_id": request_id}
