"""Thinking that a client keeps without seeing it, so that the next turn has it again."""

from __future__ import annotations

import base64

OURS = "mlx-manager:"
"""Prefix of thinking that this server can read again."""


def closed(thinking: str) -> str:
    """Return the thinking in Base64, for a client to keep and not to look at; no secret."""
    return OURS + base64.b64encode(thinking.encode("utf-8", "surrogatepass")).decode()


def opened(kept: str) -> str | None:
    """Return the thinking that `closed` was given; None if `kept` is foreign or broken."""
    if not kept.startswith(OURS):
        return None
    try:
        return base64.b64decode(kept.removeprefix(OURS)).decode("utf-8", "surrogatepass")
    except ValueError:
        return None
