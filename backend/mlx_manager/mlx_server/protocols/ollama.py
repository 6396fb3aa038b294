"""Ollama's API: body → requests, events → lines of NDJSON, events → body. Pure.

Source: Ollama's docs/api.md.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from mlx_manager.mlx_server.core import (
    Admitted,
    Constraint,
    Conversation,
    EmbeddingRequest,
    Encoded,
    Event,
    Finished,
    GenerationRequest,
    Image,
    JsonObject,
    JsonSchema,
    Message,
    Progress,
    Prompt,
    ReasoningDelta,
    Sampling,
    Started,
    StopRules,
    Text,
    TextDelta,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolCallStarted,
)
from mlx_manager.mlx_server.defaults import asked_sampling
from mlx_manager.mlx_server.errors import InvalidParameter, MLXManagerError, UnsupportedParameter
from mlx_manager.mlx_server.protocols import sse
from mlx_manager.mlx_server.protocols.answer import new_id
from mlx_manager.mlx_server.protocols.dialects import Refusal
from mlx_manager.mlx_server.protocols.images import content_of
from mlx_manager.mlx_server.protocols.logprobs import entries
from mlx_manager.mlx_server.protocols.parameters import refuse_unsupported
from mlx_manager.mlx_server.schemas.ollama import (
    OllamaBody,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
)
from mlx_manager.mlx_server.timeline import Timeline

VERSION = "0.13.5"
"""The release of Ollama whose API is served; clients compare it with what they need."""

NDJSON = "application/x-ndjson"

NANOSECONDS = 10**9

UNSUPPORTED_OPTIONS = {
    "mirostat": Refusal((0,)),
    "tfs_z": Refusal((1.0,)),
    "typical_p": Refusal((1.0, 0.0)),
}
UNSUPPORTED_IN_GENERATE = {
    "context": Refusal(([],), "Send the conversation to /api/chat."),
    "template": Refusal(("",), "The model's own template is used."),
    "width": Refusal(),
    "height": Refusal(),
    "steps": Refusal(),
}

UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
DURATION = re.compile(r"[+-]?(\d+(\.\d+)?(ns|us|µs|ms|s|m|h))+")
DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")


# ---------------------------------------------------------------------------------------------
# Body → requests
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OllamaHead:
    """Facts of an answer before it begins. `began` is read from `clock`, in seconds.

    model: the id that is leased. shown: the name that the client asked for.
    """

    model: str
    shown: str
    id: str = field(default_factory=lambda: new_id("ollama"))
    clock: Callable[[], float] = time.perf_counter
    began: float = field(default_factory=time.perf_counter)

    def elapsed(self) -> int:
        """Return the nanoseconds since the request came."""
        return nanoseconds(self.clock() - self.began)


def keep_alive(value: str | float | None) -> float | None:
    """Return the seconds that a model is to stay without use; None where the request is silent.

    A negative value means for ever. A number alone, also as text, is in seconds; durations are
    Go's (`"5m"`, `"1h30m"`).

    Raises:
        InvalidParameter: neither a number nor a duration.
    """
    if value is None:
        return None
    if isinstance(value, str):
        text = value.strip()
        try:
            seconds = float(text)
        except ValueError:
            if DURATION.fullmatch(text) is None:
                raise InvalidParameter(
                    "`keep_alive` should be a number of seconds or a duration such as '5m', "
                    f"not {value[:40]!r}.",
                    param="keep_alive",
                ) from None
            parts = DURATION_PART.findall(text)
            seconds = sum(float(number) * UNITS[unit] for number, unit in parts)
            seconds = -seconds if text.startswith("-") else seconds
    else:
        seconds = float(value)
    if math.isnan(seconds):
        raise InvalidParameter("`keep_alive` should be a number of seconds.", param="keep_alive")
    return math.inf if seconds < 0 else seconds


def chat_request(body: OllamaChatRequest, head: OllamaHead) -> GenerationRequest:
    """Return the request for the next message of a conversation.

    Raises:
        InvalidParameter: a value that contradicts another.
        UnsupportedParameter: a field or a kind of content that can't be honoured.
    """
    conversation = Conversation(
        messages=tuple(_messages(body.messages or [])),
        tools=tuple(
            Tool(
                name=tool.function.name,
                description=tool.function.description,
                parameters=tool.function.parameters or {},
                param=f"tools[{i}].function",
            )
            for i, tool in enumerate(body.tools or ())
        ),
        template_args=_template_args(body),
    )
    return _request(body, head, conversation)


def generate_request(body: OllamaGenerateRequest, head: OllamaHead) -> GenerationRequest:
    """Return the request for what follows a prompt.

    Raises:
        InvalidParameter: a value that contradicts another.
        UnsupportedParameter: a field or a kind of content that can't be honoured.
    """
    refuse_unsupported(body, UNSUPPORTED_IN_GENERATE)
    images = _images(body.images, "images")
    prompt: Prompt
    if body.raw or body.suffix:
        if images:
            raise InvalidParameter(
                "`images` are not allowed beside `raw` or `suffix`: no template is used then.",
                param="images",
            )
        if body.system:
            raise InvalidParameter(
                "`system` is not allowed beside `raw` or `suffix`: no template is used then.",
                param="system",
            )
        prompt = Text(body.prompt or "", body.suffix or "")
    else:
        before = [Message("system", body.system)] if body.system else []
        messages = (*before, Message("user", content_of((*images, body.prompt or ""))))
        prompt = Conversation(messages, template_args=_template_args(body), param="prompt")
    return _request(body, head, prompt)


def _request(body: OllamaBody, head: OllamaHead, prompt: Prompt) -> GenerationRequest:
    options = body.options or OllamaOptions()
    refuse_unsupported(options, UNSUPPORTED_OPTIONS, "options.")
    if options.num_predict == 0:
        raise InvalidParameter(
            "`options.num_predict` should be at least 1, or -1 for as many as the context holds.",
            param="options.num_predict",
        )
    limited = options.num_predict is not None and options.num_predict > 0
    stop = [options.stop] if isinstance(options.stop, str) else options.stop or []
    return GenerationRequest(
        model=head.model,
        prompt=prompt,
        sampling=_sampling(options),
        stop=StopRules(strings=tuple(stop)),
        max_tokens=options.num_predict if limited else None,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        constraint=_constraint(body),
        speculation=options.speculation,
        cache_salt=options.cache_salt or "",
        request_id=head.id,
    )


def _sampling(options: OllamaOptions) -> Sampling:
    return asked_sampling(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        repetition_penalty=1.0 if options.repeat_last_n == 0 else options.repeat_penalty,
        seed=None if options.seed is None else options.seed % 2**64,
    )


def _constraint(body: OllamaBody) -> Constraint | None:
    match body.format:
        case None | "":
            return None
        case "json":
            return JsonObject("format")
        case schema:
            return JsonSchema(json.dumps(schema), param="format")


def _template_args(body: OllamaBody) -> Mapping[str, Any]:
    match body.think:
        case None:
            args: dict[str, Any] = {}
        case bool(thinks):
            args = {"enable_thinking": thinks}
        case effort:
            args = {"enable_thinking": True, "reasoning_effort": effort}
    return args


def _images(images: Sequence[Any] | None, param: str) -> list[Image]:
    """Return the pictures that stand beside a text.

    Raises:
        UnsupportedParameter: they have not been read, since the model sees none.
    """
    if not all(isinstance(image, Image) for image in images or ()):
        raise UnsupportedParameter(
            f"`{param}`: this model takes text only; leave the images out.", param=param
        )
    return list(images or ())


def _messages(messages: list[OllamaMessage]) -> Iterator[Message]:
    """Yield the messages; results are joined to calls in order, where they name none by id."""
    open_calls: list[ToolCall] = []
    made = 0
    for i, message in enumerate(messages):
        images = _images(message.images, f"messages[{i}].images")
        calls = []
        for call in message.tool_calls or ():
            given = call.function.arguments
            text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            calls.append(ToolCall(call.id or f"call_{made}", call.function.name, text))
            made += 1
        open_calls += calls
        name = message.tool_name or message.name
        answered = message.tool_call_id
        if message.role == "tool":
            answers = next(
                (
                    call
                    for call in open_calls
                    if (call.id == answered if answered else name in (None, call.name))
                ),
                None,
            )
            if answers is not None:
                open_calls.remove(answers)
                answered, name = answers.id, name or answers.name
        yield Message(
            role="system" if message.role == "developer" else message.role,
            # Ollama, too, shows a message's pictures before its text.
            content=content_of((*images, message.content or "")),
            name=name,
            reasoning=message.thinking,
            tool_calls=tuple(calls),
            tool_call_id=answered,
        )


# ---------------------------------------------------------------------------------------------
# Events → lines, events → body
# ---------------------------------------------------------------------------------------------


def now() -> str:
    """Return the time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * NANOSECONDS))


@dataclass(slots=True)
class _Pieces:
    """Parts of an answer that one line shows."""

    text: list[str] = field(default_factory=list)
    thinking: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.text or self.thinking or self.calls)


class _Lines:
    """An answer's events as Ollama's objects: pieces, then one with the counts and durations.

    Calls are shown whole, as Ollama's clients expect them.
    """

    def __init__(self, head: OllamaHead, timeline: Timeline, *, chat: bool) -> None:
        self._head = head
        self._timeline = timeline
        self._chat = chat
        self._open: tuple[ToolCallStarted, list[str]] | None = None
        self._called = False

    def pieces(self, events: list[Event]) -> tuple[_Pieces, Finished | None]:
        """Return the text, thinking and whole calls of some events, and the end if it is there."""
        pieces = _Pieces()
        finished: Finished | None = None
        for event in events:
            match event:
                case Admitted() | Started():
                    pass
                case TextDelta(text, logprobs):
                    self._close(pieces)
                    pieces.text.append(text)
                    pieces.logprobs += entries(logprobs)
                case ReasoningDelta(text):
                    pieces.thinking.append(text)
                case ToolCallStarted():
                    self._close(pieces)
                    self._open = (event, [])
                case ToolCallDelta(_, arguments):
                    assert self._open is not None
                    self._open[1].append(arguments)
                case Finished():
                    self._close(pieces)
                    finished = event
        return pieces, finished

    def _close(self, pieces: _Pieces) -> None:
        """Show the call that has been written, if one was begun."""
        if self._open is None:
            return
        begun, written = self._open
        self._open = None
        text = "".join(written)
        try:
            arguments = json.loads(text or "{}")
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            # A call that was cut off is no object, which is all that a call may bring here.
            pieces.text.append(text)
            return
        function = {"index": begun.index, "name": begun.name, "arguments": arguments}
        pieces.calls.append({"id": begun.id, "function": function})

    def line(self, pieces: _Pieces, *, done: bool = False) -> dict[str, Any]:
        """Return the object that shows `pieces`."""
        text, thinking = "".join(pieces.text), "".join(pieces.thinking)
        shown: dict[str, Any] = {"model": self._head.shown, "created_at": now()}
        if self._chat:
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if thinking:
                message["thinking"] = thinking
            if pieces.calls:
                message["tool_calls"] = pieces.calls
            shown["message"] = message
        else:
            shown["response"] = text
            if thinking:
                shown["thinking"] = thinking
        if pieces.logprobs:
            shown["logprobs"] = pieces.logprobs
        return shown | {"done": done}

    def figures(self, finished: Finished) -> dict[str, Any]:
        """Return the reason of the end, token counts, and durations in nanoseconds."""
        line = self._timeline.rows[0]
        begun = line.started or Started(0)
        return {
            "done_reason": "length" if finished.reason == "length" else "stop",
            "total_duration": nanoseconds(line.end),
            "load_duration": nanoseconds(line.first - begun.queued - begun.prefill),
            "prompt_eval_count": finished.usage.prompt_tokens,
            "prompt_eval_duration": nanoseconds(begun.prefill),
            "prompt_eval_cached_count": finished.usage.cached_tokens,
            "eval_count": finished.usage.completion_tokens,
            "eval_duration": nanoseconds(line.end - line.first),
        }


class OllamaStream:
    """Writer of an answer's events as NDJSON."""

    media_type = NDJSON

    def __init__(self, head: OllamaHead, timeline: Timeline, *, chat: bool) -> None:
        self._lines = _Lines(head, timeline, chat=chat)
        self._last = b""
        self.keep_alive = _encoded(self._lines.line(_Pieces()))
        """NDJSON has no comments: an empty piece is the sign of life."""

    def write(self, progress: Progress) -> bytes:
        """Return the lines of one step, ready for the wire."""
        out = b""
        for _, events in progress:
            pieces, finished = self._lines.pieces(events)
            if pieces:
                out += _encoded(self._lines.line(pieces))
            if finished is not None:
                last = self._lines.line(_Pieces(), done=True)
                self._last = _encoded(last | self._lines.figures(finished))
        return out

    def end(self) -> bytes:
        return self._last

    def fail(self, error: MLXManagerError) -> bytes:
        """Return the line that follows if there is no end."""
        return _encoded(error_body(error))


class OllamaAnswer:
    """Collector of an answer's events into one object."""

    def __init__(self, head: OllamaHead, timeline: Timeline, *, chat: bool) -> None:
        self._lines = _Lines(head, timeline, chat=chat)
        self._all = _Pieces()
        self._finished: Finished | None = None

    def add(self, progress: Progress) -> None:
        for _, events in progress:
            pieces, finished = self._lines.pieces(events)
            self._all.text += pieces.text
            self._all.thinking += pieces.thinking
            self._all.calls += pieces.calls
            self._all.logprobs += pieces.logprobs
            self._finished = finished or self._finished

    def body(self) -> Iterator[str]:
        assert self._finished is not None
        whole = self._lines.line(self._all, done=True)
        yield sse.dump(whole | self._lines.figures(self._finished))


def _encoded(value: object) -> bytes:
    return f"{sse.dump(value)}\n".encode("ascii")


def error_body(error: MLXManagerError) -> dict[str, Any]:
    """Return a failure in the shape that Ollama's clients know."""
    return {"error": error.message}


def lifecycle_body(head: OllamaHead, reason: str, *, chat: bool) -> dict[str, Any]:
    """Return the answer to a request that only loads ("load") or unloads ("unload") a model."""
    empty: dict[str, Any] = {"role": "assistant", "content": ""}
    shown = {"message": empty} if chat else {"response": ""}
    told = {"model": head.shown, "created_at": now()} | shown
    return told | {"done_reason": reason, "done": True}


# ---------------------------------------------------------------------------------------------
# Embeddings and models
# ---------------------------------------------------------------------------------------------


def embed_request(
    body: OllamaEmbedRequest | OllamaEmbeddingsRequest, head: OllamaHead
) -> EmbeddingRequest:
    """Return the request for vectors; texts that are too long are cut unless `truncate` is off."""
    match body:
        case OllamaEmbedRequest():
            inputs = [body.input] if isinstance(body.input, str) else body.input
            truncate = None if body.truncate is False else -1
            dimensions = body.dimensions
        case _:
            inputs, truncate, dimensions = [body.prompt], -1, None
    return EmbeddingRequest(head.model, tuple(inputs), dimensions, truncate, request_id=head.id)


def vectors(head: OllamaHead, encoded: Encoded) -> Iterator[str]:
    """Yield the answer of `/api/embed`."""
    yield f'{{"model":{sse.quote(head.shown)},"embeddings":['
    for number, row in enumerate(encoded.rows):
        yield ("," if number else "") + sse.dump(row.tolist())
    rest = {
        "total_duration": head.elapsed(),
        "load_duration": 0,
        "prompt_eval_count": encoded.tokens,
    }
    yield "]," + sse.dump(rest)[1:]


def digest(model_id: str, nbytes: int) -> str:
    """Return a stable digest for a model that has none of Ollama's: of its name and size."""
    return hashlib.sha256(f"{model_id} {nbytes}".encode()).hexdigest()


def tagged(model_id: str) -> str:
    """Return the name with a tag, as Ollama lists models."""
    return model_id if ":" in model_id else f"{model_id}:latest"
