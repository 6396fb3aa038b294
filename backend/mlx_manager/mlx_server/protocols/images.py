"""Pictures in a conversation for models that see none: a line in their place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mlx_manager.mlx_server.settings import ImagesAsText

LINE = "(There is an image here. This model reads text only and can't see it.)"

_KINDS = frozenset({"image", "image_url", "input_image"})
"""Types of content parts that are pictures: Messages', chat's, Responses'."""
_RESULTS = frozenset({"tool_result", "function_call_output", "custom_tool_call_output"})
_ANSWERS = frozenset({"function_call", "custom_tool_call", "reasoning", "local_shell_call"})


def replace_images(body: object, policy: ImagesAsText) -> None:
    """Put `LINE` in the place of pictures, in the JSON of a request.

    policy: "history" keeps those that the user has sent since the last answer, outside of tools'
    results, to be refused by name. "never" keeps all, "always" none.
    """
    if policy == "never" or not isinstance(body, dict):
        return
    for name in ("messages", "input"):
        said = body.get(name)
        if isinstance(said, list):
            newest = _newest(said)
            for place, message in enumerate(said):
                if isinstance(message, dict):
                    keeps = policy == "history" and place >= newest and _is_users(message)
                    _replace(message, results_only=keeps)
    if policy == "always" and body.get("images") and isinstance(body.get("prompt", ""), str):
        body["prompt"] = "\n".join(filter(None, [body.get("prompt"), *_lines(body)]))


def _newest(said: list[Any]) -> int:
    """Return the place after the last message or item that is the model's."""
    answers = (
        place
        for place, message in enumerate(said)
        if isinstance(message, dict)
        and (message.get("role") == "assistant" or message.get("type") in _ANSWERS)
    )
    return max(answers, default=-1) + 1


def _is_users(message: dict[str, Any]) -> bool:
    return message.get("role") == "user"


def _replace(message: dict[str, Any], *, results_only: bool) -> None:
    """Replace the pictures of a message. results_only: only those in a tool's results."""
    for name in ("content", "output", "source"):
        content = message.get(name)
        if isinstance(content, dict):
            _replace(content, results_only=results_only)
        if not isinstance(content, list):
            continue
        for place, part in enumerate(content):
            if not isinstance(part, dict):
                continue
            if part.get("type") not in _KINDS:
                kept = results_only and part.get("type") not in _RESULTS
                _replace(part, results_only=kept)
            elif not results_only:
                kind = "input_text" if part["type"] == "input_image" else "text"
                content[place] = {"type": kind, "text": LINE}
    if not results_only and isinstance(message.get("content", ""), str):
        # Ollama's pictures stand beside the text.
        lines = list(_lines(message))
        if lines:
            message["content"] = "\n".join(filter(None, [message.get("content"), *lines]))


def _lines(holder: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each of the pictures that `holder` has beside its text, and remove them."""
    images = holder.get("images")
    if isinstance(images, list) and images:
        del holder["images"]
        yield from (LINE for _ in images)
