"""Parser of the owner's TOML files."""

from __future__ import annotations

import tomllib
from typing import Any


def parsed(text: str) -> dict[str, Any]:
    """Return the content of a TOML text.

    Raises:
        ValueError: it is not TOML, or its lists and tables are nested too deeply to be read.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("its lists or tables are nested too deeply to be read") from None
