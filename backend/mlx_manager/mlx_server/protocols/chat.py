"""`/v1/chat/completions`: body → requests, events → chunks, events → body. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_manager.mlx_server.core import (
    Admitted,
    Conversation,
    Event,
    Finished,
    GenerationRequest,
    Message,
    NamedTool,
    Part,
    Parts,
    Progress,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolCallStarted,
    ToolChoice,
)
from mlx_manager.mlx_server.errors import (
    InvalidParameter,
    MLXManagerError,
    UnsupportedParameter,
)
from mlx_manager.mlx_server.protocols import sse
from mlx_manager.mlx_server.protocols.answer import (
    AnswerHead,
    counts_so_far,
    error_body,
    last_chunks,
    new_id,
    timed,
    total,
    whole_times,
)
from mlx_manager.mlx_server.protocols.constraints import constraint
from mlx_manager.mlx_server.protocols.hosted import (
    check_demand,
    demanded,
    permitted,
    unknown_tool,
)
from mlx_manager.mlx_server.protocols.images import content_of, seen
from mlx_manager.mlx_server.protocols.logprobs import chat_logprobs, chat_logprobs_in_pieces
from mlx_manager.mlx_server.protocols.parameters import (
    UNSUPPORTED_IN_CHAT,
    agreed,
    counts_all_along,
    includes_usage,
    limited,
    prediction,
    refuse_unsupported,
    sampling,
    stop_rules,
    times,
)
from mlx_manager.mlx_server.protocols.pieces import filled, joined, whole
from mlx_manager.mlx_server.schemas.hosted import is_tool
from mlx_manager.mlx_server.schemas.openai import (
    AllowedTools,
    ChatCompletionChoice,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatMessage,
    ChatToolCall,
    ContentPart,
    FunctionCall,
    NamedFunction,
    NamedToolChoice,
    Reasoning,
    ignored,
)
from mlx_manager.mlx_server.timeline import Timeline

# ---------------------------------------------------------------------------------------------
# Body → requests
# ---------------------------------------------------------------------------------------------


def head(
    body: ChatCompletionRequest, model: str, reasoning_field: str = "reasoning_content"
) -> AnswerHead:
    """
    Raises:
        InvalidParameter: `stream_options` without `stream`.
    """
    n = body.n or 1
    return AnswerHead(
        id=new_id("chatcmpl"),
        model=model,
        n=n,
        rows=n,
        include_usage=includes_usage(body),
        counts_all_along=counts_all_along(body),
        logprobs=None if not body.logprobs else body.top_logprobs or 0,
        return_ids=body.return_token_ids or False,
        reasoning_field=reasoning_field,
        times=times(body),
    )


def requests(body: ChatCompletionRequest, head: AnswerHead) -> list[GenerationRequest]:
    """One request for each of the `n` answers; they share the prompt's pages.

    Raises:
        InvalidParameter: a value that contradicts another.
        UnsupportedParameter: a field or a kind of content that can't be honoured.
    """
    refuse_unsupported(body, UNSUPPORTED_IN_CHAT)
    max_tokens = _max_tokens(body)
    prompt = conversation(body)
    stop = stop_rules(body, max_tokens)
    content = constraint(body)
    predicted = prediction(body)
    return [
        GenerationRequest(
            model=head.model,
            prompt=prompt,
            sampling=sampling(body, draw),
            stop=stop,
            max_tokens=max_tokens,
            logprobs=_logprobs(body),
            constraint=content,
            thinking_budget=_thinking_budget(body),
            priority=body.priority or 0,
            return_ids=body.return_token_ids or False,
            prediction=predicted,
            speculation=body.speculation,
            cache_salt=body.cache_salt or "",
            request_id=head.id,
        )
        for draw in range(head.n)
    ]


def _max_tokens(body: ChatCompletionRequest) -> int | None:
    return limited(
        agreed("max_tokens", body.max_tokens, "max_completion_tokens", body.max_completion_tokens)
    )


def _logprobs(body: ChatCompletionRequest) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidParameter(
            "`top_logprobs` is allowed only when `logprobs` is true.", param="top_logprobs"
        )
    return None


def conversation(body: ChatCompletionRequest) -> Conversation:
    """
    Raises:
        InvalidParameter: a value that contradicts another.
        UnsupportedParameter: content that is not text, or a call that is demanded of a tool that
            only a provider could run.
    """
    go_on = _goes_on(body)
    if go_on and body.add_generation_prompt:
        raise InvalidParameter(
            "`continue_final_message` and `add_generation_prompt` exclude each other.",
            param="continue_final_message",
        )
    messages = tuple(_message(each, f"messages[{i}]") for i, each in enumerate(body.messages))
    if go_on and (messages[-1].tool_calls or not messages[-1].text.strip()):
        raise InvalidParameter(
            "`continue_final_message`: the last message must have a text that the answer can go on "
            "from, and no tool calls.",
            param="continue_final_message",
        )
    opens_turn = not go_on if body.add_generation_prompt is None else body.add_generation_prompt
    choice, allowed = _tool_choice(body)
    tools = permitted(tuple(_tools(body)), allowed, "tool_choice.allowed_tools.tools")
    check_demand(choice, tools, ignored(body.tools))
    return Conversation(
        messages=messages,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        add_generation_prompt=opens_turn,
        continue_final_message=go_on,
        template_args=_template_args(body),
    )


def _goes_on(body: ChatCompletionRequest) -> bool:
    """Return True if the last message is to be gone on from, as the request or the message says.

    Raises:
        InvalidParameter: a message that is not the last one, or not the assistant's, says so.
    """
    for index, message in enumerate(body.messages):
        for name in ("prefix", "partial"):
            last = index == len(body.messages) - 1 and message.role == "assistant"
            if getattr(message, name) and not last:
                param = f"messages[{index}].{name}"
                raise InvalidParameter(
                    f"`{param}` is possible for the last message alone, and of role assistant.",
                    param=param,
                )
    last_message = body.messages[-1]
    return bool(body.continue_final_message or last_message.prefix or last_message.partial)


def _tools(body: ChatCompletionRequest) -> Iterator[Tool]:
    """Yield the functions; what only a provider could run is left out.

    Raises:
        InvalidParameter: a function without a definition.
        UnsupportedParameter: a type that is not known.
    """
    for index, tool in enumerate(body.tools or ()):
        if is_tool(tool.type):
            continue
        if tool.type != "function":
            raise unknown_tool(f"tools[{index}]", tool.type)
        path = f"tools[{index}].function"
        if tool.function is None:
            raise InvalidParameter(f"`{path}` is required.", param=path)
        yield Tool(
            name=tool.function.name,
            description=tool.function.description,
            parameters=tool.function.parameters or {},
            strict=tool.function.strict or False,
            param=path,
        )


def _tool_choice(body: ChatCompletionRequest) -> tuple[ToolChoice, frozenset[str] | None]:
    """Return what must be called, and the only names that may be, if they are restricted."""
    match body.tool_choice:
        case None:
            return "auto", None
        case str() as choice:
            return choice, None
        case NamedToolChoice(type="function", function=NamedFunction(name=name)):
            return NamedTool(name), None
        case NamedToolChoice(type="allowed_tools", allowed_tools=AllowedTools() as allowed):
            return allowed.mode, frozenset(_allowed(allowed.tools))
        case NamedToolChoice(type="function" | "allowed_tools" as kind):
            raise InvalidParameter(
                f"`tool_choice.{kind}` is required.", param=f"tool_choice.{kind}"
            )
    raise demanded(body.tool_choice.type)


def _allowed(tools: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for tool in tools:
        match tool:
            case {"type": "function", "function": {"name": str(name)}}:
                yield name
            case {"type": str(kind)} if is_tool(kind):
                continue
            case _:
                raise UnsupportedParameter(
                    "`tool_choice.allowed_tools.tools` can list functions by their names only.",
                    param="tool_choice.allowed_tools.tools",
                )


def _thinking_budget(body: ChatCompletionRequest) -> int | None:
    asked = body.reasoning.max_tokens if body.reasoning else None
    thinking = body.thinking.budget_tokens if body.thinking else None
    name = "thinking_token_budget"
    budget = agreed(name, body.thinking_token_budget, "reasoning", asked)
    budget = agreed(name, budget, "thinking", thinking)
    return agreed(name, budget, "thinking_budget", body.thinking_budget)


def _template_args(body: ChatCompletionRequest) -> Mapping[str, Any]:
    args: dict[str, Any] = {}
    asked = body.reasoning or Reasoning()
    effort = agreed("reasoning_effort", body.reasoning_effort, "reasoning", asked.effort)
    if effort is not None:
        args["reasoning_effort"] = effort
        if effort == "none":
            args["enable_thinking"] = False
    thinks = agreed("enable_thinking", body.enable_thinking, "reasoning", asked.enabled)
    switch = body.thinking.type if body.thinking else None
    if switch in ("enabled", "disabled"):
        thinks = agreed("enable_thinking", thinks, "thinking", switch == "enabled")
    if thinks is not None:
        args["enable_thinking"] = thinks
    return args | (body.chat_template_kwargs or {})


def _message(message: ChatMessage, path: str) -> Message:
    for name in ("audio", "function_call"):
        if getattr(message, name) is not None:
            raise UnsupportedParameter(
                f"`{path}.{name}` is not supported by this server.", param=f"{path}.{name}"
            )
    content = message.content
    said: Parts
    if isinstance(content, list):
        said = content_of(_part(part, f"{path}.content[{i}]") for i, part in enumerate(content))
    elif content is not None:
        said = content
    elif message.role == "assistant":
        said = message.refusal or ""
    else:
        raise InvalidParameter(
            f"`{path}.content` is missing: a message of role {message.role} needs a text.",
            param=f"{path}.content",
        )
    return Message(
        role="system" if message.role == "developer" else message.role,
        content=said,
        name=message.name,
        reasoning=message.reasoning_content or message.reasoning,
        tool_calls=tuple(
            _called(call, f"{path}.tool_calls[{i}]")
            for i, call in enumerate(message.tool_calls or ())
        ),
        tool_call_id=message.tool_call_id,
    )


def _called(call: ChatToolCall, path: str) -> ToolCall:
    """
    Raises:
        InvalidParameter: a call of nothing.
    """
    if call.function is not None:
        return ToolCall(call.id or "", call.function.name, call.function.arguments or "")
    if call.custom is not None:
        arguments = json.dumps({"input": call.custom.input}, ensure_ascii=False)
        return ToolCall(call.id or "", call.custom.name, arguments)
    raise InvalidParameter(f"`{path}.function` is required.", param=f"{path}.function")


def _part(part: ContentPart, path: str) -> Part:
    match part:
        case ContentPart(type="image_url", image_url=image):
            return seen(image, path, part.type)
        case ContentPart(type="text", text=str(text)):
            return text
        case ContentPart(type="refusal", refusal=str(refusal)):
            return refusal
        case ContentPart(type="text" | "refusal"):
            raise InvalidParameter(
                f"`{path}` of type {part.type} needs a `{part.type}`.", param=f"{path}.{part.type}"
            )
    if part.type in ("image", "input_image"):
        raise UnsupportedParameter(
            f"`{path}` is of type {part.type!r}; images are of type 'image_url' here.",
            param=f"{path}.type",
        )
    raise UnsupportedParameter(
        f"`{path}` is of type {part.type!r}, which is not read here; texts and images are.",
        param=f"{path}.type",
    )


# ---------------------------------------------------------------------------------------------
# Events → chunks
# ---------------------------------------------------------------------------------------------


class ChatStream:
    """Writer of an answer's events as chunks, in OpenAI's form.

    The first chunk of a choice carries the role, the last one the finish reason. Choices begin in
    order, whichever is the first to have a token: OpenAI's SDK accumulates each at the place where
    it turns up.
    """

    media_type = sse.MEDIA_TYPE
    keep_alive = sse.KEEP_ALIVE

    def __init__(self, head: AnswerHead, timeline: Timeline) -> None:
        self.head = head
        self._timeline = timeline
        self._begun = 0
        self._open = (
            f'data: {{"id":{sse.quote(head.id)},"object":"chat.completion.chunk",'
            f'"created":{head.created},"model":{sse.quote(head.model)},'
            f'"system_fingerprint":"{head.fingerprint}","choices":['
        )
        self._close = (',"usage":null}' if head.include_usage else "}") + "\n\n"
        self._text_open = [
            f'{self._open}{{"index":{row},"delta":{{"content":' for row in range(head.n)
        ]
        self._text_close = f'}},"logprobs":null,"finish_reason":null}}]{self._close}'
        self._finished: dict[int, Finished] = {}

    def write(self, progress: Progress) -> bytes:
        """Return the chunks of one step, ready for the wire."""
        out, counted = "", self.head.counts_all_along or self.head.times == "always"
        for row, events in progress:
            for event in events:
                # The one path that every token takes; the rest happens a few times an answer.
                if type(event) is TextDelta and not event.logprobs and not counted:
                    out += self._text_open[row] + sse.quote(event.text) + self._text_close
                else:
                    out += self._chunk(row, event)
        return out.encode("ascii")

    def end(self) -> bytes:
        return last_chunks(self.head, self._open, self._finished)

    def fail(self, error: MLXManagerError) -> bytes:
        """Return the event of an error, which takes the place of `end`."""
        return sse.event(error_body(error)).encode("ascii")

    def _chunk(self, row: int, event: Event) -> str:  # noqa: PLR0911 one for each kind
        match event:
            case Admitted():
                return ""
            case Started(ids=ids):
                return self._begin(row, ids)
            case TextDelta(text, logprobs):
                return self._choice(row, {"content": text}, logprobs=chat_logprobs(logprobs))
            case ReasoningDelta(text):
                return self._choice(row, {self.head.reasoning_field: text})
            case ToolCallStarted(index, call_id, name):
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": call_id, "type": "function", "function": function}
                return self._choice(row, {"tool_calls": [call]})
            case ToolCallDelta(index, arguments):
                call = {"index": index, "function": {"arguments": arguments}}
                return self._choice(row, {"tool_calls": [call]})
            case Finished(reason, stop_sequence=stop, ids=ids):
                self._finished[row] = event
                return self._choice(row, {}, reason, stop=stop, ids=ids)

    def _begin(self, row: int, prompt_ids: tuple[int, ...]) -> str:
        """The first chunks of this choice and of those before it, unless they have been sent."""
        new = range(self._begun, row + 1)
        self._begun = max(self._begun, row + 1)
        # No empty content: an answer that turns out to be calls alone has none.
        return "".join(
            self._choice(each, {"role": "assistant"}, prompt_ids=prompt_ids) for each in new
        )

    def _choice(
        self,
        row: int,
        delta: dict[str, Any],
        reason: str | None = None,
        *,
        logprobs: dict[str, Any] | None = None,
        prompt_ids: tuple[int, ...] = (),
        stop: str | None = None,
        ids: tuple[int, ...] = (),
    ) -> str:
        choice = {"index": row, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        if stop is not None:
            choice["stop_reason"] = stop
        if ids:
            choice["token_ids"] = ids
        beside = f',"prompt_token_ids":{sse.dump(prompt_ids)}' if prompt_ids else ""
        close = self._close
        if self.head.counts_all_along:
            close = counts_so_far(self._timeline.rows[row], self._finished.get(row))
        beside += timed(self.head, self._timeline, row, ended=reason is not None)
        return f"{self._open}{sse.dump(choice)}]{beside}{close}"


# ---------------------------------------------------------------------------------------------
# Events → body
# ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Choice:
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    started: Started | None = None
    finished: Finished | None = None

    def add(self, event: Event) -> None:
        match event:
            case Started():
                self.started = event
            case TextDelta(text, logprobs):
                self.text.append(text)
                self.logprobs += logprobs
            case ReasoningDelta(text):
                self.reasoning.append(text)
            case ToolCallStarted(_, call_id, name):
                self.calls.append((call_id, name))
                self.arguments.append("")
            case ToolCallDelta(index, arguments):
                self.arguments[index] += arguments
            case Finished():
                self.finished = event

    def message(self, reasoning_field: str) -> ChatMessage:
        text = "".join(self.text)
        absent = not text and (self.calls or self.reasoning)
        optional: dict[str, Any] = {}
        if self.reasoning:
            optional[reasoning_field] = "".join(self.reasoning)
        if self.calls:
            optional["tool_calls"] = [
                ChatToolCall(
                    id=call_id,
                    type="function",
                    function=FunctionCall(name=name, arguments=arguments),
                )
                for (call_id, name), arguments in zip(self.calls, self.arguments, strict=True)
            ]
        content = None if absent else text
        return ChatMessage(role="assistant", content=content, refusal=None, **optional)


class ChatAnswer:
    """Collector of an answer's events into the body of a response."""

    def __init__(self, head: AnswerHead, timeline: Timeline) -> None:
        self.head = head
        self._timeline = timeline
        self._choices = [_Choice() for _ in range(head.n)]

    def add(self, progress: Progress) -> None:
        for row, events in progress:
            for event in events:
                self._choices[row].add(event)

    def body(self) -> Iterator[str]:
        """A `ChatCompletionResponse`, once every row has finished."""
        ends = [choice.finished for choice in self._choices if choice.finished is not None]
        around = ChatCompletionResponse(
            id=self.head.id,
            object="chat.completion",
            created=self.head.created,
            model=self.head.model,
            system_fingerprint=self.head.fingerprint,
            choices=[],
            usage=total((end.usage for end in ends), self.head.n),
            **self._prompt_ids(),
            **whole_times(self.head, self._timeline),
        )
        given = enumerate(zip(self._choices, ends, strict=True))
        choices = (self._choice(index, *each) for index, each in given)
        return filled(whole(around), "choices", joined(choices))

    def _choice(self, index: int, given: _Choice, end: Finished) -> Iterator[str]:
        choice = ChatCompletionChoice(
            index=index,
            message=given.message(self.head.reasoning_field),
            logprobs=None,
            finish_reason=end.reason,
            **({} if end.stop_sequence is None else {"stop_reason": end.stop_sequence}),
            **({"token_ids": list(end.ids)} if self.head.return_ids else {}),
        )
        if self.head.logprobs is None:
            return iter((whole(choice),))
        scores = chat_logprobs_in_pieces(given.logprobs)
        return filled(whole(choice), "logprobs", scores, "null")

    def _prompt_ids(self) -> dict[str, list[int]]:
        started = self._choices[0].started
        if not self.head.return_ids or started is None:
            return {}
        return {"prompt_token_ids": list(started.ids)}
