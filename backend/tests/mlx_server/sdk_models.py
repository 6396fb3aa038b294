"""The SDKs' own models as judges: nothing missing, nothing unknown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from openai.types.responses import Response, ResponseFunctionCallArgumentsDoneEvent
from pydantic import BaseModel, TypeAdapter

BEYOND = {
    (ResponseFunctionCallArgumentsDoneEvent, "name"),
    *((Response, name) for name in ("frequency_penalty", "presence_penalty", "store")),
}
"""Required by OpenAI's API description, or that of Open Responses, and unknown to OpenAI's SDK."""


def strictly(kind: Any, value: object) -> Any:
    """`value` as an SDK's `kind`, which must declare every field that it has."""
    model = adapter(kind).validate_python(value)
    unknown = list(undeclared(model, ""))
    assert not unknown, unknown
    return model


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def undeclared(value: object, path: str) -> Iterator[str]:
    match value:
        case BaseModel():
            unknown = [
                name for name in value.model_extra or () if (type(value), name) not in BEYOND
            ]
            yield from (f"{path}.{name}" for name in unknown)
            for name in type(value).model_fields:
                yield from undeclared(getattr(value, name), f"{path}.{name}")
        case list():
            for index, item in enumerate(value):
                yield from undeclared(item, f"{path}[{index}]")


def events(body: str) -> list[tuple[str, Any]]:
    """Names and data of a stream's events, comments and `[DONE]` left out."""
    found = []
    for text in body.split("\n\n")[:-1]:
        if text.startswith(":") or text == "data: [DONE]":
            continue
        name, data = text.split("\n")
        assert name.startswith("event: ")
        assert data.startswith("data: ")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found
