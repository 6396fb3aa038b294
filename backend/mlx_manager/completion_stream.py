"""One line of a chat completion's stream, of any server with OpenAI's shapes, as a value."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of the server. `cached`: number of the prompt's tokens that were cached."""

    prompt: int
    completion: int
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Contents of one event; the parts that the event lacks are empty."""

    text: str = ""
    reasoning: str = ""
    tool_calls: str = ""
    finish_reason: str | None = None
    usage: Usage | None = None
    error: str = ""

    @property
    def carries_output(self) -> bool:
        return bool(self.text or self.reasoning or self.tool_calls)


def lines(pieces: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, str]]:
    """Yield each line of a stream with the moment at which the line's end came.

    Only a line feed ends one: an answer may have U+2028 and what else `str.splitlines` breaks at.
    """
    moment, rest = 0.0, b""
    for moment, piece in pieces:
        *complete, rest = (rest + piece).split(b"\n")
        for line in complete:
            yield moment, line.decode(errors="replace").rstrip("\r")
    if rest:
        yield moment, rest.decode(errors="replace")


def read_line(line: str) -> Chunk | None:
    """Return the chunk in a line of the stream; None for comments, blank lines and `[DONE]`.

    A line that is not JSON, or has another shape, is a chunk with an `error`.
    """
    if not line.startswith("data:"):
        return None
    data = line[5:].strip()
    if data in {"", "[DONE]"}:
        return None
    try:
        return read_chunk(json.loads(data))
    except (ValueError, LookupError, TypeError, AttributeError):
        return Chunk(error=f"the server sent what is no chat completion chunk: {data[:200]}")


def read_chunk(body: Any) -> Chunk:
    """Return the chunk in an event. Servers leave out some keys, or send null for them."""
    if error := body.get("error"):
        return Chunk(error=error_message(body, str(error)))
    usage = read_usage(body.get("usage"))
    choices = body.get("choices") or []
    if not choices:
        return Chunk(usage=usage)
    choice = choices[0]
    delta = choice.get("delta") or choice.get("message") or {}
    calls = delta.get("tool_calls") or []
    return Chunk(
        text=text_of(delta.get("content")),
        reasoning=text_of(delta.get("reasoning_content") or delta.get("reasoning")),
        tool_calls="".join(call_text(call) for call in calls),
        finish_reason=choice.get("finish_reason"),
        usage=usage,
    )


def text_of(value: Any) -> str:
    """
    Raises:
        TypeError: it is neither a text nor null.
    """
    return "" + (value or "")


def call_text(call: Any) -> str:
    function = call.get("function") or {}
    return (function.get("name") or "") + (function.get("arguments") or "")


def read_usage(usage: Any) -> Usage | None:
    if not usage:
        return None
    details = usage.get("prompt_tokens_details") or {}
    return Usage(
        number_of(usage.get("prompt_tokens")),
        number_of(usage.get("completion_tokens")),
        number_of(details.get("cached_tokens")),
    )


def number_of(value: Any) -> int:
    """
    Raises:
        TypeError: it is neither a number nor null.
    """
    return 0 + (value or 0)


def error_message(body: Any, otherwise: str) -> str:
    """Return the message of an error body in OpenAI's or FastAPI's shape; else `otherwise`."""
    match body:
        case {"error": {"message": str(message)}} | {"error": str(message)}:
            return message
        case {"detail": str(message)} | {"message": str(message)}:
            return f"{otherwise}: {message}"
    return otherwise
