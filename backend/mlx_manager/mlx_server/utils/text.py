"""Text that can be sent."""

from __future__ import annotations

import re

_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")


def encodable(text: str) -> str:
    """`text` with U+FFFD for halves of characters, which UTF-8 has no bytes for."""
    return _LONE_SURROGATE.sub("\ufffd", text)
