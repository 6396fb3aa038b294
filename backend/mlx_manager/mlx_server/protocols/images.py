"""Pictures in a conversation: where they stand in the JSON of every protocol, and how a message's
content is put together of texts and pictures (`content_of`, `parts_of`).

For a model that sees, a picture takes the place of what describes it. Other models get a line in
its place, or the request is refused by name.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_manager.mlx_server.core import Image, Part, Parts, joined_parts
from mlx_manager.mlx_server.errors import (
    InvalidParameter,
    MLXManagerError,
    UnsupportedParameter,
)
from mlx_manager.mlx_server.images.sources import PictureSource, base64_source, url_source
from mlx_manager.mlx_server.settings import ImagesAsText

LINE = "(There is an image here. This model reads text only and can't see it.)"

_KINDS = frozenset({"image", "image_url", "input_image"})
"""Types of content parts that are pictures: Messages', chat's, Responses'."""
_SCREENSHOT = "computer_screenshot"
"""Type of a picture in Responses' outputs. Models that see none read that there is one."""
_MESSAGES = frozenset(
    {
        *("", "message", "agent_message", "computer_call_output", "function_call_output"),
        *("custom_tool_call_output", "local_shell_call_output", "apply_patch_call_output"),
    }
)
"""Types of messages and items whose pictures are read; records of hosted tools are told as text."""
_RESULT = "tool_result"
_BLOCKS = frozenset({_RESULT, "document"})
"""Types of content parts that have parts with pictures."""
_ANSWERS = frozenset({"function_call", "custom_tool_call", "reasoning", "local_shell_call"})
_DETAILS = ("auto", "low", "high", "original")


# ---------------------------------------------------------------------------------------------
# Places
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a picture in the JSON of a request.

    holder[key]: the content part that is the picture; or Ollama's list of pictures, which stands
    beside a text. path: the place's name in errors. newest: the user has sent it since the last
    answer, outside of tools' results.
    """

    holder: Any
    key: int | str
    path: str
    newest: bool = False

    @property
    def part(self) -> Any:
        """The content part, or the list."""
        return self.holder[self.key]

    @property
    def is_beside_a_text(self) -> bool:
        """Return whether the place is a list of pictures."""
        return self.key == "images"

    @property
    def count(self) -> int:
        """Number of pictures."""
        return len(self.part) if self.is_beside_a_text else 1


def places(body: object, *, beside: bool = False) -> list[Place]:
    """Return the places of the pictures in the JSON of a request, in their order.

    beside: pictures may also stand beside texts, as in Ollama's API.
    """
    found: list[Place] = []
    if not isinstance(body, dict):
        return found
    for name in ("messages", "input"):
        said = body.get(name)
        if isinstance(said, list):
            found += places_in(said, name, beside=beside)
    if beside and _has_images(body, "prompt"):
        found.append(Place(body, "images", "images", newest=True))
    return found


def places_in(said: Sequence[Any], name: str, *, beside: bool = False) -> Iterator[Place]:
    """Yield the places of the pictures in messages or items, which are JSON.

    name: the field that holds them. beside: as in `places`.
    """
    newest = _newest(said)
    for number, message in enumerate(said):
        if isinstance(message, dict) and _kind(message) in _MESSAGES:
            own = number >= newest and message.get("role") == "user"
            path = f"{name}[{number}]"
            yield from _within(message, path, newest=own)
            if beside and _has_images(message, "content"):
                yield Place(message, "images", f"{path}.images", own)


def _newest(said: Sequence[Any]) -> int:
    """Return the place after the last message or item that is the model's."""
    answers = (
        place
        for place, message in enumerate(said)
        if isinstance(message, dict)
        and (message.get("role") == "assistant" or _kind(message) in _ANSWERS)
    )
    return max(answers, default=-1) + 1


def _kind(part: Mapping[str, Any]) -> str:
    """Return the type of a part or an item, which may be anything; "" if it is no text."""
    kind = part.get("type")
    return kind if isinstance(kind, str) else ""


def _within(message: dict[str, Any], path: str, *, newest: bool) -> Iterator[Place]:
    for name in ("content", "output", "source"):
        content = message.get(name)
        if isinstance(content, dict):
            if _kind(content) == _SCREENSHOT:
                yield Place(message, name, f"{path}.{name}")
            elif name == "source":
                yield from _within(content, f"{path}.{name}", newest=newest)
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if not isinstance(part, dict):
                continue
            place = f"{path}.{name}[{number}]"
            if _kind(part) in _KINDS:
                yield Place(content, number, place, newest)
            elif _kind(part) in _BLOCKS:
                yield from _within(part, place, newest=newest and _kind(part) != _RESULT)


def _has_images(holder: Mapping[str, Any], text: str) -> bool:
    """Return whether there are pictures beside the field `text`."""
    images = holder.get("images")
    return isinstance(images, list) and bool(images) and isinstance(holder.get(text) or "", str)


# ---------------------------------------------------------------------------------------------
# For models that see none
# ---------------------------------------------------------------------------------------------


def replace_images(found: Iterable[Place], policy: ImagesAsText) -> None:
    """Put `LINE` in the place of pictures.

    policy: "history" keeps those that the user has sent since the last answer, outside of tools'
    results, to be refused by name. "never" keeps all, "always" none.
    """
    for place in found:
        keeps = policy == "never" or (policy == "history" and place.newest)
        if keeps:
            continue
        if place.is_beside_a_text:
            holder = place.holder
            field = "prompt" if place.path == "images" else "content"
            lines = [LINE] * place.count
            del holder["images"]
            holder[field] = "\n".join(filter(None, [holder.get(field), *lines]))
        elif place.part["type"] == _SCREENSHOT:
            place.holder[place.key] = place.part | {"image_url": "data:,"}
        else:
            kind = "input_text" if place.part["type"] == "input_image" else "text"
            place.holder[place.key] = {"type": kind, "text": LINE}


def without_images(items: Sequence[dict[str, Any]], policy: ImagesAsText) -> list[dict[str, Any]]:
    """Return the kept items of a conversation for a model that sees none; they are of the past."""
    if policy == "never" or not any(places_in(items, "input")):
        return list(items)
    # Others have the same items.
    own = [copy.deepcopy(item) if any(places_in([item], "")) else item for item in items]
    replace_images(places_in(own, "input"), "always")
    return own


# ---------------------------------------------------------------------------------------------
# For models that see
# ---------------------------------------------------------------------------------------------


def sources(found: Iterable[Place]) -> list[PictureSource]:
    """Return the sources of pictures, each with its place in the request.

    Raises:
        InvalidParameter: a part that does not say where its picture is.
        UnsupportedParameter: a picture that is not here, such as another server's file.
    """
    wanted: list[PictureSource] = []
    for place in found:
        wanted += _sources(place)
    return wanted


def put(found: Iterable[Place], images: Sequence[Image]) -> None:
    """Put pictures where their sources are; `images` are in the order of `sources`."""
    rest = iter(images)
    for place in found:
        if place.is_beside_a_text:
            place.holder["images"] = [next(rest) for _ in place.part]
        else:
            name = "source" if place.part["type"] == "image" else "image_url"
            # The request's own text is let go of: the picture has its bytes.
            place.holder[place.key] = place.part | {name: next(rest)}


def _sources(place: Place) -> Iterator[PictureSource]:
    part, path = place.part, place.path
    if place.is_beside_a_text:
        for number, image in enumerate(part):
            yield base64_source(_text(image, f"{path}[{number}]"), None, f"{path}[{number}]")
        return
    match part:
        case {"type": "image", "source": {"type": "base64", "data": data} as source}:
            declared = _text(source.get("media_type"), f"{path}.source.media_type")
            where = f"{path}.source.data"
            yield base64_source(_text(data, where), declared, where)
        case {"type": "image", "source": {"type": "url", "url": url}}:
            yield url_source(_text(url, f"{path}.source.url"), f"{path}.source.url")
        case {"type": "image", "source": {"type": "file"}}:
            raise _elsewhere(f"{path}.source.file_id")
        case {"type": "image"}:
            raise InvalidParameter(
                f"`{path}.source` should be of type base64, with `media_type` and `data`, or url, "
                "with `url`.",
                param=f"{path}.source",
            )
        case {"file_id": str()}:
            raise _elsewhere(f"{path}.file_id")
        case {"image_url": {"url": url} as given}:
            _check_detail(given, f"{path}.image_url")
            yield url_source(_text(url, f"{path}.image_url.url"), f"{path}.image_url.url")
        case {"image_url": str(url)}:
            _check_detail(part, path)
            yield url_source(url, f"{path}.image_url")
        case _:
            raise InvalidParameter(
                f"`{path}.image_url` is required: a data URL, or an http(s) address.",
                param=f"{path}.image_url",
            )


def _text(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise InvalidParameter(f"`{path}` should be a string.", param=path)
    return value


def _check_detail(given: Mapping[str, Any], path: str) -> None:
    detail = given.get("detail")
    if detail is not None and detail not in _DETAILS:
        raise InvalidParameter(
            f"`{path}.detail` should be one of {', '.join(_DETAILS)}.", param=f"{path}.detail"
        )


def _elsewhere(path: str) -> MLXManagerError:
    return UnsupportedParameter(
        f"`{path}` names a file, and no files are kept here. Send the image as a data URL or in "
        "base64.",
        param=path,
    )


# ---------------------------------------------------------------------------------------------
# Contents
# ---------------------------------------------------------------------------------------------


def content_of(parts: Iterable[Part]) -> Parts:
    """Return parts as the content of a message: texts between two pictures are joined by line
    breaks."""
    return joined_parts(parts, "\n")


def parts_of(content: Parts) -> tuple[Part, ...]:
    """Return the parts of a message's content; none if it is empty."""
    if isinstance(content, str):
        return (content,) if content else ()
    return content


def seen(value: object, path: str, kind: str) -> Image:
    """Return the picture that stands in a part of a request.

    kind: the part's type, for the error.

    Raises:
        UnsupportedParameter: none has been read, since the model sees none.
    """
    if isinstance(value, Image):
        return value
    raise UnsupportedParameter(
        f"`{path}` is of type {kind!r}; this model takes text only.", param=f"{path}.type"
    )
