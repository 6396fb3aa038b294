"""Contents of messages joined: texts and pictures in their order."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from mlx_manager.mlx_server.core import Parts, joined_parts


def in_one(*contents: Parts) -> Parts:
    """Return contents in one, texts that meet joined: a text, unless there is a picture."""
    several = ([content] if isinstance(content, str) else content for content in contents)
    return joined_parts(chain.from_iterable(several))


def paragraphs(contents: Iterable[Parts]) -> Parts:
    """Return contents in one, with an empty line between texts that meet."""
    whole: Parts = ""
    for content in contents:
        if not content:
            continue
        meet = whole and ends_in_text(whole) and isinstance(content[0], str)
        whole = in_one(whole, "\n\n" if meet else "", content)
    return whole


def ends_in_text(content: Parts) -> bool:
    return isinstance(content, str) or isinstance(content[-1], str)
