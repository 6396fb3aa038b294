"""`/v1/responses`: body → request, events → OpenAI's stream of items, events → body. Pure."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from types import MappingProxyType
from typing import Any, Literal

from pydantic_core import to_jsonable_python

from mlx_manager.mlx_server import core
from mlx_manager.mlx_server.core import (
    Admitted,
    Constraint,
    Conversation,
    Event,
    Finished,
    GenerationRequest,
    Image,
    JsonObject,
    JsonSchema,
    Message,
    NamedTool,
    Part,
    Parts,
    Progress,
    ReasoningDelta,
    Sampling,
    Started,
    TextDelta,
    TokenLogprob,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolCallStarted,
    ToolChoice,
)
from mlx_manager.mlx_server.defaults import asked_sampling, fill_sampling
from mlx_manager.mlx_server.errors import (
    ContextLengthExceeded,
    InvalidParameter,
    InvalidRequest,
    ItemNotFound,
    MLXManagerError,
    Overloaded,
    ResponseNotFound,
    UnsupportedParameter,
)
from mlx_manager.mlx_server.images.decode import data_url_of
from mlx_manager.mlx_server.protocols import compaction, sse
from mlx_manager.mlx_server.protocols.client_tools import (
    CALLABLE,
    DESCRIPTIONS,
    PARAMETERS,
    CallKind,
    InputReader,
    call_arguments,
    call_fields,
    custom_arguments,
    custom_parameters,
    shell_output,
)
from mlx_manager.mlx_server.protocols.dialects import OF_PROMPTS, RESPONSES, Refusal, foreign
from mlx_manager.mlx_server.protocols.hosted import (
    check_demand,
    demanded,
    permitted,
    told,
    unknown_tool,
)
from mlx_manager.mlx_server.protocols.images import content_of, parts_of, seen
from mlx_manager.mlx_server.protocols.logprobs import PIECE, entries
from mlx_manager.mlx_server.protocols.neighbours import merged
from mlx_manager.mlx_server.protocols.parameters import prediction, refuse_unsupported, sampling
from mlx_manager.mlx_server.protocols.pieces import filled, joined, sliced, whole
from mlx_manager.mlx_server.protocols.thinking import closed, opened
from mlx_manager.mlx_server.schemas.hosted import is_item, is_tool
from mlx_manager.mlx_server.schemas.responses import (
    AdditionalToolsItem,
    AgentMessageItem,
    ApplyPatchCallItem,
    CompactedResponse,
    CompactionItem,
    CompactionTrigger,
    CompactRequest,
    ConfigurationUpdateItem,
    Content,
    CustomCallItem,
    EncryptedPart,
    FunctionCallItem,
    FunctionCallOutputItem,
    ImagePart,
    InputItem,
    InputTokensRequest,
    Item,
    ItemReference,
    Items,
    LocalShellCallItem,
    MessageItem,
    OtherItem,
    ReasoningItem,
    RefusalPart,
    ResponsesReasoning,
    ResponsesRequest,
    ResponsesResponse,
    ResponsesTool,
    ShellCallItem,
    ShellOutputItem,
    Status,
    TextOptions,
    TextPart,
    ToolFormat,
    ToolOutputItem,
    ToolReference,
)
from mlx_manager.mlx_server.schemas.responses import Part as ContentPart

JsonItem = dict[str, Any]

UNSUPPORTED: dict[str, Refusal] = {
    **foreign(RESPONSES, ResponsesRequest),
    "background": Refusal((False,)),
    "conversation": Refusal(instead="Use `previous_response_id`."),
    "moderation": Refusal(),
    "prompt": Refusal(instead="Use `instructions` and `input`."),
    "stream_id": Refusal(instead="Open a connection for each conversation."),
}
UNSUPPORTED_IN_COUNTING: dict[str, Refusal] = {
    **foreign(RESPONSES, InputTokensRequest, OF_PROMPTS),
    "conversation": UNSUPPORTED["conversation"],
}
UNSUPPORTED_IN_COMPACTING: dict[str, Refusal] = {
    **foreign(RESPONSES, CompactRequest, OF_PROMPTS),
    "conversation": UNSUPPORTED["conversation"],
}
"""Fields that are refused by name. To support one, honour it and delete its line."""

FROM_CLIENTS = frozenset({"computer_call_output", "mcp_approval_response"})
"""Items about hosted tools that clients make."""

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
INCLUDABLE = frozenset(
    {
        LOGPROBS,
        ENCRYPTED,
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "message.input_image.image_url",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    }
)
"""All that may be asked for. Images are included anyway; of the rest but the first two there is
never anything."""


# ---------------------------------------------------------------------------------------------
# Body → request
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """Properties of a response that are known before it begins: all but its output.

    defaults: returns the sampling parameters that the body leaves out; known once the model is
    loaded. added: the tools that items of the conversation add to the body's.
    """

    model: str
    body: ResponsesRequest
    defaults: Callable[[], Mapping[str, float]] = dict
    added: Sequence[ResponsesTool] = ()
    id: str = field(default_factory=lambda: new_id("resp"))
    created: int = field(default_factory=lambda: int(time.time()))

    def includes(self, what: str) -> bool:
        return what in (self.body.include or ())

    def sampling(self) -> Sampling:
        """
        Raises:
            InvalidParameter: two names of one parameter that differ.
        """
        return fill_sampling(sampling(self.body), self.defaults())


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"


def request(
    head: ResponseHead, history: Sequence[Item], items: Sequence[Item]
) -> GenerationRequest:
    """Return the request for the answer.

    history: the items of the conversation before this request. items: the request's own, as
    `input_items` returns them.

    Raises:
        InvalidParameter: a value that contradicts another.
        UnsupportedParameter: a field or a kind of item that can't be honoured.
    """
    body = head.body
    refuse_unsupported(body, UNSUPPORTED)
    _check_include(body.include or ())
    asked = head.includes(LOGPROBS) or bool(body.top_logprobs)
    if body.generate is False and not any(
        isinstance(item, MessageItem | AgentMessageItem) for item in (*history, *items)
    ):
        # Templates make no prompt of tools and instructions alone.
        items = [*items, MessageItem(role="user", content="")]
    return GenerationRequest(
        model=head.model,
        prompt=_conversation(body, history, items),
        sampling=head.sampling(),
        max_tokens=1 if body.generate is False else body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if asked else None,
        constraint=_constraint(body.text, [*history, *items]),
        priority=body.priority or 0,
        prediction=prediction(body),
        speculation=body.speculation,
        cache_salt=body.cache_salt or "",
        request_id=head.id,
    )


def added_tools(items: Sequence[Item]) -> list[ResponsesTool]:
    """Return the tools that items add to those of a request."""
    added = (item.tools for item in items if isinstance(item, AdditionalToolsItem))
    return list(chain.from_iterable(added))


def kept_items(history: Sequence[JsonItem]) -> list[Item]:
    """Parse items from the form in which they were `listed` or streamed."""
    return Items.validate_python(history)


def compacted(
    model: str, body: CompactRequest, history: Sequence[Item], items: Sequence[Item]
) -> GenerationRequest:
    """Return the request with the conversation that is to be summed up.

    Raises:
        InvalidParameter: as `request`.
        UnsupportedParameter: as `request`.
    """
    refuse_unsupported(body, UNSUPPORTED_IN_COMPACTING)
    return GenerationRequest(
        model,
        _conversation(body, history, items),
        asked_sampling(),
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        request_id=new_id("resp"),
    )


def counted(
    model: str, body: InputTokensRequest, history: Sequence[Item], items: Sequence[Item]
) -> GenerationRequest:
    """Return a request with the prompt of a response to `body`, from which nothing is generated.

    Raises:
        InvalidParameter: as `request`.
        UnsupportedParameter: as `request`.
    """
    refuse_unsupported(body, UNSUPPORTED_IN_COUNTING)
    prompt = _conversation(body, history, items)
    constraint = _constraint(body.text, [*history, *items])
    return GenerationRequest(model, prompt, constraint=constraint)


def asks_for_compaction(given: str | Sequence[object]) -> bool:
    """Return True if the items of a request end with one that asks for a summary."""
    return bool(given) and isinstance(given[-1], CompactionTrigger)


def compact_threshold(body: ResponsesRequest, context: int) -> int | None:
    """Return the tokens of a prompt from which on it is summed up first; None: it never is.

    context: tokens that the model can take.
    """
    asked = [entry.compact_threshold or context * 3 // 4 for entry in body.context_management or ()]
    return min(asked, default=None)


def references(body: InputTokensRequest) -> list[str]:
    """Return the ids of the kept items that the request refers to."""
    given = body.input if isinstance(body.input, list) else []
    return [item.id for item in given if isinstance(item, ItemReference)]


def input_items(body: InputTokensRequest, kept: Mapping[str, JsonItem]) -> list[Item]:
    """Return the request's items.

    kept: the items that the request refers to, by id, as `listed` or streamed.

    Raises:
        ItemNotFound: an item that the request refers to is not in `kept`.
    """
    if isinstance(body.input, str):
        return [MessageItem(role="user", content=body.input)]
    found = {name: Items.validate_python([item])[0] for name, item in kept.items()}
    given = list(body.input or ())
    if asks_for_compaction(given):
        given.pop()
    return [_own_item(item, found, f"input[{index}]") for index, item in enumerate(given)]


def _own_item(item: InputItem, found: Mapping[str, Item], path: str) -> Item:
    match item:
        case ItemReference():
            return _referred(item.id, found, path)
        case CompactionTrigger():
            raise InvalidParameter(f"`{path}`: a compaction_trigger must be last.", param=path)
    return item


def _referred(name: str, found: Mapping[str, Item], path: str) -> Item:
    if name not in found:
        raise ItemNotFound(
            f"`{path}` refers to an item {name!r} that is not kept here: it never was, or is gone, "
            "or its response was made with `store: false`. Send the item itself.",
            param=path,
        )
    return found[name]


class Shortened:
    """A request, and ever shorter ones: without the oldest turn, without the two oldest, ...

    A turn begins with a user's message. System messages and the last turn always stay. Each request
    is made on access: a long conversation has thousands of turns.
    """

    def __init__(self, request: GenerationRequest) -> None:
        assert isinstance(request.prompt, Conversation)
        self._request, self._prompt = request, request.prompt
        users = (i for i, said in enumerate(request.prompt.messages) if said.role == "user")
        self._starts = [0, *islice(users, 1, None)]

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> GenerationRequest:
        start, messages = self._starts[index], self._prompt.messages
        system = (message for message in messages[:start] if message.role == "system")
        shorter = replace(self._prompt, messages=(*system, *messages[start:]))
        return replace(self._request, prompt=shorter)


def _check_include(names: Sequence[str]) -> None:
    for index, name in enumerate(names):
        if name not in INCLUDABLE:
            raise InvalidParameter(
                f"`include[{index}]` {name!r} is unknown; possible are {_listing(INCLUDABLE)}.",
                param=f"include[{index}]",
            )


def _listing(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _constraint(text: TextOptions | None, items: Sequence[Item]) -> Constraint | None:
    wanted = None if text is None else text.format
    for update in _updates(items):
        wanted = wanted if update.text is None else update.text.format
    if wanted is None:
        return None
    match wanted.type:
        case "text":
            return None
        case "json_object":
            return JsonObject("text.format")
        case "json_schema":
            if wanted.schema_ is None:
                raise InvalidParameter("`text.format.schema` is missing.", param="text.format")
            return JsonSchema(json.dumps(wanted.schema_), wanted.strict or False, "text.format")


def _conversation(
    body: InputTokensRequest, history: Sequence[Item], items: Sequence[Item]
) -> Conversation:
    said = [*_system(body), *_messages(history, items)]
    if not said:
        raise InvalidParameter("`input` is empty.", param="input")
    choice, allowed = _tool_choice(body.tool_choice)
    tools = permitted(_offered(body, history, items), allowed, "tool_choice.tools")
    check_demand(choice, tools, body.ignored_tools())
    return Conversation(
        messages=tuple(said),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        template_args=_template_args(body.reasoning, [*history, *items])
        | (body.chat_template_kwargs or {}),
        param="input",
    )


def _template_args(reasoning: ResponsesReasoning | None, items: Sequence[Item]) -> dict[str, Any]:
    effort = None if reasoning is None else reasoning.effort
    for update in _updates(items):
        effort = effort if update.reasoning is None else update.reasoning.effort
    if effort is None:
        return {}
    return {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})


def _updates(items: Sequence[Item]) -> Iterator[ConfigurationUpdateItem]:
    return (item for item in items if isinstance(item, ConfigurationUpdateItem))


def _offered(
    body: InputTokensRequest, history: Sequence[Item], items: Sequence[Item]
) -> list[Tool]:
    """Return the request's tools and those that items add. Of one name, the last is offered."""
    given = list(_tools(body.tools or (), "tools"))
    added: dict[str, Tool] = {}
    for index, item in enumerate([*history, *items], -len(history)):
        if isinstance(item, AdditionalToolsItem):
            added |= {tool.name: tool for tool in _tools(item.tools, f"input[{index}].tools")}
    return [*(tool for tool in given if tool.name not in added), *added.values()]


def _tools(
    tools: Sequence[ResponsesTool], path: str, namespace: str | None = None
) -> Iterator[Tool]:
    """Yield the functions, those of namespaces under their full names.

    Tools that only a provider could run are left out.

    Raises:
        InvalidParameter: a function without a name.
        UnsupportedParameter: a type that is not known.
    """
    for index, tool in enumerate(tools):
        if tool.is_left_out():
            continue
        if tool.type == "namespace" and namespace is None:
            yield from _tools(tool.tools or (), f"{path}[{index}].tools", tool.name)
        else:
            found = _tool(tool, f"{path}[{index}]")
            yield replace(found, name=_full_name(namespace, found.name))


def _full_name(namespace: str | None, name: str) -> str:
    """Return the name of a function for the model, which knows no namespaces."""
    return name if namespace is None else f"{namespace}__{name}"


def _tool(tool: ResponsesTool, path: str) -> Tool:
    match tool.type:
        case "local_shell" | "shell" | "apply_patch" as kind:
            return Tool(kind, DESCRIPTIONS[kind], PARAMETERS[kind], param=path)
        case "function" | "custom":
            pass
        case kind:
            raise unknown_tool(path, kind)
    if not tool.name:
        raise InvalidParameter(f"`{path}.name` is required.", param=f"{path}.name")
    if tool.type == "custom":
        return custom_tool(tool.name, tool.description, tool.format, path)
    return Tool(
        tool.name, tool.description, tool.parameters or {}, tool.strict or False, param=path
    )


def custom_tool(name: str, description: str | None, form: ToolFormat | None, path: str) -> Tool:
    """
    Raises:
        InvalidParameter: a grammar without a definition or a syntax.
    """
    if form is None or form.type == "text":
        return Tool(name, description, custom_parameters(), param=path)
    for field_name in ("definition", "syntax"):
        if getattr(form, field_name) is None:
            param = f"{path}.format.{field_name}"
            raise InvalidParameter(f"`{param}` is required with type grammar.", param=param)
    assert form.definition is not None
    told = f"The input must fit this {form.syntax} grammar:\n{form.definition}"
    described = f"{description}\n\n{told}" if description else told
    lark = form.syntax == "lark"
    return Tool(
        name,
        described,
        custom_parameters(None if lark else form.definition),
        strict=True,
        param=path,
        schema_field="format.definition",
        text_grammar=form.definition if lark else None,
    )


def _tool_choice(
    choice: Literal["auto", "none", "required"] | ToolReference | None,
) -> tuple[ToolChoice, frozenset[str] | None]:
    """Return the tool choice, and the only names that may be called; None: all may be.

    Raises:
        InvalidParameter: `choice` lacks its `tools` or `name`.
        UnsupportedParameter: `choice` demands a tool that the client can't run.
    """
    match choice:
        case None:
            return "auto", None
        case str():
            return choice, None
        case ToolReference(type="function" | "custom", name=str(name)):
            return NamedTool(name), None
        case ToolReference(type="local_shell" | "shell" | "apply_patch" as kind):
            return NamedTool(kind), None
        case ToolReference(type="allowed_tools", mode=mode, tools=list(tools)):
            return mode or "auto", frozenset(_allowed(tools))
        case ToolReference(type="function" | "custom" | "allowed_tools"):
            missing = f"tool_choice.{'tools' if choice.type == 'allowed_tools' else 'name'}"
            raise InvalidParameter(f"`{missing}` is required.", param=missing)
    raise demanded(choice.type)


def _allowed(tools: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for tool in tools:
        match tool:
            case {"type": "function" | "custom", "name": str(name)}:
                yield name
            case {"type": "local_shell" | "shell" | "apply_patch" as kind}:
                yield kind
            case {"type": str(kind)} if is_tool(kind):
                continue
            case _:
                raise UnsupportedParameter(
                    "`tool_choice.tools` can list functions and custom tools by their names only.",
                    param="tool_choice.tools",
                )


# -- Items → messages -------------------------------------------------------------------------


def _system(body: InputTokensRequest) -> Iterator[Message]:
    if body.instructions:
        yield Message("system", body.instructions)


def _messages(history: Sequence[Item], items: Sequence[Item]) -> Iterator[Message]:
    """Yield the messages of the items.

    All that an assistant says, thinks and calls between two other messages is one message.
    """
    # The request's own items keep their numbers for errors; those of the history are negative.
    numbered = list(enumerate([*history, *items], -len(history)))
    begun = False
    pieces: list[Message] = []
    for index, item in _since_summary(numbered):
        match item:
            case ConfigurationUpdateItem():
                continue
            case AdditionalToolsItem():
                # Tools that are added before the first message are described where all tools are.
                if not begun or not (names := [*dict(_called(_run_here(item.tools)))]):
                    continue
                pieces.append(Message("system", "\n".join(map(CALLABLE.format, names))))
            case _:
                pieces.append(_piece(item, f"input[{index}]"))
                begun = begun or pieces[-1].role != "system"
    return merged(pieces, frozenset({"assistant"}))


def _since_summary(numbered: Sequence[tuple[int, Item]]) -> Sequence[tuple[int, Item]]:
    """Return the items from the last summary on, and the earlier ones that it does not replace:
    system messages, and the user's newest messages."""
    last = max(
        (i for i, (_, it) in enumerate(numbered) if isinstance(it, CompactionItem)), default=0
    )
    summary = numbered[last][1] if numbered else None
    if not isinstance(summary, CompactionItem):
        return numbered
    opened = compaction.Compacted.open(summary.encrypted_content)
    before = [(n, item) for n, item in numbered[:last] if isinstance(item, MessageItem)]
    said = [(n, item) for n, item in before if item.role == "user"]
    sizes = [_size(item.content) for _, item in said]
    kept = {
        n for n, _ in said[len(said) - compaction.newest(sizes, opened.keep if opened else 0) :]
    }
    stays = [(n, item) for n, item in before if n in kept or item.role in ("system", "developer")]
    return [*stays, *numbered[last:]]


def _size(content: Content) -> int:
    """Return the number of characters of the text in `content`."""
    if isinstance(content, str):
        return len(content)
    return sum(len(part.text) for part in content if isinstance(part, TextPart))


def _piece(item: Spoken, path: str) -> Message:
    match item:
        case CompactionItem():
            return _summary(item, path)
        case MessageItem():
            role = "system" if item.role == "developer" else item.role
            return Message(role, _content(item.content, f"{path}.content"))
        case AgentMessageItem():
            said = parts_of(_content(item.content, f"{path}.content"))
            return Message(
                "user", content_of((f"{item.author} to {item.recipient}:", *(said or ("",))))
            )
        case FunctionCallOutputItem() | ToolOutputItem() | ShellOutputItem():
            return Message("tool", _output(item, path), tool_call_id=item.call_id or item.id)
        case ReasoningItem():
            return Message("assistant", reasoning=_thinking(item))
        case _:
            return _record(item, path)


def _record(item: OtherItem | Call, path: str) -> Message:
    """Return a call, or what a hosted tool did.

    Raises:
        UnsupportedParameter: an item of a type that is not known.
    """
    if not isinstance(item, OtherItem):
        return Message("assistant", tool_calls=(_call(item),))
    if not is_item(item.type):
        raise UnsupportedParameter(
            f"`{path}` is of type {item.type!r}, which this server can't read.",
            param=f"{path}.type",
        )
    # Outputs and messages of the client's side are the user's.
    role: Literal["user", "assistant"] = "user" if item.type in FROM_CLIENTS else "assistant"
    text = told(item.type, item.model_extra or {})
    image = _screenshot(item)
    if image is None:
        return Message(role, text)
    return Message(role, (text, replace(image, param=f"{path}.output.image_url")))


def _screenshot(item: OtherItem) -> Image | None:
    """Return the picture that a computer_call_output brings; None if there is none to be seen."""
    match item.model_extra or {}:
        case {"output": {"type": "computer_screenshot", "image_url": Image() as image}}:
            return image
    return None


def _output(item: Output, path: str) -> Parts:
    if isinstance(item, ShellOutputItem):
        return shell_output([each.model_dump() for each in item.output])
    if item.output is None:
        return f"({item.status})" if item.status else ""
    return _content(item.output, f"{path}.output")


Call = FunctionCallItem | CustomCallItem | LocalShellCallItem | ShellCallItem | ApplyPatchCallItem
Output = FunctionCallOutputItem | ToolOutputItem | ShellOutputItem
Spoken = MessageItem | AgentMessageItem | ReasoningItem | CompactionItem | Call | Output | OtherItem
"""Items that are messages for the model; the others say what holds for those that follow."""


def _call(item: Call) -> ToolCall:
    match item:
        case FunctionCallItem():
            return ToolCall(item.call_id, _full_name(item.namespace, item.name), item.arguments)
        case CustomCallItem():
            name = _full_name(item.namespace, item.name)
            return ToolCall(item.call_id, name, custom_arguments(item.input))
        case LocalShellCallItem():
            return ToolCall(item.call_id, "local_shell", call_arguments(item.action))
        case ShellCallItem():
            return ToolCall(item.call_id, "shell", call_arguments(item.action))
        case ApplyPatchCallItem():
            return ToolCall(item.call_id, "apply_patch", call_arguments(item.operation))


def _summary(item: CompactionItem, path: str) -> Message:
    opened = compaction.Compacted.open(item.encrypted_content)
    if opened is None:
        raise UnsupportedParameter(
            f"`{path}` is a summary that another server made, which this one can't read.",
            param=f"{path}.encrypted_content",
        )
    return opened.message()


def _content(content: Content, path: str) -> Parts:
    if isinstance(content, str):
        return content
    return content_of(_part(part, f"{path}[{index}]") for index, part in enumerate(content))


def _part(part: ContentPart, path: str) -> Part:
    match part:
        case (
            TextPart(text=text) | RefusalPart(refusal=text) | EncryptedPart(encrypted_content=text)
        ):
            return text
        case ImagePart(image_url=image):
            # One of a kept item was at another place when it came.
            return replace(seen(image, path, part.type), param=f"{path}.image_url")
    if part.type in ("image", "image_url"):
        raise UnsupportedParameter(
            f"`{path}` is of type {part.type!r}; images are of type 'input_image' here.",
            param=f"{path}.type",
        )
    raise UnsupportedParameter(
        f"`{path}` is of type {part.type!r}, which is not read here; texts and images are.",
        param=f"{path}.type",
    )


def _thinking(item: ReasoningItem) -> str | None:
    """Return the thinking; None if only another server can read it."""
    parts = item.content or item.summary
    if parts:
        return "\n".join(part.text for part in parts)
    return opened(item.encrypted_content or "")


# -- Kept items → items with what is to be included --------------------------------------------


def including(items: Sequence[JsonItem], include: Sequence[str]) -> list[JsonItem]:
    """Return `items` with the extra contents that `include` names.

    items: as `listed` or streamed.

    Raises:
        InvalidParameter: nothing of such a name can be included.
        UnsupportedParameter: log probabilities of a text that was kept without them.
    """
    _check_include(include)
    if LOGPROBS in include and any(map(_lacks_logprobs, items)):
        param = f"include[{include.index(LOGPROBS)}]"
        raise UnsupportedParameter(
            f"`{param}` {LOGPROBS!r} is not supported here: a text's are kept with the answer that "
            "it is, if its request included them.",
            param=param,
        )
    return [_with_thinking(item) for item in items] if ENCRYPTED in include else list(items)


def _lacks_logprobs(item: JsonItem) -> bool:
    match item:
        case {"type": "message", "role": "assistant", "content": list(parts)}:
            return any(part["text"] and not part["logprobs"] for part in parts)
    return False


def _with_thinking(item: JsonItem) -> JsonItem:
    if item["type"] != "reasoning" or item.get("encrypted_content") is not None:
        return item
    thinking = _thinking(ReasoningItem.model_validate(item))
    return item if thinking is None else item | {"encrypted_content": closed(thinking)}


# -- Items → items that can be listed ----------------------------------------------------------


def listed(items: Sequence[Item]) -> list[JsonItem]:
    """Return the items of a request as the API gives them back, each with an id of its own."""
    found = [_listed(item) for item in items]
    seen: set[str] = set()
    for item in found:
        if item["id"] in seen:
            item["id"] = new_id("item")
        seen.add(item["id"])
    return found


def _listed(item: Item) -> JsonItem:
    match item:
        case MessageItem(content=content):
            kind = "output_text" if item.role == "assistant" else "input_text"
            parts = [content] if isinstance(content, str) else [_part(p, "") for p in content]
            return {
                "id": item.id or new_id("msg"),
                "type": "message",
                "status": "completed",
                "role": item.role,
                "content": [_listed_part(kind, part) for part in parts],
            }
        case FunctionCallItem():
            kept = {"type", "call_id", "name", "namespace", "arguments"}
            return item.model_dump(include=kept, exclude_none=True) | {
                "id": item.id or new_id("fc"),
                "status": "completed",
            }
        case FunctionCallOutputItem():
            return {
                "id": item.id or new_id("fco"),
                "type": "function_call_output",
                "call_id": item.call_id,
                "output": _listed_output(item.output),
                "status": "completed",
            }
        case CompactionItem():
            summed_up = {"type": "compaction", "encrypted_content": item.encrypted_content}
            return {"id": item.id or new_id("cmp")} | summed_up
        case ReasoningItem():
            return {"summary": []} | _as_given(item) | {"id": item.id or new_id("rs")}
        case _:
            # Of a tool: all else has been refused.
            return {"id": new_id("item")} | _as_given(item)


def _as_given(item: Item) -> JsonItem:
    """Return an item's fields, in which pictures stay as they are."""
    beside: JsonItem = {}
    match item:
        case ToolOutputItem(output=list(output)):
            beside = {"output": _listed_output(output)}
        case AgentMessageItem(content=list(content)):
            beside = {"content": [_as_part(each) for each in content]}
        case OtherItem() if (image := _screenshot(item)) is not None:
            beside = {"output": {"type": "computer_screenshot", "image_url": image}}
    given: JsonItem = to_jsonable_python(
        item.model_dump(exclude_none=True, exclude=set(beside)), inf_nan_mode="null"
    )
    return given | beside


def _as_part(part: ContentPart) -> JsonItem:
    if isinstance(part, ImagePart):
        return _listed_part("", _part(part, ""))
    return part.model_dump(exclude_none=True)


def _listed_output(output: Content) -> str | list[JsonItem]:
    """Return an output as a text, or as parts where it has pictures."""
    content = _content(output, "")
    if isinstance(content, str):
        return content
    return [_listed_part("input_text", part) for part in content]


def _listed_part(kind: str, part: Part) -> JsonItem:
    if isinstance(part, Image):
        return {"type": "input_image", "image_url": part, "detail": "auto"}
    said: JsonItem = {"type": kind, "text": part}
    return said if kind == "input_text" else said | {"annotations": [], "logprobs": []}


def shown(items: Sequence[JsonItem]) -> list[JsonItem]:
    """Return items that are `listed` or kept as they go to a client: pictures as data URLs."""
    return [_shown(item) for item in items]


def _shown(value: Any) -> Any:
    match value:
        case Image():
            return data_url_of(value.data)
        case dict():
            return {name: _shown(inner) for name, inner in value.items()}
        case list():
            return [_shown(inner) for inner in value]
    return value


# ---------------------------------------------------------------------------------------------
# The response, at any time of its life
# ---------------------------------------------------------------------------------------------


def _shell(head: ResponseHead) -> JsonItem:
    """Return a response without output. Numbers that JSON lacks, such as 1e999, are null."""
    body, sampled = head.body, head.sampling()
    shell: JsonItem = {
        "id": head.id,
        "object": "response",
        "created_at": head.created,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "frequency_penalty": sampled.frequency_penalty,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": head.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": sampled.presence_penalty,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": sampled.temperature,
        "text": _text_options(body.text),
        "tool_choice": _shown_choice(body),
        "tools": [_shown_tool(tool) for tool in body.tools or () if not tool.is_left_out()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampled.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
    }
    # OpenAI's has no user at all unless one was named.
    if body.user is not None:
        shell["user"] = body.user
    finite: JsonItem = to_jsonable_python(shell, inf_nan_mode="null")
    return finite


def _text_options(text: TextOptions | None) -> JsonItem:
    shown: JsonItem = {"format": _format(text)}
    if text is not None and text.verbosity is not None:
        shown["verbosity"] = text.verbosity
    return shown


def _format(text: TextOptions | None) -> JsonItem:
    if text is None or text.format is None:
        return {"type": "text"}
    return text.format.model_dump(by_alias=True, exclude_unset=True)


def _shown_choice(body: ResponsesRequest) -> str | JsonItem:
    if isinstance(body.tool_choice, ToolReference):
        return body.tool_choice.model_dump(exclude_none=True)
    return body.tool_choice or "auto"


def _shown_tool(tool: ResponsesTool) -> JsonItem:
    if tool.type == "namespace":
        shown = tool.model_dump(include={"type", "name", "description"})
        return shown | {"tools": [_shown_tool(each) for each in tool.tools or ()]}
    if tool.type != "function":
        return tool.model_dump(exclude_none=True)
    return {
        "type": tool.type,
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict or False,
    }


def _usage(usage: core.Usage) -> JsonItem:
    details = {"reasoning_tokens": usage.reasoning_tokens}
    if usage.accepted_prediction_tokens or usage.rejected_prediction_tokens:
        # Names of OpenAI's chat completions; its Responses has no predictions.
        details["accepted_prediction_tokens"] = usage.accepted_prediction_tokens
        details["rejected_prediction_tokens"] = usage.rejected_prediction_tokens
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": details,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def added(one: core.Usage, other: core.Usage) -> core.Usage:
    """Return the sum of the token usages of two passes of one response."""
    return core.Usage(
        one.prompt_tokens + other.prompt_tokens,
        one.completion_tokens + other.completion_tokens,
        one.cached_tokens + other.cached_tokens,
        one.reasoning_tokens + other.reasoning_tokens,
        one.kept_tokens + other.kept_tokens,
        one.accepted_prediction_tokens + other.accepted_prediction_tokens,
        one.rejected_prediction_tokens + other.rejected_prediction_tokens,
    )


def error_frame(status: int, body: Mapping[str, Any], headers: Mapping[str, str]) -> str:
    """Return a failure as an event of a WebSocket, with the status and headers of HTTP.

    A missing previous response has OpenAI's status and code, by which clients know that they have
    to send the whole conversation.
    """
    error = dict(body.get("error") or {"message": "The request failed.", "code": None})
    if error.get("code") == ResponseNotFound.code and error.get("param") == "previous_response_id":
        status = InvalidRequest.status
        error["code"] = "previous_response_not_found"
    return sse.dump({"type": "error", "status": status, "error": error, "headers": dict(headers)})


def _error(error: MLXManagerError) -> JsonItem:
    match error:
        case ContextLengthExceeded():
            # Codex looks for it to shorten the conversation.
            code = error.code
        case Overloaded():
            code = "rate_limit_exceeded"
        case InvalidRequest():
            code = "invalid_prompt"
        case _:
            code = "server_error"
    return {"code": code, "message": error.message}


# ---------------------------------------------------------------------------------------------
# Events → stream
# ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _OpenItem:
    """Item that is being written. `call`, `names` and `reader` are for calls only.

    A call of a tool with fields of its own is announced once it is whole.
    """

    kind: ItemKind
    id: str
    call: ToolCallStarted | None = None
    names: JsonItem = field(default_factory=dict)
    reader: InputReader = field(default_factory=InputReader)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[JsonItem] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def part(self) -> JsonItem:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": list(self.logprobs),
        }

    def item(self, status: Status, *, encrypted: bool = False) -> JsonItem:
        begun = status == "in_progress"
        match self.kind:
            case "message":
                content = [] if begun else [self.part()]
                said = {"role": "assistant", "content": content}
                return {"id": self.id, "type": "message", "status": status, **said}
            case "reasoning":
                content = [] if begun else [self.part()]
                thought: JsonItem = {"summary": [], "content": content}
                if encrypted and not begun:
                    thought["encrypted_content"] = closed(self.text)
                return {"id": self.id, "type": "reasoning", "status": status, **thought}
            case "function_call":
                assert self.call is not None
                called = {"call_id": self.call.id, "arguments": self.text, **self.names}
                return {"id": self.id, "type": "function_call", "status": status, **called}
            case "custom":
                assert self.call is not None
                called = {"call_id": self.call.id, "input": self.text, **self.names}
                return {"id": self.id, "type": "custom_tool_call", **called}
            case "local_shell" | "shell" | "apply_patch" as kind:
                assert self.call is not None
                called = {"call_id": self.call.id, **call_fields(kind, self.text)}
                # OpenAI's knows no patch that is incomplete.
                ended = "completed" if (kind, status) == ("apply_patch", "incomplete") else status
                return {"id": self.id, "type": f"{kind}_call", "status": ended, **called}


ItemKind = Literal["message", "reasoning", "function_call", "custom"] | CallKind
_PREFIXES: Mapping[ItemKind, str] = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom": "ctc",
    "local_shell": "lsh",
    "shell": "sh",
    "apply_patch": "apc",
}
_WITH_PARTS = frozenset({"message", "reasoning"})
_WHOLE = frozenset({"local_shell", "shell", "apply_patch"})


def _run_here(tools: Sequence[ResponsesTool]) -> list[ResponsesTool]:
    return [tool for tool in tools if not tool.is_left_out()]


def _called(
    tools: Sequence[ResponsesTool], space: str | None = None
) -> Iterator[tuple[str, tuple[ItemKind, JsonItem]]]:
    """Yield what a call of each tool is as an item, by the names that the model knows."""
    for tool in tools:
        match tool.type:
            case "namespace":
                yield from _called(tool.tools or (), tool.name)
            case "local_shell" | "shell" | "apply_patch" as kind:
                yield kind, (kind, {})
            case _:
                names = {"name": tool.name} | ({} if space is None else {"namespace": space})
                called: ItemKind = "custom" if tool.type == "custom" else "function_call"
                yield _full_name(space, str(tool.name)), (called, names)


class ResponseStream:
    """Writer of an answer's events in OpenAI's form: items and parts open, grow, close in turn.

    `response` returns the response written so far at any time. `end` writes the last event: by then
    a response that is to be kept has been stored.
    """

    media_type = sse.MEDIA_TYPE
    keep_alive = sse.KEEP_ALIVE
    _text_open = (
        "event: response.output_text.delta\n"
        'data: {"type":"response.output_text.delta","sequence_number":'
    )

    def __init__(self, head: ResponseHead) -> None:
        self.head = head
        self._number = 0
        self._items: list[JsonItem] = []
        self._open: _OpenItem | None = None
        self._finished: Finished | None = None
        self._completed: int | None = None
        self._unkept = False
        self._summary: compaction.Summary | None = None
        self._spent = core.Usage(0, 0)
        self._message: _OpenItem | None = None
        self._text_middle = ""
        self._calls = dict(_called(_run_here([*(head.body.tools or ()), *head.added])))

    def write(self, progress: Progress) -> bytes:
        """Return the events of one step, ready for the wire."""
        out = ""
        for _, events in progress:
            for event in events:
                # The one path that nearly every token takes.
                if type(event) is TextDelta and self._message is not None and not event.logprobs:
                    self._message.pieces.append(event.text)
                    out += (
                        f"{self._text_open}{self._number}{self._text_middle}"
                        f'{sse.quote(event.text)},"logprobs":[]}}\n\n'
                    )
                    self._number += 1
                else:
                    out += _wire(self.events(event))
        return out.encode("ascii")

    def end(self) -> bytes:
        response = self.response()
        last = self._emit(f"response.{response['status']}", response=response)
        return (_wire(last) + sse.DONE).encode("ascii")

    def fail(self, error: MLXManagerError) -> bytes:
        # Signs of life may be all that was sent; a response begins all the same before it fails.
        begun = [] if self._number else self._begin()
        response = self.response() | {"status": "failed", "error": _error(error)}
        failed = self._emit("response.failed", response=response)
        return (_wire(begun + failed) + sse.DONE).encode("ascii")

    def sum_up(self, summary: compaction.Summary, *, alone: bool) -> None:
        """Take the next events as those of a summary. alone: there is no answer besides."""
        self._summary = summary
        self._alone = alone

    def unkept(self) -> None:
        """Note that the response could not be stored, though that was asked for."""
        self._unkept = True

    def response(self) -> JsonItem:
        """Return the response so far, with finished items only."""
        shell = _shell(self.head) | {"output": list(self._items)}
        if self._unkept:
            shell["store"] = False
        if self._finished is None:
            return shell
        cut = self._finished.reason == "length"
        return shell | {
            "status": "incomplete" if cut else "completed",
            "completed_at": None if cut else self._completed,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": _usage(self._spent),
        }

    def events(self, event: Event) -> list[JsonItem]:  # noqa: PLR0911 one for each kind
        """Return the items to send for an event, and make the event part of the response."""
        if self._summary is not None:
            return self._summed_up(self._summary, event)
        if self.head.body.generate is False:
            return self._warmed_up(event)
        match event:
            case Admitted():
                return []
            case TextDelta(text, logprobs):
                return self._enter("message") + self._text(text, logprobs)
            case ReasoningDelta(text):
                return self._enter("reasoning") + self._reasoning(text)
            case ToolCallStarted(_, _, name):
                kind, names = self._calls.get(name, ("function_call", {"name": name}))
                return self._enter(kind, event, names)
            case ToolCallDelta(_, arguments):
                return self._arguments(arguments)
            case Started():
                return [] if self._number else self._begin()
            case Finished(reason):
                closed = self._leave("incomplete" if reason == "length" else "completed")
                self._finish(event)
                return closed

    def _finish(self, end: Finished) -> None:
        self._finished = end
        self._spent = added(self._spent, end.usage)
        self._completed = int(time.time())

    def _summed_up(self, summary: compaction.Summary, event: Event) -> list[JsonItem]:
        """Return the items to send for an event of a summary, which is shown only when complete."""
        index = len(self._items)
        first = summary.add(event)
        match event:
            case Started():
                out = [] if self._number else self._begin()
                item = summary.item()
                return out + self._emit("response.output_item.added", output_index=index, item=item)
            case Finished(usage=usage):
                item = summary.item()
                self._items.append(item)
                self._summary = None
                if self._alone:
                    self._finish(Finished("stop", usage))
                else:
                    self._spent = added(self._spent, usage)
                return self._emit("response.output_item.done", output_index=index, item=item)
            case _ if first:
                place = {"output_index": index, "item_id": summary.id}
                return self._emit("response.compaction.compacting", **place)
        return []

    def _warmed_up(self, event: Event) -> list[JsonItem]:
        """Return the items to send for an event of a response without output, for prefill alone."""
        match event:
            case Started():
                return self._begin()
            case Finished(usage=usage):
                self._finish(
                    Finished("stop", replace(usage, completion_tokens=0, reasoning_tokens=0))
                )
        return []

    def _begin(self) -> list[JsonItem]:
        created = self._emit("response.created", response=self.response())
        return created + self._emit("response.in_progress", response=self.response())

    def _text(self, text: str, logprobs: Sequence[TokenLogprob]) -> list[JsonItem]:
        assert self._open is not None
        scores = entries(logprobs)
        self._open.logprobs += scores
        return self._grow(
            "response.output_text.delta", text, content_index=0, logprobs=_bare(scores)
        )

    def _reasoning(self, text: str) -> list[JsonItem]:
        return self._grow("response.reasoning_text.delta", text, content_index=0)

    def _arguments(self, arguments: str) -> list[JsonItem]:
        assert self._open is not None
        match self._open.kind:
            case "function_call":
                return self._grow("response.function_call_arguments.delta", arguments)
            case "custom":
                return self._input(self._open.reader.feed(arguments))
        self._open.pieces.append(arguments)
        return []

    def _input(self, text: str) -> list[JsonItem]:
        return self._grow("response.custom_tool_call_input.delta", text) if text else []

    def _grow(self, kind: str, delta: str, **more: Any) -> list[JsonItem]:
        assert self._open is not None
        self._open.pieces.append(delta)
        return self._emit(kind, **self._place(), **more, delta=delta)

    def _enter(
        self,
        kind: ItemKind,
        call: ToolCallStarted | None = None,
        names: JsonItem = MappingProxyType({}),  # type: ignore[assignment]
    ) -> list[JsonItem]:
        """Open an item unless one of its kind is open that goes on; each call has its own."""
        if self._open is not None and self._open.kind == kind and call is None:
            return []
        closed = self._leave("completed")
        opened = self._open = _OpenItem(kind, new_id(_PREFIXES[kind]), call, names)
        if kind == "message":
            self._message = opened
            self._text_middle = (
                f',"item_id":"{opened.id}","output_index":{len(self._items)},'
                '"content_index":0,"delta":'
            )
        if kind in _WHOLE:
            return closed
        return closed + self._added(opened) + self._part("added")

    def _added(self, opened: _OpenItem) -> list[JsonItem]:
        return self._emit(
            "response.output_item.added",
            output_index=len(self._items),
            item=opened.item("in_progress"),
        )

    def _leave(self, status: Status) -> list[JsonItem]:
        if self._open is None:
            return []
        rest = self._input(self._open.reader.end()) if self._open.kind == "custom" else []
        whole = self._added(self._open) if self._open.kind in _WHOLE else []
        item = self._open.item(status, encrypted=self.head.includes(ENCRYPTED))
        index = len(self._items)
        done = rest + whole + self._done() + self._part("done")
        self._items.append(item)
        self._open = self._message = None
        return done + self._emit("response.output_item.done", output_index=index, item=item)

    def _done(self) -> list[JsonItem]:
        assert self._open is not None
        place, text = self._place(), self._open.text
        match self._open.kind:
            case "function_call":
                return self._emit(
                    "response.function_call_arguments.done",
                    **place,
                    name=self._open.names["name"],
                    arguments=text,
                )
            case "custom":
                return self._emit("response.custom_tool_call_input.done", **place, input=text)
            case "reasoning":
                return self._emit(
                    "response.reasoning_text.done", **place, content_index=0, text=text
                )
            case "message":
                logprobs = _bare(self._open.logprobs)
                return self._emit(
                    "response.output_text.done",
                    **place,
                    content_index=0,
                    text=text,
                    logprobs=logprobs,
                )
        return []

    def _part(self, what: Literal["added", "done"]) -> list[JsonItem]:
        assert self._open is not None
        if self._open.kind not in _WITH_PARTS:
            return []
        part = self._open.part()
        kind = f"response.content_part.{what}"
        return self._emit(kind, **self._place(), content_index=0, part=part)

    def _place(self) -> JsonItem:
        assert self._open is not None
        return {"item_id": self._open.id, "output_index": len(self._items)}

    def _emit(self, kind: str, **fields: Any) -> list[JsonItem]:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return [event]


def _wire(events: Iterable[JsonItem]) -> str:
    return "".join(sse.named(event["type"], event) for event in events)


def _bare(logprobs: Sequence[JsonItem]) -> list[JsonItem]:
    """Return `logprobs` without the bytes, which only finished texts have."""
    return [
        {
            "token": token["token"],
            "logprob": token["logprob"],
            "top_logprobs": [
                {"token": top["token"], "logprob": top["logprob"]} for top in token["top_logprobs"]
            ],
        }
        for token in logprobs
    ]


# ---------------------------------------------------------------------------------------------
# Events → body
# ---------------------------------------------------------------------------------------------


class ResponseAnswer:
    """Collector of an answer's events into the body of a response: what the stream ends with."""

    def __init__(self, stream: ResponseStream) -> None:
        self._stream = stream

    def add(self, progress: Progress) -> None:
        for _, events in progress:
            for event in events:
                self._stream.events(event)

    def body(self) -> Iterator[str]:
        """A `ResponsesResponse`, once the answer has finished."""
        response = self._stream.response()
        around = ResponsesResponse(**response | {"output": []})
        return filled(whole(around), "output", joined(map(_in_pieces, response["output"])))


class CompactionAnswer:
    """Collects a summary into the body of a conversation that is summed up."""

    def __init__(self, summary: compaction.Summary, items: Sequence[Item]) -> None:
        self._summary = summary
        self._items = items

    def add(self, progress: Progress) -> None:
        for _, events in progress:
            for event in events:
                self._summary.add(event)

    def body(self) -> Iterator[str]:
        """A `CompactedResponse`: what the user said last, as much as is read beside a summary."""
        assert self._summary.usage is not None
        summary = self._summary.item()
        numbered = list(enumerate([*self._items, CompactionItem.model_validate(summary)]))
        kept = [item for _, item in _since_summary(numbered)[:-1]]
        said = [item for item in kept if isinstance(item, MessageItem) and item.role == "user"]
        answer = CompactedResponse(
            id=new_id("resp"),
            created_at=int(time.time()),
            output=[*shown(listed(said)), summary],
            usage=_usage(self._summary.usage),
        )
        return iter((sse.dump(answer.model_dump()),))


def _in_pieces(item: JsonItem) -> Iterator[str]:
    match item:
        case {"type": "message", "content": [{"logprobs": [_, *_] as scores} as part]}:
            bare = item | {"content": [part | {"logprobs": []}]}
            return filled(sse.dump(bare), "logprobs", sliced(scores, PIECE))
    return iter((sse.dump(item),))
