"""Requests in the vocabulary of `core` as bodies of OpenAI's API, for one server. Pure.

A conversation goes to `/chat/completions`, any other prompt to `/completions`. Fields that a
request leaves open are left out, so that the server's own defaults hold. A demand that the
server's dialect has no field for is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

from pydantic_core import from_json

from mlx_manager.mlx_server.core import (
    SAMPLING_DEFAULTS,
    Choice,
    Constraint,
    Conversation,
    EmbeddingRequest,
    GenerationRequest,
    Grammar,
    JsonObject,
    JsonSchema,
    Message,
    NamedTool,
    Part,
    Regex,
    RerankRequest,
    Sampling,
    Text,
    Tokens,
    Tool,
    ToolCall,
    ToolChoice,
)
from mlx_manager.mlx_server.errors import UnsupportedParameter
from mlx_manager.mlx_server.images.decode import data_url_of
from mlx_manager.mlx_server.remotes.dialects import OTHER, OURS, SGLANG
from mlx_manager.mlx_server.remotes.facts import Facts

OPENAIS = frozenset({"temperature", "top_p", "presence_penalty", "frequency_penalty"})
"""The fields of `Sampling` that every server takes."""
NEUTRAL = Sampling()
SIGN = 2**63


class Body:
    """A body in the making, for the server of `facts` at `place`."""

    def __init__(self, facts: Facts, place: str) -> None:
        self.fields: dict[str, Any] = {"model": facts.name}
        self.dialect = facts.dialect
        self._place = place

    def put(self, **fields: Any) -> None:
        """Put fields that every server takes."""
        self.fields |= fields

    def completion(self, **fields: Any) -> None:
        """Put fields of OpenAI's completions that not every server takes.

        Raises:
            UnsupportedParameter: the server does not take one.
        """
        for name in fields.keys() & self.dialect.lacking:
            raise self.refusal(name)
        self.put(**fields)

    def beyond(self, name: str, value: Any, param: str | None = None) -> None:
        """Put a field that is not OpenAI's. param: the field of the request, if it is another.

        Raises:
            UnsupportedParameter: the server has no such field.
        """
        own = self.dialect.fields.get(name)
        if own is None:
            raise self.refusal(param or name)
        self.fields[own] = value

    def has(self, name: str) -> bool:
        return name in self.dialect.fields

    def refusal(self, param: str) -> UnsupportedParameter:
        return UnsupportedParameter(
            f"`{param}` can't be asked of the server that has this model, {self._place} "
            f"({self.dialect.name}).",
            param=param,
        )

    def unbounded(self) -> UnsupportedParameter:
        return UnsupportedParameter(
            "`max_tokens` must be a number of tokens, 1 or more, for the server that has this "
            f"model, {self._place} ({self.dialect.name}): left open it would be 16.",
            param="max_tokens",
        )


def generation(request: GenerationRequest, facts: Facts, place: str) -> tuple[str, dict[str, Any]]:
    """Return the path below `/v1` and the body for one row.

    Raises:
        UnsupportedParameter: a demand that the server has no field for.
    """
    body = Body(facts, place)
    options = {"include_usage": True}
    if body.dialect.counts:
        options["continuous_usage_stats"] = True
    body.put(stream=True, stream_options=options)
    match request.prompt:
        case Conversation() as conversation:
            path = "/chat/completions"
            _put_conversation(body, conversation)
            _put_chat(body, request)
        case Text() | Tokens() as prompt:
            path = "/completions"
            _put_prompt(body, prompt)
            _put_completion(body, request, facts)
    _put_sampling(body, request.sampling)
    _put_ends(body, request)
    if request.constraint is not None:
        _put_constraint(body, request.constraint)
    _put_rest(body, request)
    return path, body.fields


# ---------------------------------------------------------------------------------------------
# Parameters
# ---------------------------------------------------------------------------------------------


def _put_sampling(body: Body, sampling: Sampling) -> None:
    for name in sorted(SAMPLING_DEFAULTS - sampling.silent):
        value = getattr(sampling, name)
        if name == "top_k" and not value and body.has(name):
            body.beyond(name, body.dialect.all_tokens)
        elif name in OPENAIS:
            body.put(**{name: value})
        elif value != getattr(NEUTRAL, name) or body.has(name):
            body.beyond(name, value)
    if sampling.seed is not None:
        # The wire's seeds have a sign; 64 bits mean the same draws with it and without.
        body.put(seed=sampling.seed - 2 * SIGN if sampling.seed >= SIGN else sampling.seed)
    if sampling.logit_bias:
        body.put(logit_bias={str(token): bias for token, bias in sampling.logit_bias})


def _put_ends(body: Body, request: GenerationRequest) -> None:
    stop = request.stop
    if stop.strings:
        body.put(stop=list(stop.strings))
    if stop.token_ids:
        body.beyond("stop_token_ids", list(stop.token_ids))
    if stop.ignore_eos:
        body.beyond("ignore_eos", True)
    if stop.min_tokens:
        body.beyond("min_tokens", stop.min_tokens)
    if request.max_tokens is not None:
        body.put(max_tokens=request.max_tokens)


def _put_rest(body: Body, request: GenerationRequest) -> None:
    if request.thinking_budget is not None:
        body.beyond("thinking_token_budget", request.thinking_budget)
    if request.return_ids:
        body.beyond("return_token_ids", True)
    if request.context_length is not None:
        raise body.refusal("context_length")
    if request.speculation == "off":
        body.beyond("speculation", "off")
    if request.cache_salt:
        # Equal ones stay equal; a key's own may have what no body may.
        body.beyond("cache_salt", sha256(request.cache_salt.encode()).hexdigest())
    # Without effect on the answer: an order among waiting requests, and tokens that are tried.
    if request.priority and body.has("priority"):
        body.beyond("priority", request.priority)
    if request.speculation == "auto" and body.has("speculation"):
        body.beyond("speculation", "auto")


def _put_constraint(body: Body, constraint: Constraint) -> None:
    match constraint:
        case JsonObject() | JsonSchema():
            _put_json(body, constraint)
        case Regex(pattern, param):
            _put_form(body, "regex", pattern, param, "regex")
        case Choice(options, param):
            _put_form(body, "choice", list(options), param, None)
        case Grammar(text, param):
            other = "grammar" if body.has("grammar") else "ebnf"
            _put_form(body, "grammar", text, param, other)


def _put_json(body: Body, asked: JsonObject | JsonSchema) -> None:
    """Put the JSON of the answer. OpenAI's field for it is one of chats alone.

    Raises:
        UnsupportedParameter: the server has no field for it beside a prompt that is no chat.
    """
    field = "response_format" if "messages" in body.fields else body.dialect.schema
    match field, asked:
        case None, _:
            raise body.refusal(asked.param)
        case "json_schema", JsonObject():
            body.put(json_schema={"type": "object"})
        case "json_schema", JsonSchema(schema):
            body.put(json_schema=from_json(schema))
        case _, JsonObject():
            body.put(response_format={"type": "json_object"})
        case _, JsonSchema(schema, strict):
            form = {"name": "answer", "schema": from_json(schema), "strict": strict}
            body.put(response_format={"type": "json_schema", "json_schema": form})


def _put_form(body: Body, kind: str, value: Any, param: str, other: str | None) -> None:
    """Put a form of the answer: as vLLM has it, or in a field `other` of its own."""
    if body.has("structured_outputs") or other is None:
        body.beyond("structured_outputs", {kind: value}, param)
    else:
        body.beyond(other, value, param)


# ---------------------------------------------------------------------------------------------
# Prompts
# ---------------------------------------------------------------------------------------------


def _put_prompt(body: Body, prompt: Text | Tokens) -> None:
    if isinstance(prompt, Tokens):
        body.put(prompt=list(prompt.ids))
        return
    body.put(prompt=prompt.text)
    if prompt.suffix:
        body.completion(suffix=prompt.suffix)


def _put_completion(body: Body, request: GenerationRequest, facts: Facts) -> None:
    if request.max_tokens is None:
        # Left out it would be 16.
        if body.dialect.unlimited is not None:
            body.put(**body.dialect.unlimited)
        elif facts.context_length and body.dialect is not SGLANG:
            body.put(max_tokens=facts.context_length)
        else:
            # SGLang refuses more tokens than there is room for beside the prompt.
            raise body.unbounded()
    if request.echo:
        body.completion(echo=True)
    if request.logprobs is not None:
        body.put(logprobs=max(request.logprobs, body.dialect.least_top))
    if request.prediction and body.dialect is OURS:
        body.put(prediction={"type": "content", "content": request.prediction})


def _put_chat(body: Body, request: GenerationRequest) -> None:
    if request.logprobs is not None:
        most = max(request.logprobs, body.dialect.least_top)
        body.put(logprobs=True, top_logprobs=most)
    if request.prediction:
        body.put(prediction={"type": "content", "content": request.prediction})


def _put_conversation(body: Body, conversation: Conversation) -> None:
    """Put a conversation and all that belongs to it.

    Raises:
        UnsupportedParameter: a grammar for a tool's text, or what the server has no field for.
    """
    body.put(messages=list(map(_message, conversation.messages)))
    if conversation.tools:
        body.put(tools=[_tool(tool, body) for tool in conversation.tools])
        body.put(tool_choice=_choice(conversation.tool_choice, conversation.tools, body))
        if not conversation.parallel_tool_calls:
            body.put(parallel_tool_calls=False)
    if not conversation.add_generation_prompt:
        body.beyond("add_generation_prompt", False)
    if conversation.continue_final_message:
        body.beyond("continue_final_message", True)
    _put_template_args(body, conversation.template_args)


def _put_template_args(body: Body, args: Mapping[str, Any]) -> None:
    effort, thinks = args.get("reasoning_effort"), args.get("enable_thinking")
    if isinstance(effort, str):
        body.put(reasoning_effort=effort)
    if body.dialect is not OTHER:
        if args:
            body.beyond("chat_template_kwargs", dict(args))
        return
    if thinks is not None and effort is None:
        # OpenAI's own switch, which is all that such a server may know.
        body.put(reasoning_effort="medium" if thinks else "none")
    for name in args.keys() - {"reasoning_effort", "enable_thinking"}:
        raise body.refusal(f"chat_template_kwargs.{name}")


def _tool(tool: Tool, body: Body) -> dict[str, Any]:
    if tool.text_grammar is not None:
        raise body.refusal(tool.schema_param)
    function: dict[str, Any] = {"name": tool.name, "parameters": dict(tool.parameters)}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice, tools: Sequence[Tool], body: Body) -> Any:
    """
    Raises:
        UnsupportedParameter: one of several tools is named, and the server has no word for that.
    """
    if not isinstance(choice, NamedTool):
        return choice
    if body.dialect.names_tools:
        return {"type": "function", "function": {"name": choice.name}}
    if len(tools) > 1:
        raise body.refusal("tool_choice")
    return "required"


def _message(message: Message) -> dict[str, Any]:
    said = message.content
    content: Any = said if isinstance(said, str) else [_part(part) for part in said]
    if not content and message.tool_calls:
        content = None
    entry: dict[str, Any] = {"role": message.role, "content": content}
    if message.name is not None:
        entry["name"] = message.name
    if message.reasoning is not None:
        entry["reasoning_content"] = entry["reasoning"] = message.reasoning
    if message.tool_calls:
        entry["tool_calls"] = list(map(_call, message.tool_calls))
    if message.tool_call_id is not None:
        entry["tool_call_id"] = message.tool_call_id
    return entry


def _part(part: Part) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image_url", "image_url": {"url": data_url_of(part.data)}}


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


# ---------------------------------------------------------------------------------------------
# Encoders, and tokenizers
# ---------------------------------------------------------------------------------------------


def embedding(request: EmbeddingRequest, facts: Facts, place: str) -> dict[str, Any]:
    """Return the body for `/embeddings`.

    Raises:
        UnsupportedParameter: a demand that the server has no field for.
    """
    body = Body(facts, place)
    inputs = [each if isinstance(each, str) else list(each) for each in request.inputs]
    body.put(input=inputs, encoding_format="base64")
    if request.dimensions is not None:
        body.put(dimensions=request.dimensions)
    if request.truncate is not None:
        body.beyond("truncate_prompt_tokens", request.truncate)
    if request.prompt is not None:
        body.beyond("prompt_name", request.prompt)
    return body.fields


def ranking(request: RerankRequest, facts: Facts, place: str) -> dict[str, Any]:
    """Return the body for `/rerank`.

    Raises:
        UnsupportedParameter: a demand that the server has no field for.
    """
    body = Body(facts, place)
    body.put(query=request.query, documents=list(request.documents))
    if facts.dialect is OURS:
        body.put(return_documents=False)
    if request.truncate is not None:
        body.beyond("truncate_prompt_tokens", request.truncate)
    if not request.activate:
        body.beyond("use_activation", False)
    if request.instruction is not None:
        body.beyond("instruction", request.instruction)
    return body.fields


def rendering(conversation: Conversation, facts: Facts, place: str) -> Iterator[tuple[str, Any]]:
    """Yield the fields by which a conversation is tokenised, or rendered.

    Raises:
        UnsupportedParameter: a demand that the server has no field for.
    """
    body = Body(facts, place)
    _put_conversation(body, conversation)
    dropped = {"tool_choice", "parallel_tool_calls", "reasoning_effort"}
    if conversation.tool_choice == "none":
        # A prompt without tools: the routes of tokenizers have no choice of tools.
        dropped.add("tools")
    yield from ((name, value) for name, value in body.fields.items() if name not in dropped)
