"""Server-sent events by hand: a delta is one JSON string between two constant pieces.

Serialising each chunk as an object would cost ten times as much, and a busy server writes tens of
thousands a second.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from json.encoder import encode_basestring_ascii
from typing import Any

MEDIA_TYPE = "text/event-stream"

DONE = "data: [DONE]\n\n"

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients skip."""

quote: Callable[[str], str] = encode_basestring_ascii
"""A string as a JSON string, all ASCII: a lone surrogate or U+2028 can't break the wire."""


def dump(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def event(value: object) -> str:
    """`value` as one event."""
    return f"data: {dump(value)}\n\n"


def parse(data: bytes) -> Iterator[dict[str, Any]]:
    """The objects in a piece of a stream that was written here, `[DONE]` left out."""
    for line in data.decode().split("\n\n"):
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def named(name: str, value: object) -> str:
    """`value` as one event with a name, as Anthropic and OpenAI's Responses send them."""
    return f"event: {name}\ndata: {dump(value)}\n\n"
