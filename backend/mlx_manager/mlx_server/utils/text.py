"""Text that can be sent, and sizes as people read and set them."""

from __future__ import annotations

import re
from collections.abc import Mapping

_SURROGATES = re.compile(r"[\ud800-\udbff][\udc00-\udfff]|[\ud800-\udfff]")


def encodable(text: str) -> str:
    """Return `text` with U+FFFD for single surrogates, for which UTF-8 has no bytes.

    A pair of surrogates, as JSON escapes a character, becomes that character.
    """
    try:
        # Encoding is twenty times as fast as a search for surrogates.
        text.encode()
    except UnicodeEncodeError:
        return _SURROGATES.sub(_character, text)
    return text


def sized(nbytes: float) -> str:
    """Return `512 bytes`, `64.0 kB`, `345 MB` or `6.71 GB`: powers of 1024, as in the settings."""
    if abs(nbytes) < 1023.5:
        return f"{nbytes:.0f} bytes"
    units = iter(("kB", "MB", "GB", "TB"))
    unit = ""
    while unit != "TB" and abs(nbytes) >= 1023.5:
        nbytes, unit = nbytes / 1024, next(units)
    digits = 2 if abs(nbytes) < 9.995 else 1 if abs(nbytes) < 99.95 else 0
    return f"{nbytes:,.{digits}f} {unit}"


def gigabytes(nbytes: int) -> str:
    """Return `6.26 GB`: powers of 1024, as in the settings, in one unit for all sizes of a line."""
    return f"{nbytes / 2**30:,.2f} GB"


def in_words(usage: Mapping[str, int]) -> str:
    """Return the findings of `get_memory_usage` in words, for the log."""
    active, peak, cache = (gigabytes(usage[name]) for name in ("active", "peak", "cache"))
    return f"memory: {active} active, {peak} peak, {cache} cache"


def _character(halves: re.Match[str]) -> str:
    return halves[0].encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
