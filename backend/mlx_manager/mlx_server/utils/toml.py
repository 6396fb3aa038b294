"""TOML as the owner's files have it."""

from __future__ import annotations

import tomllib
from typing import Any


def parsed(text: str) -> dict[str, Any]:
    """
    Raises:
        ValueError: it is not TOML, or has more lists and tables in one another than can be read.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("its lists or tables are nested too deeply to be read") from None
