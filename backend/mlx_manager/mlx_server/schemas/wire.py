"""Base and parts of the wire types of every protocol.

Requests accept unknown fields, because clients run ahead of servers. Unknown fields land in
`model_extra` and are named by `unknown_fields`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, WithJsonSchema

T = TypeVar("T")

CONVERSATIONS = ("messages", "input")
SYSTEMS = ("system",)
CONTENTS = ("content", "output", "tool_calls")
TOOLS = ("tools", "functions")
TEMPLATE_VARIABLES = "Variables for the chat template, such as enable_thinking"

Many = Annotated[list[T], Field(fail_fast=True)]
"""List of any length. Errors name the first wrong item only: a million of them would take seconds,
in which nobody else is served."""
NonEmpty = Annotated[str, Field(min_length=1)]
ModelName = Annotated[str, Field(max_length=4096)]
"""Name of a model, at most as long as a path: unknown names go into the log and traces, too."""
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
"""Stop string, of limited length: the matcher has a node for each of its characters."""
Seconds = Annotated[float, Field(gt=0)]


ImageUrl = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "object",
                    "properties": {
                        "url": {"type": "string"},
                        "detail": {"type": "string", "enum": ["auto", "low", "high", "original"]},
                    },
                    "required": ["url"],
                },
                {"type": "null"},
            ],
            "description": "Data URL of a PNG, JPEG, WebP or GIF, or an address at an allowed host",
        }
    ),
]
"""Source of a picture; where the model sees, `core.Image` has taken its place (`protocols.images`)
before a body is validated."""
ImageSource = Annotated[
    Any,
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "type": {"type": "string", "enum": ["base64", "url"]},
                "media_type": {"type": "string"},
                "data": {"type": "string"},
                "url": {"type": "string"},
            },
            "required": ["type"],
            "description": "PNG, JPEG, WebP or GIF in base64, or its address at an allowed host",
        }
    ),
]
"""Source of a picture in Anthropic's form; as `ImageUrl`."""
Images = Annotated[
    list[Any],
    WithJsonSchema(
        {"type": "array", "items": {"type": "string"}, "description": "In base64"},
    ),
]
"""Pictures in Ollama's form; as `ImageUrl`."""


class Wire(BaseModel):
    """The base of every wire type: unknown fields are kept, not-a-number and infinity refused."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    types_read: ClassVar[Container[str | None] | None] = None
    """Values of `type` that are read; None: all. Other values are refused by name later, so
    `unknown_fields` does not name the fields of such an object."""

    def ignored_tools(self) -> list[str]:
        """Return what is offered and left out, as the client calls it: tools that providers run."""
        return []

    def unknown_fields(self) -> list[str]:
        """Return the fields that no type here declares, dotted, each once (`messages.audio`)."""
        return list(dict.fromkeys(_unknown(self, "")))


def conversation(kind: type[Wire], body: object) -> tuple[str, list[Any]]:
    """Return the name of the field with the messages or items so far, and these; or nothing.

    body: JSON that is to be a `kind`, and need not be one.
    """
    for name, found in _lists(body, [name for name in CONVERSATIONS if name in kind.model_fields]):
        # The `input` of embeddings is a list of texts.
        if isinstance(found[0], dict):
            return name, found
    return "", []


def parts(message: object, fields: Sequence[str] = CONTENTS) -> Iterator[Any]:
    """Yield the parts of a message's content, if any, and the parts of those parts.

    Outputs of tools and sources of documents may have parts. Calls are parts, too. message: JSON.
    """
    for _, content in _lists(message, fields):
        for part in content:
            yield part
            yield from parts(part)
            if isinstance(part, dict):
                yield from parts(part.get("source"))


def tools(body: object) -> Iterator[Any]:
    """Yield the tools of a body, and those that they have, as a namespace does. body: JSON."""
    for _, found in _lists(body, TOOLS):
        for tool in found:
            yield tool
            yield from tools(tool)


def entries(body: object) -> Iterator[tuple[str, list[Any] | dict[str, Any]]]:
    """Yield the lists and objects of a body and of its objects that have entries, by their dotted
    names. body: JSON."""
    for name, value in body.items() if isinstance(body, dict) else ():
        if value and isinstance(value, list | dict):
            yield name, value
        if isinstance(value, dict):
            for inner, held in value.items():
                if held and isinstance(held, list | dict):
                    yield f"{name}.{inner}", held


def _lists(value: object, fields: Sequence[str]) -> Iterator[tuple[str, list[Any]]]:
    """Yield the fields of `fields` that are lists and not empty."""
    if isinstance(value, dict):
        for name in fields:
            match value.get(name):
                case [_, *_] as found:
                    yield name, found


class Timed(Wire):
    """Time limits of an answer. Where the server's owner allows less, the owner's limit counts."""

    timeout: Seconds | None = Field(None, description="Seconds for the whole answer, or 504")
    first_token_timeout: Seconds | None = Field(
        None, description="Seconds until the first token, or 504"
    )
    queue_timeout: Seconds | None = Field(
        None, description="Seconds in the queue of the loaded model, or 504"
    )


def _unknown(value: object, path: str) -> Iterator[str]:
    # Most values are scalars. Whether something is a `Wire` takes pydantic a microsecond to say.
    if value is None or isinstance(value, str | int | float):
        return
    if isinstance(value, list):
        if value and isinstance(value[0], Wire):
            for item in value:
                yield from _unknown(item, path)
    elif isinstance(value, Wire):
        if value.types_read is not None and value.type not in value.types_read:  # type: ignore[attr-defined]
            return
        for name, given in (value.model_extra or {}).items():
            # A null means the default, everywhere.
            if given is not None:
                yield path + name
        for name, given in value.__dict__.items():
            if given is not None:
                yield from _unknown(given, f"{path}{name}.")


def shape(value: object) -> str | None:
    match value:
        case str():
            return "<text>"
        case [int(), *_]:
            return "<ids>"
        case list():
            return "<list>"
        case dict() | BaseModel():
            return "<object>"
    return None


def text_or_list(value: object) -> str | None:
    return "<list>" if isinstance(value, list) else shape(value)


def text_or_ids(value: object) -> str | None:
    return "<ids>" if isinstance(value, list) else shape(value)


def object_or_boolean(value: object) -> str | None:
    return "<boolean>" if isinstance(value, bool) else shape(value)


def choose(by: Callable[[object], str | None], allowed: str) -> Discriminator:
    """Validate by the branch that the value's shape names, so that an error speaks of it alone.

    The names stand in angle brackets in an error's location, where no field is called so.
    """
    return Discriminator(by, "wrong_shape", f"Input should be {allowed}")
