"""Contents of messages joined: texts and pictures in their order."""

from __future__ import annotations

from collections.abc import Iterable

from mlx_manager.mlx_server.core import Part, Parts


def in_one(*contents: Parts) -> Parts:
    """Return contents in one, texts that meet joined: a text, unless there is a picture."""
    joined: list[Part] = []
    for content in contents:
        for part in [content] if isinstance(content, str) else content:
            if isinstance(part, str) and joined and isinstance(joined[-1], str):
                joined[-1] += part
            elif part != "":
                joined.append(part)
    match joined:
        case []:
            return ""
        case [str(text)]:
            return text
    return tuple(joined)


def paragraphs(contents: Iterable[Parts]) -> Parts:
    """Return contents in one, with an empty line between texts that meet."""
    joined: Parts = ""
    for content in contents:
        if not content:
            continue
        meet = joined and ends_in_text(joined) and isinstance(content[0], str)
        joined = in_one(joined, "\n\n" if meet else "", content)
    return joined


def ends_in_text(content: Parts) -> bool:
    return isinstance(content, str) or isinstance(content[-1], str)
